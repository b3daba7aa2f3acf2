"""The store of decisions: one protocol, one file per implementation."""
