"""Who may compile, when, and in which environment."""
