"""Roll back, where the living copies are no complete state: snapshots that complete them, or an older state.

Snapshots of the step that the copies are of give what lost members alone held: nothing goes back. Else the job
goes on from an older state, in snapshots or in checkpoints. It is taken as soon as the plan's members can read
it. What is newer, and lacks only workers that are on their way, is waited for, but not for ever while there is
something else. With no worker left at all the job waits for some to come: torchrun starts them again, or
somebody starts the job's command again.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from elasticd_planner.layout.optimizer_sharding import with_carriers
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.machines.job.copies.snapshots import plan_of, words
from elasticd.machines.job.state.job_state import JobPhase, WaitCause
from elasticd.machines.job.state.last_checkpoint import is_dead
from elasticd.machines.job.state.snapshot_sets import Moment, stand_ins
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import Proposal, Recovery

#: The name of all checkpoints: members read the first that all can.
CHECKPOINTS = "checkpoints"
#: Times that a recovery from one older state is tried.
MOST_TRIES = 3


class Source(Value, frozen=True, kw_only=True):
    """The source of a recovery's state, as the proposal carries it."""

    plan: JobPlan | None  # that copies or snapshots are of; None: checkpoints
    recovery: Recovery  # who has what
    checkpoints: tuple[str, ...] = ()  # names, newest first
    words: str = ""  # where the state comes from, if not from copies that live


def called(proposal: Proposal) -> str:
    """The name of the state that a proposal goes back to; empty where copies live."""
    recovery = proposal.recovery
    if recovery is None:
        return ""
    if recovery.snapshots and proposal.old is not None:
        return set_name(proposal.old.number, recovery.step)
    return CHECKPOINTS if proposal.old is None else ""


def set_name(plan: int, step: int) -> str:
    """The name of a set of snapshots."""
    return f"the snapshots of plan {plan} at step {step}"


def waits(turn: Transaction, why: str, cause: WaitCause = "") -> None:
    """The job cannot go on as things are: it waits, its state safe, for more to come. cause: of the wait, where
    a decision goes by it."""
    if turn.job.reason != why:
        what = "waiting for capacity" if turn.job.phase is JobPhase.RECOVERING else "waiting"
        turn.set(reason=why, cause=cause)
        turn.note("waiting", f"{what}: {why}", number=turn.job.number)


def older_state(turn: Transaction) -> bool:
    """Returns True if there is any state to go back to."""
    return bool(_sets(turn) or _checkpoints(turn))


def older(turn: Transaction, *, survivors: bool) -> Source | str | None:
    """The newest older state that the plan at hand can go on from, or what to wait for, for people (empty while
    a plan is on its way); None if there is no older state at all. survivors: members of the plan in force live,
    and stand still meanwhile."""
    options = sorted([*_sets(turn), *_checkpoints(turn)], key=lambda option: option.moment, reverse=True)
    if not options:
        return None
    held = f"the state is safe in {options[0].words}"
    if not turn.job.workers:
        return f"no worker is left; {held}: give the job's command again, under the name {turn.job.job}"
    if not survivors and (coming := _coming(turn)):
        return f"{coming} may come yet; {held}"
    if turn.job.planning.remedy is None:
        return ""
    plan = spread(turn.job.planning.remedy.plan)
    patient = turn.now - turn.job.since < turn.settings.prepare_seconds
    waits: list[str] = []
    for option in options:
        source = _source(turn, option, plan)
        if isinstance(source, Source):
            return waits[0] if waits and patient else source
        waits.append(source)
    return waits[0]


def spread(plan: JobPlan) -> JobPlan:
    """The plan with the members that carry replicas of state alone, where it needs any."""
    return with_carriers(plan) if isinstance(plan, Plan) else plan


def completed(
    turn: Transaction, source: Source, holders: Collection[str], nodes: Collection[str] | None = None
) -> Source | None:
    """Copies that live, with snapshots of the same step for the parts that they lack.

    Args:
        turn: of the job.
        source: the copies.
        holders: the members that had those parts.
        nodes: that are reached; None: all that are connected.

    Returns:
        None where some of those snapshots cannot be read now.
    """
    plan, recovery, job = source.plan, source.recovery, turn.job
    assert plan is not None
    moment = Moment(plan.number, recovery.step)
    failed = job.snapshots.failed.get(set_name(*moment), 0)
    if failed >= (1 if older_state(turn) else MOST_TRIES):
        return None
    there = turn.connected if nodes is None else turn.connected & {*nodes}
    copies = job.snapshots.copies(moment, plan, there)
    lacked = [member for member in plan.members if member in holders]
    joining = spread(job.planning.remedy.plan).members if job.planning.remedy is not None else ()
    readers = stand_ins(lacked, copies, dict.fromkeys((*recovery.sources, *joining)))
    if readers is None:
        return None
    kept = sorted({node_of(reader) for reader in readers.values()})
    text = f"the part of {', '.join(lacked)} is read from {words(moment, kept)}"
    return Source(plan=plan, recovery=msgspec.structs.replace(recovery, snapshots=readers), words=text)


class _Option(Value, frozen=True, kw_only=True):
    """An older state."""

    moment: Moment  # the point in the job's history
    words: str  # where it is, for people
    old: JobPlan | None = None  # plan that snapshots are of, None for checkpoints
    lacking: tuple[str, ...] = ()  # nodes that cannot be reached now, and alone hold some of it


def _sets(turn: Transaction) -> list[_Option]:
    """The sets of snapshots that agents hold all of."""
    snapshots = turn.job.snapshots
    there = turn.connected
    options = []
    for moment in snapshots.moments():
        plan = plan_of(turn, moment.plan)
        if plan is None or snapshots.failed.get(set_name(*moment), 0) >= MOST_TRIES:
            continue
        copies = snapshots.copies(moment, plan)
        if any(device not in copies for device in plan.members):
            continue
        away = {node for nodes in copies.values() if not there & {*nodes} for node in nodes}
        where = words(moment, snapshots.holding(moment))
        options.append(_Option(moment=moment, words=where, old=plan, lacking=tuple(sorted(away))))
    return options


def _checkpoints(turn: Transaction) -> list[_Option]:
    names = checkpoint_names(turn)
    if not names or turn.job.snapshots.failed.get(CHECKPOINTS, 0) >= MOST_TRIES:
        return []
    known = {one.name: Moment(one.plan, one.step) for one in turn.job.checkpoints.published}
    # Of one that was there before the job nothing is known but that it is older than what the job made.
    return [_Option(moment=known.get(names[0], Moment(0, -1)), words=f"checkpoint {names[0]}")]


def checkpoint_names(turn: Transaction) -> tuple[str, ...]:
    """The checkpoints that members may try, the newest first: those that the job published, then others that
    workers saw as they came. What is beyond a step that the job went back to is no part of its history."""
    published = sorted(turn.job.checkpoints.published, key=lambda one: (one.plan, one.step), reverse=True)
    names = [one.name for one in published if not is_dead(turn.job, one)]
    others = {one.name for one in turn.job.checkpoints.published}
    for worker in () if turn.job.start.fresh else turn.job.workers.values():
        names += [name for name in worker.checkpoints if name not in others]
        others |= {*worker.checkpoints}
    return tuple(names)


def _coming(turn: Transaction) -> str:
    """Workers that are on their way, while a plan without them need not be made in haste."""
    job, settings = turn.job, turn.settings
    since = max(job.since, job.start.arrived)
    if turn.now - job.start.arrived < settings.gather_seconds:
        return "more workers"
    there = {name for worker in job.workers.values() for name in (worker.node, worker.device)}
    awaited = [place for place in sorted(job.start.joiners) if place not in there]
    if awaited and turn.now - since < settings.prepare_seconds:
        return f"the workers of {', '.join(awaited)}"
    return ""


def _source(turn: Transaction, option: _Option, plan: JobPlan) -> Source | str:
    """The source in a proposal of `plan`, or a sentence about the state that is lacking."""
    job = turn.job
    assert job.losses.fence is not None
    if option.old is None:
        recovery = Recovery(fence=job.losses.fence.number, step=-1, sources={})
        names = checkpoint_names(turn)
        text = f"the state is read from {option.words}"
        return Source(plan=None, recovery=recovery, checkpoints=names, words=text)
    if option.lacking:
        return f"node {', '.join(option.lacking)} cannot be reached, and alone keeps a part of {option.words}"
    copies = job.snapshots.copies(option.moment, option.old, turn.connected)
    readers = stand_ins(option.old.members, copies, plan.members)
    if readers is None:
        away = {node for nodes in copies.values() if plan.nodes.isdisjoint(nodes) for node in nodes}
        return f"no worker on node {', '.join(sorted(away))} reads its part of {option.words}"
    used = {*readers.values()}
    recovery = Recovery(
        fence=job.losses.fence.number,
        step=option.moment.step,
        sources={device: job.workers[device].incarnation for device in plan.members if device in used},
        snapshots=readers,
    )
    return Source(plan=option.old, recovery=recovery, words=f"the state is read from {option.words}")
