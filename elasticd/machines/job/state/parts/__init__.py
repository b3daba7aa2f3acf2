"""The parts of a job's state: each belongs to one phase or to one concern."""
