"""Tests of the simulator: its parts, whole scenarios, and that the same seed gives the same bytes."""
