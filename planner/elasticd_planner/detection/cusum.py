"""CUSUM: Page's sequential test for a lasting shift of a noisy signal, with a bound on the weight of one step.

Theory of operation. Residuals e of a signal are normal with standard deviation s around 0, and around d
once it has shifted. One residual weighs

    w = (d e - d^2 / 2) / s^2                      (the logarithm of how much likelier it is after the shift)

and S = max(0, S + w) is compared with a limit h. Page's test is the quickest there is for a given rate of false
alarms (Lorden 1971, Moustakides 1986), and noise alone passes h less than once in e^h steps: h = -ln(alpha)
for false alarms at the rate alpha. On average it takes about h / (d^2 / 2 s^2) steps: with d = ln 1.1 and
s = 0.05 one step of a device that is 1.1 times slow weighs 1.8 of h = 13.1.

Steps are not all normal: a garbage collection or a checkpoint makes a single one last many times as long. So no
step weighs more than h / k, whatever it looks like: k of them in a row are the least that a verdict takes. In
other words single steps go astray with the probability alpha^(1/k) (one in a hundred, for k = 3) and that is
all that a step far out proves. The same bound holds below, so that a wild step forgives nothing either. And
steps beyond `CLEAR` standard deviations weigh so much only while they last: if a step that is not beyond comes
before a verdict, they were single steps, and count for no more than a step at d does on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from elasticd_planner.numeric import Bools, Floats
from elasticd_planner.value import Value

#: Standard deviations beyond which a step is a shift or a single wild step.
CLEAR = 4.0

#: The least shift that is tested for, in standard deviations. A smaller one would delay large shifts.
VISIBLE = 1.5

#: A normal variable's median absolute deviation over its standard deviation.
MAD = 0.6745


class CusumState(Value, frozen=True, kw_only=True):
    """The cumulative sum of one signal: the evidence so far that it has shifted."""

    total: float = 0.0  # the sum of the weights, without those of the `clear` last steps
    clear: int = 0  # how many of the last steps in a row are far out
    since: int = 0  # steps since the sum was last zero


#: Most devices have none most of the time.
NONE = CusumState()


@dataclass(frozen=True, kw_only=True, slots=True)
class CusumTest:
    """Page's test for a shift of residuals."""

    shift: float  # the shift that is tested for, above 0
    sigma: float  # standard deviation of the residuals
    limit: float  # the signal has shifted once the sum reaches this
    max_weight: float  # what one step weighs at most
    mean_weight: float  # what one step weighs on average once the signal has shifted

    @classmethod
    def of(cls, shift: float, sigma: float, false_alarms: float, min_steps: int) -> CusumTest:
        """The test that raises `false_alarms` alarms a step by noise alone, and none before `min_steps` steps.

        A shift below `VISIBLE` standard deviations is tested for as one of `VISIBLE`: half of that is still
        found, and large shifts are found soon.
        """
        shift = max(shift, VISIBLE * sigma)
        limit = -math.log(false_alarms)
        max_weight = limit / min_steps
        mean_weight = min(max_weight, (shift / sigma) ** 2 / 2)
        return cls(shift=shift, sigma=sigma, limit=limit, max_weight=max_weight, mean_weight=mean_weight)

    def clear(self, residual: float) -> bool:
        """Returns True if a residual is far out: a shift, or a single wild step."""
        return residual >= CLEAR * self.sigma and residual > self.shift / 2

    def add(self, before: CusumState, residual: float) -> CusumState:
        """The evidence after one more residual."""
        if self.clear(residual):
            return CusumState(total=before.total, clear=before.clear + 1, since=before.since + 1)
        weight = self.shift * (residual - self.shift / 2) / self.sigma**2
        weight = max(-self.max_weight, min(self.max_weight, weight))
        total = before.total + before.clear * self.mean_weight + weight
        return CusumState(total=total, since=before.since + 1) if total > 0 else NONE

    def add_all(self, before: Floats, residuals: Floats) -> tuple[Floats, Bools]:
        """`add` for many signals at once.

        Args:
            before: CUSUM states [3, signals]; the rows are total, clear and since.
            residuals: [signals].

        Returns:
            The states after the step [3, signals], and which residuals are far out [signals], as in `clear`.
        """
        total, clear, since = before
        weight = self.shift * (residuals - self.shift / 2) / self.sigma**2
        weight = np.maximum(-self.max_weight, np.minimum(self.max_weight, weight))
        after = np.empty_like(before)
        sums = total + clear * self.mean_weight + weight
        np.maximum(sums, 0.0, out=after[0])
        after[1] = 0.0
        np.multiply(since + 1, sums > 0, out=after[2])
        far = residuals >= CLEAR * self.sigma
        if far.any():
            far &= residuals > self.shift / 2
            after[:, far] = before[:, far]
            after[1:, far] += 1
        return after, far

    def passed(self, evidence: CusumState) -> bool:
        """Returns True if the signal has shifted."""
        return evidence.total + evidence.clear * self.max_weight >= self._enough

    def passed_all(self, evidence: Floats) -> Bools:
        """`passed` for many signals at once; states as in `add_all`."""
        passed: Bools = evidence[0] + evidence[1] * self.max_weight >= self._enough
        return passed

    @property
    def _enough(self) -> float:
        # A verdict's least steps weigh the limit exactly, but for rounding.
        return self.limit * (1 - 1e-9)

    def steps(self, evidence: CusumState, residuals: Sequence[float]) -> int:
        """The number of the last steps for which the shift has lasted.

        Usually these are the steps since the sum was zero. If the far-out steps differ clearly from those
        before them, only the far-out steps count: the others were noise before the shift.
        """
        if evidence.clear > 1:
            lately, all_of_it = (median(residuals[-n:]) for n in (evidence.clear, evidence.since))
            if abs(lately - all_of_it) > CLEAR / 2 * self.sigma:
                return evidence.clear
        return evidence.since


def trimmed(values: Sequence[float]) -> float:
    """The mean without the smallest and the largest fifth, at least one each; the median of two or one."""
    if len(values) < 3:
        return median(values)
    cut = max(1, len(values) // 5)
    inner = sorted(values)[cut : len(values) - cut]
    return sum(inner) / len(inner)


def spread_of(change: float) -> float:
    """The standard deviation of a signal from the median absolute change between its steps."""
    return change / (MAD * math.sqrt(2))
