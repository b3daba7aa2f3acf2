"""Which lane takes which part of which sequence of a step, in which row: planned each step, on every rank."""
