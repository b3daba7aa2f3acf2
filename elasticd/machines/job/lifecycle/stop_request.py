"""A user stops a job: its workers drain, make a last checkpoint where they can, and the job ends.

The leader has the agents send SIGTERM to the job's workers. What follows is what follows any SIGTERM to all of
them (`lifecycle.drain`). The job ends at once where nothing trains or nobody is there, and at the latest when
the time is up that the user gave. The wish is written to the store (`StopRecord`): a new leader goes on with
it, and tells the agents as they come.

An agent of release 0.1 skips the order: the user is told of its node, whose workers train on until the time is
up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elasticd.codec.decoding import shown
from elasticd.machines.job.lifecycle.fence import FALLIBLE
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.events import StopAsked
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobState, NodeState
from elasticd.machines.job.state.last_checkpoint import after_steps, lost_steps
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import StopRecord
from elasticd.wire.coordinator import End, is_first

#: How the reason of a job begins that was stopped because somebody asked for it.
BY_REQUEST = "stopped by "


def asked(turn: Transaction, event: StopAsked) -> None:
    """From now on; a second wish may shorten the time, or lengthen it."""
    job = turn.job
    if event.seconds <= 0 or (job.plan is None and not job.takeover.unmet):
        at_once(turn, event)
        return
    text = f"{event.by} stops the job: its workers drain, and have {event.seconds:g} s"
    if deaf := unheard(job, turn.nodes, event.seconds):
        text = f"{text}; {words(deaf)}"
    note = turn.told("stopping", text, by=event.by, seconds=event.seconds, unheard=sorted(deaf))
    turn.write(StopRecord(by=event.by, seconds=event.seconds), notes=(note,))
    turn.change(
        "ending", stopping=f"{BY_REQUEST}{event.by}", stop_asked_at=turn.now, stop_at=turn.now + event.seconds
    )
    for name in turn.nodes:
        if turn.here(name):
            remind(turn, name)


def restored(job: JobState, record: StopRecord | None, seconds: float, now: float) -> JobState:
    """The job as a new leader finds it, so many seconds after a user's wish to stop it."""
    if record is None or job.phase in OVER:
        return job
    left = max(0.0, record.seconds - seconds)
    return job.changed("ending", stopping=f"{BY_REQUEST}{record.by}", stop_asked_at=now, stop_at=now + left)


def at_once(turn: Transaction, event: StopAsked) -> None:
    """Nothing trains that could be saved: the job ends now."""
    stop(turn, f"{BY_REQUEST}{event.by}, {after_steps(turn.job)}", orderly=True, requested=True)


def remind(turn: Transaction, node: str) -> None:
    """Tells the agent of a node that is there, or came back, of its workers that are not leaving yet. It tells
    each of them once."""
    if not turn.job.ending.stopping or turn.over:
        return
    if staying := tuple(_staying(turn.job, node)):
        turn.order(node, End(job=turn.job.job, devices=staying))


def _staying(job: JobState, node: str) -> Iterable[str]:
    """The devices of a node whose workers are not leaving."""
    return (w.device for w in job.workers.values() if w.node == node and not w.left and not w.draining)


def unheard(job: JobState, nodes: Mapping[str, NodeState], seconds: float) -> dict[str, str]:
    """The nodes whose workers a wish to stop the job would not reach, and the release of each one's agent.
    Without any time, or where nothing trains, nobody need hear of it: the store ends the job."""
    if seconds <= 0 or job.phase not in FALLIBLE:
        return {}
    return {
        name: node.release
        for name, node in nodes.items()
        if is_first(node.release) and any(_staying(job, name))
    }


def words(deaf: Mapping[str, str]) -> str:
    """The same in words."""
    names = ", ".join(f"{name} (elasticd {shown(release)})" for name, release in sorted(deaf.items()))
    return (
        f"the workers of {names} are not told, and train on until the time is up: that release's agents cannot"
    )


def due(turn: Transaction) -> None:
    """Ends the job once nobody is left who holds the state, the recovery of those who do takes too long, or the
    time is up. A leader that just came has not heard of all."""
    job = turn.job
    if not job.ending.stopping:
        return
    nobody = job.takeover.settle_until is None and not job.takeover.unmet and not job.holders
    since = max(job.since, job.ending.stop_asked_at)
    stands = job.phase is JobPhase.RECOVERING and turn.now - since >= turn.settings.stopping_seconds
    if stands and not nobody:
        ends_unsaved(turn, job.reason or "its workers did not recover from the loss before")
    elif nobody or turn.now >= job.ending.stop_at:
        stop(turn, f"{job.ending.stopping}, {after_steps(job)}", orderly=not lost_steps(job), requested=True)


def awaited(job: JobState) -> str:
    """Says what a job that is being stopped waits for ("": it is not, or is over)."""
    if not job.ending.stopping or job.phase in OVER:
        return ""
    if job.phase is JobPhase.RECOVERING:
        lost = job.losses.fence.reason if job.losses.fence is not None else ""
        what = f"recovers for its last checkpoint ({lost})"
        return f"stopping: {what}; {job.reason}" if job.reason else f"stopping: {what}"
    deaf = [worker.device for worker in job.holders if not worker.draining]
    saves = [worker.device for worker in job.holders if worker.draining and worker.saves]
    parts = [f"for {_few(deaf)} to hear of it"] if deaf else []
    parts += [f"for the last checkpoint of {_few(saves)}"] if saves else []
    text = f"stopping: waits {' and '.join(parts)}" if parts else "stopping: all workers are told"
    return f"{text}; {job.reason}" if job.reason else text


def _few(devices: Sequence[str], most: int = 4) -> str:
    more = f" and {len(devices) - most} more" if len(devices) > most else ""
    return f"{', '.join(devices[:most])}{more}"


def ends_unsaved(turn: Transaction, why: str) -> None:
    """Ends a job that was to make a last checkpoint after a loss, and cannot."""
    job = turn.job
    who = job.ending.stopping or "all workers drain"
    stop(
        turn,
        f"{who}, {after_steps(job)}; no last checkpoint could be made: {why}",
        orderly=not lost_steps(job),
        requested=bool(job.ending.stopping),
    )
