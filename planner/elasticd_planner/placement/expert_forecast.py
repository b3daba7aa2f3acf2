"""The load of experts that the next steps will have, from reports of the last ones.

Loads drift, and a report of one step has chance in it. A mean that follows the reports quickly is soon where
the load is, and one that follows slowly has less of the chance. Several are kept. The forecast is the one that
was nearest to the reports that came after it: a steady load of few rows gets a slow mean, a drifting one of
many rows a quick one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from elasticd_planner.value import Value

#: By block: rows of each expert.
RowsByBlock = dict[int, tuple[float, ...]]

#: The parts of the newest report in the means, the slowest mean first.
NEWEST = (0.25, 0.5, 1.0)
#: The part of the errors before that counts in the sum of errors at the next report.
REMEMBERED = 0.9


class ExpertForecast(Value, frozen=True, kw_only=True):
    """Means of reports, one for each of `NEWEST`."""

    means: tuple[RowsByBlock, ...] = ()
    errors: tuple[float, ...] = (0.0,) * len(NEWEST)  # of parts of rows, squared: the newest count most
    reports: int = 0  # that came so far

    @property
    def rows(self) -> RowsByBlock:
        """The rows of a step to expect; none before the first report."""
        return self.means[self._best] if self.means else {}

    @property
    def reports_in_mean(self) -> float:
        """The number of reports whose plain mean would have as much chance in it."""
        return min(self.reports, 2 / NEWEST[self._best] - 1)

    @property
    def _best(self) -> int:
        return min(range(len(NEWEST)), key=self.errors.__getitem__)

    def after(self, rows: RowsByBlock) -> ExpertForecast:
        """The forecast after a further report.

        Args:
            rows: of each expert of each block, in a step.
        """
        if not self.means:
            return ExpertForecast(means=(rows,) * len(NEWEST), reports=1)
        means = []
        for part, mean in zip(NEWEST, self.means, strict=True):
            newest = max(part, 1 / (self.reports + 1))
            means.append(
                {**mean, **{block: _between(mean.get(block, own), own, newest) for block, own in rows.items()}}
            )
        return msgspec.structs.replace(
            self,
            means=tuple(means),
            errors=tuple(
                REMEMBERED * error + _apart(mean, rows)
                for error, mean in zip(self.errors, self.means, strict=True)
            ),
            reports=self.reports + 1,
        )


def _between(old: tuple[float, ...], new: tuple[float, ...], part: float) -> tuple[float, ...]:
    return tuple(round(a + part * (b - a), 3) for a, b in zip(old, new, strict=False))


def _apart(mean: Mapping[int, tuple[float, ...]], rows: Mapping[int, tuple[float, ...]]) -> float:
    """The squared distance of the parts that experts have of their blocks' rows."""
    distance = 0.0
    for block, new in rows.items():
        old = mean.get(block, new)
        of_old, of_new = math.fsum(old) or 1.0, math.fsum(new) or 1.0
        distance += math.fsum((a / of_old - b / of_new) ** 2 for a, b in zip(old, new, strict=False))
    return distance
