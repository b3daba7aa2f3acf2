"""Hangs of a main thread: agents say which workers stand still and where; who makes the others wait is found.

A rank may hang in a step's computation: a sleep in the loss, or a loop in C that keeps the interpreter's lock.
Whether its control thread still answers or not, its place says where it is. The others come to wait, for it or
for one another. So the culprits are the members that stand still and wait for nobody, once all other members
stand still and wait. As long as a single one is somewhere else (it computes still, it is in its script's own
code) nobody is to blame.

Nobody knows how long a script's own code, its loader or a compilation may take. A member that the others wait
for there is a culprit only beyond `detect.outside_seconds`, if that is set.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.plan import Plan

from elasticd.machines.job.state import Worker
from elasticd.machines.job.turn import Turn
from elasticd.whereabouts import Halted

#: Characters that are kept of a place and a stack, whatever an agent says.
MOST_PLACE, MOST_STACK = 80, 8000


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
    plan = turn.job.plan
    members = turn.job.bound(plan)
    if plan is None or len(members) < len(plan.binding):
        return ()
    waiting = [worker for worker in members if worker.halted is not None and worker.halted.waits]
    others = [worker for worker in members if worker not in waiting]
    if 2 * len(others) > len(members) or not all(_stands(turn, worker) for worker in others):
        return ()
    return tuple(others)


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
    halted = worker.halted
    if halted is None or halted.waits or halted.computes or worker.frozen:
        return False
    return not _too_long_outside(turn, worker)


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
        for worker in turn.job.bound(plan)
        if plan is not None and worker.device not in names and worker.halted is not None
    ]
    more = f" and {len(waits) - 3} more" if len(waits) > 3 else ""
    return f"{', '.join(texts)}, while {', '.join(waits[:3])}{more} wait{'s' * (len(waits) == 1)}"


def _waiting(plan: Plan, device: str, halted: Halted) -> str:
    source = f" from {plan.members[halted.rank]}" if 0 <= halted.rank < len(plan.members) else ""
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
