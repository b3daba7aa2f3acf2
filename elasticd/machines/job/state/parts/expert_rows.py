"""The rows of a job's experts, as its members report them."""

from __future__ import annotations

import msgspec
from elasticd_planner.placement.expert_forecast import ExpertForecast, RowsByBlock
from elasticd_planner.value import Value


class ExpertRows(Value, frozen=True, kw_only=True):
    """Sums of the newest report, and what the last ones let expect."""

    of: int = 0  # number of the plan that the newest report is of
    step: int = -1  # the newest that was reported
    awaited: frozenset[str] = frozenset()  # devices that have not reported it; none: the forecast has it
    open: RowsByBlock = msgspec.field(default_factory=dict)  # its rows so far
    forecast: ExpertForecast = ExpertForecast()
    chosen: float = 1.0  # experts of a row
    plan: int = 0  # number of the plan that the rest is of
    work: dict[str, float] = msgspec.field(default_factory=dict)  # of a device over that by its share
    uneven: float = 0.0  # of the worst lane: the busiest device's time for experts over the least, less 1
    decided: float = 0.0  # the part of a step that it cost when a plan was last asked for (0: it is even since)
    unjudged: int = 0  # steps whose slowdowns were not judged, because the load was not known

    @property
    def mean(self) -> RowsByBlock:
        """The rows of each expert in a step, as they are to expect."""
        return self.forecast.rows
