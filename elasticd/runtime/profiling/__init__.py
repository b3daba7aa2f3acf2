"""Measures what a model's sections cost on this device: `elasticd profile` runs this package as a process."""
