"""An agent watches the rounds of a job in restart mode for as long as somebody on its node asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticd_agent import restart_rendezvous

from elasticd.records import Keys
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import Watch
from elasticd.testing.waiting import until
from elasticd.wire.launch import FollowEvents, Following
from elasticd.wire.rendezvous import (
    Attend,
    Attending,
    AtWork,
    Join,
    Lap,
    Present,
    ReadRound,
    RoundAnswer,
    StepTime,
    Watching,
    WriteRound,
)
from elasticd.wire.worker import Hello, Rejected, Welcome
from tests.agent.support import CLUSTER, Node, Trainer, closing_all, spec

KEYS = Keys(cluster=CLUSTER)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing_all() as register:
        yield Node(register, tmp_path)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Watch]]:
    """Every watch of the store that was made, with its prefix."""
    made: list[tuple[str, Watch]] = []
    real = MemoryStore.watch

    def watch(store: MemoryStore, prefix: str, *given: Any) -> Watch:
        found = real(store, prefix, *given)
        made.append((prefix, found))
        return found

    monkeypatch.setattr(MemoryStore, "watch", watch)
    return made


def attending(node: Node, job: str) -> Trainer:
    torchrun = node.trainer()
    torchrun.say(Attend(job=job, pid=os.getpid()))
    assert isinstance(torchrun.hear(), Attending)
    return torchrun


def test_job_of_which_nobody_is_left_is_not_watched_any_more(
    node: Node, watched: list[tuple[str, Watch]]
) -> None:
    node.agent()
    for number in range(3):
        job = f"job-{number}"
        first, second = attending(node, job), attending(node, job)
        for at, torchrun in enumerate((first, second)):
            torchrun.say(ReadRound(id=at))
            assert isinstance(torchrun.hear(), RoundAnswer)
        (watch,) = [watch for prefix, watch in watched if prefix == KEYS.rendezvous(job)]
        first.close()
        second.say(WriteRound(id=7, value=b"state", token=0))
        answer = second.hear()
        assert isinstance(answer, RoundAnswer)
        assert (answer.done, answer.value) == (True, b"state")
        assert not watch.cancelled
        second.close()
        until(lambda watch=watch: watch.cancelled)
    again = attending(node, "job-0")
    again.say(ReadRound(id=1))
    answer = again.hear()
    assert isinstance(answer, RoundAnswer)
    assert answer.value == b"state"


def test_torchrun_that_hangs_up_at_once_leaves_no_watch(node: Node, watched: list[tuple[str, Watch]]) -> None:
    node.agent()
    for number in range(20):
        torchrun = attending(node, "job")
        torchrun.say(Present(id=1, name=f"t{number}", store="", left=True))
        torchrun.say(ReadRound(id=number))
        torchrun.close()
    attending(node, "job").close()
    of_job = [watch for prefix, watch in watched if prefix == KEYS.rendezvous("job")]
    until(lambda: all(watch.cancelled for watch in of_job))


def test_torchrun_that_writes_again_and_again_does_not_fill_the_store(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_rendezvous, "WRITTEN_AT_ONCE", 10_000)
    monkeypatch.setattr(restart_rendezvous, "WRITTEN_A_SECOND", 100)
    node.agent()
    torchrun = attending(node, "job")
    token = 0
    for number in range(10):
        torchrun.say(WriteRound(id=number, value=bytes(990) + bytes([number]), token=token))
        answer = torchrun.hear()
        assert isinstance(answer, RoundAnswer)
        assert answer.done, answer
        token = answer.token
    torchrun.say(WriteRound(id=11, value=bytes(1000), token=token))
    answer = torchrun.hear()
    assert isinstance(answer, RoundAnswer)
    assert not answer.done
    assert "write more than 100 bytes a second" in answer.error
    torchrun.say(ReadRound(id=12))  # it is heard as before
    assert isinstance(torchrun.hear(), RoundAnswer)


@pytest.mark.parametrize("names", [("t0", "t1"), ("a/b",), ("x" * 2000,)])
def test_torchrun_has_one_name_that_is_a_key(node: Node, names: tuple[str, ...]) -> None:
    node.agent()
    torchrun = attending(node, "job")
    *taken, refused = names
    for name in taken:
        torchrun.say(Present(id=1, name=name, store=""))
        assert isinstance(torchrun.hear(), RoundAnswer)
    torchrun.say(Present(id=2, name=refused, store=""))
    assert isinstance(torchrun.hear(), Rejected)


# -- the devices of torchruns ----------------------------------------------------------------------------------


def used(node: Node) -> dict[str, str]:
    """The launcher's view of the node's devices."""
    launcher = node.trainer()
    launcher.say(FollowEvents(job="other"))
    following = launcher.hear()
    assert isinstance(following, Following)
    launcher.close()
    return following.used


def refusal_of(node: Node, opening: Attend | Join | Hello) -> str:
    client = node.trainer()
    client.say(opening)
    answer = client.hear()
    client.close()
    return answer.reason if isinstance(answer, Rejected) else ""


def hello(job: str, index: int) -> Hello:
    return Hello(job=job, local_rank=index, world_size=1, pid=os.getpid(), spec=spec(job))


def test_devices_of_a_torchrun_belong_to_its_job_until_it_has_ended(node: Node) -> None:
    node.agent()
    torchrun = node.trainer()
    torchrun.say(Attend(job="ddp", pid=os.getpid(), slots=(1,)))
    assert isinstance(torchrun.hear(), Attending)
    assert used(node) == {"n0/1": "ddp"}
    for opening in (
        Attend(job="other", pid=os.getpid(), slots=(0, 1)),
        Join(job="other", min_nodes=1, max_nodes=1, pid=os.getpid(), slot=1),
        hello("other", 1),
    ):
        assert "n0/1 is used by job ddp" in refusal_of(node, opening)
    same = attending(node, "ddp")
    same.say(Present(id=1, name="t", store="", at_work=AtWork(phase="runs", slots=(1,))))
    assert isinstance(same.hear(), RoundAnswer), "torchruns of one job may share a node"
    same.close()
    torchrun.close()
    until(lambda: used(node) == {})
    assert not refusal_of(node, Attend(job="other", pid=os.getpid(), slots=(0, 1)))


def test_torchrun_is_refused_devices_of_a_live_job_and_devices_that_are_not_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_rendezvous, "RETURN_SECONDS", 0.1)
    node.agent()
    worker = node.trainer()
    worker.say(hello("live", 0))
    assert isinstance(worker.hear(), Welcome)
    assert "n0/0 is used by job live" in refusal_of(node, Attend(job="ddp", pid=os.getpid(), slots=(0,)))
    assert "there is no device n0/7" in refusal_of(node, Attend(job="ddp", pid=os.getpid(), slots=(7,)))
    plain = attending(node, "ddp")  # torchrun's own launcher knows its workers later
    plain.say(Present(id=1, name="t", store=""))
    assert isinstance(plain.hear(), RoundAnswer)
    plain.say(Present(id=2, name="t", store="", at_work=AtWork(phase="runs", slots=(0, 1))))
    answer = plain.hear()
    assert isinstance(answer, Rejected)
    assert "n0/0 is used by job live" in answer.reason
    # It was dismissed, and does not count as there for as long as this agent runs.
    until(
        lambda: (
            not [item for item in node.store.snapshot(KEYS.rendezvous("ddp")).items if b'"here"' in item.value]
        )
    )


def test_step_of_a_watched_process_is_that_of_its_device(node: Node) -> None:
    leader = node.leader()
    node.agent()
    until(lambda: leader.heard)  # a lap is a hint: without a leader it is dropped
    torchrun = node.trainer()
    torchrun.say(Attend(job="ddp", pid=os.getpid(), slots=(1,)))
    assert isinstance(torchrun.hear(), Attending)
    torchrun.say(Present(id=1, name="t", store=""))
    assert isinstance(torchrun.hear(), RoundAnswer)
    worker = node.trainer()
    worker.say(
        Watching(job="ddp", torchrun="t", local_rank=0, pid=os.getpid(), round=0, world=1, nodes=1, least=1)
    )
    worker.say(Lap(step=1, seconds=0.1, wall=0.1))
    until(lambda: [m.device for m in leader.heard if isinstance(m, StepTime)] == ["n0/1"])
