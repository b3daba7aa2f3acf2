"""Tests of elasticd.chaos."""
