"""How devices leave a job and how a job ends: fences, drains, stop requests."""
