"""Whether the state that a plan gives each device fits there: under ZeRO, by the layouts themselves.

The planner counts with parts of a profile, evenly spread; where replicas must be on different nodes, one device
may have to keep more than its part.
"""

from __future__ import annotations

import math

from elasticd_planner.layouts import Layouts
from elasticd_planner.plan import Plan
from elasticd_planner.profiles import ModelProfile, item_size
from elasticd_planner.rules import ModelSpec

from elasticd.machines.job.state import NodeState


def lacks_room(plan: Plan, spec: ModelSpec, profile: ModelProfile, nodes: dict[str, NodeState]) -> str:
    """Which member would have to hold more than its memory, in words; nothing if none, or without ZeRO."""
    if not plan.state.zero:
        return ""
    layouts = Layouts(spec, plan)
    sizes = {name: item_size(layouts.value(name).dtype) for name in {item.name for item in layouts.items}}
    trained = frozenset(layouts.trained)
    memory = {device.name: device.memory for node in nodes.values() for device in node.record.devices}
    for device in plan.members:
        need = 0.0
        for item, boxes in layouts.held(device).items():
            size = sum(box.size for box in boxes) * sizes[item.name]
            if item.role == "state":
                need += size * profile.optimizer_factor
                need += size * profile.gradient_factor if plan.state.zero == 2 else 0.0
            else:
                gradient = profile.gradient_factor if item.name in trained and plan.state.zero == 1 else 0.0
                need += size * (1 + gradient)
        if need > memory.get(device, math.inf):
            return (
                f"{device} would have to keep {need / (1 << 20):,.0f} MiB of state and has "
                f"{memory[device] / (1 << 20):,.0f}: {plan.state.replicas} replicas on different nodes ask too "
                "much of it; take fewer, or more memory on its node"
            )
    return ""
