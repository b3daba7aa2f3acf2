"""The speed of devices without work: probed before they get any, and again while they stand by."""

from __future__ import annotations

from collections.abc import Iterable

from elasticd_planner.detection.idle_probes import judged
from elasticd_planner.detection.stragglers import Change
from elasticd_planner.policy.stability import changed, corrected
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.state.events import slowdown_kind
from elasticd.machines.job.state.job_state import Worker
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.node_health import causes
from elasticd.wire.worker import Probed


def probed(turn: Transaction, worker: Worker, body: Probed) -> None:
    """A device's probe, of which `judge` makes something once a plan could be asked for."""
    turn.worker(worker, probe_by=None)
    idle = not turn.job.is_member(worker.device, worker.incarnation)
    turn.change("detection", probes=turn.job.detection.probes.heard(worker.device, body.seconds, idle=idle))


def awaited(turn: Transaction) -> frozenset[str]:
    """The devices without work whose first probe may still come."""
    return frozenset(
        worker.device
        for worker in turn.job.workers.values()
        if worker.probe_by is not None
        and turn.now < worker.probe_by
        and not worker.left
        and not turn.job.is_member(worker.device, worker.incarnation)
    )


def judge(turn: Transaction) -> None:
    """Takes in what was probed, of devices that have no work still."""
    job = turn.job
    probes = (
        job.detection.probes.worked(job.plan.number, job.plan.binding)
        if job.plan is not None
        else job.detection.probes
    )
    probes, rates, changes = judged(probes, job.detection.rates, turn.settings.detect)
    if probes is not job.detection.probes:
        turn.change("detection", probes=probes, rates=rates)
        told(turn, changes)


def told(turn: Transaction, changes: Iterable[Change]) -> None:
    """Rates that changed: for people, and for how long such conditions last."""
    horizon = turn.settings.policy.horizon_steps
    for change in changes:
        known_better = change.kind == "corrected"
        stability = turn.job.planning.stability
        if known_better:
            stability = corrected(stability, change.device, change.after)
        else:
            stability = changed(stability, change.device, change.after, change.step, horizon)
        turn.change("planning", stability=stability)
        slow = known_better or change.after > change.before
        node = turn.nodes.get(node_of(change.device))
        why = causes(node.health if node is not None else None, change.device) if slow else ()
        turn.note(
            slowdown_kind(change),
            "; ".join((change.reason, *why)),
            device=change.device,
            before=change.before,
            after=change.after,
            step=change.step,
            causes=list(why),
        )
