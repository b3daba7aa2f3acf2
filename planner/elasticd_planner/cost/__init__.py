"""Cost models: the seconds and the bytes of a plan, from a model's profile or from a table."""
