"""Departure of devices, and the end of a job: fences, drains, stop requests."""
