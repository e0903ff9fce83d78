"""Judging facts: pure functions, one for each check."""
