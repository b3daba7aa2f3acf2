"""Waits between attempts: bounded, doubled, and not in step with those of other processes."""

from __future__ import annotations

import random
import re

import pytest

from elasticd.backoff import LEAST, Backoff, jittered
from tests.house import ROOT

#: A wait that is the same for all who wait: a constant in seconds between attempts, or between tries to return.
CONSTANT = re.compile(r"(?:sleep|wait|wait_cancelled)\(_?(?:RETRY|AGAIN|PAUSE|LOOK|BACKOFF)\w*\)")


def test_a_wait_is_between_half_of_its_seconds_and_all_of_them() -> None:
    assert jittered(2.0, lambda: 0.0) == 2.0 * LEAST
    assert jittered(2.0, lambda: 1.0) == 2.0
    assert all(1.0 <= jittered(2.0) <= 2.0 for _ in range(100))


def test_waits_double_to_the_most_and_begin_anew() -> None:
    pause = Backoff(0.5, 3.0, lambda: 1.0)
    assert [pause.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    pause.reset()
    assert pause.next() == 0.5
    always = Backoff(0.2, draw=lambda: 1.0)
    assert [always.next() for _ in range(3)] == [0.2] * 3


def test_processes_that_were_seeded_alike_wait_for_different_times_and_keep_their_seed() -> None:
    waits = []
    for _ in range(2):
        random.seed(7)
        before = random.getstate()
        pause = Backoff(1.0, 8.0)
        waits.append([pause.next() for _ in range(8)])
        assert random.getstate() == before, "the state of the user's own generator"
    assert waits[0] != waits[1]


@pytest.mark.parametrize("folder", ["elasticd", "agent"])
def test_no_wait_between_attempts_is_a_constant(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    alone = {"store_writer.py"}  # one leader writes, and none beside it
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in paths
        if path.name not in alone
        for text in CONSTANT.findall(path.read_text())
    ]
    assert found == []
    assert CONSTANT.search("time.sleep(_RETRY_SECONDS)")
