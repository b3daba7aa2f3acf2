"""Moves state between layouts: transfers, rounds, and their execution."""
