"""Hang detection: heartbeats of the workers' processes, and where their main threads stand still."""
