"""Accelerators on a machine without one: a torch device that breaks where a GPU breaks, NCCL's rules over gloo,
and the launches of all ranks checked for a deadlock."""
