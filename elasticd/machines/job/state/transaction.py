"""One step under way: the state so far and the effects collected. It never outlives its step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from elasticd.codec.safe_text import shortened
from elasticd.machines.job.state.events import (
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    Effect,
    EventKind,
    Log,
    Record,
    Write,
)
from elasticd.machines.job.state.job_state import (
    OVER,
    TRANSITIONS,
    JobPhase,
    JobSettings,
    JobState,
    NodeState,
    Part,
    Worker,
)
from elasticd.wire.coordinator import FromMachine, ToClient
from elasticd.wire.rendezvous import Joined
from elasticd.wire.worker import Closed, Rehearse, Rejected, SaveNow

#: Events that the log has lines of, which their phases have nothing for.
MOST_UNEXPECTED = 32


def doubled(seconds: float, times: int, most: float) -> float:
    """Seconds until the next try after `times` in a row: doubled with each after the first, up to the most."""
    return min(seconds * 2.0 ** min(times - 1, 64), most)


class IllegalTransition(RuntimeError):
    """A phase followed another that the table does not let it follow: an error of this program."""


class Transaction:
    """Collects what one event does to one job. `nodes` and `epoch` are the leader's, read only here."""

    def __init__(
        self, job: JobState, nodes: Mapping[str, NodeState], epoch: int, settings: JobSettings, now: float
    ) -> None:
        self.job, self.nodes, self.epoch, self.settings, self.now = job, nodes, epoch, settings, now
        self.effects: list[Effect] = []

    @property
    def over(self) -> bool:
        """True if the job is done or stopped."""
        return self.job.phase in OVER

    def set(self, **changes: Any) -> None:
        """Changes fields of the job. A reason without a cause has none."""
        if "reason" in changes:
            changes = {"cause": "", **changes}
        self.job = msgspec.structs.replace(self.job, **changes)

    def change(self, part: Part, **changes: Any) -> None:
        """Changes fields of one part of the job."""
        self.job = self.job.changed(part, **changes)

    def enter(self, phase: JobPhase, **changes: Any) -> None:
        """The next phase; raises `IllegalTransition` where the table lacks it."""
        if phase not in TRANSITIONS[self.job.phase]:
            raise IllegalTransition(f"job {self.job.job}: {self.job.phase.value} to {phase.value}")
        self.set(phase=phase, since=self.now, **changes)

    def worker(self, worker: Worker, **changes: Any) -> Worker:
        """`worker` with changes, put in its place."""
        changed = msgspec.structs.replace(worker, **changes)
        self.set(workers={**self.job.workers, worker.device: changed})
        self._met(worker.device)
        return changed

    def drop(self, *devices: str) -> None:
        """The workers of these devices are no more."""
        workers = dict(self.job.workers)
        for device in devices:
            workers.pop(device, None)
        self.set(workers=workers)
        self._met(*devices)

    def _met(self, *devices: str) -> None:
        """A device has one process at a time: of one that is heard of, none before it is waited for."""
        known = [device for device in devices if device in self.job.takeover.unmet]
        if known:
            unmet = dict(
                self.job.takeover.unmet
            )  # a copy, and not a comprehension: thousands say hello one by one
            for device in known:
                del unmet[device]
            self.change("takeover", unmet=unmet)

    def note(self, kind: EventKind, text: str, **data: Any) -> None:
        """Tells people of something now."""
        self.effects.append(self.told(kind, text, **data))

    def told(self, kind: EventKind, text: str, **data: Any) -> CoordinatorNote:
        """A note to be told later, as when a write is done."""
        return CoordinatorNote(kind=kind, job=self.job.job, text=shortened(text), data=data)

    def unexpected(self, event: str) -> None:
        """Logs an event that the job's phase has nothing for: the first of its kind in each phase, and not for
        ever."""
        what = f"{event} while {self.job.phase.value}"
        if what not in self.job.unexpected and len(self.job.unexpected) < MOST_UNEXPECTED:
            self.set(unexpected=self.job.unexpected | {what})
            self.effects.append(Log(job=self.job.job, text=f"{what}: nothing follows from it"))

    @property
    def connected(self) -> frozenset[str]:
        """The nodes whose agents are connected now."""
        return frozenset(name for name, node in self.nodes.items() if node.connected)

    def here(self, node: str) -> bool:
        """Returns True if the agent of a node is connected now."""
        return node in self.nodes and self.nodes[node].connected

    def here_seconds(self, node: str) -> float:
        """For how long the agent of a node has been connected; minus infinity where it is not."""
        return self.now - self.nodes[node].since if self.here(node) else -math.inf

    @property
    def lone_seconds(self) -> float:
        """Seconds that a node is waited for that alone holds a part of the state."""
        seconds = self.settings.lone_seconds
        return min(seconds, self.settings.stopping_seconds) if self.job.ending.stopping else seconds

    def give_up(self, why: str) -> None:
        """The open proposal is to be aborted; the first reason stays."""
        if not self.job.switching.give_up:
            self.change("switching", give_up=why)

    def drop_request(self) -> None:
        """Nobody waits for the plan that is being made, if one is."""
        if self.job.planning.asked is not None:
            self.change("planning", asked=None)
            self.effects.append(CancelPlan(job=self.job.job))

    def order(self, node: str, message: FromMachine) -> None:
        """To the agent itself."""
        self.effects.append(CoordinatorSend(node=node, message=message))

    def send(self, node: str, client: str, body: Rejected | Joined | Closed | Rehearse | SaveNow) -> None:
        """Sends a message to a client of the agent of `node`."""
        self.order(node, ToClient(client=client, body=body))

    def write(
        self,
        *records: Record,
        notes: tuple[CoordinatorNote, ...] = (),
        close: bool = False,
    ) -> None:
        """Writes records in one transaction; `notes` are told when it is done. close: deletes the proposal with
        it."""
        self.effects.append(Write(job=self.job.job, records=records, notes=notes, close=close))
