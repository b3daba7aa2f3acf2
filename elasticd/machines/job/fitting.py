"""Whether a plan can be switched to in the memory that there is: beside the old copy, or only in place.

In place, old boxes give their memory to new ones as these come. If that fails midway nobody has a whole copy,
so that it is done only where the state is safe elsewhere: in replicas on other nodes, or in an older state that
can be read now.
"""

from __future__ import annotations

from elasticd_planner.plan import Plan
from elasticd_planner.value import Value

from elasticd.machines.job.room import room
from elasticd.machines.job.snapshots import secured
from elasticd.machines.job.source import Source
from elasticd.machines.job.turn import Turn


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
        wrong=f"{found.cramped}; it could move in place if replicas on other nodes, or snapshots "
        "(Job(snapshot_every=...)), kept the state safe meanwhile"
    )


def _is_older(source: Source) -> bool:
    return source.plan is None or bool(source.recovery.snapshots)


def _safe(turn: Turn, old: Plan | None, source: Source | None) -> bool:
    """Whether no copy of `old` is needed once the move has begun."""
    if old is None or (source is not None and _is_older(source)):
        return True  # it is read from where it stays
    if source is None and _replicated(old):  # after a loss some replica may be the last
        return True
    return secured(turn, old) is not None


def _replicated(plan: Plan) -> bool:
    """Whether each box of the state is held on two nodes."""
    if plan.state.zero:
        return (plan.state.replicas or len(plan.modules[0].pipelines)) >= 2
    nodes = [{device.rpartition("/")[0] for device in _devices(plan, index)} for index in _pipelines(plan)]
    return any(not one & other for number, one in enumerate(nodes) for other in nodes[:number])


def _pipelines(plan: Plan) -> range:
    return range(len(plan.modules[0].pipelines))


def _devices(plan: Plan, pipeline: int) -> list[str]:
    return [device for stage in plan.modules[0].pipelines[pipeline].stages for device in stage.devices]
