"""Hangs of a main thread: agents say which workers stand still and where; who makes the others wait is found.

A rank may hang in a step's computation: a sleep in the loss, or a loop in C that keeps the interpreter's lock.
Whether its control thread still answers or not, its place says where it is. The others come to wait, for it or
for one another. So the culprits are the members that stand still and wait for nobody, once all other members
stand still and wait. As long as a single one is somewhere else (it computes still, it is in its script's own
code) nobody is to blame.

Nobody knows how long a script's own code, its loader or a compilation may take, nor what elasticd calls or does
between two steps: the optimizer's factory, a callback, the reading of a checkpoint. A member that the others
wait for there is a culprit only beyond `detect.outside_seconds`, if that is set. With or without that limit the
job's status says which worker it waits for, and where that one is (`awaited`). In a switch all who take part in
it wait for one another, also those who join; in the job's start these are all of its first plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from elasticd_planner.plan import Plan

from elasticd.machines.job.state import JobState, Phase, Worker
from elasticd.machines.job.turn import Turn
from elasticd.whereabouts import Halted

#: Characters that are kept of a place and a stack, whatever an agent says.
MOST_PLACE, MOST_STACK = 80, 8000
#: Seconds that a worker is outside of a step until the status says that the job waits for it; workers that it
#: names.
TOLD_SECONDS, MOST_NAMED = 10.0, 3


def stood(turn: Turn, message: Halted) -> None:
    """A worker's main thread stands still, or moves again. That alone costs nothing: see `culprits`."""
    worker = turn.job.workers.get(message.device)
    if worker is None or worker.incarnation != message.incarnation or turn.over:
        return
    if not message.place:
        turn.worker(worker, halted=None, halted_at=turn.now)
        return
    place, stack = message.place[:MOST_PLACE], message.stack[-MOST_STACK:]
    seconds = max(0.0, message.seconds)
    found = msgspec.structs.replace(message, place=place, stack=stack, seconds=seconds)
    turn.worker(worker, halted=found, halted_at=turn.now - seconds)


def culprits(turn: Turn) -> tuple[Worker, ...]:
    """The members that all others wait for, and that have no reason to let them. Never more than half of them:
    what befalls most of a job is no fault of its devices."""
    for members in (_training(turn.job), _switching(turn.job)):
        others = [worker for worker in members if not _waits(worker)]
        if others and 2 * len(others) <= len(members) and all(_stands(turn, worker) for worker in others):
            return tuple(others)
    return ()


def _training(job: JobState) -> tuple[Worker, ...]:
    """The members of the plan in force; none where one of them is not known."""
    return _known(job, job.plan.binding if job.plan is not None else {})


def _switching(job: JobState) -> tuple[Worker, ...]:
    """Those who take part in the switch to a proposal that all have prepared; none where one is not known."""
    proposal = job.proposal
    if job.phase is not Phase.PROPOSED or proposal is None:
        return ()
    before = job.plan.binding if job.plan is not None else {}
    if proposal.recovery is not None:
        before = proposal.recovery.sources
    found = _known(job, {**before, **proposal.plan.binding})
    new = [worker for worker in found if worker.device in proposal.plan.binding]
    return found if all(worker.prepared >= proposal.number for worker in new) else ()


def _known(job: JobState, binding: Mapping[str, str]) -> tuple[Worker, ...]:
    """The workers of these incarnations, by device; none where one of them is not known."""
    found = ((job.workers.get(device), incarnation) for device, incarnation in binding.items())
    known = tuple(worker for worker, one in found if worker is not None and worker.incarnation == one)
    return known if len(known) == len(binding) else ()


def _waits(worker: Worker) -> bool:
    return worker.halted is not None and worker.halted.waits


def _outside(worker: Worker) -> bool:
    """Of the computation of a step."""
    return worker.halted is not None and not (worker.halted.waits or worker.halted.computes)


def awaited(job: JobState, now: float) -> str:
    """Which workers a job waits for outside of a step, where they are and for how long, in words; nothing
    while one of the others does something else than wait for them."""
    for members in (_training(job), _switching(job)):
        outside = [worker for worker in members if _outside(worker)]
        alone = all(_waits(worker) or _outside(worker) for worker in members)
        since = min((worker.halted_at for worker in outside), default=now)
        if alone and now - since >= TOLD_SECONDS:
            return f"waits for {_named(outside, now)}"
    return ""


def _named(workers: Sequence[Worker], now: float) -> str:
    named = sorted(workers, key=lambda worker: worker.halted_at)[:MOST_NAMED]
    texts = [
        f"worker {worker.device}, which is in {worker.halted.place} for {now - worker.halted_at:.0f} s"
        for worker in named
        if worker.halted is not None
    ]
    more = f" and {len(workers) - len(named)} more" * (len(workers) > len(named))
    return "; ".join(texts) + more


def _stands(turn: Turn, worker: Worker) -> bool:
    """Whether a member that waits for nobody stands still for longer than it may."""
    if worker.halted is None:
        return False
    return worker.halted.computes or _too_long_outside(turn, worker)


def _too_long_outside(turn: Turn, worker: Worker) -> bool:
    limit = turn.settings.detect.outside_seconds
    return limit > 0 and turn.now - worker.halted_at >= limit


def busy(turn: Turn, worker: Worker) -> bool:
    """Whether a worker that is silent is known to be in its script's own code, or in its loader, and may be."""
    return _outside(worker) and not worker.frozen and not _too_long_outside(turn, worker)


def described(turn: Turn, found: tuple[Worker, ...]) -> str:
    """Who stands still, where and for how long, and who waits for them."""
    texts = []
    for worker in found:
        assert worker.halted is not None
        step = f" of step {worker.halted.step}" if worker.halted.step >= 0 else ""
        seconds = turn.now - worker.halted_at
        texts.append(f"worker {worker.device} stands still in {worker.halted.place}{step} for {seconds:.1f} s")
    names = {worker.device for worker in found}
    plan = turn.job.plan
    waits = [
        _waiting(plan, worker.device, worker.halted)
        for worker in _training(turn.job) or _switching(turn.job)
        if worker.device not in names and worker.halted is not None
    ]
    more = f" and {len(waits) - 3} more" if len(waits) > 3 else ""
    return f"{', '.join(texts)}, while {', '.join(waits[:3])}{more} wait{'s' * (len(waits) == 1)}"


def _waiting(plan: Plan | None, device: str, halted: Halted) -> str:
    source = ""
    if plan is not None and halted.step >= 0 and 0 <= halted.rank < len(plan.members):
        source = f" from {plan.members[halted.rank]}"
    return f"{device} (in {halted.place}{source})"


def note(turn: Turn, found: tuple[Worker, ...]) -> None:
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
