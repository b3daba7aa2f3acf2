"""Harm on purpose: scripts of faults for real and simulated clusters, and what must hold whatever they do."""
