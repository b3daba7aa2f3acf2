"""The search: from a planning problem to the best plan, or to the reason why there is none."""
