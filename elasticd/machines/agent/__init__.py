"""The agent's state machine: which clients it admits, and what passes between workers, store and leader."""
