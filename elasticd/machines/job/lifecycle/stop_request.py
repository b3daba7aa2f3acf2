"""A user stops a job: its workers drain, make a last checkpoint where they can, and the job ends.

The leader has the agents send SIGTERM to the job's workers. What follows is what follows any SIGTERM to all of
them (`lifecycle.drain`). The job ends at once where nothing trains or nobody is there, and at the latest when
the time is up that the user gave. A new leader knows nothing of the wish, but the workers that drain say so
again; where none drains, the user asks once more.

An agent of release 0.1 skips the order: the user is told of its node, whose workers train on until the time is
up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elasticd.codec.decoding import shown
from elasticd.machines.job.lifecycle.fence import FALLIBLE
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.events import StopAsked
from elasticd.machines.job.state.job_state import JobState, NodeState
from elasticd.machines.job.state.transaction import Turn
from elasticd.wire.coordinator import End, is_first

#: How the reason of a job begins that was stopped because somebody asked for it.
BY_REQUEST = "stopped by "


def on_request(reason: str) -> bool:
    """Whether a job that ended for this reason did so because somebody asked for it."""
    return reason.startswith(BY_REQUEST)


def asked(turn: Turn, event: StopAsked) -> None:
    """From now on; a second wish may shorten the time, or lengthen it."""
    job = turn.job
    if event.seconds <= 0:
        at_once(turn, event)
        return
    text = f"{event.by} stops the job: its workers drain, and have {event.seconds:g} s"
    if deaf := unheard(job, turn.nodes, event.seconds):
        text = f"{text}; {words(deaf)}"
    turn.note("stopping", text, by=event.by, seconds=event.seconds, unheard=sorted(deaf))
    turn.set(stopping=f"{BY_REQUEST}{event.by}", stop_at=turn.now + event.seconds)
    for name in turn.nodes:
        if turn.here(name):
            remind(turn, name)


def at_once(turn: Turn, event: StopAsked) -> None:
    """Nothing trains that could be saved: the job ends now."""
    stop(turn, f"{BY_REQUEST}{event.by}, after step {turn.job.progress.step}", orderly=True)


def remind(turn: Turn, node: str) -> None:
    """Tells the agent of a node that is there, or came back, of its workers that are not leaving yet. It tells
    each of them once."""
    if not turn.job.stopping or turn.over:
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


def due(turn: Turn) -> None:
    """Ends the job once nobody is left, or the time is up. A leader that just came has not heard of all."""
    job = turn.job
    if not job.stopping:
        return
    deserted = job.settle_until is None and all(worker.left for worker in job.workers.values())
    if deserted or turn.now >= job.stop_at:
        stop(turn, f"{job.stopping}, after step {job.progress.step}", orderly=True)
