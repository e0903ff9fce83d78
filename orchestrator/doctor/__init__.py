"""`dfo doctor`: every hop and every assumption between the laptop and CUDA, looked at and never touched.

    examine(target, …)    → Diagnosis     collects the facts, layer by layer, and judges them
    facts                 what was seen, as plain data; a part that could not be looked at is `Missing(why)`
    look/                 collects facts: a few calls, each with a deadline
    checks/               judges facts: one small pure function for each check

A check gives `ok`, `warning`, `failed` or `skipped`, what it saw, and a fix to paste.
"""
