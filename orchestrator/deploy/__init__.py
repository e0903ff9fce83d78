"""Sources, releases, the lock and the audit file: everything between a laptop's files and `current`."""
