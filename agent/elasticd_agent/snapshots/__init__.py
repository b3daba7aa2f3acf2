"""Snapshots in the agents' memory: kept, sent to another node over TLS, given back to workers."""
