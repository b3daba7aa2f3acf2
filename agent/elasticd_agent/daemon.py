"""The agent's daemon: IO around `elasticd.machines.agent.machine`, on one event loop.

Clients, link and store emit events; each goes through the machine in turn, and its effects are carried out
before the next. All that blocks (the store's calls) runs in threads.

All workers of the node depend on this process, so a defect of elasticd does not end it: an exception costs the
message, its client or its job's workers here (`machine.failed`), and is logged (`internal_errors`). What ends
an agent is said by name: another agent has its node, its store is another one or an old copy, its leader or its
store is of a release too far away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from msgspec import structs

from elasticd.backoff import jittered
from elasticd.config.credentials import credentials
from elasticd.config.tree import Config
from elasticd.machines.agent import machine
from elasticd.machines.agent.state import (
    AgentNote,
    AgentSend,
    AgentState,
    AgentTell,
    AgentTick,
    ClearMember,
    Dismiss,
    Effect,
    Ended,
    Event,
    HangUp,
    Pulse,
    SetMember,
    SetNode,
    Stood,
    Stop,
)
from elasticd.records import Keys, NodeRecord, encode, schema_refusal
from elasticd.store.protocol import Store, StoreError, StoreReplaced
from elasticd.store.state_file import NOTE_SECONDS, StateFile
from elasticd.system import network_addresses
from elasticd.system.sd_notify import SdNotifier
from elasticd.version import __version__
from elasticd.wire.coordinator import End, Harm, ToLeader, TryReach
from elasticd.wire.launch import Happened, ReadOutput
from elasticd.wire.main_thread import Whereabouts
from elasticd.wire.snapshots import SnapshotSetComplete
from elasticd.wire.unix_socket import own_path
from elasticd.wire.worker import EmulatedSpeed, Ping
from elasticd_agent.chaos.cut_store import CuttableStore
from elasticd_agent.chaos.injector import FaultInjector
from elasticd_agent.coordinator_link import Link
from elasticd_agent.hangs import stack_dump
from elasticd_agent.hangs.heartbeat import BEAT_SECONDS, Heartbeats, look
from elasticd_agent.hangs.main_thread_watch import Halt, MainThreadWatch, told_of
from elasticd_agent.hardware import devices
from elasticd_agent.hardware.nvml import NvidiaReader
from elasticd_agent.hardware.processes import WorkerProcesses
from elasticd_agent.hardware.sensors import Sensors
from elasticd_agent.internal_errors import outlived
from elasticd_agent.launches import Launches
from elasticd_agent.link_probe import LinkProbe
from elasticd_agent.orphans import TorchrunOrphans, WorkerOrphans
from elasticd_agent.peer_reachability import PeerReachability
from elasticd_agent.registration import Registrar
from elasticd_agent.restart_rendezvous import RestartRendezvous
from elasticd_agent.snapshots.service import SnapshotService
from elasticd_agent.store_watch import StoreWatch
from elasticd_agent.worker_socket import WorkerHandlers, Workers

#: Seconds for which the store keeps a silent agent's keys.
LEASE_SECONDS = 3
_TICK_SECONDS = 0.25
_SENSE_SECONDS = 10.0
#: Seconds until a part that failed is begun again.
_AGAIN_SECONDS = 1.0

_log = logging.getLogger(__name__)


class AgentError(Exception):
    """This agent cannot go on; the message says why and what to do."""


class Agent:
    """One node's agent. `run` serves until `stop` is called or something makes that impossible; `memory` keeps
    the highest epoch, and what is known of the store; `supervisor` hears when it serves, and that it lives."""

    def __init__(
        self,
        config: Config,
        store: Store,
        *,
        lease_seconds: int = LEASE_SECONDS,
        memory: StateFile | None = None,
        supervisor: SdNotifier | None = None,
    ) -> None:
        self._config = config
        self._security = config.security
        credentials(self._security)  # what is wrong with them is said now, not at the first connection
        self._memory = memory
        self._supervisor = supervisor or SdNotifier({})
        self._store = CuttableStore(store)
        self._keys = Keys(cluster=config.cluster.name)
        self._lease_seconds = lease_seconds
        self._path = config.agent.socket or own_path()
        self._events: deque[Event] = deque()
        self._heartbeats = Heartbeats(look)
        self._main_threads = MainThreadWatch()
        emulate = config.emulate
        pace = None
        if emulate.enabled:
            pace = EmulatedSpeed(
                forward=emulate.forward,
                backward=emulate.backward,
                attention_tokens=emulate.attention_tokens,
            )
        self._state = AgentState(
            record=self._node_record(),
            pace=pace,
            epoch=memory.epoch if memory is not None else 0,
            probe_seconds=config.agent.probe_seconds,
        )
        self._end: asyncio.Future[str | None] | None = None
        self._stopped = False
        self._injector: FaultInjector | None = None
        self._terminated: set[str] = set()
        self._effects: dict[type, Callable[[Any], None]] = {
            AgentSend: self._send_client,
            AgentTell: self._send_leader,
            Dismiss: self._dismiss,
            SetNode: self._set_node,
            SetMember: self._set_member,
            ClearMember: self._clear_member,
            AgentNote: self._note,
            HangUp: self._hang_up,
            Stop: self._stop_agent,
        }

    @property
    def record(self) -> NodeRecord:
        """The record of this agent's node, as it is in the store."""
        return self._state.record

    def reconfigure(self, config: Config) -> None:
        """Go by a file that was read anew, as far as that is possible: by whether chaos is allowed."""
        self._config = config
        if self._injector is not None:
            self._injector.allowed = config.chaos.enabled

    def stop(self) -> None:
        """Let `run` return. To be called on its loop."""
        self._stopped = True
        self._finish(None)

    async def run(self) -> None:
        """Serve. Raises AgentError, SocketTaken, NodeTaken, and StoreError when the store is not there."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        if self._stopped:
            return
        text = "elasticd %s: the agent of node %s of cluster %s"
        _log.info(text, __version__, self.record.node, self._config.cluster.name)

        if refusal := await asyncio.to_thread(self._schema_refusal):
            raise AgentError(refusal)

        def failed(reason: str) -> None:
            loop.call_soon_threadsafe(self._finish, reason)

        self._torchruns, self._children = TorchrunOrphans(self._path), WorkerOrphans()
        self._workers = Workers(self._path, self.record.node, self._config.agent.group)
        self._launches = Launches(
            lambda: self.record,
            lambda: machine.used_devices(self._state),
            self._workers.send,
            lambda message: self._link.send(message),
        )
        try:
            self._snapshot_service = self._make_snapshot_service()
            self._reaching = self._make_reaching()
        except BaseException:
            self._workers.close()
            raise
        self._registrar = Registrar(self._store, self._keys, self.record, self._lease_seconds, failed)
        try:
            if await self._claim():
                await self._serve(self._end)
        finally:
            self._workers.close()
            await asyncio.to_thread(self._registrar.close)
            await asyncio.to_thread(self._snapshot_service.close)
            self._main_threads.close()

    def _schema_refusal(self) -> str:
        """Why this agent cannot work with what the store holds, or nothing. Raises StoreError."""
        record = self._store.get(self._keys.schema)
        refusal = schema_refusal(record.value) if record is not None else ""
        return f"the key {self._keys.schema}: {refusal}" if refusal else ""

    async def _claim(self) -> bool:
        """Take the node's key, which may take a dead agent's lease to run out; False if told to stop."""
        assert self._end is not None
        claim = asyncio.create_task(asyncio.to_thread(self._registrar.claim))
        self._end.add_done_callback(lambda _: self._registrar.give_up())
        await claim
        return not self._end.done()

    async def _serve(self, end: asyncio.Future[str | None]) -> None:
        """Starts the agent's parts, and ends them once `end` is set."""
        self._registrar.start()
        injector = self._injector = FaultInjector(
            *(self.record.node, self._config.chaos.enabled, self._store, self._pidfd),
            lambda url: self._link.follow(url),
            known=lambda: credentials(self._security),
            devices=[device.name for device in self.record.devices],
        )
        orders: dict[type, Callable[[Any], None]] = {
            SnapshotSetComplete: self._snapshot_service.whole,
            Harm: injector.take,
            End: self._end_workers,
            TryReach: self._reaching.take,
            Happened: self._launches.happened,
            ReadOutput: self._launches.read,
        }
        self._link = Link(self._emit, orders, lambda: credentials(self._security))
        records = StoreWatch(
            *(self._store, self._keys, self._emit, injector.follow, self._read_node),
            refuse=self._finish,
            memory=self._memory,
        )
        rounds = self._rounds = self._make_rounds()
        beside = [asyncio.create_task(_lasting(part)) for part in self._lasting_parts(self._link)]
        try:
            await self._reaching.start()
            await records.start()
            self._torchruns.start()
            self._workers.start(
                WorkerHandlers(
                    events=self._emit,
                    snapshots=self._snapshot_service.hear,
                    pongs=self._answered,
                    rounds=rounds.take,
                    whereabouts=self._on_whereabouts,
                    launches=self._launches.hear,
                    gone=self._launches.gone,
                )
            )
            text = f"agent of node {self.record.node} serves {len(self.record.devices)} devices at {self._path}"
            _log.info("%s", text)
            self._supervisor.ready(text)
            reason = await end
            if reason is None:
                await self._link.leave()
        finally:
            self._supervisor.stopping()
            for task in beside:
                task.cancel()
            rounds.close()
            self._torchruns.close()
            self._children.close()
            self._launches.close()
            await injector.close()
            records.close()
            await self._reaching.close()
            await self._link.close()
        if reason is not None:
            raise AgentError(reason)

    def _make_rounds(self) -> RestartRendezvous:
        return RestartRendezvous(
            self._store,
            self._keys,
            self._registrar,
            self.record,
            state=lambda: self._state,
            emit=self._emit,
            tell=self._tell,
            send=self._workers.send,
            dismiss=self._workers.dismiss,
        )

    def _read_node(self, node: str, record: NodeRecord | None) -> None:
        """The store has this record of a node now; None when it is gone."""
        self._snapshot_service.read(node, record)
        if node == self.record.node and (record is None or record.agent != self.record.agent):
            self._registrar.recheck()

    def _lasting_parts(self, link: Link) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """The parts that run beside the sockets for as long as the agent serves."""
        service, every = self._snapshot_service, self._config.agent.probe_seconds
        link_probe = LinkProbe(every, service.sender.cross, service.ring, lambda: self._state, link.send)
        lasting = self._supervisor.watch, link_probe.run
        return (self._tick, self._beat, self._remember, self._sense, *lasting)

    def _emit(self, event: Event) -> None:
        """One event after the other: what carrying out an effect emits waits until the effects are done."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                self._take(self._events[0])
            finally:
                self._events.popleft()

    def _take(self, event: Event) -> None:
        """One event. An error costs what `machine.failed` says, or the effect that it hinders."""
        try:
            state, effects = machine.step(self._state, event, time.monotonic())
        except Exception as error:
            outlived(type(event).__name__, error)
            try:
                state, effects = machine.failed(self._state, event, error, time.monotonic())
            except Exception as another:
                outlived(f"the failure of {type(event).__name__}", another)
                return
        if self._memory is not None and state.epoch > self._state.epoch:  # first remembered, then obeyed
            try:
                self._memory.note(epoch=state.epoch)
            except Exception as error:
                outlived("the memory of the highest epoch", error)
        self._state = state
        self._observed(event, self._snapshot_service.observe, self._torchruns.observe, self._children.observe)
        for effect in effects:
            try:
                self._perform(effect)
            except Exception as error:
                self._undone(effect, outlived(type(effect).__name__, error))
        # A new leader hears the hello first, which is an effect.
        self._observed(event, self._launches.observe, self._rounds.observe)

    def _observed(self, event: Event, *observers: Callable[[Event], None]) -> None:
        """Tells those beside the machine of an event."""
        for observe in observers:
            try:
                observe(event)
            except Exception as error:
                outlived(f"{type(event).__name__} beside the machine", error)

    def _undone(self, effect: Effect, why: str) -> None:
        """An effect failed. A client that did not hear what it was to hear is let go: it would wait for it."""
        if isinstance(effect, AgentSend):
            how = f"elasticd failed to send it {type(effect.body).__name__} ({why})"
            self._emit(Ended(client=effect.client, how=how))
            try:
                self._workers.dismiss(effect.client, f"{how}: please report it with the agent's log")
            except Exception as error:
                outlived("Dismiss", error)

    def _perform(self, effect: Effect) -> None:
        self._effects[type(effect)](effect)

    def _send_client(self, effect: AgentSend) -> None:
        self._workers.send(effect.client, effect.body)

    def _send_leader(self, effect: AgentTell) -> None:
        self._link.send(effect.message)

    def _dismiss(self, effect: Dismiss) -> None:
        _log.warning("client refused: %s", effect.reason)
        self._workers.dismiss(effect.client, effect.reason)

    def _set_node(self, effect: SetNode) -> None:
        self._registrar.set_node(effect.record)

    def _set_member(self, effect: SetMember) -> None:
        self._registrar.hold(self._keys.member(effect.job, effect.record.device), encode(effect.record))

    def _clear_member(self, effect: ClearMember) -> None:
        self._registrar.release(self._keys.member(effect.job, effect.device))

    def _note(self, effect: AgentNote) -> None:
        _log.warning("%s", effect.text)

    def _hang_up(self, effect: HangUp) -> None:
        self._link.hang_up()

    def _stop_agent(self, effect: Stop) -> None:
        self._finish(effect.reason)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._emit(AgentTick())

    async def _beat(self) -> None:
        """Asks the workers, again and again, whether they still run."""
        looking: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            there, now = self._workers.workers(), time.monotonic()
            halted, moving = self._main_threads.beat(there, now)
            ask, frozen = self._heartbeats.beat(there, now, self._main_threads.outside())
            for client in ask:
                self._workers.send(client, Ping())
            for client, how in frozen.items():
                _log.warning("%s is frozen: %s", client, how)
                self._emit(Pulse(client=client, how=how))
            for client in moving:
                self._emit(Stood(client=client))
            for halt in halted:
                task = asyncio.create_task(self._look_at(halt, there[halt.client]))
                looking.add(task)
                task.add_done_callback(looking.discard)

    async def _look_at(self, halt: Halt, pid: int) -> None:
        """Tells of a worker that stands still, with its stack where nobody else makes it wait."""
        try:
            text = ""
            if halt.looks:
                pidfd = self._workers.pidfd(halt.client)
                text = await stack_dump.stack(pid, pidfd, self._main_threads.stacks_of(halt.client))
            halted = told_of(halt, text)
            if halt.looks:
                _log.warning("%s stands still in %s for %.1f s", halt.client, halted.place, halt.seconds)
            if self._main_threads.still(halt):  # else it moved meanwhile, and that is not to be told before
                self._emit(Stood(client=halt.client, halted=halted))
        except Exception as error:
            outlived("a look at a worker that stands still", error)

    def _on_whereabouts(self, client: str, body: Whereabouts, fd: int | None) -> None:
        if why := self._main_threads.hear(client, body, fd):
            _log.warning("where %s is cannot be known: %s", client, why)

    def _answered(self, client: str) -> None:
        if self._heartbeats.answered(client):
            self._emit(Pulse(client=client, how=""))

    async def _sense(self) -> None:
        """Tells the leader how machine and devices are."""
        emulated = self._config.emulate.enabled
        names = [] if emulated else [device.name for device in self.record.devices]
        devices = NvidiaReader(names, WorkerProcesses(self._pids).read)
        sensors = Sensors(devices.read)
        try:
            while True:
                self._link.send(await asyncio.to_thread(sensors.read))
                await asyncio.sleep(_SENSE_SECONDS)
        finally:
            devices.close()

    async def _remember(self) -> None:
        while self._memory is not None:
            await asyncio.to_thread(self._memory.note, identity=self._store.known())
            await asyncio.sleep(NOTE_SECONDS)

    def _tell(self, message: ToLeader) -> None:
        self._link.send(message)

    def _make_snapshot_service(self) -> SnapshotService:
        """And publish where it takes other nodes' snapshots."""
        agent = self._config.agent
        try:
            service = SnapshotService(
                agent, self.record.agent, state=lambda: self._state, send=self._workers.send, tell=self._tell
            )
        except OSError as error:
            raise AgentError(
                f"cannot listen for other nodes' snapshots at {agent.listens}: {error.strerror or error}; "
                "give [agent] address one of this machine's addresses"
            ) from error
        record = structs.replace(self.record, snapshots=service.address, certificate=service.certificate)
        self._state = replace(self._state, record=record)
        return service

    def _make_reaching(self) -> PeerReachability:
        """And publish where other nodes may try whether they reach this one."""
        reachability = PeerReachability(self._config.agent.listens, self._tell)
        record = structs.replace(self.record, reach=reachability.address)
        self._state = replace(self._state, record=record)
        return reachability

    def _pidfd(self, device: str) -> int | None:
        worker = self._state.worker_of(device)
        client = worker.id if worker is not None else self._rounds.watched(device)
        return self._workers.pidfd(client) if client else None

    def _pids(self) -> dict[str, int]:
        """The process that drives each device that has one."""
        clients = self._state.clients.values()
        return {client.device: client.opening.pid for client in clients if client.device}

    def _end_workers(self, order: End) -> None:
        """Sends SIGTERM to the workers of a job that a user stops, or to its torchruns: once, as a second one
        ends them at once."""
        torchruns = self._rounds.torchruns(order.job)
        self._terminated &= self._state.clients.keys() | {*torchruns}
        for torchrun in torchruns:
            if order.at_once or torchrun not in self._terminated:
                self._terminated.add(torchrun)
                _log.warning("job %s is stopped: %s ends", order.job, torchrun)
                self._workers.terminate(torchrun, at_once=order.at_once)
        for client in self._state.clients.values():
            its = client.job == order.job and client.device in order.devices
            if its and client.id not in self._terminated:
                self._terminated.add(client.id)
                _log.warning("job %s is stopped: %s drains", order.job, client.device)
                self._workers.terminate(client.id)

    def _finish(self, reason: str | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)

    def _node_record(self) -> NodeRecord:
        agent = self._config.agent
        return NodeRecord(
            node=agent.node,
            devices=devices.devices(agent, self._config.emulate),
            address=agent.listens,
            host=network_addresses.host(),
            agent=secrets.token_hex(8),
            emulated=self._config.emulate.enabled,
        )


async def _lasting(part: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A part of the agent that goes on beside the others: it is begun again after an error."""
    while True:
        try:
            await part()
            return
        except Exception as error:
            outlived(getattr(part, "__qualname__", "a part of the agent"), error)
        await asyncio.sleep(jittered(_AGAIN_SECONDS))


async def check_store(store: Store, endpoints: tuple[str, ...]) -> None:
    """Raises AgentError with the remedy when no etcd answers, StoreReplaced when it is not the one known."""
    try:
        await asyncio.to_thread(store.identity)
    except StoreReplaced:
        raise
    except StoreError as error:
        raise AgentError(
            f"no etcd can be used at {', '.join(endpoints)} ({error}): start it, or name yours with --etcd "
            "or as endpoints under [etcd] in the configuration"
        ) from error
