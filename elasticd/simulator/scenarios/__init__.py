"""What a simulation is given: cluster, model and faults."""
