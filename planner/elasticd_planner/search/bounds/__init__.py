"""Lower bounds: proofs that no plan takes less time.

`search.planner` takes the largest of them and of `cost.group_bound` for the bound that a plan's prediction has.
"""
