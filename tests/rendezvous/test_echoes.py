"""torchrun hears SIGTERM once, however many pass it on; and a later one, by which somebody insists."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from elasticd.rendezvous import sigterm_echo


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that torchrun's own handler gets."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_an_echo_is_not_heard(heard: list[int]) -> None:
    sigterm_echo.ignore_echoes()
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_one_that_comes_later_is_heard(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigterm_echo, "ECHO_SECONDS", 0.0)
    sigterm_echo.ignore_echoes()
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2


def test_a_handler_is_wrapped_once_and_a_new_one_again(heard: list[int]) -> None:
    sigterm_echo.ignore_echoes()
    wrapped = signal.getsignal(signal.SIGTERM)
    sigterm_echo.ignore_echoes()
    assert signal.getsignal(signal.SIGTERM) is wrapped
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(-number))  # torchrun starts workers again
    sigterm_echo.ignore_echoes()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM, -signal.SIGTERM]


@pytest.mark.parametrize("how", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_torchrun_handles_nothing_nothing_changes(how: signal.Handlers, heard: list[int]) -> None:
    signal.signal(signal.SIGTERM, how)
    sigterm_echo.ignore_echoes()
    assert signal.getsignal(signal.SIGTERM) == how
