"""What is installed on a target, what changed, and how to return."""
