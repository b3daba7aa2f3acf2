"""The agent's daemon: IO around `elasticd.machines.agent`, on one event loop.

Clients, link and store emit events; each goes through the machine in turn, and its effects are carried out
before the next. All that blocks (the store's calls) runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque

from elasticd.config import Config
from elasticd.machines import agent as machine
from elasticd.machines.agent_state import (
    ClearMember,
    Dismiss,
    Effect,
    Event,
    Note,
    Send,
    SetMember,
    State,
    Tell,
    Tick,
)
from elasticd.messages import Pace
from elasticd.packets import default_path
from elasticd.records import Keys, NodeRecord
from elasticd.remembered import NOTE_SECONDS, StateFile
from elasticd.store.protocol import Store, StoreError, StoreReplaced
from elasticd_agent import probe
from elasticd_agent.link import Link
from elasticd_agent.registrar import Registrar
from elasticd_agent.watch import Records
from elasticd_agent.workers import Workers

#: Seconds for which the store keeps a silent agent's keys.
LEASE_SECONDS = 3
_TICK_SECONDS = 0.25

_log = logging.getLogger(__name__)


class AgentError(Exception):
    """This agent cannot go on; the message says why and what to do."""


class Agent:
    """One node's agent. `run` serves until `stop` is called or something makes that impossible; `memory` keeps
    the highest epoch, and what is known of the store."""

    def __init__(
        self,
        config: Config,
        store: Store,
        *,
        lease_seconds: int = LEASE_SECONDS,
        memory: StateFile | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._store = store
        self._keys = Keys(cluster=config.cluster.name)
        self._lease_seconds = lease_seconds
        self._path = config.agent.socket or default_path()
        self._events: deque[Event] = deque()
        epoch = memory.epoch if memory is not None else 0
        self._state = State(record=self._node_record(), pace=self._emulated_pace(), epoch=epoch)
        self._end: asyncio.Future[str | None] | None = None
        self._stopped = False

    @property
    def record(self) -> NodeRecord:
        return self._state.record

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

        def failed(reason: str) -> None:
            loop.call_soon_threadsafe(self._finish, reason)

        self._registrar = Registrar(self._store, self._keys, self.record, self._lease_seconds, failed)
        self._workers = Workers(self._path, self.record.node, self._emit)
        try:
            if await self._claim():
                await self._serve(self._end)
        finally:
            self._workers.close()
            await asyncio.to_thread(self._registrar.close)

    async def _claim(self) -> bool:
        """Take the node's key, which may take a dead agent's lease to run out; False if told to stop."""
        assert self._end is not None
        claim = asyncio.create_task(asyncio.to_thread(self._registrar.claim))
        self._end.add_done_callback(lambda _: self._registrar.give_up())
        await claim
        return not self._end.done()

    async def _serve(self, end: asyncio.Future[str | None]) -> None:
        self._registrar.start()
        self._link = Link(self._emit)
        records = Records(self._store, self._keys, self._emit, self._link.follow)
        beside = (asyncio.create_task(self._tick()), asyncio.create_task(self._remember()))
        try:
            await records.start()
            self._workers.start()
            _log.info(
                "agent of node %s serves %d devices at %s",
                self.record.node,
                len(self.record.devices),
                self._path,
            )
            reason = await end
        finally:
            for task in beside:
                task.cancel()
            records.close()
            await self._link.close()
        if reason is not None:
            raise AgentError(reason)

    def _emit(self, event: Event) -> None:
        """One event after the other: what carrying out an effect emits waits until the effects are done."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                before = self._state.epoch
                self._state, effects = machine.step(self._state, self._events[0], time.monotonic())
                if self._memory is not None and self._state.epoch > before:  # first remembered, then obeyed
                    self._memory.note(epoch=self._state.epoch)
                for effect in effects:
                    self._perform(effect)
            except Exception as error:
                _log.exception("the agent failed on %r", self._events[0])
                self._finish(
                    f"the agent has an error ({type(error).__name__}: {error}): see its log, restart it"
                )
            finally:
                self._events.popleft()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._workers.send(effect.client, effect.body)
        elif isinstance(effect, Tell):
            self._link.send(effect.message)
        elif isinstance(effect, Dismiss):
            _log.warning("client refused: %s", effect.reason)
            self._workers.dismiss(effect.client, effect.reason)
        elif isinstance(effect, SetMember):
            self._registrar.set_member(effect.job, effect.record)
        elif isinstance(effect, ClearMember):
            self._registrar.clear_member(effect.job, effect.device)
        elif isinstance(effect, Note):
            _log.warning("%s", effect.text)
        else:
            self._finish(effect.reason)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._emit(Tick())

    async def _remember(self) -> None:
        while self._memory is not None:
            await asyncio.to_thread(self._memory.note, identity=self._store.known())
            await asyncio.sleep(NOTE_SECONDS)

    def _finish(self, reason: str | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)

    def _node_record(self) -> NodeRecord:
        agent = self._config.agent
        return NodeRecord(
            node=agent.node,
            devices=probe.devices(agent, self._config.emulate),
            address=agent.address,
            agent=secrets.token_hex(8),
            emulated=self._config.emulate.enabled,
        )

    def _emulated_pace(self) -> Pace | None:
        emulate = self._config.emulate
        return Pace(forward=emulate.forward, backward=emulate.backward) if emulate.enabled else None


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
