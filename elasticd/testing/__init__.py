"""Clusters of real processes on one machine, and scripts of faults played on them."""
