"""Launches of a node: output that the agent keeps and the leader reads, and events for launchers."""

from __future__ import annotations

import os
from typing import Any

import pytest
from elasticd_agent import launches
from elasticd_agent.launches import Launches

from elasticd.machines.agent.state import LinkUp
from elasticd.system.output_ring import OutputRing
from elasticd.wire.launch import (
    FollowEvents,
    Following,
    FollowJob,
    Happened,
    KeepOutput,
    OutputKept,
    OutputPart,
    ReadOutput,
)
from elasticd.wire.worker import Rejected
from tests.machines.cast import node_record


class Node:
    """An agent's `Launches`, with what it says to clients and to the leader."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.told: list[Any] = []
        self.used: dict[str, str] = {}
        self.launches = Launches(
            lambda: node_record("alpha"),
            lambda: self.used,
            lambda client, body: self.said.append((client, body)),
            self.told.append,
        )

    def share(self, job: str, index: int, text: bytes, client: str = "t") -> OutputRing:
        ring = OutputRing()
        ring.write(text)
        self.launches.hear(client, KeepOutput(job=job, index=index), os.dup(ring.fd))
        return ring

    def read(self, job: str = "", after: int = -1000, device: str = "alpha/1") -> OutputPart:
        self.launches.read(ReadOutput(id=7, device=device, job=job, after=after, most=100))
        part = self.told.pop()
        assert isinstance(part, OutputPart)
        assert part.id == 7
        return part


@pytest.fixture
def node() -> Any:
    made = Node()
    yield made
    made.launches.close()


def test_output_is_kept_beyond_the_end_of_its_torchrun(node: Node) -> None:
    ring = node.share("job", 1, b"one\n")
    assert node.said == [("t", OutputKept(index=1, device="alpha/1"))]
    ring.write(b"two\n")
    ring.close()
    node.launches.gone("t")
    assert node.read() == OutputPart(id=7, job="job", begin=0, end=8, data=b"one\ntwo\n")
    assert node.read(after=4).data == b"two\n"
    assert node.read(job="other").error.startswith("no output of alpha/1 in job other is kept")
    assert node.read(device="alpha/0").error


def test_the_newest_job_of_a_device_is_read_unless_one_is_named(node: Node) -> None:
    for job in ("old", "new"):
        node.share(job, 1, job.encode()).close()
    assert (node.read().data, node.read(job="old").data) == (b"new", b"old")
    node.share("old", 1, b"again").close()
    assert (node.read().data, node.read(job="old").data) == (b"again", b"again")


def test_only_so_many_outputs_are_kept_and_their_descriptors_are_given_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MOST_KEPT", 2)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        node.share(f"job{number}", 1, b"x").close()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert node.read(job="job0").error
    assert node.read(job="job9").data == b"x"


def test_output_of_workers_that_run_is_kept_longer_than_that_of_jobs_that_are_over(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MOST_KEPT", 2)
    node.share("long", 0, b"long").close()
    for number in range(10):
        node.share(f"job{number}", 1, b"x", client=f"t{number}").close()
        node.launches.gone(f"t{number}")
    assert node.read(job="long", device="alpha/0").data == b"long"
    assert node.read(job="job9").data == b"x"
    assert node.read(job="job8").error


def test_launcher_that_is_given_up_while_it_is_told_keeps_nothing_from_the_others(node: Node) -> None:
    heard = []

    def say(client: str, body: Any) -> None:
        heard.append(client)
        node.launches.gone("x")  # it does not read: its connection is closed

    for client in ("x", "y"):
        node.launches.hear(client, FollowEvents(job="a"), None)
    node.launches._say = say
    node.launches.happened(Happened(job="a", kind="finished", text="finished"))
    assert heard == ["x", "y"]


def test_what_is_no_ring_is_refused_and_its_descriptor_closed(node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node.launches.hear("t", KeepOutput(job="job", index=0), os.open("/dev/null", os.O_RDONLY))
    node.launches.hear("t", KeepOutput(job="job", index=0), None)
    assert [type(body) for _, body in node.said] == [Rejected, Rejected]
    assert len(os.listdir("/proc/self/fd")) == before


def test_launchers_hear_of_their_own_job_and_each_leader_of_what_they_follow(node: Node) -> None:
    node.used = {"alpha/0": "a"}
    for client, job in (("x", "a"), ("y", "b")):
        node.launches.hear(client, FollowEvents(job=job), None)
    devices = tuple(device.name for device in node_record("alpha").devices)
    assert node.said == [(client, Following(devices=devices, used=node.used)) for client in ("x", "y")]
    assert node.told == [FollowJob(job="a"), FollowJob(job="b")]
    event = Happened(job="b", kind="recorded", text="plan 1 is recorded")
    node.launches.happened(event)
    assert node.said[2:] == [("y", event)]
    node.launches.gone("x")
    node.launches.observe(LinkUp())
    assert node.told[2:] == [FollowJob(job="b")]


def test_a_device_that_a_launcher_has_is_no_other_jobs_until_it_hangs_up(node: Node) -> None:
    def asks(client: str, job: str, *slots: int) -> dict[str, str]:
        node.launches.hear(client, FollowEvents(job=job, slots=slots), None)
        _, answer = node.said[-1]
        used: dict[str, str] = answer.used
        return used

    assert asks("x", "a", 0) == {}
    assert asks("y", "b", 0, 1) == {"alpha/0": "a"}, "and has none then"
    assert asks("z", "c", 1) == {"alpha/0": "a"}
    assert asks("y", "b") == {"alpha/0": "a", "alpha/1": "c"}
    assert asks("w", "a", 0) == {"alpha/0": "a", "alpha/1": "c"}, "its own job's are no other job's"
    node.launches.gone("w")
    node.launches.gone("x")
    assert asks("y", "b", 0) == {"alpha/1": "c"}
    node.used = {"alpha/0": "b"}
    assert asks("x", "a", 0) == {"alpha/0": "b", "alpha/1": "c"}
