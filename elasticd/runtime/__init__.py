"""The part of elasticd inside a training process."""
