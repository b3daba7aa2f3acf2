"""Which lane takes which part of which sequence of a step, in which row: planned for every step, on every rank."""
