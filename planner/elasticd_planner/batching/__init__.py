"""Which lane takes which part of which sequence of a step, in which row: planned on every rank, every step."""
