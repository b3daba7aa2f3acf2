"""The inputs of a simulation: cluster, model and faults."""
