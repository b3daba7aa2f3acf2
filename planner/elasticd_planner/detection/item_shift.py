"""Shifts of the items of samples: how many a sample has, and of how many rows, told apart from noise.

Each of the two numbers is compared with its reference, the one that plans are made with, as a ratio, by the
sequential test of stragglers (`cusum`), up and down. Its noise is that of the batches, and is measured. After
`refine_after_steps` steps a reference that was off is told at once: it was a guess. Ratios are not logarithms,
since a step may have no item at all.
"""

from __future__ import annotations

import math

import msgspec

from elasticd_planner.detection.data_shift import ENOUGH, KEPT, OFF, Signal
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.value import Value

#: Standard deviations of a mean within which it may still be the reference.
SURE = 3.0

#: Steps whose mean says what came lately.
LATELY = 4


class MeanShift(Value, frozen=True, kw_only=True):
    """The mean of a number that each step has another sample of."""

    reference: float  # above 0
    recent: tuple[float, ...] = ()  # of the last steps since the reference was told
    signal: Signal = Signal()  # of its ratio to the reference
    refined: bool = False  # the reference is known from steps

    @property
    def mean(self) -> float:
        """Of the last steps."""
        return math.fsum(self.recent) / len(self.recent) if self.recent else self.reference

    def after(self, value: float, settings: DetectSettings) -> tuple[MeanShift, bool]:
        """The state after one more step, and whether the reference is another one now."""
        signal, since = self.signal.after(value / self.reference, 1.0, settings)
        now = msgspec.structs.replace(self, recent=(*self.recent, value)[-KEPT:], signal=signal)
        if since:
            shifted = msgspec.structs.replace(now, recent=now.recent[-since:])
            if shifted.off(ENOUGH * settings.shift):
                return shifted.anew(), True
            return msgspec.structs.replace(now, signal=signal.anew()), False
        count = len(now.recent)
        if self.refined or count < settings.refine_after_steps:
            return now, False
        if now.off(max(OFF, SURE * signal.noise / math.sqrt(count))):
            return now.anew(), True
        return msgspec.structs.replace(now, refined=count == KEPT), False

    @property
    def off_lately(self) -> bool:
        """Returns True if the last few steps are further off the reference than their noise explains."""
        few = self.recent[-LATELY:]
        if not few:
            return False
        near = max(OFF, SURE * self.signal.noise / math.sqrt(len(few)))
        return abs(math.fsum(few) / len(few) / self.reference - 1) > near

    def off(self, part: float) -> bool:
        """Returns True if the mean is off the reference by more than this fraction, and above 0."""
        return self.mean > 0 and abs(self.mean / self.reference - 1) > part

    def anew(self) -> MeanShift:
        """With the mean of the last steps as the reference."""
        noise = Signal(noise=self.signal.noise * self.reference / self.mean, seen=self.signal.seen)
        return MeanShift(reference=self.mean, recent=self.recent, signal=noise, refined=True)


class ItemShiftState(Value, frozen=True, kw_only=True):
    """The knowledge of the items that a module takes."""

    items: MeanShift  # of a sample
    rows: MeanShift  # of an item

    @classmethod
    def begin(cls, items_a_sample: float, rows_an_item: float) -> ItemShiftState:
        """With the numbers that plans are made with so far."""
        return cls(items=MeanShift(reference=items_a_sample), rows=MeanShift(reference=rows_an_item))

    def after(
        self, items: float, rows: float, samples: float, settings: DetectSettings
    ) -> tuple[ItemShiftState, bool]:
        """The state after one more step, and whether one of the references is another one now.

        Args:
            items: of all samples of the step.
            rows: of all its items.
            samples: of the step.
            settings: of detection.
        """
        each, shifted = self.items.after(items / samples, settings)
        size, resized = self.rows.after(rows / items, settings) if items else (self.rows, False)
        return ItemShiftState(items=each, rows=size), shifted or resized
