"""Whether a plan can be switched to in the memory that there is: beside the old copy, or only in place.

In place, old boxes give their memory to new ones as these come. If that fails midway nobody has a whole copy of
either plan, and replicas do not help: each has given something up. So it is done only where an older state can
be read now.
"""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.machines.job.copies.memory import room
from elasticd.machines.job.copies.snapshots import secured
from elasticd.machines.job.state.recovery_source import Source
from elasticd.machines.job.state.transaction import Turn


class Fit(Value, frozen=True, kw_only=True):
    """`wrong`: why the plan cannot be switched to. `in_place`: why it can in place only."""

    wrong: str = ""
    in_place: str = ""


def fit(turn: Turn, plan: Plan, source: Source | None) -> Fit:
    """For a switch to `plan` from the plan in force; after a fence, from `source`."""
    job = turn.job
    if job.spec is None or job.profile is None:
        return Fit()
    old = source.plan if source is not None and not _is_older(source) else job.plan
    holders = {worker.device for worker in job.bound(old)}
    anew = source is not None and _is_older(source)
    found = room(plan, old, job.spec.model, job.profile, turn.nodes, holders=holders, anew=anew)
    if found.lacks:
        return Fit(wrong=found.lacks)
    if not found.cramped:
        return Fit()
    if _safe(turn, old, source):
        return Fit(in_place=found.cramped)
    return Fit(
        wrong=f"{found.cramped}; it could move in place if snapshots (CheckpointingOptions(snapshot_every=...))"
        " kept the state safe meanwhile"
    )


def _is_older(source: Source) -> bool:
    return source.plan is None or bool(source.recovery.snapshots)


def _safe(turn: Turn, old: Plan | None, source: Source | None) -> bool:
    """Whether no copy of `old` is needed once the move has begun."""
    if old is None or (source is not None and _is_older(source)):
        return True  # it is read from where it stays
    return secured(turn, old) is not None
