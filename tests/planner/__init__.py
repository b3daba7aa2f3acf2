"""Tests of the planner: the vocabulary against plain arrays, the search against brute force."""
