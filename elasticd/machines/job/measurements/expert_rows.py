"""The load of experts: what members report of it, the plans that are made for it, and the work that it is.

A report in every tenth step has the rows of each expert of a lane. Their mean over the last ones is the load.
Another plan is asked for when the devices' unevenness under it costs more of a step than the least saving of
the policy, and more than chance alone; and again only when it has grown since, or the slowdowns have changed.
"""

from __future__ import annotations

import math

import msgspec
from elasticd_planner.detection.expert_work import expert_work
from elasticd_planner.spec.expert_load import ExpertLoad, costed
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.state.expert_rows import ExpertRows
from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.transaction import Turn
from elasticd.records import JobSpec

#: The part of the newest report in the mean, at least.
NEWEST = 0.25
#: How much more of a step unevenness must cost than at the last decision for another one.
GROWN = 0.02
#: Standard deviations of a device's rows, by chance, that are no unevenness.
BY_CHANCE = 2.0


def reported(turn: Turn, measurement: Measurement) -> None:
    """Takes in what a member tells of its lane. Reports of a step that others have left behind do not count."""
    rows, known = measurement.expert_rows, turn.job.expert_rows
    spec = turn.job.spec
    if not rows or not isinstance(spec, JobSpec) or spec.modules or measurement.plan != turn.job.number:
        return
    if measurement.step > known.step:
        known = _closed(turn, spec, known)
        known = msgspec.structs.replace(known, step=measurement.step, open={})
    if measurement.step < known.step:
        return
    added = {
        block: tuple(map(sum, zip(known.open[block], own, strict=False))) if block in known.open else own
        for block, own in rows.items()
    }
    first = min(rows)
    chosen = sum(rows[first]) / measurement.tokens if measurement.tokens else known.chosen
    turn.set(expert_rows=msgspec.structs.replace(known, open={**known.open, **added}, chosen=chosen))


def renewed(turn: Turn) -> None:
    """Plans are made for the newest load from now on, if they are made for one at all."""
    if turn.job.experts is not None and (load := newest(turn, turn.job)) is not None:
        turn.set(experts=load)


def work(turn: Turn, plan: Plan) -> dict[str, float]:
    """The work of devices of the plan in force over that by their shares, where it differs: by the load that
    was measured, be it under an earlier plan."""
    known, spec = turn.job.expert_rows, turn.job.spec
    if known.plan != plan.number and known.mean and isinstance(spec, JobSpec):
        if (load := _load(turn, spec, known)) is None:
            return {}
        found, uneven = expert_work(plan, load, turn.job.rates.rates)
        known = msgspec.structs.replace(known, work=found, uneven=uneven, plan=plan.number, decided=0.0)
        turn.set(expert_rows=known)
    return known.work


def newest(turn: Turn, job: JobState) -> ExpertLoad | None:
    """The load as last measured; None: it is not known."""
    spec = job.spec
    if not job.expert_rows.mean or not isinstance(spec, JobSpec) or turn.settings.policy.experts == "fixed":
        return None
    return _load(turn, spec, job.expert_rows)


def _load(turn: Turn, spec: JobSpec, known: ExpertRows) -> ExpertLoad | None:
    replicas = turn.settings.policy.expert_replicas
    return costed(spec.model, spec.sample_tokens, known.mean, known.chosen, replicas)


def _closed(turn: Turn, spec: JobSpec, known: ExpertRows) -> ExpertRows:
    """After all reports of a step: the mean, the work of devices, and whether another plan is due."""
    job, plan = turn.job, turn.job.plan
    if not known.open or not isinstance(plan, Plan):
        return known
    part = max(NEWEST, 1 / (known.seen + 1))
    mean = {
        block: tuple(
            round(old + part * (new - old), 3)
            for old, new in zip(known.mean.get(block, own), own, strict=False)
        )
        for block, own in known.open.items()
    }
    known = msgspec.structs.replace(known, mean=mean, seen=known.seen + 1)
    load = _load(turn, spec, known)
    if load is None:
        return known
    rates = job.rates.rates
    work, uneven = expert_work(plan, load, rates)
    same = known.plan == plan.number
    decided = known.decided if same else 0.0
    known = msgspec.structs.replace(known, work=work, uneven=uneven, plan=plan.number, decided=decided)
    cost = load.part * uneven
    policy = turn.settings.policy
    chance = load.part * _chance(known, _width(plan))
    if policy.experts == "fixed" or cost <= max(policy.minimum_saving, chance):
        return known
    if same and known.decided and cost < known.decided + GROWN:
        return known
    turn.set(experts=load)
    return msgspec.structs.replace(known, decided=cost)


def _width(plan: Plan) -> int:
    """Devices of the widest TP group."""
    return max((len(lane.devices) for _, _, lane in plan.walk()), default=1)


def _chance(known: ExpertRows, devices: int) -> float:
    """How far a device's rows of a block are off by chance, in the reports that the mean is of."""
    rows = min(map(sum, known.mean.values())) * min(known.seen, round(1 / NEWEST)) / devices
    return BY_CHANCE / math.sqrt(rows) if rows else math.inf
