"""The training loop against faults at awkward moments; the engine and the switcher are small stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.records import Vote
from elasticd.runtime.api.between_steps import BetweenSteps
from elasticd.runtime.api.step import Step
from elasticd.runtime.api.train_loop import Loop, Next
from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.data.prefetch import NothingRead, SampleError
from elasticd.runtime.engine.state_health import StateHealth
from elasticd.runtime.exits import JobStopped
from elasticd.runtime.telemetry.main_thread import MainThread
from elasticd.wire.worker import DrainNotice, Finished, Raised


class Alone:
    """The group of all members, of which there is one."""

    size = 1

    def meet(self, number: int) -> list[int]:
        return [number]


@dataclass
class Engine:
    """As much of an engine as the loop uses: `faults` gives the exception of a step, by its index, once."""

    number: int
    faults: dict[int, Exception] = field(default_factory=dict)
    after_recovery: bool = False
    interrupted: bool = False
    health: StateHealth = field(default_factory=StateHealth)
    rank: int = 0
    stopping: list[bool] = field(default_factory=list)  # of each step that was made

    def __post_init__(self) -> None:
        self.plan, self.layouts, self.everyone = SimpleNamespace(number=self.number), None, Alone()
        self.plan_groups = SimpleNamespace(stopwatch=SimpleNamespace(where=MainThread()), dead=False)
        self.guard = SimpleNamespace(back_reason="", stop_reason="", told=0, limit=3)

    def step(self, index: int, *asked: Callable[[], Any]) -> Any:
        if index in self.faults:
            raise self.faults.pop(index)
        self.stopping.append(asked[-1]())
        vote = Vote(step=index, loss=1.0, norm=1.0, count=1.0, tokens=1, apply=True)
        outcome = SimpleNamespace(
            vote=vote, stop=self.stopping[-1], last=False, saving=(0,), snapshot=(False,), prepared=(0,)
        )
        return SimpleNamespace(outcome=outcome, measurement=None)

    def delivered_state(self) -> None: ...
    def gather(self, word: int) -> tuple[int, ...]:
        return (word,)

    def settle(self) -> None: ...
    def rest(self) -> None: ...


@dataclass
class Switcher:
    """A fault leads to the next of `engines`, with the state after `back_to` updates (None: the newest)."""

    engines: list[Engine]
    back_to: int | None = None
    step: int = 0
    lost: list[Exception] = field(default_factory=list)
    draining: bool = False
    at_work: bool = True
    last: Vote | None = None

    @property
    def engine(self) -> Any:
        return self.engines[0]

    def wait(self) -> Any:
        return self.engine

    def taken(self) -> list[Any]:
        return []

    def peers_lost(self, error: Exception) -> None:
        self.lost.append(error)
        self.engines.pop(0)
        self.engine.after_recovery = True
        if self.back_to is not None:
            self.step, self.back_to = self.back_to, None

    def prepared(self) -> int:
        return 0

    def voted(self, numbers: Any) -> None: ...
    def begin_drain(self) -> None:
        self.draining = True

    def loaded(self, step: int) -> bool:
        return False


@dataclass
class Saver:
    """The last checkpoint, which a fault may end."""

    faults: list[tuple[int, Exception]] = field(
        default_factory=list
    )  # updates of the state here, and the fault
    saved: list[int] = field(default_factory=list)
    word: int = 0
    switcher: Any = None
    options: Any = None

    def voted(self, *at: Any, begins: bool = True) -> None: ...
    def went_back(self, step: int) -> None: ...
    def finish(self, step: int, *at: Any) -> bool:
        if self.faults:
            updates, fault = self.faults.pop(0)
            self.switcher.step = updates
            raise fault
        self.saved.append(step)
        return True


def loop_of(switcher: Switcher, saver: Saver | None = None, fault: Exception | None = None) -> Any:
    """A loop, with the messages that it sends. fault: of the first `closing`."""
    sent: list[Any] = []
    control = SimpleNamespace(send=sent.append, ending=0, alone=False)
    faults = [] if fault is None else [fault]

    def closing(engine: Any, step: int) -> None:
        if faults:
            raise faults.pop()
        loop.close(engine, step)

    if saver is not None:
        saver.switcher = switcher
    loop = Loop(
        switcher=cast(Any, switcher),
        control=cast(Any, control),
        pacer=cast(Any, SimpleNamespace(take=lambda: (0.0, 0))),
        feed=cast(Any, SimpleNamespace(samples=lambda step: ())),
        between_steps=BetweenSteps(cast(Any, switcher), [], closing),
        saver=cast(Any, saver),
        snapshotter=None,
    )
    loop._report = lambda *at: None  # type: ignore[method-assign]
    return loop, sent


def trained(loop: Any, total: int, stops: int = -1) -> list[int]:
    """The steps that the script gets; it stops the job in the body of one."""
    steps: list[int] = []
    for event in loop.run(total):
        if isinstance(event, Step):
            steps.append(event.index)
            loop.stopping |= event.index == stops
        else:
            assert isinstance(event, Next)
    return steps


def test_a_stop_outlives_a_fault_in_the_last_checkpoint() -> None:
    switcher = Switcher([Engine(1), Engine(2), Engine(3)])
    saver = Saver([(5, PeerLost("connection closed")), (5, PeerLost("again"))])
    loop, sent = loop_of(switcher, saver)
    assert trained(loop, 100, stops=3) == [0, 1, 2, 3], "the switcher gives the last"
    assert saver.saved == [5], "no step more"
    assert [message for message in sent if isinstance(message, Finished)] == [
        Finished(step=5, plan=1, loss=1.0, tokens=1)
    ]


def test_where_the_fault_takes_steps_back_the_job_stops_where_it_was_to() -> None:
    engines = [Engine(1), Engine(2)]
    switcher, saver = Switcher(engines.copy(), back_to=2), Saver([(5, PeerLost("connection closed"))])
    loop, _ = loop_of(switcher, saver)
    assert trained(loop, 100, stops=3) == [0, 1, 2, 3, 2, 3, 4]
    assert engines[1].stopping == [False, False, True]
    assert saver.saved == [5]


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_exception_over_garbage_of_an_aborted_collective_is_a_lost_peer(interrupted: bool) -> None:
    first = Engine(1, {2: AssertionError("not finite")}, interrupted=interrupted)
    switcher = Switcher([first, Engine(2)])
    loop, _ = loop_of(switcher)
    if interrupted:
        assert trained(loop, 4) == [0, 1, 2, 3]
        assert isinstance(switcher.lost[0], Cancelled)
        assert "AssertionError" in str(switcher.lost[0])
    else:
        with pytest.raises(AssertionError, match="not finite"):
            trained(loop, 4)


def test_an_exception_that_comes_of_a_lost_peer_is_not_reported_as_the_scripts() -> None:
    wrapped = ValueError("cannot write the sample")
    wrapped.__cause__ = lost = Cancelled("shut while the device was waited for")
    switcher = Switcher([Engine(1), Engine(2), Engine(3)])
    engines = switcher.engines.copy()
    loop, sent = loop_of(switcher, fault=RuntimeError("garbage"))
    engines[1].interrupted = True
    peers_lost = switcher.peers_lost

    def last(error: Exception) -> None:
        peers_lost(error)
        if len(switcher.lost) == 2:
            raise SystemExit("the others have the state")

    switcher.peers_lost = last  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        loop.fail(wrapped)
    assert [type(message) for message in sent] == [DrainNotice]
    assert switcher.lost[0] is lost
    assert switcher.draining
    with pytest.raises(IndexError):
        loop.fail(ValueError("the script's own"))
    assert [type(message) for message in sent[1:3]] == [Raised, DrainNotice]


@pytest.mark.parametrize(("members", "end"), [(1, JobStopped), (2, NothingRead)])
def test_a_rank_that_can_read_nothing_makes_no_checkpoint_with_ranks_that_wait_for_its_passes(
    members: int, end: type[BaseException]
) -> None:
    """Its disk is gone: it is a rank whose code raised, and the others go on without it."""
    nothing = NothingRead("sample 3 of the dataset could not be read: OSError: the disk is gone")
    nothing.__cause__ = SampleError(3, "OSError: the disk is gone")
    engine, saver = Engine(1, {2: nothing}), Saver()
    engine.everyone.size = members
    loop, sent = loop_of(Switcher([engine]), saver)
    with pytest.raises(end, match="the disk is gone"):
        trained(loop, 4)
    alone = members == 1
    assert saver.saved == ([2] if alone else [])
    assert [word.ends for word in sent if isinstance(word, Raised)] == ([True] if alone else [])
