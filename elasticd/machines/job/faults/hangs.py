"""Hangs of a main thread: agents say which workers stand still and where; who makes the others wait is found.

A rank may hang in a step's computation: a sleep in the loss, or a loop in C that keeps the interpreter's lock.
Whether its control thread still answers or not, its place says where it is. The others come to wait, for it or
for one another. So the culprits are the members that stand still and wait for nobody, once all other members
stand still and wait. As long as a single one is somewhere else (it computes still, it is in its script's own
code) nobody is to blame.

Nobody knows how long a script's own code, its loader or a compilation may take, nor what elasticd calls or does
between two steps: the optimizer's factory, a callback, the reading of a checkpoint. So it is with what is
computed in the first two steps under a plan. A member that the others wait for there is a culprit only beyond
`detect.outside_seconds`, if that is set; agents tell of all these places alike ("outside of a step" below).

Whoever is waited for, to blame or not, the job's status says which workers these are, and where (`awaited`).
Where most members hang in a step's computation, or a job's only device does, events have their stacks (`tell`).
A job's only device that stands still beyond `detect.outside_seconds` is given up for one that stands by, which
goes on from the newest snapshot or checkpoint.
Members that all wait, some in a step and others in an evaluation, say, which the script asks for on one rank
alone, would wait for ever (`apart`). Nobody is to blame: a fence has them meet under the same plan, where all
do first what one has asked for (`runtime.api.between_steps`).
In a switch all who take part in it wait for one another, also those who join; in the job's start these are all
of its first plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from elasticd_planner.spec.mesh import JobPlan

from elasticd.machines.job.copies.rollback import older_state
from elasticd.machines.job.state.job_state import JobPhase, JobState, Worker
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.main_thread import Halted

#: Characters that are kept of a place and a stack, whatever an agent says.
MOST_PLACE, MOST_STACK = 80, 8000
#: Seconds that a worker stands still until the status says that the job waits for it; workers that it names.
TOLD_SECONDS, MOST_NAMED = 10.0, 3


def stood(turn: Transaction, node: str, message: Halted) -> None:
    """A worker's main thread stands still, or moves again. That alone costs nothing: see `culprits`."""
    worker = turn.job.worker(message.device, message.incarnation)
    if worker is None:
        return
    if not message.place:
        turn.worker(worker, halted=None, halted_at=turn.now)
        return
    place, stack = message.place[:MOST_PLACE], message.stack[-MOST_STACK:]
    seconds, task = max(0.0, message.seconds), message.task[:MOST_PLACE]
    halted = msgspec.structs.replace(message, place=place, stack=stack, seconds=seconds, task=task)
    turn.worker(worker, halted=halted, halted_at=turn.now - seconds)


def culprits(turn: Transaction) -> tuple[Worker, ...]:
    """The members that all others wait for, and that have no reason to let them. Never more than half of them:
    what befalls most of a job is no fault of its devices. A job's only member is one beyond the limit, where
    another device can go on from a copy of the state."""
    job, limit = turn.job, turn.settings.detect.outside_seconds
    for members in (_training(job), _switching(job)):
        others = [worker for worker in members if not _waits(worker)]
        if not others or (2 * len(others) > len(members) and not _replaceable(turn, members)):
            continue
        if all(_stands(job, worker, turn.now, limit) for worker in others):
            return tuple(others)
    return ()


def _replaceable(turn: Transaction, members: Sequence[Worker]) -> bool:
    """Returns True if a job's only member stands still beyond the limit beside a device that could go on from
    an older state. That is done again once the job has come farther: code that hangs on one may hang on the
    next."""
    job, limit = turn.job, turn.settings.detect.outside_seconds
    if len(members) != 1 or job.steps.progress.step <= job.losses.stuck_step or not older_state(turn):
        return False
    spare = [worker for worker in job.workers.values() if worker.device != members[0].device]
    goes_on = any(
        turn.here(worker.node)
        and not (worker.left or worker.draining or worker.frozen or worker.raised or worker.orphan)
        for worker in spare
    )
    return goes_on and _too_long_outside(job, members[0], turn.now, limit)


def _training(job: JobState) -> tuple[Worker, ...]:
    """The members of the plan in force; none where one of them is not known."""
    return job.all_known(job.plan.binding) if job.plan is not None else ()


def _switching(job: JobState) -> tuple[Worker, ...]:
    """Those who take part in the switch to a proposal that all have prepared; none where one is not known."""
    proposal = job.proposal
    if job.phase is not JobPhase.PROPOSED or proposal is None:
        return ()
    before = job.plan.binding if job.plan is not None else {}
    if proposal.recovery is not None:
        before = proposal.recovery.sources
    workers = job.all_known({**before, **proposal.plan.binding})
    new = [worker for worker in workers if worker.device in proposal.plan.binding]
    return workers if all(worker.prepared >= proposal.number for worker in new) else ()


def _waits(worker: Worker) -> bool:
    return worker.halted is not None and worker.halted.waits


def apart(turn: Transaction) -> str:
    """Why members that wait for one another never come together: they are at different places of the script."""
    members = _training(turn.job)
    halts = [worker.halted for worker in members if worker.halted is not None and worker.halted.waits]
    if len(halts) < len(members) or not any(halt.task for halt in halts):
        return ""
    places = [halt.task or (f"step {halt.step}" if halt.step >= 0 else halt.place) for halt in halts]
    since = max(worker.halted_at for worker in members)
    if len(set(places)) < 2 or turn.now - since < TOLD_SECONDS:
        return ""
    named = {place: worker.device for worker, place in reversed([*zip(members, places, strict=True)])}
    texts = ", ".join(f"{device} is in {place}" for place, device in sorted(named.items(), key=lambda x: x[1]))
    task = next(place for place, halt in zip(places, halts, strict=True) if halt.task)
    return (
        f"{texts}: every member must call {task}, at the same place of the script, without "
        "`if job.rank == 0`. All do it now, after a wait of some seconds"
    )


def awaited(job: JobState, now: float, limit: float = 0.0) -> str:
    """Which workers a job waits for, where they are and for how long, in words; nothing while one of the others
    does something else than wait for them. limit: `detect.outside_seconds`. Members of the plan in force that
    wait for one another may all wait for one that joins: so they are looked at last."""
    mutual = ""
    for members in (_training(job), _switching(job)):
        if not members or any(worker.halted is None for worker in members):
            continue
        busy = [worker for worker in members if not _waits(worker)]
        if busy and now - min(worker.halted_at for worker in busy) >= TOLD_SECONDS:
            return f"waits for {_named(busy, now)}{_kept(job, members, busy, now, limit)}"
        if not busy and now - max(worker.halted_at for worker in members) >= TOLD_SECONDS:
            mutual = _mutual(job, members)
    return mutual


def _kept(job: JobState, members: Sequence[Worker], found: Sequence[Worker], now: float, limit: float) -> str:
    """Why workers that stand still for longer than they may are not given up, if it is for their number."""
    if 2 * len(found) <= len(members) or not any(_stands(job, worker, now, limit) for worker in found):
        return ""
    if len(members) == 1:
        return "; it is the job's only device, and is not given up for it"
    return "; no device is given up for it, since most of the job's stand still"


def _mutual(job: JobState, members: Sequence[Worker]) -> str:
    waits = [_waiting(job.plan, w.device, w.halted) for w in members[:MOST_NAMED] if w.halted is not None]
    return f"its workers wait for one another: {', '.join(waits)}{_more(members)}"


def tell(turn: Transaction) -> None:
    """Of members that stand still for longer than they may, though none is a culprit, since they are most of
    the job's or another one may still: whom the job waits for, and their stacks. Of each step once."""
    job = turn.job
    if job.losses.standstill == job.steps.progress.step:
        return
    limit = turn.settings.detect.outside_seconds
    members = (*_training(job), *_switching(job))
    standing = [worker for worker in members if _stands(job, worker, turn.now, limit)]
    if standing and (text := awaited(job, turn.now, limit)):
        turn.change("losses", standstill=job.steps.progress.step)
        turn.note("waiting", f"waiting: {text}", number=job.number)
        note(turn, tuple({worker.device: worker for worker in standing}.values())[:MOST_NAMED])


def _named(workers: Sequence[Worker], now: float) -> str:
    named = sorted(workers, key=lambda worker: worker.halted_at)[:MOST_NAMED]
    texts = [
        f"worker {worker.device}, which is in {worker.halted.place} for {now - worker.halted_at:.0f} s"
        for worker in named
        if worker.halted is not None
    ]
    return "; ".join(texts) + _more(workers)


def _more(workers: Sequence[object]) -> str:
    """Of those that are not named."""
    return f" and {len(workers) - MOST_NAMED} more" * (len(workers) > MOST_NAMED)


def _stands(job: JobState, worker: Worker, now: float, limit: float) -> bool:
    """Returns True if a member that waits for nobody stands still for longer than it may."""
    if worker.halted is None or worker.halted.waits:
        return False
    return worker.halted.computes or _too_long_outside(job, worker, now, limit)


def _too_long_outside(job: JobState, worker: Worker, now: float, limit: float) -> bool:
    """Beyond the limit. Of a place in a step it counts from when two steps, as they are expected, are over."""
    prediction = job.plan.prediction if job.plan is not None else None
    step = worker.halted is not None and worker.halted.step >= 0
    late = 2 * prediction.step_seconds if step and prediction is not None else 0.0
    return limit > 0 and now - worker.halted_at >= limit + late


def busy(turn: Transaction, worker: Worker) -> bool:
    """Returns True if a worker that is silent is known to be in its script's own code, in its loader or in its
    plan's first steps, and may be."""
    if worker.frozen or worker.halted is None or worker.halted.waits or worker.halted.computes:
        return False
    return not _too_long_outside(turn.job, worker, turn.now, turn.settings.detect.outside_seconds)


def described(turn: Transaction, found: tuple[Worker, ...]) -> str:
    """A sentence that names the workers that stand still, the place and the seconds, and the others that
    wait."""
    texts = []
    for worker in found:
        assert worker.halted is not None
        step = f" of step {worker.halted.step}" if worker.halted.step >= 0 else ""
        seconds = turn.now - worker.halted_at
        texts.append(f"worker {worker.device} stands still in {worker.halted.place}{step} for {seconds:.1f} s")
    members = _training(turn.job) or _switching(turn.job)
    waits = [
        _waiting(turn.job.plan, worker.device, worker.halted)
        for worker in members
        if worker.halted is not None and worker.halted.waits
    ]
    if not waits:
        return ", ".join(texts)
    return f"{', '.join(texts)}, while {', '.join(waits[:3])}{_more(waits)} wait{'s' * (len(waits) == 1)}"


def _waiting(plan: JobPlan | None, device: str, halted: Halted) -> str:
    source = ""
    if plan is not None and halted.step >= 0 and 0 <= halted.rank < len(plan.members):
        source = f" from {plan.members[halted.rank]}"
    return f"{device} (in {halted.place}{source})"


def note(turn: Transaction, found: tuple[Worker, ...]) -> None:
    """Tells of each, with its stack."""
    for worker in found:
        assert worker.halted is not None
        turn.note(
            "halted",
            described(turn, (worker,)),
            device=worker.device,
            step=worker.halted.step,
            place=worker.halted.place,
            stack=worker.halted.stack,
        )
