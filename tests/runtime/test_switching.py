"""A job of one real worker, whose agent is played: what its script gets when the others are lost at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from elasticd_planner.plan import Plan

import elasticd
from elasticd import messages
from elasticd.checkpoints.folder import scan
from elasticd.messages import (
    Bereft,
    Closed,
    Fenced,
    Finished,
    Goodbye,
    Message,
    Propose,
    Published,
    Recorded,
    Saved,
    Shutdown,
    Standing,
    Swapped,
)
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.records import Proposal, Recovery
from elasticd.runtime.groups import PeerLost
from elasticd.runtime.job import Step
from tests.integration.test_switches import plan_of, stage
from tests.runtime.test_control import WELCOME, Agent

CONFIG = DecoderConfig(vocabulary=16, width=16, layers=3, heads=4, kv_heads=2, hidden=12)
STEPS = 3
ME, OTHER = "a/0", "a/1"


def plan(number: int) -> Plan:
    return plan_of((3, [stage(0, 3, (ME, 1))])).replace(number=number, binding={ME: WELCOME.incarnation})


def first() -> Proposal:
    return Proposal(number=1, epoch=1, plan=plan(1), old=None)


def recovery(step: int) -> Proposal:
    source = Recovery(fence=2, step=step, sources={ME: WELCOME.incarnation})
    return Proposal(number=3, epoch=1, plan=plan(3), old=plan(1), recovery=source)


class Played:
    """An agent that answers what its worker says by `answers`, and keeps it."""

    def __init__(self, path: str, answers: Callable[[Message], list[Message]]) -> None:
        self.said: list[Message] = []
        self._agent = Agent(path, WELCOME)
        self._answers = answers
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, *orders: Message) -> None:
        self._agent.ready()
        for order in orders:
            self._agent.send(order)
        self._thread.start()

    def _run(self) -> None:
        while (message := self._agent.receive()) is not None:
            self.said.append(message)
            for answer in self._answers(message):
                self._agent.send(answer)

    def end(self) -> list[Message]:
        """All that was said, once the worker is gone."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._agent.close()
        return self.said

    def of(self, *kinds: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kinds)]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As torchrun starts a worker; this process does not end with its parent, though."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELASTICD_SOCKET", str(tmp_path / "s"))
    monkeypatch.setattr("elasticd.runtime.parent.end_with", lambda parent: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def job(**changes: Any) -> elasticd.Job:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    row = torch.arange(8) % 16
    return elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named),
        dataset=[{"inputs": row, "targets": row}] * 12,
        global_batch=6,
        **changes,
    )


def fails(what: str, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """The others are lost in this call of the engine, the first `times` that it is made."""
    from elasticd.runtime.engine import Engine

    method, left = getattr(Engine, what), [times]

    def lose(self: Engine, *args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise PeerLost("connection closed")
        return method(self, *args)

    monkeypatch.setattr(Engine, what, lose)


def indices(steps: Iterator[Step]) -> list[int]:
    return [step.index for step in steps]


def test_who_loses_the_others_at_the_last_step_ends_with_the_job_and_its_script_gets_that_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another made the last step and ended: nobody is left to be recovered with, and no fence will come."""
    over = Closed(reason="the job finished at step 3")
    agent = Played(str(tmp_path / "s"), lambda said: [over] if isinstance(said, Bereft) else [])
    trained = job()
    agent.start(Propose(proposal=first()))
    fails("settle", monkeypatch)
    assert indices(trained.steps(STEPS)) == [0, 1, 2]
    agent.end()
    assert agent.of(Bereft) == [Bereft(step=STEPS, reason="connection closed", plan=1)]
    assert agent.of(Goodbye) == [Goodbye()]


def test_who_has_heard_of_the_end_before_it_loses_the_others_does_not_wait_for_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = threading.Event()

    def answers(said: Message) -> list[Message]:
        return [Closed(reason="the job finished at step 3")] if isinstance(said, Swapped) else []

    agent = Played(str(tmp_path / "s"), answers)
    trained = job()
    heard = trained._switcher._close
    monkeypatch.setattr(trained._switcher, "_close", lambda reason: (heard(reason), closed.set()))
    agent.start(Propose(proposal=first()))
    fails("settle", monkeypatch)
    got = []
    for step in trained.steps(STEPS):
        assert closed.wait(60), "and it trains on, as all others do who are at work"
        got.append(step.index)
    assert got == [0, 1, 2]
    agent.end()
    assert agent.of(Bereft, Shutdown) == []


def test_a_standby_ends_with_the_job(tmp_path: Path) -> None:
    agent = Played(str(tmp_path / "s"), lambda said: [])
    trained = job()
    agent.start(Closed(reason="the job finished at step 3"))
    assert indices(trained.steps(STEPS)) == []
    agent.end()
    assert agent.of(Goodbye) == [Goodbye()]


@pytest.mark.parametrize("where", ["gather", "settle"])
def test_a_recovery_from_the_last_step_makes_the_last_checkpoint_and_ends(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others are lost while the last checkpoint is made, or just after it."""

    def answers(said: Message) -> list[Message]:
        match said:
            case Bereft():
                return [Fenced(number=2, reason="a/1 died")]
            case Standing(copies=copies):
                return [Propose(proposal=recovery(copies[0].step))]
            case Swapped(number=number):
                return [Recorded(number=number)]
            case Saved(name=name):
                return [Published(name=name)]
            case _:
                return []

    agent = Played(str(tmp_path / "s"), answers)
    folder = tmp_path / "checkpoints"
    trained = job(checkpoint=folder, checkpoint_every=100)
    agent.start(Propose(proposal=first()))
    fails(where, monkeypatch)
    assert indices(trained.steps(STEPS)) == [0, 1, 2]
    agent.end()
    (stood,) = agent.of(Standing)
    assert [msgspec.structs.astuple(copy)[:2] for copy in stood.copies] == [(1, STEPS)]
    assert agent.of(Finished) == [Finished(step=STEPS)]
    assert [item.step for item in scan(folder)] == [STEPS]
    assert messages.encode(agent.said[-1]) == messages.encode(Goodbye())
