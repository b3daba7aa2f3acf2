"""Explanations for people: why a plan was made, what a switch gained, how fast a job trains."""
