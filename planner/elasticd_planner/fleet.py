"""What a normal device spends in a step: the fleet's unit cost, its noise, and how cost grows with length.

Cost is seconds per unit of work. A device's residual is the logarithm of its cost over the fleet's, so what
slows everybody slows nobody. The fleet is the devices that are not known to be slow, without those that are far
from the cheaper half: a device that is slow from the start is not in it, and one out of two devices is not
either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from elasticd_planner.sequential import spread_of
from elasticd_planner.value import Value

#: Spreads above the cheaper half's middle within which a device belongs to the fleet.
NEAR = 4.5

#: Steps over which the fleet's noise is averaged, and what it learned about lengths is forgotten.
NOISE_STEPS = 32
CURVE_STEPS = 200

#: Weight of the assumption that cost does not grow with length, in device-steps whose lengths differ by all
#: that they can: with few devices of nearly equal lengths nothing is learned, since nothing could be.
DOUBT = 0.5


class Curve(Value, frozen=True, kw_only=True):
    """By what the cost of a token grows with its sequence's length: 1 + rise x length / middle. `middle` is a
    typical length (0: none seen); `known` how much was learned."""

    rise: float = 0.0
    middle: float = 0.0
    known: float = 0.0

    def factor(self, length: float) -> float:
        """How much more a token costs than one of a very short sequence."""
        return 1.0 + self.rise * length / self.middle if self.middle else 1.0

    @property
    def per_token(self) -> float:
        """The same rise for each token of length (0 where none is known)."""
        return self.rise / self.middle if self.middle else 0.0


def fleet_cost(costs: Mapping[str, float], slow: Mapping[str, float], spread: float = 0.05) -> float:
    """The unit cost of a normal device, of those not known to be slow. Where only slow ones work, of all of
    them by their rates."""
    normal = sorted(cost for name, cost in costs.items() if name not in slow)
    if not normal:
        normal = sorted(cost / slow[name] for name, cost in costs.items())
    cheap = median(normal[: (len(normal) + 1) // 2])
    near = cheap * math.exp(NEAR * spread)
    return median([cost for cost in normal if cost <= near])


def noise(before: float, steps: int, changes: Sequence[float]) -> float:
    """The fleet's noise after one more step, from the `changes` of its devices' residuals since the last one;
    `steps`: how many were seen."""
    if not changes:
        return before
    part = 1.0 / min(steps + 1, NOISE_STEPS)
    return math.sqrt((1 - part) * before**2 + part * spread_of(changes) ** 2)


def learned(
    before: Curve, lengths: Mapping[str, float], residuals: Mapping[str, float], spread: float
) -> Curve:
    """The curve after one more step: `lengths` and `residuals` of the fleet's normal devices, of which those
    with longer sequences tell it by their residuals (least squares, forgetting). Wild residuals are cut."""
    known = [(lengths[name], residual) for name, residual in residuals.items() if lengths.get(name, 0) > 0]
    if len(known) < 2:
        return before
    middle = median(length for length, _ in known)
    if not before.middle:
        before = Curve(middle=middle)
    # The middle follows slowly; what a token of length costs stays the same when it does.
    moved = before.middle + (middle - before.middle) / NOISE_STEPS
    rise = before.rise * moved / before.middle
    slopes = [length / moved / (1 + rise * length / moved) for length, _ in known]
    mean = sum(slopes) / len(slopes)
    cut = 3 * spread
    pull = sum((s - mean) * max(-cut, min(cut, r)) for s, (_, r) in zip(slopes, known, strict=True))
    weight = before.known * (1 - 1 / CURVE_STEPS) + sum((slope - mean) ** 2 for slope in slopes)
    return Curve(rise=max(0.0, rise + pull / (DOUBT + weight)), middle=moved, known=weight)
