"""The coordinator's state machine: nodes, links between nodes, and the machines of all jobs."""
