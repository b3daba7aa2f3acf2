"""The thresholds of detection, in one value that can be changed while it runs."""

from __future__ import annotations

import math

from elasticd_planner.value import Value, refuse


class DetectSettings(Value, frozen=True, kw_only=True):
    """slow: the ratio that counts as slow; moved: the relative change of a slow device's rate that counts as
    one; recovered: the estimate below which a device that became faster is normal again. noise: the spread of a
    device's cost from step to step (standard deviation of its logarithm) that is expected at least; what is
    measured beyond counts. false_alarms: how often a device may be found slow by noise alone, in each of its
    steps. quickest: steps that no verdict comes before, however far out they are.

    tolerance: a lasting difference between devices up to which it is their own and no slowness. settle: steps
    after which a new rate is corrected by what was seen since, if it is off by more than `refine`. window:
    steps whose median is shown to people. warmup: steps skipped after each change of plan. rounding: rates
    between 1 and 2 are rounded to it, between 2 and 4 to twice of it, and so on.

    shift: the relative change of the batches' lengths that counts as a shift of the data; link: how many times
    slower a link must be to count as slow. chronic: steps that slowness must last to be called chronic.

    outside_seconds: how long the others may wait for a rank that is in its script's own code (an evaluation, a
    save, a factory that a switch calls), in its loader, in a compilation or in what it computes in the first
    two steps under a plan, before its device is given up (0: for ever). For a rank that is in a step, two
    steps, as long as the plan expects them to be, are added.
    """

    slow: float = 1.1
    recovered: float = 1.05
    moved: float = 0.1
    noise: float = 0.05
    false_alarms: float = 2e-6
    quickest: int = 3
    tolerance: float = 0.03
    settle: int = 9
    refine: float = 0.02
    window: int = 5
    warmup: int = 1
    rounding: float = 0.01
    shift: float = 0.2
    link: float = 1.5
    chronic: int = 200
    outside_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.recovered < self.slow < math.inf:
            refuse(
                f"detect: recovered ({self.recovered}) must be at least 1 and below slow ({self.slow}); "
                "the room between them is what keeps a device from flapping"
            )
        if not 0 < self.false_alarms < 1:
            refuse(f"detect: false_alarms ({self.false_alarms}) is a part of all steps, as 2e-6")
        if not 0 < self.noise < 1:
            refuse(f"detect: noise ({self.noise}) must be above 0 and below 1, as 0.05")
        if not 1 + self.tolerance < self.slow or self.tolerance < 0:
            refuse(f"detect: tolerance ({self.tolerance}) must be at least 0 and less than slow is above 1")
        for name in ("quickest", "settle", "window", "chronic"):
            if getattr(self, name) < 1:
                refuse(f"detect: {name} ({getattr(self, name)}) must be at least 1 step")
        if self.settle < self.quickest:
            refuse(f"detect: settle ({self.settle}) must not come before quickest ({self.quickest})")
        if self.warmup < 0:
            refuse(f"detect: warmup ({self.warmup}) must be at least 0 steps")
        for name in ("moved", "shift"):
            if not 0 < getattr(self, name) < math.inf:
                refuse(f"detect: {name} ({getattr(self, name)}) must be above 0, as 0.1")
        if not 1 < self.link < math.inf:
            refuse(f"detect: link ({self.link}) must be above 1, as 1.5")
        if not 0 <= self.outside_seconds < math.inf:
            refuse(f"detect: outside_seconds ({self.outside_seconds}) must be at least 0, which is no limit")
        if not 0 <= self.refine < 1 or not 0 < self.rounding <= 1:
            refuse("detect: refine must be at least 0 and below 1, rounding above 0 and at most 1")

    @property
    def kept(self) -> int:
        """Steps whose residuals are kept of a device."""
        return max(self.settle, self.window, 2 * self.quickest) + 2
