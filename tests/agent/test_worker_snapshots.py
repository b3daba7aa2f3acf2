"""A worker's end of snapshots, `Control`, against whole agents: descriptors both ways, and agents that end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elasticd_planner.spec.cluster import node_of

from elasticd.codec.message import encode
from elasticd.runtime.control.agent_client import AgentClient
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.snapshots import Fetched, Freed, Held, Snapped, SnapshotSetComplete
from elasticd.wire.worker import Goodbye, Hello, Recorded, ToWorker, Welcome
from tests.agent.snapshots import memory, plan_of, read
from tests.agent.support import Node, closing_all, spec
from tests.descriptors import open_descriptors
from tests.etcds import SharedEtcd

WAIT = 90.0


@pytest.fixture
def register() -> Iterator[Callable[..., object]]:
    with closing_all() as register:
        yield register


class Worker:
    """A `Control` and what its handler heard."""

    def __init__(self, path: str) -> None:
        hello = Hello(job="job", local_rank=0, world_size=1, pid=os.getpid(), spec=spec("job"))
        self.control = AgentClient(path, hello, connect_seconds=WAIT)
        self.heard: list[ToWorker] = []
        self.control.start(self.heard.append)

    def held(self, step: int, size: int) -> Held:
        me = self.control.welcome
        node = node_of(me.device)
        return Held(
            job="job",
            device=me.device,
            incarnation=me.incarnation,
            plan=1,
            step=step,
            node=node,
            size=size,
        )

    def snap(self, step: int, data: bytes) -> Held:
        held, fd = self.held(step, len(data)), memory(data)
        self.control.send(Snapped(held=held, plan=plan_of(1, {held.device: held.incarnation})), fd=fd)
        os.close(fd)
        return held

    def fetch(self, held: Held) -> bytes:
        found, fd = self.control.fetch(held, WAIT)
        assert found == held
        return read(fd)

    def close(self) -> None:
        self.control.close(Goodbye())


def test_snapshot_goes_to_the_agent_and_comes_back(tmp_path: Path, register: Callable[..., object]) -> None:
    node = Node(register, tmp_path)
    leader = node.leader()
    node.agent()
    worker = Worker(node.path)
    register(worker)
    data = os.urandom(2_000_000)
    held = worker.snap(4, data)
    assert worker.fetch(held) == data
    worker.snap(5, data)
    until(lambda: leader.keeps and len(leader.keeps[-1][1].snapshots) == 2)
    leader.send(SnapshotSetComplete(job="job", plan=1, step=5))
    until(lambda: Freed(plan=1, step=4) in worker.heard)
    with pytest.raises(OSError, match="no snapshot of n0/0 at step 4 of plan 1 is kept on node n0"):
        worker.control.fetch(held, WAIT)


class Played:
    """A listener that plays the agent: it welcomes whoever comes, and the test says the rest."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self._listener = unix_socket.listen(self.path)
        self._listener.setblocking(True)
        self.ends: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            unix_socket.receive(end)
            answer = Welcome(device="n0/0", incarnation="i", address="127.0.0.1")
            unix_socket.send(end, encode(answer))
            self.ends.append(end)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for end in self.ends:
            end.close()


def test_agent_that_hangs_or_ends_fails_what_is_fetched(
    tmp_path: Path, register: Callable[..., object]
) -> None:
    agent = Played(tmp_path)
    register(agent)
    worker = Worker(agent.path)
    register(worker)
    held = worker.held(1, 5)
    until(lambda: agent.ends)
    before = open_descriptors()
    with pytest.raises(TimeoutError):
        worker.control.fetch(held, 0.1)
    fd = memory(b"state")
    unix_socket.send(agent.ends[0], encode(Fetched(held=held)), fd)  # too late: nobody waits for it
    os.close(fd)
    unix_socket.send(agent.ends[0], encode(Recorded(number=7)))
    until(lambda: worker.heard)
    assert open_descriptors() <= before

    def hang_up() -> None:
        for _ in range(2):  # what was asked for before, and what is waited for
            unix_socket.receive(agent.ends[0])
        agent.ends[0].shutdown(socket.SHUT_RDWR)

    threading.Thread(target=hang_up, daemon=True).start()
    with pytest.raises(TimeoutError, match="broke"):
        worker.control.fetch(held, WAIT)


def test_snapshots_wait_for_an_agent_that_is_slow_to_read(
    tmp_path: Path, register: Callable[..., object]
) -> None:
    agent = Played(tmp_path)
    register(agent)
    worker = Worker(agent.path)
    register(worker)
    until(lambda: agent.ends)
    before = open_descriptors()
    for step in range(500):  # more than the socket takes without a reader
        worker.snap(step, str(step).encode())
    for step in range(500):
        data, fd = unix_socket.accept(agent.ends[0])
        assert data is not None
        assert b'"step":%d,' % step in data
        assert fd is not None
        assert read(fd) == str(step).encode()
    until(lambda: open_descriptors() <= before)


def test_worker_hears_of_a_new_connection_and_goes_on(tmp_path: Path, shared_etcd: SharedEtcd) -> None:
    """An agent that is killed, in a process of its own, and the one that comes after it."""
    path, log, config = str(tmp_path / "a.sock"), tmp_path / "log", tmp_path / "e.toml"
    config.write_text(
        f'[cluster]\nname = "{shared_etcd.cluster("snapshots")}"\n[agent]\nstate = "{tmp_path}"\n'
        f'[etcd]\nendpoints = ["{shared_etcd.endpoint}"]\n'
    )

    def agent() -> subprocess.Popen[bytes]:
        options = ("--socket", path, "--node", "n0", "--devices", "2", "--memory", "1 MiB")
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "elasticd_agent", "--config", str(config), *options],
                stdout=out,
                stderr=out,
            )

    processes = [agent()]
    try:
        with contextlib.closing(Worker(path)) as worker:  # while there is an agent to say goodbye to
            first = worker.snap(1, b"one")
            assert worker.fetch(first) == b"one"
            processes[0].send_signal(signal.SIGKILL)
            processes[0].wait()
            processes.append(agent())
            until(lambda: any(isinstance(word, Welcome) for word in worker.heard))
            with pytest.raises(OSError, match="no snapshot"):
                worker.control.fetch(first, WAIT)
            second = worker.snap(2, b"two")
            assert worker.fetch(second) == b"two"
            worker.control.renew()
            assert worker.fetch(second) == b"two", "another incarnation's snapshot stays"
    finally:
        for process in processes:
            process.kill()
            process.wait()
