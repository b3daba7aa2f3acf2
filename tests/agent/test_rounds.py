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
from elasticd.wire.rendezvous import Attend, Attending, Present, ReadRound, RoundAnswer, WriteRound
from elasticd.wire.worker import Rejected
from tests.agent.support import CLUSTER, Node, Trainer, closing_all

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
