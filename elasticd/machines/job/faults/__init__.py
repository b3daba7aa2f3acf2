"""Diagnosis of a job's faults: hangs, exceptions of the user's code, network partitions."""
