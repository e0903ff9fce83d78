"""Collecting facts: nothing here changes anything, and every step has a deadline."""
