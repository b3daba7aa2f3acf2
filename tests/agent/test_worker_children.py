"""What a worker leaves: ended after one that died or drained, left alone after one that ended its script."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from elasticd_agent.orphans import WorkerOrphans

from elasticd.machines.agent.state import Said
from elasticd.system import process_mark, process_sessions
from elasticd.testing.waiting import until
from elasticd.wire.worker import Goodbye
from tests.machines.agent_scene import hello

#: A worker that leads its session, as torchrun starts it; one child in it, and one in a session of its own.
WORKER = """
import subprocess, sys
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
quiet = {"stdout": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
children = [subprocess.Popen(sleeps, **quiet), subprocess.Popen(sleeps, start_new_session=True, **quiet)]
print(*[child.pid for child in children], flush=True)
sys.stdin.read()
"""


class Worker:
    def __init__(self, *, leads: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=leads,
        )
        assert self.process.stdout is not None
        self.child, self.service = map(int, self.process.stdout.readline().split())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.end()
    for pid in (started.child, started.service):
        if process_mark.mark(pid) is not None:
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    return process_mark.mark(pid) is not None


async def observed(worker: Worker, *words: Goodbye | str) -> None:
    """An agent hears a worker, which ends then, and looks after what it left.

    words: messages of the worker, and names of clients as which it connects anew.
    """
    children, client = WorkerOrphans(), "w"
    children.observe(replace(hello(0, client), pid=worker.process.pid))
    for word in words:
        if isinstance(word, str):
            client = word
            children.observe(replace(hello(0, client), pid=worker.process.pid))
        else:
            children.observe(Said(client=client, body=word))
    watched = children._pidfds
    worker.end()
    async with asyncio.timeout(60):
        while watched or children._tasks:
            await asyncio.sleep(0.01)
    children.close()


@pytest.mark.parametrize(
    "words",
    [(), (Goodbye(reason="it has drained", drained=True),), (Goodbye(), "second job")],
    ids=["died", "drained", "died in its second job"],
)
def test_its_children_are_ended_but_not_those_that_were_given_a_session_of_their_own(
    worker: Worker, words: tuple[Goodbye | str, ...]
) -> None:
    asyncio.run(observed(worker, *words))
    until(lambda: not lives(worker.child))
    assert lives(worker.service)


@pytest.mark.parametrize("words", [(Goodbye(),), ("connected anew", Goodbye())], ids=["first", "anew"])
def test_the_children_of_a_script_that_ended_in_good_order_go_on(
    worker: Worker, words: tuple[Goodbye | str, ...]
) -> None:
    asyncio.run(observed(worker, *words))
    assert lives(worker.child)


def test_a_worker_in_a_session_of_others_is_not_watched() -> None:
    started = Worker(leads=False)
    try:
        asyncio.run(observed(started))
        assert lives(started.child)
    finally:
        started.end()
        for pid in (started.child, started.service):
            os.kill(pid, signal.SIGKILL)


def test_what_does_not_hear_sigterm_is_killed() -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_sessions.end({process.pid}, 0.2) == {process.pid}
        assert process.wait(60) == -signal.SIGKILL
    assert process_sessions.end({process.pid}) == set()
