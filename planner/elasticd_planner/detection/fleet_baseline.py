"""Fleet baseline: what a normal device spends on a unit of work, its noise, and its growth with length.

Cost is seconds per unit of work. A device's residual is the logarithm of its cost over the fleet's, so what
slows everybody slows nobody. The fleet is the devices that are not known to be slow, without those that are far
from the cheaper half: a device that is slow from the start is not in it, and one out of two devices is not
either.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from elasticd_planner.detection.cusum import spread_of
from elasticd_planner.numeric import Floats, middle
from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.value import Value

#: Standard deviations above the cheaper half's median within which a device belongs to the fleet.
NEAR = 4.5

#: Steps over which the fleet's noise is averaged, and what it learned about lengths is forgotten.
NOISE_STEPS = 32
CURVE_STEPS = 200

#: Weight of the assumption that cost does not grow with length, in device-steps whose lengths differ by all
#: that they can: with few devices of nearly equal lengths nothing is learned, since nothing could be.
DOUBT = 0.5


class Curve(Value, frozen=True, kw_only=True):
    """The growth of a token's cost with its sequence's length: by the factor 1 + rise x length / middle."""

    rise: float = 0.0  # at the typical length
    middle: float = 0.0  # a typical length in tokens; 0: none was seen
    known: float = 0.0  # how much was learned, in device-steps whose lengths differ by all that they can

    def factor(self, length: float) -> float:
        """The cost of a token in a sequence of `length` tokens, over that in a very short one."""
        return 1.0 + self.rise * length / self.middle if self.middle else 1.0

    def factors(self, lengths: Floats) -> Floats:
        """`factor` for many lengths."""
        return 1.0 + self.rise * lengths / self.middle if self.middle else np.ones(len(lengths))

    @property
    def per_token(self) -> float:
        """The rise for each token of length; 0 where no length is known."""
        return self.rise / self.middle if self.middle else 0.0

    def moved(self, typical: float) -> Curve:
        """The curve after a step with this typical length: the middle follows slowly, and `per_token` stays."""
        if not self.middle:
            return Curve(middle=typical)
        middle = self.middle + (typical - self.middle) / NOISE_STEPS
        return Curve(rise=self.rise * middle / self.middle, middle=middle, known=self.known)

    def pulled(self, pull: float, weight: float) -> Curve:
        """The curve after one more step, whose residuals pull the rise by `pull` with weight `weight`."""
        known = self.known * (1 - 1 / CURVE_STEPS) + weight
        return Curve(rise=max(0.0, self.rise + pull / (DOUBT + known)), middle=self.middle, known=known)


def fleet_cost(costs: Mapping[str, float], slow: Mapping[str, float], sigma: float = 0.05) -> float:
    """The cost of a unit of work on a normal device.

    Args:
        costs: by device, in any unit.
        slow: slowdowns of the stragglers. If all devices are stragglers, costs over slowdowns count.
        sigma: the noise of a cost, as the standard deviation of its logarithm.
    """
    normal = sorted(cost for name, cost in costs.items() if name not in slow)
    return _level(normal or sorted(cost / slow[name] for name, cost in costs.items()), sigma)


def fleet_cost_of_many(costs: Floats, rates: Floats, sigma: float = 0.05) -> float:
    """`fleet_cost` from the costs and the slowdowns of devices, each [devices]."""
    normal = costs[rates == NORMAL]
    return _level(np.sort(normal if normal.size else costs / rates), sigma)


def _level(ordered: Sequence[float] | Floats, sigma: float) -> float:
    """The baseline of costs in ascending order."""
    cheap = middle(ordered[: (len(ordered) + 1) // 2])
    near = cheap * math.exp(NEAR * sigma)
    return middle(ordered[: bisect_right(ordered, near)])


def noise(before: float, steps: int, change: float | None) -> float:
    """The fleet's noise after one more step.

    Args:
        before: the noise so far.
        steps: how many steps it was measured in.
        change: the median absolute change of the devices' residuals since the last step; None: it is unknown.
    """
    if change is None:
        return before
    part = 1.0 / min(steps + 1, NOISE_STEPS)
    return math.sqrt((1 - part) * before**2 + part * spread_of(change) ** 2)


def learned(before: Curve, lengths: Mapping[str, float], residuals: Mapping[str, float], sigma: float) -> Curve:
    """The curve after one more step, by least squares that forget; residuals beyond three `sigma` are cut.

    Args:
        lengths: the sequence length of each normal device's tokens.
        residuals: of the normal devices.
    """
    known = [(lengths[name], residual) for name, residual in residuals.items() if lengths.get(name, 0) > 0]
    if len(known) < 2:
        return before
    before = before.moved(median(length for length, _ in known))
    slopes = [length / before.middle / (1 + before.rise * length / before.middle) for length, _ in known]
    mean = sum(slopes) / len(slopes)
    cut = 3 * sigma
    pull = sum((s - mean) * max(-cut, min(cut, r)) for s, (_, r) in zip(slopes, known, strict=True))
    return before.pulled(pull, sum((slope - mean) ** 2 for slope in slopes))


def learned_of_many(before: Curve, lengths: Floats, residuals: Floats, sigma: float) -> Curve:
    """`learned` from the lengths and the residuals of normal devices, each [devices]."""
    known = lengths > 0
    lengths, residuals = lengths[known], residuals[known]
    if len(lengths) < 2:
        return before
    before = before.moved(middle(np.sort(lengths)))
    slopes = lengths / before.middle / (1 + before.rise * lengths / before.middle)
    slopes -= slopes.sum() / len(slopes)
    cut = np.clip(residuals, -3 * sigma, 3 * sigma)
    return before.pulled(float((slopes * cut).sum()), float((slopes**2).sum()))
