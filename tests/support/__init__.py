"""What several test folders share; imported as `support.…` (see `pythonpath` in pyproject.toml)."""
