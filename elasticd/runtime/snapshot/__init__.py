"""Snapshots: copies of a rank's state in memory that the agent keeps, and recovery from them."""
