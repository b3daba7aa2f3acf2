"""A user stops a job: its workers are told to go, make a last checkpoint where they can, and the job ends.

The leader has the agents send SIGTERM to the job's workers. What follows is what follows any SIGTERM to all of
them (`leaving`). The job ends at once where nothing trains or nobody is there, and at the latest when the time
is up that the user gave. A new leader knows nothing of the wish, but the workers that were told to go say so
again; where none was told, the user asks once more.
"""

from __future__ import annotations

from elasticd.machines.job.effects import Send, StopAsked
from elasticd.machines.job.ending import stop
from elasticd.machines.job.fence import FALLIBLE
from elasticd.machines.job.turn import Turn
from elasticd.orders import End


def asked(turn: Turn, event: StopAsked) -> None:
    """From now on; a second wish may shorten the time, or lengthen it."""
    job = turn.job
    if turn.over:
        return
    why = f"stopped by {event.by}"
    if event.seconds <= 0 or job.phase not in FALLIBLE:
        stop(turn, f"{why}, after step {job.progress.step}")
        return
    text = f"{event.by} stops the job: its workers are told to go, and have {event.seconds:g} s"
    turn.note("stopping", text, by=event.by, seconds=event.seconds)
    turn.set(stopping=why, stop_at=turn.now + event.seconds)
    for name, node in turn.nodes.items():
        if node.connected:
            remind(turn, name)


def remind(turn: Turn, node: str) -> None:
    """Tells the agent of a node that is there, or came back, of its workers that are not leaving yet. It tells
    each of them once."""
    if not turn.job.stopping or turn.over:
        return
    workers = turn.job.workers.values()
    staying = tuple(w.device for w in workers if w.node == node and not w.left and not w.leaving)
    if staying:
        turn.effects.append(Send(node=node, message=End(job=turn.job.job, devices=staying)))


def due(turn: Turn) -> None:
    """Ends the job once nobody is left, or the time is up. A leader that just came has not heard of all."""
    job = turn.job
    if not job.stopping or turn.over:
        return
    deserted = job.settle_until is None and all(worker.left for worker in job.workers.values())
    if deserted or turn.now >= job.stop_at:
        stop(turn, f"{job.stopping}, after step {job.progress.step}")
