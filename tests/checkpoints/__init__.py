"""Checkpoints on disk: what they hold, what damage and crashes do to them, and how a gang makes them."""
