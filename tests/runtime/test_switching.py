"""A job of one real worker, whose agent is played: what its script gets when the others are lost at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import Plan

import elasticd
from elasticd.checkpoints.folder import scan
from elasticd.codec.message import Message, encode
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.records import Proposal, Recovery
from elasticd.runtime.api.step import Step
from elasticd.runtime.comm.groups import PeerLost
from elasticd.runtime.control import preemption_notice, user_exceptions
from elasticd.runtime.telemetry.main_thread import MainThread, shared
from elasticd.wire.main_thread import WORDS, read
from elasticd.wire.worker import (
    Closed,
    DrainNotice,
    Fenced,
    Finished,
    Goodbye,
    PeersLost,
    Propose,
    Published,
    Raised,
    Recorded,
    Saved,
    Shutdown,
    StateReport,
    Switched,
)
from tests.integration.test_switch import plan_of, stage
from tests.runtime.test_control import WELCOME, Agent

CONFIG = DecoderConfig(vocabulary=16, width=16, layers=3, heads=4, kv_heads=2, hidden=12)
STEPS = 3
ME, OTHER = "a/0", "a/1"
ROWS = [{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 12


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


def leader(said: Message) -> list[Message]:
    """Has who lost the others go on from what it holds, with its checkpoints published. Of a job that an
    exception ends it says so."""
    match said:
        case Raised(ends=True):
            return [Shutdown(reason="the script's code raised ValueError: bad sample")]
        case PeersLost():
            return [Fenced(number=2, reason="a/1 died, or its code raised")]
        case StateReport(copies=copies):
            return [Propose(proposal=recovery(copies[0].step))]
        case Switched(number=number):
            return [Recorded(number=number)]
        case Saved(name=name):
            return [Published(name=name)]
        case _:
            return []


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As torchrun starts a worker; this process does not end with its parent, though."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELASTICD_SOCKET", str(tmp_path / "s"))
    monkeypatch.setattr("elasticd.runtime.control.parent_death.end_with", lambda parent: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if preemption_notice._present is not None:  # of a job that this process does not end with
        preemption_notice._present.restore()


def job(**changes: Any) -> elasticd.Job:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    return elasticd.Job(
        model=model,
        loss=changes.pop("loss", next_token_loss),
        optimizer=changes.pop("optimizer", torch.optim.AdamW),
        dataset=changes.pop("dataset", ROWS),
        global_batch=6,
        **changes,
    )


def fails(what: str, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """The others are lost in this call of the engine, the first `times` that it is made."""
    from elasticd.runtime.engine.engine import Engine

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
    over = Closed(reason="the job finished after 3 steps")
    agent = Played(str(tmp_path / "s"), lambda said: [over] if isinstance(said, PeersLost) else [])
    trained = job()
    agent.start(Propose(proposal=first()))
    fails("settle", monkeypatch)
    assert indices(trained.steps(STEPS)) == [0, 1, 2]
    trained.close()
    agent.end()
    assert agent.of(PeersLost) == [PeersLost(step=STEPS, reason="connection closed", plan=1)]
    assert agent.of(Goodbye) == [Goodbye()]


def test_who_has_heard_of_the_end_before_it_loses_the_others_does_not_wait_for_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = threading.Event()

    def answers(said: Message) -> list[Message]:
        return [Closed(reason="the job finished after 3 steps")] if isinstance(said, Switched) else []

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
    trained.close()
    agent.end()
    assert agent.of(PeersLost, Shutdown) == []


def test_a_standby_ends_with_the_job(tmp_path: Path) -> None:
    agent = Played(str(tmp_path / "s"), lambda said: [])
    trained = job()
    agent.start(Closed(reason="the job finished after 3 steps"))
    assert indices(trained.steps(STEPS)) == []
    trained.close()
    agent.end()
    assert agent.of(Goodbye) == [Goodbye()]


@pytest.mark.parametrize("where", ["gather", "settle"])
def test_a_recovery_from_the_last_step_makes_the_last_checkpoint_and_ends(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others are lost while the last checkpoint is made, or just after it."""
    agent = Played(str(tmp_path / "s"), leader)
    folder = tmp_path / "checkpoints"
    trained = job(checkpointing=elasticd.CheckpointingOptions(folder=folder, every=100))
    agent.start(Propose(proposal=first()))
    fails(where, monkeypatch)
    assert indices(trained.steps(STEPS)) == [0, 1, 2]
    trained.close()
    agent.end()
    (stood,) = agent.of(StateReport)
    assert [msgspec.structs.astuple(copy)[:2] for copy in stood.copies] == [(1, STEPS)]
    assert [(body.step, body.plan) for body in agent.of(Finished)] == [(STEPS, 1)]
    assert [item.step for item in scan(folder)] == [STEPS]
    assert encode(agent.said[-1]) == encode(Goodbye())


def here() -> str:
    """Where this process tells its agent that it is."""
    found = read(os.pread(shared().fd, WORDS.size, 0))
    assert found is not None
    return found.name


def test_what_elasticd_calls_between_steps_is_told_by_its_name(tmp_path: Path) -> None:
    """A hang there holds all others up, and only its name says why."""
    places = dict[str, str]()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        places["optimizer"] = here()
        return torch.optim.AdamW(named)

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        places["scheduler"] = here()
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        places["loss in a step"] = here()  # of the last step: it is no longer one of the plan's first
        return next_token_loss(output, batch)

    def held_out_loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        places["loss in an evaluation"] = here()
        return next_token_loss(output, batch)

    class Told(elasticd.Callback):
        def on_plan(self, job: Any, plan: Any) -> None:
            places["on_plan"] = here()

        def on_step(self, job: Any, step: Any) -> None:
            places["on_step"] = here()

        def on_evaluation(self, job: Any, evaluation: Any) -> None:
            places["on_evaluation"] = here()

        def on_end(self, job: Any) -> None:
            places["on_end"] = here()

    class Dataset:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            places["dataset"] = here()
            return ROWS[index]

    def length(index: int) -> int:
        places["length"] = here()
        return 8

    agent = Played(str(tmp_path / "s"), leader)
    trained = job(
        optimizer=optimizer,
        scheduler=scheduler,
        loss=loss,
        data=elasticd.DataOptions(length=length, readers=0),
        dataset=Dataset(),
        evaluation=elasticd.EvaluationOptions(held_out=elasticd.HeldOut(dataset=ROWS, loss=held_out_loss)),
        callbacks=[Told()],
    )
    model = trained._recipe.model
    init: Any = model._init

    def told_init(*given: Any) -> torch.Tensor:
        places["init"] = here()
        value: torch.Tensor = init(*given)
        return value

    model._init = told_init
    agent.start(Propose(proposal=first()))
    for step in trained.steps(STEPS):
        if step.index == 0:
            places["the loop's body"] = here()
            trained.evaluate()
    trained.close()
    agent.end()
    assert places == {
        "init": "the first values of its parameters (init)",
        "optimizer": "the optimizer's factory",
        "scheduler": "the scheduler's factory",
        "dataset": "its loader",
        "length": "its loader",
        "loss in a step": "the loss",
        "loss in an evaluation": "an evaluation",
        "on_plan": "a callback",
        "on_step": "a callback",
        "on_evaluation": "a callback",
        "on_end": "a callback",
        "the loop's body": "its script's own code",
    }


def test_the_thread_that_prepares_a_plan_does_not_say_where_the_main_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for other ranks, too, on groups that are the main thread's only later."""
    from elasticd.runtime.switch import move

    told, prepare = list[object](), move.prepare

    def preparing(*given: Any) -> Any:
        prepared = prepare(*given)
        assert prepared.engine is not None
        told.extend(
            plan_groups.stopwatch.where for plan_groups in (prepared.transition, prepared.engine.plan_groups)
        )
        return prepared

    monkeypatch.setattr(move, "prepare", preparing)
    agent = Played(str(tmp_path / "s"), leader)
    trained = job()
    agent.start(Propose(proposal=first()))
    for _ in trained.steps(1):
        engine = trained._switcher.engine
        assert engine is not None
        assert engine.plan_groups.stopwatch.where is shared()
    trained.close()
    agent.end()
    assert [type(where) for where in told] == [MainThread, MainThread]


def bad_loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    raise ValueError("bad sample")


_held: list[Any] = []


class Large:
    """What a frame of the step keeps."""


def large_loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    large = Large()
    _held.append(weakref.ref(large))
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def fails_from_here(trained: elasticd.Job, loss: Any = bad_loss) -> None:
    engine = trained._switcher.engine
    assert engine is not None
    assert engine.module.runner is not None
    engine.module.runner.loss = loss


class Bad(torch.optim.SGD):
    """Fails in the midst of an update."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise ValueError("bad update")


@pytest.mark.parametrize("where", ["loss", "loop", "callback", "exits"])
def test_an_exception_of_the_script_is_told_and_the_state_before_it_saved_where_the_leader_asks_for_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exits: it takes longer from the loop's body to the script's end than a leave is put off."""
    monkeypatch.setattr(user_exceptions, "_ON_ITS_WAY", 0.2)

    class Told(elasticd.Callback):
        def on_step(self, job: Any, step: Any) -> None:
            if where == "callback" and step.index == 1:
                raise ValueError("bad sample")

    agent = Played(str(tmp_path / "s"), leader)
    folder = tmp_path / "checkpoints"
    checkpointing = elasticd.CheckpointingOptions(folder=folder, every=100)
    trained = job(checkpointing=checkpointing, callbacks=[Told()])
    agent.start(Propose(proposal=first()))

    def script() -> None:
        try:
            for step in trained.steps(10):
                if step.index == 1 and where == "loss":
                    fails_from_here(trained)
                elif step.index == 1 and where in ("loop", "exits"):
                    raise ValueError("bad sample")
        finally:
            time.sleep(0.6 if where == "exits" else 0.0)

    with pytest.raises(ValueError, match="bad sample") as caught:
        script()
    if where in ("loop", "exits"):  # as the interpreter does with what nobody caught
        sys.excepthook(ValueError, caught.value, None)
    trained._control.close(Goodbye(reason="the test ends"))
    agent.end()
    words = agent.of(Raised)
    assert [(word.plan, word.step, word.kind, word.holds, word.ends) for word in words] == [
        (1, 2, "ValueError", True, False),
        (3, 2, "ValueError", True, True),
    ]
    index = 2 if where == "loss" else 1  # of the step that the script has, or waits for
    assert {word.index for word in words} == {index}
    assert "bad sample" in words[0].traceback
    (stood,) = agent.of(StateReport)
    assert [(copy.number, copy.step) for copy in stood.copies] == [(1, 2)]
    assert [item.step for item in scan(folder)] == [2]
    assert agent.of(Goodbye) == [Goodbye(reason="the test ends")]


@pytest.mark.parametrize("how", ["break", "caught", "close"])
def test_a_script_that_leaves_its_loop_takes_its_leave(how: str, tmp_path: Path) -> None:
    """And not by an exception that it caught itself."""
    agent = Played(str(tmp_path / "s"), leader)
    ends = list[elasticd.Job]()

    class Told(elasticd.Callback):
        def on_end(self, job: elasticd.Job) -> None:
            ends.append(job)

    trained = job(callbacks=[Told()])
    agent.start(Propose(proposal=first()))
    if how == "close":
        assert trained.next(10) == 0
        trained.close()
    else:
        with contextlib.suppress(ValueError):
            for _ in trained.steps(10):
                if how == "break":
                    break
                raise ValueError("enough")
    assert ends == [trained], "once, on the main thread, and at once"
    with pytest.raises(RuntimeError, match="in the body of the loop"):
        trained.state_dict()
    agent.end()
    made = 0 if how == "close" else 1
    assert agent.of(Goodbye) == [Goodbye(reason=f"the script left the loop after {made} of 10 steps")]
    assert agent.of(Raised, PeersLost) == []
    trained._end.uncaught._hook(ValueError, ValueError("much later"), None)
    assert agent.of(Raised) == []


def no_groups(trained: elasticd.Job) -> bool:
    """Whether all are let go: an interpreter that ends while a thread is inside gloo aborts (exit code -6)."""
    inside = [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("park-", "elasticd-prep"))
    ]
    return not inside and trained._switcher._groups_by_plan._numbers == {}


def test_an_exception_in_the_midst_of_an_update_ends_the_process_at_once(tmp_path: Path) -> None:
    agent = Played(str(tmp_path / "s"), lambda said: [])
    trained = job(optimizer=lambda named: Bad([parameter for _, parameter in named], lr=0.1))
    agent.start(Propose(proposal=first()))
    with pytest.raises(ValueError, match="bad update"):
        indices(trained.steps(STEPS))
    trained._control.close(Goodbye(reason="the test ends"))
    agent.end()
    (word,) = agent.of(Raised)
    assert (word.step, word.holds) == (0, False)
    assert agent.of(PeersLost, StateReport) == []
    assert no_groups(trained)


@pytest.mark.parametrize("loss", [bad_loss, large_loss])
def test_one_that_is_of_no_more_use_ends_with_its_own_exception(loss: Any, tmp_path: Path) -> None:
    def answers(said: Message) -> list[Message]:
        match said:
            case PeersLost():
                return [Fenced(number=2, reason="the script's code raised")]
            case StateReport():
                return [Recorded(number=3)]  # of a plan without it
            case _:
                return []

    freed = list[bool]()

    def heard(said: Message) -> list[Message]:
        freed.append(not any(large() for large in _held))
        return answers(said)

    agent = Played(str(tmp_path / "s"), heard)
    trained = job()
    agent.start(Propose(proposal=first()))

    def script() -> None:
        for _ in trained.steps(10):
            fails_from_here(trained, loss)

    with pytest.raises((ValueError, torch.OutOfMemoryError), match=r"bad sample|allocate"):
        script()
    assert freed[-1], "the memory of the step is free while the state is given away"
    assert no_groups(trained)
    trained._control.close(Goodbye(reason="the test ends"))
    agent.end()
    assert [type(word).__name__ for word in agent.said if isinstance(word, Raised | DrainNotice)] == [
        "Raised",
        "DrainNotice",
    ]


#: A sample of the second step, beyond those whose lengths are looked at as the job starts.
BAD = next(index for index in Sampler(size=200, global_batch=6, seed=0).samples(1) if index >= 64)


class Unread:
    """A sample of it cannot be read."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == BAD:
            raise OSError("stale file handle")
        row = torch.arange(8) % 16
        return {"inputs": row, "targets": row}


def test_a_sample_that_cannot_be_read_is_told_like_any_exception(tmp_path: Path) -> None:
    """The ranks have agreed on it, and saved the state: nothing is left to be tried."""

    def answers(said: Message) -> list[Message]:
        return [Published(name=said.name)] if isinstance(said, Saved) else []

    agent = Played(str(tmp_path / "s"), answers)
    checkpointing = elasticd.CheckpointingOptions(folder=tmp_path / "checkpoints")
    trained = job(dataset=Unread(), checkpointing=checkpointing)
    agent.start(Propose(proposal=first()))
    with pytest.raises(SystemExit, match=f"sample {BAD} of the dataset could not be read"):
        indices(trained.steps(STEPS))
    trained._control.close(Goodbye(reason="the test ends"))
    agent.end()
    (word,) = agent.of(Raised)
    assert (word.ends, word.saves) == (True, True)
    assert (word.step, f"sample {BAD}" in word.text) == (1, True)
    assert "stale file handle" in word.traceback
    assert "in __getitem__" in word.traceback
