"""Placement: which device takes which place, so that the fewest bytes of state move."""
