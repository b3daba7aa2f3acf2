"""What a killed torchrun leaves behind is ended by the agent, also what it left while there was no agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from elasticd_agent import orphans
from elasticd_agent.orphans import TorchrunOrphans

from elasticd.system import process_mark
from elasticd.testing.waiting import until
from elasticd.wire.unix_socket import SOCKET_VARIABLE, TORCHRUN_VARIABLE
from tests.agent.support import closing_all
from tests.agent.test_torchrun import Nodes
from tests.torchruns import environment

#: A worker that still imports: it has said nothing to anybody.
IMPORTING = """
import os, sys, time
with open(os.path.join(sys.argv[2], str(os.getpid())), "w") as file:
    file.write("importing")
time.sleep(600)
"""

#: A mark of no process: there are no such numbers.
NOBODY = "4194305-1"


@pytest.mark.slow
def test_a_worker_that_still_imports_does_not_outlive_its_torchrun(tmp_path: Path) -> None:
    with closing_all() as register:
        nodes = Nodes(register, tmp_path, 1)
        nodes.script.write_text(IMPORTING)
        # Not forked: the agent knows workers by the environment that they were started with.
        command = (sys.executable, "-m", "torch.distributed.run", *nodes.options("alpha", 1, 2))
        torchrun = subprocess.Popen(command, env=environment(), start_new_session=True)
        marks: list[str | None] = []
        try:
            marks += [process_mark.mark(pid) for pid in until(lambda: _both(tmp_path / "out"))]
            torchrun.kill()
            torchrun.wait()
            until(lambda: not any(mark and process_mark.alive(mark) for mark in marks))
        finally:
            torchrun.kill()
            torchrun.wait()
            for mark in marks:
                _kill(mark)


def _both(folder: Path) -> list[int]:
    pids = [int(path.name) for path in folder.iterdir()]
    return pids if len(pids) == 2 else []


def test_workers_of_a_torchrun_are_ended_by_its_start_and_not_by_its_name_alone() -> None:
    """A process may give itself another's name."""
    name = "alpha_4711_0"
    started = "123456789"
    with (
        sleeping({TORCHRUN_VARIABLE: name, process_mark.VARIABLE: f"4194305-{started}"}) as worker,
        sleeping({TORCHRUN_VARIABLE: name, process_mark.VARIABLE: f"7-{started}"}) as contained,
        sleeping({TORCHRUN_VARIABLE: "another's", process_mark.VARIABLE: f"4194305-{started}"}) as other,
    ):
        assert orphans.end(name, "4194306-12345678") == [], "a liar's mark"
        assert orphans.end(name, "") == []
        assert sorted(orphans.end(name, f"4194305-{started}")) == sorted([worker.pid, contained.pid])
        assert other.poll() is None


def test_an_agent_ends_what_torchruns_left_while_there_was_none_and_that_alone(tmp_path: Path) -> None:
    socket = str(tmp_path / "agent.sock")
    with sleeping({}) as gone:
        dead = process_mark.mark(gone.pid)
    assert dead
    with (
        sleeping({}) as torchrun,
        sleeping({SOCKET_VARIABLE: socket, process_mark.VARIABLE: dead}) as orphan,
        sleeping({SOCKET_VARIABLE: "another's", process_mark.VARIABLE: NOBODY}) as other,
        sleeping(
            {SOCKET_VARIABLE: socket, process_mark.VARIABLE: str(process_mark.mark(torchrun.pid))}
        ) as worker,
    ):

        async def agent() -> None:
            torchruns = TorchrunOrphans(socket)
            torchruns.start()
            await ends(orphan)
            assert worker.poll() is None, "its torchrun lives"
            torchrun.kill()  # and is watched, though it never spoke to this agent
            await ends(worker)
            torchruns.close()

        asyncio.run(agent())
        assert other.poll() is None, "it is another agent's"


async def ends(process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(60):
        while process.poll() is None:
            await asyncio.sleep(0.01)


@contextmanager
def sleeping(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with this in its environment, by the time that we go on."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_mark_is_of_one_process_alone() -> None:
    with sleeping({}) as process:
        mark = process_mark.mark(process.pid)
        assert mark
        assert process_mark.alive(mark)
        assert not process_mark.alive(f"{process.pid}-1"), "a later process with the same number"
        process.kill()
        until(lambda: not process_mark.alive(mark))  # though its parent has not looked yet
    assert process_mark.mark(process.pid) is None


def _kill(mark: str | None) -> None:
    if mark and process_mark.alive(mark):
        os.kill(int(mark.partition("-")[0]), 9)


def test_a_mark_that_is_no_process_keeps_no_other_from_being_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts a process sets its environment."""
    made_up = ["9" * 30 + "-1", "9" * 5000 + "-1", "\N{SUPERSCRIPT TWO}-1", "-", ""]
    mine = process_mark.mark(os.getpid())
    monkeypatch.setattr(orphans, "_starters", lambda socket: [*made_up, mine])
    monkeypatch.setattr(orphans, "_end", lambda entry: [])

    async def body() -> None:
        torchruns = TorchrunOrphans("a.sock")
        try:
            await torchruns._begin()
            assert torchruns._watched.keys() == {mine}
        finally:
            torchruns.close()

    asyncio.run(body())
