"""The simulator: the real machines, detection and planner on a virtual clock over a modelled cluster."""
