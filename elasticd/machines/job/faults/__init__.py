"""How a job's faults are diagnosed: hangs, exceptions of the user's code, network partitions."""
