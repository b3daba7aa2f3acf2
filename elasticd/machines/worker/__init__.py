"""A worker's state machines: plan switches and faults, checkpoints, snapshots."""
