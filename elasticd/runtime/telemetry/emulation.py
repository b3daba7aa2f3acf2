"""Emulated devices: numbers stay real, speed is made. Each block is paced to a set time by sleeping.

A block on a device of rate r that holds the share w of it takes seconds-per-token x tokens x w x r of
computation, and as much again for tokens of sequences of the length that the speed names; communication comes
on top. Of a block whose experts devices share, w is by the rows that went to the device's experts. What the
real small computation did not take is slept, to an absolute deadline; where it took longer, that is an overrun,
and a figure with more than 1 % of them is invalid.
"""

from __future__ import annotations

import time

from elasticd.wire.worker import EmulatedSpeed

#: What a probe's product takes on a normal device.
PRODUCT_SECONDS = 0.02


class SpeedEmulator:
    """Paces one device. `pace` may be replaced from another thread at any time (chaos)."""

    def __init__(self, pace: EmulatedSpeed | None) -> None:
        self.pace = pace or EmulatedSpeed()
        self.paced = 0
        self.overruns = 0

    @property
    def emulates(self) -> bool:
        """False where the device has its own speed."""
        return self.pace != EmulatedSpeed()

    def __call__(
        self, kind: str, tokens: int, share: float, start: float, communicated: float, squares: float = 0.0
    ) -> float:
        """Sleeps at the end of one block's pass ("forward" or "backward") that began at `start`
        (perf_counter) and spent `communicated` seconds in communication. `squares` is the sum over tokens of
        the length of their sequence. Returns when it ended, by the table: that is the start of what follows at
        once, so that late waking does not add up."""
        pace = self.pace
        each = pace.forward if kind == "forward" else pace.backward
        spent = time.perf_counter() - start - communicated
        if each is None:  # no table: stretch what the real computation took
            _until(start + communicated + spent * pace.factor)
            return time.perf_counter()  # what was slept too long is not stretched once more
        work = tokens + (squares / pace.attention_tokens if pace.attention_tokens else 0.0)
        target = each * work * share * pace.factor
        self.paced += 1
        if spent > target:
            self.overruns += 1
        return _until(start + communicated + target)

    def product(self, start: float) -> None:
        """Sleeps at the end of a probe's product that began at `start`."""
        pace = self.pace
        spent = PRODUCT_SECONDS if pace.forward is not None else time.perf_counter() - start
        _until(start + spent * pace.factor)

    def take(self) -> tuple[int, int]:
        """(sections paced, overruns) since the last take."""
        counts = self.paced, self.overruns
        self.paced = self.overruns = 0
        return counts


def _until(deadline: float) -> float:
    """The deadline, or now where it is over already."""
    now = time.perf_counter()
    if now >= deadline:
        return now
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)
    return deadline
