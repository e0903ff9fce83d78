"""What the inventory means: strict YAML, models, precedence, and where every value came from."""
