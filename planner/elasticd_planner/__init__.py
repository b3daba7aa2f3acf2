"""The planner: the shared vocabulary (cluster, model, layout, plan, boxes), cost, search, detection, policy.

Pure: no torch, clock, IO or logging. Every decision is a function of its arguments.
"""
