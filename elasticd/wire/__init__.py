"""The messages between workers, torchruns, agents and the coordinator, and the unix socket of a node."""
