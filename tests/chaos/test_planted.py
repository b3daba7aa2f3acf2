"""Faults that are planted in a script's own code: who finds them, where, and how often."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from tests.soak.script_faults import Finder, Injected, Planted, hold_lock, plant, taken, withdraw


def finder(folder: Path, device: str = "alpha/0") -> Finder:
    made = Finder(folder)
    made.know(device)
    return made


def test_a_planted_exception_is_raised_at_its_place_on_its_device_once(tmp_path: Path) -> None:
    mine, other = finder(tmp_path), finder(tmp_path, "alpha/1")
    plant(tmp_path, "alpha/0", Planted(number=3, place="loss", how="raise", text="planted: d"))
    mine.at("script")
    other.at("loss")
    assert not taken(tmp_path, 3)
    with pytest.raises(Injected, match="planted: d"):
        mine.at("loss")
    assert taken(tmp_path, 3)
    mine.at("loss")


def test_what_was_withdrawn_befalls_nobody(tmp_path: Path) -> None:
    plant(tmp_path, "alpha/0", Planted(number=1, place="loss", how="raise"))
    withdraw(tmp_path, "alpha/0")
    finder(tmp_path).at("loss")
    assert not taken(tmp_path, 1)


def test_who_does_not_know_its_device_finds_nothing(tmp_path: Path) -> None:
    plant(tmp_path, "alpha/0", Planted(number=1, place="loss", how="raise"))
    Finder(tmp_path).at("loss")


@pytest.mark.parametrize(("how", "others_run"), [("sleep", True), ("lock", False)])
def test_a_hang_lasts_and_with_the_lock_no_other_thread_runs(
    tmp_path: Path, how: str, others_run: bool
) -> None:
    looks: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            looks.append(time.monotonic())
            over.wait(0.01)

    plant(tmp_path, "alpha/0", Planted(number=1, place="loss", how=how, seconds=0.5))  # type: ignore[arg-type]
    other = threading.Thread(target=look)
    other.start()
    began = time.monotonic()
    finder(tmp_path).at("loss")
    ended = time.monotonic()
    over.set()
    other.join()
    assert ended - began >= 0.5
    # Let go of only where the other thread had asked for it before: at the beginning.
    within = [look for look in looks if began + 0.1 < look < ended - 0.1]
    assert bool(within) == others_run


def test_a_signal_does_not_end_a_hang_with_the_lock() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        hold_lock(0.4)
        assert time.monotonic() - began >= 0.4
    finally:
        signal.signal(signal.SIGALRM, before)
