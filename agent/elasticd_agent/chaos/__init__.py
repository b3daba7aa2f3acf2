"""Fault injection on a node: signals to workers, cut links to the store, the leader and other nodes."""
