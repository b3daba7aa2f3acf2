"""What the script's own code raised: in which words the leader hears of it, and what is no such exception."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

import pytest

from elasticd.codec.message import encode
from elasticd.runtime.comm.groups import PeerLost
from elasticd.runtime.control import user_exceptions
from elasticd.runtime.control.user_exceptions import (
    MOST_TEXT,
    MOST_TRACEBACK,
    Uncaught,
    UserExceptionExit,
    kind_of,
    lost_within,
    raised,
)


class Odd(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def caught(error: Exception) -> Exception:
    """With a traceback."""
    try:
        raise error
    except Exception as found:
        return found


def test_an_exception_is_told_with_its_class_its_text_and_where_it_was_raised() -> None:
    word = raised(caught(ValueError("bad sample")), plan=3, step=7, holds=True, saves=False)
    assert (word.kind, word.text, word.plan, word.step) == ("ValueError", "bad sample", 3, 7)
    assert "test_user_exceptions.py" in word.traceback
    assert word.traceback.endswith("ValueError: bad sample\n")
    assert kind_of(Odd()) == f"{__name__}.Odd"


@pytest.mark.parametrize("error", [Odd(), ValueError("x" * 100_000), ValueError("\ud800"), ValueError()])
def test_whatever_it_says_it_can_be_sent(error: Exception) -> None:
    word = raised(caught(error), plan=1, step=0, holds=True, saves=True)
    assert len(word.text) <= MOST_TEXT
    assert len(word.traceback) <= MOST_TRACEBACK
    assert len(encode(word)) < 60_000


def test_a_lost_peer_that_the_scripts_code_caught_is_a_lost_peer() -> None:
    lost, handled = PeerLost("connection closed"), ValueError("the loss failed")
    handled.__cause__ = lost
    assert lost_within(handled) is lost
    assert lost_within(lost) is lost
    assert lost_within(ValueError("its own")) is None
    around = ValueError("a")
    around.__context__ = around
    assert lost_within(around) is None
    assert str(lost_within(Odd(), interrupted=True)).endswith("(its text cannot be made)")


def test_what_ends_the_main_thread_is_shown_first_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def shows(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        done.append(("shown", error))

    monkeypatch.setattr(sys, "excepthook", shows)
    uncaught = Uncaught(lambda error: done.append(("told", error)))
    uncaught.install()
    error, stopped = ValueError("bad"), KeyboardInterrupt()
    sys.excepthook(ValueError, error, None)
    sys.excepthook(KeyboardInterrupt, stopped, None)
    assert done == [("shown", error), ("told", error), ("shown", stopped)]
    uncaught.restore()
    assert sys.excepthook is shows


def test_a_farewell_is_said_once_and_a_moment_later_unless_it_was_withdrawn() -> None:
    said, spoken = [], threading.Event()

    def leave() -> None:
        said.append("leave")
        spoken.set()

    farewell = UserExceptionExit(leave)
    farewell.later()
    assert spoken.wait(30)
    farewell.now()
    assert not farewell.withdrawn(), "too late"
    withdrawn = UserExceptionExit(leave)
    assert withdrawn.withdrawn()
    withdrawn.now()
    assert said == ["leave"]


#: Seconds that a farewell takes in the tests that follow, and what is much longer.
MOMENT, LONG = 0.2, 0.6


def loop(farewell: UserExceptionExit) -> Iterator[int]:
    """As the job's: it is closed by whatever leaves it."""
    try:
        yield 0
    except GeneratorExit as closed:
        farewell.later(closed.__context__)
        raise


def by_finally(said: threading.Event, farewell: UserExceptionExit) -> None:
    try:
        for _ in loop(farewell):
            raise ValueError("bad sample")
    finally:
        with contextlib.suppress(KeyError):
            raise KeyError("another one, that is caught")
        assert not said.wait(LONG)


def by_with(said: threading.Event, farewell: UserExceptionExit) -> None:
    @contextlib.contextmanager
    def closing() -> Iterator[None]:
        try:
            yield
        finally:
            assert not said.wait(LONG)

    with closing():
        for _ in loop(farewell):
            raise ValueError("bad sample")


def by_except(said: threading.Event, farewell: UserExceptionExit) -> None:
    try:
        for _ in loop(farewell):
            raise ValueError("bad sample")
    except ValueError:
        assert not said.wait(LONG)
        raise


def by_the_end_of_the_loop(said: threading.Event, farewell: UserExceptionExit) -> None:
    """Callbacks hear of it in there, and may take long."""

    def slow() -> Iterator[int]:
        try:
            yield from loop(farewell)
        except GeneratorExit:
            assert not said.wait(LONG)
            raise

    for _ in slow():
        raise ValueError("bad sample")


@pytest.mark.parametrize("leaves", [by_finally, by_with, by_except, by_the_end_of_the_loop])
def test_an_exception_that_is_on_its_way_is_waited_for_however_long_that_takes(
    leaves: Callable[[threading.Event, UserExceptionExit], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_exceptions, "_ON_ITS_WAY", MOMENT)
    said = threading.Event()
    farewell = UserExceptionExit(said.set)
    with pytest.raises(ValueError, match="bad sample"):
        leaves(said, farewell)
    assert said.wait(30), "it was caught, and the script has left the loop"


def test_an_exception_that_the_interpreter_shows_is_waited_for_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sets `last_value`, and then calls the hook, which may be anybody's and send mail."""
    monkeypatch.setattr(user_exceptions, "_ON_ITS_WAY", MOMENT)
    monkeypatch.setattr(sys, "last_value", KeyError("before"), raising=False)
    said = threading.Event()
    farewell = UserExceptionExit(said.set)
    with contextlib.suppress(ValueError):
        for _ in loop(farewell):
            raise ValueError("bad sample")
    monkeypatch.setattr(sys, "last_value", ValueError("bad sample"))
    assert not said.wait(LONG)
    assert farewell.withdrawn()


@pytest.mark.parametrize("error", [None, SystemExit(3), KeyboardInterrupt()])
def test_a_break_in_an_except_around_the_loop_and_a_wish_to_end_are_leaves(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_exceptions, "_ON_ITS_WAY", MOMENT)
    said = threading.Event()
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        try:
            raise ConnectionError("the first try")
        except ConnectionError:
            try:
                for _ in loop(UserExceptionExit(said.set)):
                    if error is not None:
                        raise error
                    break
            finally:
                assert said.wait(30)
