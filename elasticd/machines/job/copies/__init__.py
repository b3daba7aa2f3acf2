"""The copies of a job's state: on devices and in the memory they take, in snapshots, in checkpoints."""
