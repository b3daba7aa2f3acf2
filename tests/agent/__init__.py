"""Tests of the agent, by itself and with a real torchrun."""
