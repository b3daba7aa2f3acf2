"""What the script's own code raised: in which words the leader hears of it, and what is no such exception."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

import pytest

from elasticd.messages import encode
from elasticd.runtime.groups import PeerLost
from elasticd.runtime.thrown import MOST_TEXT, MOST_TRACEBACK, Farewell, Uncaught, kind_of, lost_within, raised


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
    assert "test_thrown.py" in word.traceback
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

    farewell = Farewell(leave)
    farewell.later()
    assert spoken.wait(30)
    farewell.now()
    assert not farewell.withdrawn(), "too late"
    withdrawn = Farewell(leave)
    assert withdrawn.withdrawn()
    withdrawn.now()
    assert said == ["leave"]
