"""Checkpoints on disk without torch: their files, their manifest, what is sound among them, and their bytes."""
