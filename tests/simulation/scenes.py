"""Scenarios for the tests: two nodes of two devices, a model that they hold, one device slow for a while."""

from __future__ import annotations

SMALL = """
seed = 3
steps = 90

[cluster]
nodes = 2
devices = 2
memory = "736 MiB"
flops = 1e12
assumed = 1.3e12
inside = {bandwidth = 2e10, latency = 1e-5}
between = {bandwidth = 5e9, latency = 2e-5}

[model]
layers = 12
width = 512
heads = 8
kv_heads = 4
hidden = 1408
tokens = 1024
global_batch = 8
"""

SLOW = """
[[fault]]
kind = "slow"
device = "n0/1"
factor = 3.0
step = 30

[[fault]]
kind = "recover"
device = "n0/1"
step = 60
"""
