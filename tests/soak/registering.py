"""Simulated nodes whose agents keep their keys in the store by the agent's own `Registrar`.

Its threads, and those of its lease's keeper, run on simulated time (`tests.soak.virtual_threads`), over a store
that is late, loses and repeats (`tests.soak.faulty_store`). Agents die, are started again, are cut off, and
stand still for longer than their lease lives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from elasticd_agent import registration
from elasticd_agent.registration import NodeTaken, Registrar

from elasticd.backoff import Backoff
from elasticd.machines.agent.state import ClearMember, Effect, SetMember, SetNode
from elasticd.records import encode
from elasticd.simulator.cluster.nodes import Node
from elasticd.simulator.run import KEYS
from elasticd.store import lease
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import StoreError
from tests.soak.faulty_store import FaultyStore
from tests.soak.virtual_threads import Process, VirtualThreads

#: Seconds that an agent's lease lives without a refresh; between starts of one that ended.
LEASE_SECONDS, AGAIN_SECONDS = 3, 1.0


@contextmanager
def on_simulated_time(threads: VirtualThreads, draw: random.Random) -> Iterator[None]:
    """The registrar's module, and that of leases, take threads and time from the simulation."""

    def jittered(seconds: float) -> float:
        return seconds * (0.5 + 0.5 * draw.random())

    with (
        mock.patch.multiple(
            registration,
            threading=threads,
            time=threads,
            jittered=jittered,
            Backoff=partial(Backoff, draw=draw.random),
        ),
        mock.patch.multiple(lease, threading=threads, time=threads),
    ):
        yield


class RegisteredNode(Node):
    """A node with the process of its agent that keeps the keys in `store`."""

    def __init__(self, *args: Any, threads: VirtualThreads, store: FaultyStore, **options: Any) -> None:
        self._threads, self.store = threads, store
        self._process: Process | None = None
        self._registrar: Registrar | None = None
        self._keys: dict[str, bytes] = {}
        super().__init__(*args, **options)
        self._power_on()

    # -- its life ------------------------------------------------------------------------------------------

    def power_off(self) -> None:
        """Nothing of its agent runs any more."""
        self._kill()

    def crash(self) -> None:
        """The whole machine is gone."""
        self._kill()
        super().crash()

    def restart(self) -> None:
        """Its agent dies and another is started."""
        self._kill()
        super().restart()
        self._power_on()

    def link(self, up: bool) -> None:
        """A machine that has a link has an agent."""
        if up and self._process is None:
            self._power_on()
        super().link(up)

    def freeze(self, seconds: float) -> None:
        """The agent's process stands still for so long."""
        if self._process is not None:
            self._process.hold()
            self._threads.engine.after(seconds, self._process.release)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process = self._registrar = None
        self._keys = {}

    def _power_on(self) -> None:
        self._process = process = self._threads.process()
        self._keys[KEYS.node(self.name)] = encode(self.state.record)
        process.start(lambda: self._serve(process))

    def _serve(self, process: Process) -> None:
        """As the daemon does; one that finds its name taken ends, and systemd starts another."""
        while True:
            record = self.state.record
            registrar = Registrar(self.store, KEYS, record, LEASE_SECONDS, self._failed)
            try:
                registrar.claim()
                break
            except (NodeTaken, StoreError):
                self._threads.Event().wait(AGAIN_SECONDS)
        self._registrar = registrar
        registrar.start()
        if self.state.record != record:
            registrar.set_node(self.state.record)
        for key, value in self._keys.items():
            if key != KEYS.node(self.name):
                registrar.hold(key, value)

    def _failed(self, why: str) -> None:
        """The registrar gave up: the agent ends, and another is started."""
        self._threads.engine.after(AGAIN_SECONDS, self._again)

    def _again(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = self._threads.process()
            self._process.start(partial(self._serve, self._process))

    # -- its keys ------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, SetNode):
            self._keys[KEYS.node(self.name)] = encode(effect.record)
            if self._registrar is not None:
                self._registrar.set_node(effect.record)
        elif isinstance(effect, SetMember):
            self._hold(KEYS.member(effect.job, effect.record.device), encode(effect.record))
        elif isinstance(effect, ClearMember):
            key = KEYS.member(effect.job, effect.device)
            self._keys.pop(key, None)
            if self._registrar is not None:
                self._registrar.release(key)
        else:
            super()._perform(effect)

    def _hold(self, key: str, value: bytes) -> None:
        self._keys[key] = value
        if self._registrar is not None:
            self._registrar.hold(key, value)

    def kept(self) -> dict[str, bytes]:
        """The entries that the store is to have of it, by key: nothing of a machine that is gone."""
        return dict(self._keys) if self._process is not None else {}


def unlike(server: MemoryServer, nodes: list[RegisteredNode]) -> list[str]:
    """Keys of agents that are not as they are to be, once nothing happens any more."""
    store = MemoryStore(server)
    items = (*store.snapshot(KEYS.nodes).items, *store.snapshot(KEYS.members).items)
    found = {item.key: item.value for item in items}
    wanted = {key: value for node in nodes for key, value in node.kept().items()}
    wrong = [f"{key} is in the store, and no agent keeps it" for key in found.keys() - wanted.keys()]
    wrong += [f"{key} is not in the store" for key in wanted.keys() - found.keys()]
    for key in found.keys() & wanted.keys():
        if found[key] != wanted[key]:
            wrong.append(f"{key} is {found[key]!r} in the store, and {wanted[key]!r} at its agent")
    return wrong
