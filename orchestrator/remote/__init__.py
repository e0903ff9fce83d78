"""What runs inside the target, as values: nothing in this package opens a connection."""
