"""The gain of a switch to a plan: the seconds of the steps around it, and the pause that its ranks measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from elasticd_planner.readable import readable_seconds
from elasticd_planner.value import Value

from elasticd.wire.step_record import StepRecord

#: Steps before a switch, and after it, that its gain is the median of. Few before: the reason for the switch is
#: often no older than that.
BEFORE, AFTER = 3, 20


class Gain(Value, frozen=True, kw_only=True):
    """The change that a switch to a plan brought."""

    before: float  # seconds a step
    after: float  # seconds a step
    pause: float  # seconds for which the step loop stood still: the longest that a rank measured
    #: the plan answers a fault, after which the plan before it could not run: the change is no gain of the plan
    faulted: bool = False

    @property
    def about(self) -> str:
        """The name of the change, as people read it."""
        return "after a fault" if self.faulted else "gained"

    @property
    def text(self) -> str:
        """As people read it."""
        text = (
            f"{readable_seconds(self.before)} a step before, {readable_seconds(self.after)} after "
            f"({self.before / self.after:.2f}x); the switch took {readable_seconds(self.pause)}"
        )
        if self.faulted:
            return text
        if self.before <= self.after:
            return f"{text}, not paid back by speed"
        steps = max(1, math.ceil(self.pause / (self.before - self.after)))
        return f"{text}, paid back in {steps} step{'s' * (steps > 1)}"


def gain_of(
    number: int, steps: Sequence[StepRecord], pause_seconds: float, fences: Collection[int] = ()
) -> Gain | None:
    """The last steps before the switch beside the first after it, and the pause that its ranks measured; None
    where the steps are few, or some between them are not known. fences: the numbers of the job's fences."""
    after = [step for step in steps if step.plan == number][: AFTER + 1]
    before = [step for step in steps if after and step.step < after[0].step][-BEFORE:]
    if len(after) < 4 or len(before) < BEFORE or before[-1].step + 1 != after[0].step:
        return None
    was, now = median(step.seconds for step in before), median(step.seconds for step in after[1:])
    if not now > 0.0:
        return None
    faulted = any(before[-1].plan < fence < number for fence in fences)
    return Gain(before=was, after=now, pause=pause_seconds, faulted=faulted)
