"""The thresholds of detection: one frozen value, which can be replaced while a job runs."""

from __future__ import annotations

import math

from elasticd_planner.value import Value, refuse

# Names in stored records and in the configuration of releases before 0.2.
_ENCODED = {
    "min_steps": "quickest",
    "slowdown_change": "moved",
    "refine_after_steps": "settle",
    "persistent_steps": "chronic",
}


#: The least noise and rounding, the least probability, and the most steps that settings may say.
LEAST_FRACTION, LEAST_PROBABILITY, MOST_STEPS = 1e-6, 1e-30, 1_000_000


class DetectSettings(Value, frozen=True, kw_only=True, rename=_ENCODED):
    """When a device counts as a straggler, a link as slow, and the data as shifted."""

    # [ratio] A device whose slowdown reaches this is a straggler.
    slow: float = 1.1
    # [ratio] A straggler that became faster is normal again below this slowdown.
    recovered: float = 1.05
    # [fraction] The smallest change of a straggler's slowdown that is noticed.
    slowdown_change: float = 0.1
    # [fraction] The least noise that is assumed from step to step: the standard deviation of the logarithm of a
    # device's cost. More than this is measured.
    noise: float = 0.05
    # [probability] How often noise alone may make a straggler of a device, for each device and step.
    false_alarms: float = 2e-6
    # [steps] A device is never flagged before this many slow steps, however slow they are.
    min_steps: int = 3
    # [fraction] A lasting difference from the other devices up to which a device still counts as normal.
    tolerance: float = 0.03
    # [steps] After this many steps a new slowdown is corrected once by their mean.
    refine_after_steps: int = 9
    # [fraction] That correction is made only if the slowdown is off by more than this.
    refine: float = 0.02
    # [steps] Screens show the median slowdown of this many steps.
    window: int = 5
    # [steps] Steps that are ignored after each change of plan.
    warmup: int = 1
    # [ratio] Slowdowns from 1 to 2 are rounded to multiples of this, from 2 to 4 to multiples of twice this,
    # etc.
    rounding: float = 0.01
    # [fraction] The relative change of the batches' sequence lengths that counts as a shift of the data.
    shift: float = 0.2
    # [ratio] A link that is this many times slower than its peers counts as slow.
    link: float = 1.5
    # [steps] A straggler is called persistent after it has been slow for this many steps.
    persistent_steps: int = 200
    # [seconds] How long the other ranks may wait for a rank in the script's own code (evaluation, saving, the
    # optimizer's factory), in its data loader, in a compilation, or in the first two steps under a plan, before
    # its device is given up. For a rank in a step, the time of two predicted steps is added. 0: no limit.
    outside_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.recovered < self.slow < math.inf:
            refuse(
                f"detect: recovered ({self.recovered}) must be at least 1 and below slow ({self.slow}); "
                "the room between them is what keeps a device from flapping"
            )
        if not LEAST_PROBABILITY <= self.false_alarms < 1:
            refuse(f"detect: false_alarms ({self.false_alarms}) is a part of all steps, as 2e-6")
        if not LEAST_FRACTION <= self.noise < 1:
            refuse(f"detect: noise ({self.noise}) must be from {LEAST_FRACTION:g} to below 1, as 0.05")
        if not 1 + self.tolerance < self.slow or self.tolerance < 0:
            refuse(f"detect: tolerance ({self.tolerance}) must be at least 0 and less than slow is above 1")
        for name in ("min_steps", "refine_after_steps", "window", "persistent_steps"):
            if not 1 <= getattr(self, name) <= MOST_STEPS:
                refuse(f"detect: {name} must be from 1 to {MOST_STEPS:,} steps")
        if self.refine_after_steps < self.min_steps:
            refuse(
                f"detect: refine_after_steps ({self.refine_after_steps}) must be at least min_steps "
                f"({self.min_steps})"
            )
        if not 0 <= self.warmup <= MOST_STEPS:
            refuse(f"detect: warmup must be from 0 to {MOST_STEPS:,} steps")
        for name in ("slowdown_change", "shift"):
            if not 0 < getattr(self, name) < math.inf:
                refuse(f"detect: {name} ({getattr(self, name)}) must be above 0, as 0.1")
        if not 1 < self.link < math.inf:
            refuse(f"detect: link ({self.link}) must be above 1, as 1.5")
        if not 0 <= self.outside_seconds < math.inf:
            refuse(f"detect: outside_seconds ({self.outside_seconds}) must be at least 0, which is no limit")
        if not 0 <= self.refine < 1 or not LEAST_FRACTION <= self.rounding <= 1:
            refuse(f"detect: refine must be from 0 to below 1, rounding from {LEAST_FRACTION:g} to 1")

    @property
    def kept(self) -> int:
        """Steps whose residuals are kept for each device."""
        return max(self.refine_after_steps, self.window, 2 * self.min_steps) + 2
