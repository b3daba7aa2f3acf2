"""Checkpoints at work: each rank's share is staged, written, and read again under any layout."""
