"""Keeps snapshots for the agent: takes them from its workers, sends a copy to another node, tells the leader.

    worker -> `Snapped`  the store has it. A thread sends it to the next node of the job's plan that takes it,
                         in a ring; where none does, this is tried again for as long as the store has it.
    agent  -> a stream   another node's arrived.
    `SnapshotInventory` -> leader    all that is held of a job, after every change (a few at once) and on every
                                     new link; before the word of a worker's end, or of what survivors hold.
    leader -> `SnapshotSetComplete`    all of a set are kept: older ones go.
    `Freed` -> worker    the store let go of one of its own: it may write to that memory again.
    worker -> `Fetch`    is answered with the memory file.

Invariant: the memory of a snapshot that the store holds, or that a thread reads, is not written to, but by the
job's end. A worker writes to it again only after `Freed`; one whose connection broke, or that took another
incarnation, gives up the files that it had handed over, and what they hold stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil

from elasticd.backoff import Backoff
from elasticd.config.tree import AgentSection
from elasticd.machines.agent.state import (
    AgentState,
    AgentTick,
    DoneRead,
    Ended,
    Event,
    FenceRead,
    LinkUp,
    Opened,
    PlanRead,
)
from elasticd.records import NodeRecord
from elasticd.wire.snapshots import (
    Fetch,
    Fetched,
    Freed,
    Held,
    OfSnapshots,
    Snapped,
    SnapshotInventory,
    SnapshotSetComplete,
)
from elasticd.wire.worker import ToWorker
from elasticd_agent.snapshots.peers import Peers
from elasticd_agent.snapshots.port import StreamFailed, yielding
from elasticd_agent.snapshots.store import Snapshot, SnapshotStore
from elasticd_agent.snapshots.tls import TlsIdentity
from elasticd_agent.snapshots.transfer import SnapshotSender, SnapshotServer

#: Seconds for which changes are gathered before the leader is told.
_TELL_SECONDS = 0.05
#: Seconds between attempts to send what no other agent took: doubled from the first to the second.
_RETRY = (0.5, 5.0)
#: Snapshots that are sent at once.
_SENDERS = 4

_log = logging.getLogger(__name__)


class SnapshotService:
    """On one event loop, but for the threads that send and receive. `state` gives what the agent knows, `send`
    sends a client a message and a descriptor, which it closes; `tell` tells the leader, if there is a link."""

    def __init__(
        self,
        section: AgentSection,
        agent: str,
        *,
        state: Callable[[], AgentState],
        send: Callable[[str, ToWorker, int | None], None],
        tell: Callable[[SnapshotInventory], None],
    ) -> None:
        self._node = section.node
        self._state, self._send, self._tell = state, send, tell
        self._loop = asyncio.get_running_loop()
        mib = section.snapshot_mib
        limit = mib << 20 if mib is not None else int(psutil.virtual_memory().total) // 4
        self._snapshots = SnapshotStore(section.node, limit)
        self._peers = Peers(section.node)
        self._identity = TlsIdentity.make(agent)
        self._server = SnapshotServer(
            section.listens, self._identity, self._snapshots, self._peers.certificates, self._arrived
        )
        self.sender = SnapshotSender(
            self._identity
        )  # of its copies, which link probes use too; `close` closes it
        self._pool = ThreadPoolExecutor(_SENDERS, "snapshots", initializer=yielding)
        self._closing = ThreadPoolExecutor(1, "snapshots-close")  # which waits for no node that does not answer
        self._changed: set[str] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._pause, self._again = Backoff(*_RETRY), 0.0
        self._trouble = ""
        self.address = f"{section.listens}:{self._server.port}"
        self.certificate = self._identity.certificate
        self._observers: dict[type, Callable[[Any], None]] = {
            AgentTick: self._tick,
            LinkUp: self._linked,
            Opened: self._opened,
            Ended: self._fenced,
            FenceRead: self._fenced,
            PlanRead: self._planned,
            DoneRead: self._done,
        }

    def ring(self) -> list[NodeRecord]:
        """The other nodes that take snapshots, from the one behind this on."""
        return self._peers.ring(None)

    def close(self) -> None:
        """Breaks off what is under way, and lets go of everything. Not on the loop: it waits for threads."""
        self._server.close()
        self.sender.close()
        self._pool.shutdown(cancel_futures=True)
        self._closing.shutdown()
        for job in self._snapshots.jobs():
            _close(self._snapshots.forget(job))

    # -- what happens -----------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """An event that the agent's machine has taken in, before its effects."""
        if (handler := self._observers.get(type(event))) is not None:
            handler(event)

    def _tick(self, event: AgentTick) -> None:
        self._release(self._snapshots.expire(time.monotonic(), self._drives))
        if time.monotonic() >= self._again:
            self._send_all()

    def _linked(self, event: LinkUp) -> None:
        self._mark(self._snapshots.jobs())

    def _opened(self, event: Opened) -> None:
        """A leader hears this node of a job only once it has a part in it."""
        client = self._state().clients.get(event.client)
        if client is not None and client.job in self._snapshots.jobs():
            self._mark([client.job])

    def _fenced(self, event: Ended | FenceRead) -> None:
        """The leader is to know of the newest snapshots when it looks for state."""
        if self._telling is not None:
            self._telling.cancel()
            self._publish_changed()

    def _planned(self, event: PlanRead) -> None:
        self._send_all()

    def _done(self, event: DoneRead) -> None:
        """The job finished; or it stopped, and now it is forgotten."""
        if event.record is None or not event.record.reason:
            self._release(self._snapshots.forget(event.job))

    def read(self, node: str, record: NodeRecord | None) -> None:
        """The store has this record of a node now; None when it is gone."""
        agent = self._peers.read(node, record)
        if agent:
            self._snapshots.lost([agent])
        self._again = 0.0
        self._pause.reset()
        self._send_all()

    def whole(self, whole: SnapshotSetComplete) -> None:
        """The leader says so."""
        self._release(self._snapshots.whole(whole.job, (whole.plan, whole.step)))

    def hear(self, client: str, body: OfSnapshots, fd: int | None) -> None:
        """A client's word, with the descriptor that came with it, which is the keeper's from now on."""
        if isinstance(body, Snapped):
            self._snapped(client, body, fd)
            return
        if fd is not None:
            os.close(fd)
        self._fetch(client, body)

    # -- workers ----------------------------------------------------------------------------------------------

    def _snapped(self, name: str, body: Snapped, fd: int | None) -> None:
        held, state = body.held, self._state()
        client = state.clients.get(name)
        why = ""
        if client is None or (client.device, client.incarnation) != (held.device, held.incarnation):
            why = "it is another worker's"
        elif (client.job, self._node) != (held.job, held.node):
            why = f"it says that it is of job {held.job} on node {held.node}"
        elif fd is None or os.fstat(fd).st_size < held.size:
            why = "its memory file is missing or too short"
        elif (done := state.done.get(held.job)) is not None and not done.reason:
            why = "the job has finished"
        if why or fd is None:
            _log.warning("a snapshot of %s at step %d is not kept: %s", held.device, held.step, why)
            if fd is not None:
                os.close(fd)
            self._send(name, Freed(plan=held.plan, step=held.step), None)
            return
        self._release(self._snapshots.put(Snapshot(held=held, fd=fd, plan=body.plan)))
        self._mark([held.job])
        self._copy(held)

    def _fetch(self, name: str, body: Fetch) -> None:
        held = body.held
        client = self._state().clients.get(name)
        snapshot = self._snapshots.find(held) if client is not None and client.job == held.job else None
        if snapshot is None:
            what = f"{held.device} at step {held.step} of plan {held.plan}"
            error = f"no snapshot of {what} is kept on node {self._node}"
            self._send(name, Fetched(held=held, error=error), None)
        else:
            self._send(name, Fetched(held=snapshot.held), snapshot.fd)

    # -- the copy on another node -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        for held in self._snapshots.unsent():
            self._copy(held)

    def _copy(self, held: Held) -> None:
        record = self._state().plans.get(held.job)
        nodes = None if record is None else record.plan.nodes
        ring = self._peers.ring(nodes)
        revoked = self._snapshots.lend(held)
        if revoked is None:
            return
        if ring:
            self._submit(self._pool, lambda: self._carry(held, revoked, ring))
        else:
            self._release(self._snapshots.settle(held, revoked, "", 0.0))

    def _carry(self, held: Held, revoked: threading.Event, ring: list[NodeRecord]) -> None:
        """In a thread: to the first of the ring that takes it."""
        started, peer, trouble = time.monotonic(), "", ""
        snapshot = None
        try:
            snapshot = self._snapshots.find(held)
            if snapshot is None:
                return
            for record in ring:
                try:
                    self.sender.send(snapshot, revoked, record.snapshots, record.certificate)
                except StreamFailed as error:
                    trouble = trouble or f"node {record.node}: {error}"
                    if revoked.is_set():
                        break
                else:
                    peer = record.agent
                    break
        except Exception as error:
            _log.exception("sending a snapshot failed")
            trouble = str(error)
        finally:
            if snapshot is not None:
                os.close(snapshot.fd)
        took = time.monotonic() - started
        with suppress(RuntimeError):  # the loop has ended, and with it the store
            self._loop.call_soon_threadsafe(self._carried, held, revoked, peer, took, trouble)

    def _carried(self, held: Held, revoked: threading.Event, peer: str, took: float, trouble: str) -> None:
        if peer and not self._peers.there(peer):
            peer, trouble = "", "its agent ended"
        if peer:
            self._trouble = ""
            self._pause.reset()
        elif not revoked.is_set():
            self._again = time.monotonic() + self._pause.next()
            if trouble != self._trouble:
                _log.warning("no other node keeps the snapshots of this one, trying again: %s", trouble)
            self._trouble = trouble
        self._release(self._snapshots.settle(held, revoked, peer, took))
        if peer:
            self._send_all()  # what waited for this one

    def _arrived(self, held: Held, gone: list[Snapshot]) -> None:
        """In a stream's thread: another node's snapshot is kept here now."""

        def take() -> None:
            self._release(gone)
            self._mark([held.job])

        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(take)

    # -- parts ------------------------------------------------------------------------------------------------

    def _drives(self, device: str) -> bool:
        return self._state().worker_of(device) is not None

    def _release(self, gone: list[Snapshot]) -> None:
        """The store let go of these: their workers hear of it, if they live."""
        for snapshot in gone:
            held = snapshot.held
            worker = self._state().worker_of(held.device) if self._snapshots.mine(held) else None
            if worker is not None and worker.job == held.job:
                self._send(worker.id, Freed(plan=held.plan, step=held.step), None)
        if gone:
            self._mark({snapshot.held.job for snapshot in gone})
            self._submit(self._closing, lambda: _close(gone))

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """Does it in a thread; at once where the agent ends, and its threads have ended."""
        try:
            threads.submit(work)
        except RuntimeError:
            work()

    def _mark(self, jobs: Iterable[str]) -> None:
        """The leader is to hear of these jobs' snapshots, soon."""
        self._changed.update(jobs)
        if self._changed and self._telling is None:
            self._telling = self._loop.call_later(_TELL_SECONDS, self._publish_changed)

    def _publish_changed(self) -> None:
        self._telling = None
        jobs, self._changed = self._changed, set()
        for job in sorted(jobs):
            self._tell(
                SnapshotInventory(
                    job=job, snapshots=self._snapshots.held(job), plans=self._snapshots.plans(job)
                )
            )


def _close(snapshots: Iterable[Snapshot]) -> None:
    for snapshot in snapshots:
        os.close(snapshot.fd)
