"""Messages between an agent and its clients where the agent has no descriptor or memory left for a while."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from elasticd_agent import worker_socket
from elasticd_agent.worker_socket import Workers

from elasticd.codec.message import encode
from elasticd.machines.agent.state import Event, Opened
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.worker import Hello, Rejected, to_worker
from tests.agent.support import handlers, spec
from tests.descriptors import few_descriptors


def test_message_with_a_descriptor_waits_until_there_is_room_for_it(tmp_path: Path) -> None:
    """The kernel drops a descriptor for which a process has no room, and the client did nothing wrong."""

    async def body() -> None:
        events: list[Event] = []
        workers = Workers(path := str(tmp_path / "agent.sock"), "alpha")
        names = tuple(f"{number:0100}" for number in range(1000))  # a message of more than a packet
        hello = Hello(
            job="job", local_rank=0, world_size=1, pid=os.getpid(), spec=spec("job"), checkpoints=names
        )
        try:
            workers.start(handlers(events))
            with unix_socket.connect(path) as client, contextlib.ExitStack() as stack:
                await asyncio.to_thread(until, lambda: bool(workers._connections))
                unix_socket.send(client, encode(hello))
                with few_descriptors(spare=0):
                    with contextlib.suppress(OSError):
                        while True:
                            stack.callback(os.close, os.dup(client.fileno()))
                    await asyncio.sleep(0.5)
                    assert not events
                    assert workers._connections
                await asyncio.to_thread(until, lambda: bool(events))
                (opened,) = events
                assert isinstance(opened, Opened)
                assert opened.body == hello
        finally:
            workers.close()

    asyncio.run(body())


def test_process_that_opens_connections_without_end_takes_no_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_socket, "_MOST_OF_A_PROCESS", 3)

    async def body() -> None:
        workers = Workers(path := str(tmp_path / "agent.sock"), "alpha")
        script = (
            "import sys; from elasticd.wire import unix_socket as u; s = u.connect(sys.argv[1], 60); input()"
        )
        other = None
        try:
            workers.start(handlers([]))
            with contextlib.ExitStack() as stack:
                for _ in range(3):
                    stack.enter_context(unix_socket.connect(path))
                await asyncio.to_thread(until, lambda: len(workers._connections) == 3)
                refused = stack.enter_context(unix_socket.connect(path))
                data, _ = await asyncio.to_thread(unix_socket.accept, refused)
                assert data is not None
                answer = to_worker(data)
                assert isinstance(answer, Rejected)
                assert f"process {os.getpid()} has 3 connections to this agent already" in answer.reason
                other = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE)
                await asyncio.to_thread(until, lambda: len(workers._connections) == 4)
        finally:
            workers.close()
            if other is not None:
                other.kill()
                other.communicate()

    asyncio.run(body())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_message_for_which_there_is_no_room_now_is_sent_later_and_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, tries = os.memfd_create, 0

    def full(name: str, flags: int) -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(number, os.strerror(number))
        return real(name, flags)

    async def body() -> None:
        workers = Workers(path := str(tmp_path / "agent.sock"), "alpha")
        try:
            workers.start(handlers([]))
            with unix_socket.connect(path) as client:
                await asyncio.to_thread(until, lambda: bool(workers._connections))
                (name,) = workers._connections
                monkeypatch.setattr(os, "memfd_create", full)
                bodies = [Rejected(reason="x" * 100_000), Rejected(reason="behind it")]
                for each in bodies:
                    workers.send(name, each)
                for each in bodies:
                    data, _ = await asyncio.to_thread(unix_socket.accept, client)
                    assert data is not None
                    assert to_worker(data) == each
                assert tries == 3
        finally:
            workers.close()

    asyncio.run(body())
