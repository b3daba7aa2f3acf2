"""The engine: one plan at work on one rank, from pipeline passes to the vote and the optimizer's step."""
