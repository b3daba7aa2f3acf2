"""Parallelism on one device: tensor parallelism, gradient reduction and ZeRO."""
