"""Completeness of the state that lives: box arithmetic over a plan's layouts."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from elasticd_migration.reshard import span
from elasticd_planner.layout.holdings import JobTensors, holdings_of
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.box import cells
from elasticd_planner.spec.mesh import JobPlan


def only_copies(tensors: JobTensors, plan: JobPlan) -> tuple[str, ...]:
    """The devices that alone hold some of the state under `plan`, by name."""
    layouts, alone, known = holdings_of(tensors, plan), set[str](), set[Hashable]()
    for item in layouts.items:
        if (key := layouts.family(item)) not in known:
            known.add(key)
            for _, held in cells(layouts.layout(item).holdings):
                if len(holders := {holding.device for holding in held}) == 1:
                    alone |= holders
    return tuple(sorted(alone))


def lost_boxes(tensors: JobTensors, plan: JobPlan, live: Collection[str], stale: Collection[str] = ()) -> str:
    """Which part of the state none of the devices `live` holds under `plan`, in words; nothing if none."""
    left = _left(tensors, plan, live, stale)
    lost = [f"{item} {span(box)}" for item, boxes in left.lost() for box in boxes] if left else []
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"{lost[0]}{more}" if lost else ""


def last_holders(
    tensors: JobTensors, plan: JobPlan, live: Collection[str], stale: Collection[str] = ()
) -> frozenset[str]:
    """The members of `plan` that had held any of what none of the devices `live` holds."""
    left = _left(tensors, plan, live, stale)
    return left.last_holders() if left else frozenset()


def _left(
    tensors: JobTensors, plan: JobPlan, live: Collection[str], stale: Collection[str]
) -> SurvivingLayouts | None:
    gone = set(plan.members) - set(live)
    return SurvivingLayouts(holdings_of(tensors, plan), gone=gone, stale=stale) if gone or stale else None
