"""A sequential test for a shift of a noisy signal: Page's cumulative sum, with a bound on what one step says.

Theory of operation. Residuals e of a signal are normal with spread s around 0, and around d once it has
shifted. One residual weighs

    w = (d e - d^2 / 2) / s^2                      (the logarithm of how much likelier it is after the shift)

and S = max(0, S + w) is compared with a limit h. Page's test is the quickest there is for a given rate of false
alarms (Lorden 1971, Moustakides 1986), and noise alone passes h less than once in e^h steps: h = -ln(alpha)
for false alarms at the rate alpha. On average it takes about h / (d^2 / 2 s^2) steps: with d = ln 1.1 and
s = 0.05 one step of a device that is 1.1 times slow weighs 1.8 of h = 13.1.

Steps are not all normal: a garbage collection or a checkpoint makes a single one last many times as long. So no
step weighs more than h / k, whatever it looks like: k of them in a row are the least that a verdict takes. In
other words single steps go astray with the probability alpha^(1/k) (one in a hundred, for k = 3) and that is
all that a step far out proves. The same bound holds below, so that a wild step forgives nothing either. And
steps beyond `CLEAR` spreads weigh so much only while they last: when one comes that is not, before a verdict,
they have been single ones, and count for no more than a step at d does on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from elasticd_planner.numeric import Bools, Floats
from elasticd_planner.value import Value

#: Spreads beyond which a step is a shift or a wild one.
CLEAR = 4.0

#: Spreads of the least shift that is tested for. With less, what is large would be found as late as what is
#: small.
VISIBLE = 1.5

#: By what a normal variable's median distance from its median is divided to be its standard deviation.
MAD = 0.6745


class Evidence(Value, frozen=True, kw_only=True):
    """For a shift: the `total` of steps, without the last ones, `clear` in number, that are far out. since:
    steps since there was none."""

    total: float = 0.0
    clear: int = 0
    since: int = 0


#: Most devices have none most of the time.
NONE = Evidence()


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """Against a shift by `shift` (> 0) of residuals with spread `spread`. limit: of the sum. most: what one
    step may weigh; usual: what one weighs on average, once they have shifted."""

    shift: float
    spread: float
    limit: float
    most: float
    usual: float

    @classmethod
    def of(cls, shift: float, spread: float, false_alarms: float, quickest: int) -> Detector:
        """limit and most from the rate of false alarms and the least steps of a verdict. Against a shift that
        is small beside the noise, one of `VISIBLE` spreads: half of that is still found, and large ones
        soon."""
        shift = max(shift, VISIBLE * spread)
        limit = -math.log(false_alarms)
        most = limit / quickest
        usual = min(most, (shift / spread) ** 2 / 2)
        return cls(shift=shift, spread=spread, limit=limit, most=most, usual=usual)

    def clear(self, residual: float) -> bool:
        """Whether a residual is far out: a shift, or a single wild step."""
        return residual >= CLEAR * self.spread and residual > self.shift / 2

    def add(self, before: Evidence, residual: float) -> Evidence:
        """The evidence after one more residual."""
        if self.clear(residual):
            return Evidence(total=before.total, clear=before.clear + 1, since=before.since + 1)
        weight = self.shift * (residual - self.shift / 2) / self.spread**2
        total = before.total + before.clear * self.usual + max(-self.most, min(self.most, weight))
        return Evidence(total=total, since=before.since + 1) if total > 0 else NONE

    def add_all(self, before: Floats, residuals: Floats) -> tuple[Floats, Bools]:
        """The same for many signals at once: evidence [3, signals], its rows total, clear and since; and which
        residuals [signals] are far out, as `clear` has it."""
        total, clear, since = before
        weight = self.shift * (residuals - self.shift / 2) / self.spread**2
        weight = np.maximum(-self.most, np.minimum(self.most, weight))
        after = np.empty_like(before)
        sums = total + clear * self.usual + weight
        np.maximum(sums, 0.0, out=after[0])
        after[1] = 0.0
        np.multiply(since + 1, sums > 0, out=after[2])
        far = residuals >= CLEAR * self.spread
        if far.any():
            far &= residuals > self.shift / 2
            after[:, far] = before[:, far]
            after[1:, far] += 1
        return after, far

    def passed(self, evidence: Evidence) -> bool:
        """Whether the signal has shifted."""
        return evidence.total + evidence.clear * self.most >= self._enough

    def passed_all(self, evidence: Floats) -> Bools:
        """The same for many signals at once, evidence as in `add_all`."""
        passed: Bools = evidence[0] + evidence[1] * self.most >= self._enough
        return passed

    @property
    def _enough(self) -> float:
        # A verdict's least steps weigh the limit exactly, but for rounding.
        return self.limit * (1 - 1e-9)

    def steps(self, evidence: Evidence, residuals: Sequence[float]) -> int:
        """For how many of the last steps the signal has shifted, if it has: for as long as there was evidence,
        but only in the clear ones where those are far from the rest, which was noise before the shift."""
        if evidence.clear > 1:
            lately, all_of_it = (median(residuals[-n:]) for n in (evidence.clear, evidence.since))
            if abs(lately - all_of_it) > CLEAR / 2 * self.spread:
                return evidence.clear
        return evidence.since


def trimmed(values: Sequence[float]) -> float:
    """The mean without the least and the greatest fifth (of 3 to 5 values without one each); of fewer the
    median."""
    if len(values) < 3:
        return median(values)
    cut = max(1, len(values) // 5)
    inner = sorted(values)[cut : len(values) - cut]
    return sum(inner) / len(inner)


def spread_of(change: float) -> float:
    """The standard deviation of a signal from the median of the changes between its steps, up and down alike:
    whatever some of them are."""
    return change / (MAD * math.sqrt(2))
