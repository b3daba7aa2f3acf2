"""The load of experts: what members report of it, the plans that are made for it, and the work that it is.

Of several modules it is that of the module with the loss.

A report in every tenth step has the rows of each expert of a lane. Those of the steps that all lanes have
reported make a forecast (`ExpertForecast`), which is the load. Another plan is asked for when the devices'
unevenness under it costs more of a step than the least saving of the policy, and more than chance alone; and
again only when it has grown since, or was even meanwhile. Whatever else a plan is asked for, it is made for the
newest load.
"""

from __future__ import annotations

import math
from collections.abc import Container

import msgspec
from elasticd_planner.detection.expert_work import expert_work
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, costed, expert_counts
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.parts.expert_rows import ExpertRows
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import JobSpec

#: How much more of a step unevenness must cost than at the last decision for another one.
GROWN = 0.02
#: Standard deviations of a device's rows, by chance, that are no unevenness.
BY_CHANCE = 2.0
#: Steps until slowdowns are judged without a load: by then one should have been reported.
UNJUDGED = 10


def reported(turn: Transaction, measurement: Measurement) -> None:
    """Takes in what a member tells of its lane. A step counts once all lanes have reported it, and once alone;
    rows that are none of the model's do not count."""
    known, spec, plan = turn.job.learned.expert_rows, turn.job.spec, turn.job.plan
    if not isinstance(spec, JobSpec) or not isinstance(plan, Plan):
        return
    if not measurement.expert_rows or measurement.plan != turn.job.number:
        return
    counts = expert_counts(spec.model)
    rows = {block: own for block, own in measurement.expert_rows.items() if block in counts}
    if not rows or any(len(own) != counts[block] or min(own) < 0 for block, own in rows.items()):
        return
    if measurement.plan != known.of or measurement.step > known.step:
        known = msgspec.structs.replace(
            known,
            of=measurement.plan,
            step=measurement.step,
            awaited=_first_devices(plan.loss_view, counts),
            open={},
        )
    if measurement.step < known.step or measurement.device not in known.awaited:
        return
    added = {
        block: tuple(map(sum, zip(known.open[block], own, strict=False))) if block in known.open else own
        for block, own in rows.items()
    }
    first = min(rows)
    chosen = sum(rows[first]) / measurement.tokens if measurement.tokens else known.chosen
    known = msgspec.structs.replace(
        known, open={**known.open, **added}, chosen=chosen, awaited=known.awaited - {measurement.device}
    )
    turn.change("learned", expert_rows=known if known.awaited else _closed(turn, spec, known))


def _first_devices(plan: Plan, blocks: Container[int]) -> frozenset[str]:
    """The devices of a plan of one module that report rows of these blocks: the first of each lane with
    some."""
    return frozenset(
        lane.devices[0] for _, _, lane in plan.walk() if any(block in blocks for block in blocks_of(lane))
    )


def renewed(turn: Transaction) -> None:
    """The next plan is made for the newest load."""
    if (load := newest(turn, turn.job)) is not None:
        turn.change("learned", experts=load)


def unjudged(turn: Transaction, plan: Plan) -> bool:
    """Returns True of a step in which devices of TP groups may differ by a load that is not known yet."""
    job = turn.job
    spec, known = job.spec, job.learned.expert_rows
    if (
        known.mean
        or job.learned.experts is not None
        or known.unjudged >= UNJUDGED
        or not isinstance(spec, JobSpec)
    ):
        return False
    counts = expert_counts(spec.model)
    if not counts or all(len(lane.devices) == 1 for _, _, lane in plan.loss_view.walk()):
        return False
    turn.change("learned", expert_rows=msgspec.structs.replace(known, unjudged=known.unjudged + 1))
    return True


def work(turn: Transaction, plan: Plan) -> dict[str, float]:
    """The work of devices of the plan in force over that by their shares, where it differs: by the load that
    was measured, be it under an earlier plan."""
    known, spec = turn.job.learned.expert_rows, turn.job.spec
    if known.plan != plan.number and isinstance(spec, JobSpec):
        if (load := in_force(turn)) is None:
            return {}
        found, uneven = expert_work(plan.loss_view, load, turn.job.detection.rates.rates)
        known = msgspec.structs.replace(known, work=found, uneven=uneven, plan=plan.number, decided=0.0)
        turn.change("learned", expert_rows=known)
    return known.work


def in_force(turn: Transaction) -> ExpertLoad | None:
    """The load as last measured, else that of the plan: a new leader knows no other."""
    known, spec = turn.job.learned.expert_rows, turn.job.spec
    return _load(turn, spec, known) if known.mean and isinstance(spec, JobSpec) else turn.job.learned.experts


def newest(turn: Transaction, job: JobState) -> ExpertLoad | None:
    """The load as last measured; None: it is not known."""
    spec = job.spec
    if (
        not job.learned.expert_rows.mean
        or not isinstance(spec, JobSpec)
        or turn.settings.policy.experts == "fixed"
    ):
        return None
    return _load(turn, spec, job.learned.expert_rows)


def _load(turn: Transaction, spec: JobSpec, known: ExpertRows) -> ExpertLoad | None:
    replicas, profile = turn.settings.policy.expert_replicas, turn.job.learned.profile
    measured = profile.experts if profile is not None else None
    part = measured.part if measured is not None else 0.0
    return costed(spec.model, spec.sample_tokens, known.mean, known.chosen, replicas, part)


def _closed(turn: Transaction, spec: JobSpec, known: ExpertRows) -> ExpertRows:
    """After the last report of a step: the forecast, the work of devices, and whether another plan is due."""
    job, plan = turn.job, turn.job.plan
    if not known.open or not isinstance(plan, Plan):
        return known
    known = msgspec.structs.replace(known, forecast=known.forecast.after(known.open), open={})
    load = _load(turn, spec, known)
    if load is None:
        return known
    rates = job.detection.rates.rates
    work, uneven = expert_work(plan.loss_view, load, rates)
    same = known.plan == plan.number
    decided = known.decided if same else 0.0
    known = msgspec.structs.replace(known, work=work, uneven=uneven, plan=plan.number, decided=decided)
    cost = load.part * uneven
    policy = turn.settings.policy
    chance = load.part * _chance(known, _width(plan))
    if policy.experts == "fixed" or cost <= max(policy.minimum_saving, chance):
        return msgspec.structs.replace(known, decided=0.0)
    if same and known.decided and cost < known.decided + GROWN:
        return known
    turn.change("learned", experts=load)
    return msgspec.structs.replace(known, decided=cost)


def _width(plan: Plan) -> int:
    """Devices of the widest TP group."""
    return max((len(lane.devices) for _, _, lane in plan.loss_view.walk()), default=1)


def _chance(known: ExpertRows, devices: int) -> float:
    """The distance by chance of a device's rows of a block, in the reports that the forecast is of."""
    rows = min(map(sum, known.mean.values())) * known.forecast.reports_in_mean / devices
    return BY_CHANCE / math.sqrt(rows) if rows else math.inf
