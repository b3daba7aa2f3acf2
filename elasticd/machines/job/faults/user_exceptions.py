"""Exceptions of the script's own code: a step is tried on other devices once, then the job ends with the text.

Such an exception may be its device's fault, or that of the code and its data. So a rank whose code raises says
so, and stays while it holds state:

    first      a fence, and a plan without its device. The rank is a source of the recovery like any that was
               drained (`lifecycle.drain`), and ends when nobody needs it. The others make the step again.
    again      the same exception in the same step on another device: no device is to blame. A fence, and the
               plan in force once more, under which its members write a last checkpoint. Then the job ends, with
               the exception as its reason. It ends at once where no state can be saved: nothing was trained, no
               checkpoints are kept, a member is gone or is of a release that cannot.
    in turn    the same exception on a third device, a few steps later: the code of the first rank fails, say,
               and each plan has another. That is as good as in the same step.
    no other   a job without another device to try the step on ends likewise, and so does one for which there is
               no plan without the device: its rank stays, so that no torchrun starts it anew.

A rank whose code raised in the midst of an update (the optimizer's) holds no state that is whole, and is lost.
"""

from __future__ import annotations

import re

import msgspec

from elasticd.machines.job.lifecycle.fence import fault
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.job_state import JobState, Worker
from elasticd.machines.job.state.last_checkpoint import after_steps
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import Thrown
from elasticd.wire.worker import Raised

#: Characters that are kept of an exception's type, its text and its traceback, whatever a worker says.
MOST_KIND, MOST_TEXT, MOST_TRACEBACK = 120, 1000, 8000
#: Exceptions of a job that are remembered.
MOST_THROWN = 8

#: Steps in which an exception ends one device after the other, if it does.
NEAR = 100

#: What differs between two devices though the exception is the same: addresses, ids, sizes with their units
#: (what torch says of memory that is not enough has ten of them).
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?(\s?([KMGT]i?B|bytes)\b)?")
#: What the job's reason ends with where its members made a last checkpoint.
_SAVED = "the state is saved"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def raised(turn: Transaction, worker: Worker, body: Raised) -> None:
    """A rank says that its script's own code raised. Said again it changes nothing."""
    job, body = turn.job, _bounded(body)
    if worker.raised == body or (worker.raised is not None and not body.ends):
        return  # one process raises once; what all raise alike, and the job ends by, may follow
    if job.ending.failing and body.ends:
        stop(turn, f"{job.ending.failing}; {_kept(job)}")
        return
    over = body.plan < job.number  # a plan without it was recorded: a new leader hears what was
    worker = turn.worker(worker, raised=body, judged=over)
    thrown = Thrown(
        device=worker.device, step=index_of(body), kind=body.kind, text=body.text, traceback=body.traceback
    )
    turn.change(
        "ending", thrown=(*(each for each in job.ending.thrown if each != thrown), thrown)[-MOST_THROWN:]
    )
    if over:
        return
    turn.note(
        "raised",
        described(worker.device, body),
        device=worker.device,
        plan=body.plan,
        step=index_of(body),
        exception=body.kind,
        message=body.text,
        traceback=body.traceback,
    )
    if body.ends:
        saved = f"; {_kept(job)}" if body.saves and body.step > 0 else ""
        stop(turn, f"{described(worker.device, body)}{saved}")


def _kept(job: JobState) -> str:
    """The outcome of the last checkpoint, in words."""
    unmade = job.checkpoints.unmade
    return _SAVED if unmade is None else f"the last checkpoint failed ({unmade.reason}): {after_steps(job)}"


def judge(turn: Transaction) -> None:
    """Draws the consequences of the exceptions, once a new leader knows which workers there are."""
    job = turn.job
    if not job.ending.thrown or job.ending.failing:
        return
    for worker in job.workers.values():
        if worker.raised is not None and not worker.judged and not turn.job.ending.failing and not turn.over:
            _judge(turn, turn.worker(turn.job.workers[worker.device], judged=True), worker.raised)


def _judge(turn: Transaction, worker: Worker, body: Raised) -> None:
    others = [thrown for thrown in turn.job.ending.thrown if thrown.device != worker.device]
    again = next((thrown for thrown in others if alike(thrown, body)), None) or _in_turn(others, body)
    what = described(worker.device, body)
    if again is not None:
        _end(turn, f"{what}, as on {again.device} before", body)
    elif not _others(turn.job):
        _end(turn, f"{what}, and there is no other device to try the step on", body)
    elif body.holds:
        turn.worker(worker, draining=f"its code raised {body.kind}")
        fault(turn, {}, what)
    else:
        fault(turn, {worker.device: worker.incarnation}, what)


def unplanned(turn: Transaction, why: str) -> bool:
    """There is no plan without the device of a rank whose code raised: the step cannot be tried elsewhere.
    Whether there is such a rank, by which the job then ends."""
    job = turn.job
    raisers = [worker for worker in job.workers.values() if worker.raised is not None and worker.draining]
    for worker in raisers:
        body = worker.raised
        if body is not None and body.plan == job.number and not job.ending.failing:
            what = described(worker.device, body)
            _end(turn, f"{what}, and there is no plan without its device to try the step again: {why}", body)
            return True
    return False


def index_of(body: Raised) -> int:
    """The index of the step, as the script sees it; of an older release the updates before it."""
    return body.step if body.index is None else body.index


def alike(one: Thrown, other: Raised) -> bool:
    """Returns True if the same step failed with the same exception."""
    return one.step == index_of(other) and same(one, other)


def _in_turn(others: list[Thrown], body: Raised) -> Thrown | None:
    """The last of two other devices or more that had the same exception a few steps before."""
    alike = [thrown for thrown in others if same(thrown, body) and abs(index_of(body) - thrown.step) <= NEAR]
    return alike[-1] if len({thrown.device for thrown in alike}) > 1 else None


def same(one: Thrown, other: Raised | Thrown) -> bool:
    """Returns True if it is the same exception. Numbers in the text may differ."""
    return (one.kind, _NUMBER.sub("", one.text)) == (other.kind, _NUMBER.sub("", other.text))


def described(device: str, body: Raised) -> str:
    """The exception in one line."""
    text = _UNPRINTABLE.sub(" ", body.text).strip()
    kind = _UNPRINTABLE.sub(" ", body.kind)
    what = f"{kind}: {text}" if text else kind
    return f"the script's code raised {what} (in step {index_of(body)}, on {device})"


def _bounded(body: Raised) -> Raised:
    return msgspec.structs.replace(
        body,
        kind=body.kind[:MOST_KIND],
        text=body.text[:MOST_TEXT],
        traceback=body.traceback[-MOST_TRACEBACK:],
    )


def _others(job: JobState) -> bool:
    """Returns True if a worker is there on which the step was not tried, or may be, unknown to a new leader."""
    return bool(job.takeover.unmet) or any(
        not (worker.left or worker.draining or worker.frozen or worker.raised)
        for worker in job.workers.values()
    )


def _end(turn: Transaction, why: str, body: Raised) -> None:
    """No device is to blame. The members save the state, if they can, and the job ends."""
    if not (body.step > 0 and body.saves and _all_can_save(turn.job)):
        stop(turn, why)
        return
    for worker in turn.job.workers.values():
        if worker.raised is not None and worker.draining:
            turn.worker(worker, draining="")
    fault(turn, {}, why)
    turn.change("ending", failing=why)


def _all_can_save(job: JobState) -> bool:
    members = job.all_known(job.plan.binding) if job.plan is not None else ()
    return bool(members) and all(map(_can_save, members))


def _can_save(worker: Worker) -> bool:
    whole = worker.raised is None or worker.raised.holds
    return worker.closes and whole and not (worker.left or worker.frozen or worker.orphan)
