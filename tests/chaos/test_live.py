"""What a real cluster's player takes for a finding that is false."""

from __future__ import annotations

from elasticd.records import Fence
from tests.soak.fault_player import Pause

PAUSE = Pause(device="alpha/0", incarnation="i", until=100.0, fences=1)
BEFORE = Fence(number=1, epoch=1, gone={"alpha/0": "i"}, reason="before")


def test_whoever_is_fenced_off_between_two_steps_is_a_false_finding() -> None:
    later = Fence(number=2, epoch=1, gone={"alpha/0": "i"}, reason="gave no word")
    said = "alpha/0 was fenced off while it was between two steps: gave no word"
    assert PAUSE.false([BEFORE, later], struck=0.0) == said
    assert PAUSE.false([BEFORE, later], struck=95.0) == "", "another fault was the reason"


def test_others_earlier_ones_and_those_before_the_pause_are_none() -> None:
    other = Fence(number=2, epoch=1, gone={"alpha/1": "i"}, reason="died")
    earlier = Fence(number=3, epoch=1, gone={"alpha/0": "h"}, reason="died")
    assert PAUSE.false([BEFORE], struck=0.0) == ""
    assert PAUSE.false([BEFORE, other, earlier], struck=0.0) == ""
