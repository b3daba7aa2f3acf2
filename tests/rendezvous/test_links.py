"""The connections of a torchrun and of a launcher to their agent: made again where another agent came."""

from __future__ import annotations

import concurrent.futures
import os
import select
import socket
from contextlib import closing
from pathlib import Path

import pytest

from elasticd.codec.message import encode
from elasticd.rendezvous.output_link import OutputLink
from elasticd.system import launch_events, output_ring
from elasticd.system.launch_events import LaunchLink
from elasticd.system.output_ring import OutputRing
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.launch import FollowEvents, Following, Happened, KeepOutput, OutputKept
from elasticd.wire.worker import ToWorker, from_worker


class AgentOf:
    """Whoever listens at an agent's socket, one client at a time."""

    def __init__(self, path: Path) -> None:
        self._listener = unix_socket.listen(str(path))
        self.path = path
        self.client: socket.socket | None = None

    def hear(self) -> tuple[object, int | None]:
        if self.client is None:
            select.select([self._listener], [], [], 60)
            self.client, _ = self._listener.accept()
            self.client.setblocking(True)
            self.client.settimeout(60)
        data, fd = unix_socket.accept(self.client)
        assert data is not None
        return from_worker(data), fd

    def say(self, message: ToWorker) -> None:
        assert self.client is not None
        unix_socket.send(self.client, encode(message))

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        self._listener.close()
        unix_socket.remove(str(self.path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def test_rings_are_shown_to_each_agent_and_devices_are_called_as_it_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticd.rendezvous.output_link.ANSWER_SECONDS", 0.05)
    rings = OutputRing(), OutputRing()
    link = OutputLink(str(path), "job")
    assert link.share(1, rings[0]).endswith("/1"), "there is no agent yet"
    rings[0].write(b"kept")
    for turn in range(2):
        with closing(AgentOf(path)) as agent:
            for index in range(1, turn + 2):
                body, fd = agent.hear()
                assert isinstance(body, KeepOutput)
                assert (body.job, body.index) == ("job", index)
                assert fd is not None
                assert output_ring.read(fd, 0, 10).data == (b"kept" if index == 1 else b"")
                os.close(fd)
                agent.say(OutputKept(index=index, device=f"alpha/{index}"))
            until(lambda: link.share(1, rings[0]) == "alpha/1")
        if turn == 0:
            link.share(2, rings[1])
    for ring in rings:
        ring.close()


def test_launcher_follows_its_job_from_one_agent_to_the_next(path: Path) -> None:
    heard: list[str] = []
    agents = [AgentOf(path)]
    link = LaunchLink(str(path), "job", lambda event: heard.append(event.text))
    try:
        for turn in range(2):
            if turn:
                agents[0].close()
                agents.append(AgentOf(path))
            body, _ = agents[-1].hear()
            slots = (0,) if turn else ()
            assert body == FollowEvents(job="job", slots=slots, release=body.release)  # type: ignore[attr-defined]
            agents[-1].say(Following(devices=("a/0",), used={}))
            agents[-1].say(Happened(job="job", kind="recorded", text=f"event {turn}"))
            until(lambda turn=turn: f"event {turn}" in heard)
            if not turn:
                with concurrent.futures.ThreadPoolExecutor() as threads:
                    answer = threads.submit(link.take, (0,))
                    body, _ = agents[-1].hear()
                    agents[-1].say(Following(devices=("a/0",), used={"a/0": "job"}))
                    assert answer.result().used == {"a/0": "job"}
        assert link.following() == Following(devices=("a/0",), used={})
    finally:
        link.close()
        agents[-1].close()


@pytest.mark.parametrize("restarts", [False, True])
def test_launcher_takes_no_answer_that_was_asked_for_before_its_question(path: Path, restarts: bool) -> None:
    """Neither one that is on its way as it asks, nor that of an agent that is gone since."""
    stale, fresh = (Following(devices=("a/0", "a/1"), used={"a/1": job}) for job in ("before", "after"))
    agents = [AgentOf(path)]
    heard: list[Happened] = []
    link = LaunchLink(str(path), "job", heard.append)
    try:
        agents[0].hear()
        if restarts:
            agents[0].say(stale)
            assert link.following() == stale
        with concurrent.futures.ThreadPoolExecutor() as threads:
            answer = threads.submit(link.take, (0,))
            body, _ = agents[0].hear()
            if restarts:
                agents[0].close()
                agents.append(AgentOf(path))
                body, _ = agents[1].hear()
            else:
                agents[0].say(stale)
                agents[0].say(Happened(job="job", kind="recorded", text="behind it"))
                until(lambda: bool(heard))
            assert isinstance(body, FollowEvents)
            assert body.slots == (0,)
            agents[-1].say(fresh)
            assert answer.result() == fresh
        assert link.following() == fresh
    finally:
        link.close()
        agents[-1].close()


def test_launcher_without_an_agent_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_events, "AGENT_SECONDS", 0.05)
    link = LaunchLink(str(path), "job", lambda event: None)
    assert link.following() is None
    assert link.refusal.startswith("no agent listens at")
    link.close()
