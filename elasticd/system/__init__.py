"""The operating system of one node: child processes, torchrun, systemd, logs and network addresses."""
