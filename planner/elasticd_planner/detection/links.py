"""Slow links between nodes, from what transfers took over what they should take.

A device's slowdown is read from its computation alone and a link's from transfers alone, so that neither is
taken for the other. Links are compared with each other in the same step; fewer than `FEW` of them each with
what it did before, so that the only link of two nodes is judged as well (but not one that was always slow).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import msgspec

from elasticd_planner.detection.fleet_baseline import fleet_cost
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, RateState, judged
from elasticd_planner.spec.cluster import Link
from elasticd_planner.value import Value, refuse

#: Links that are a fleet.
FEW = 3

#: Steps whose median is what a link did before, where it is compared with itself.
HISTORY = 8

#: Transfers stray more than computation does: times the settings' noise.
ROUGHER = 3.0


class Transfer(Value, frozen=True, kw_only=True):
    """A transfer between two nodes that waited for neither."""

    source: str  # node
    target: str  # node
    size: int  # bytes
    seconds: float

    def __post_init__(self) -> None:
        if self.size < 0 or not 0 < self.seconds < math.inf:
            refuse(f"transfer {self.name}: {self.size} bytes in {self.seconds} s are none")

    @property
    def name(self) -> str:
        """The link's name; both directions have the same."""
        return " - ".join(sorted((self.source, self.target)))


class LinkState(Value, frozen=True, kw_only=True):
    """Detection's knowledge of all links."""

    rates: RateState = msgspec.field(default_factory=RateState)  # by the links' names
    # The logarithms of seconds over expected seconds in each link's first steps.
    first: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)


def observe_links(
    state: LinkState, transfers: Iterable[Transfer], step: int, link: Link, settings: DetectSettings
) -> tuple[LinkState, tuple[Change, ...]]:
    """Takes in one step's transfers. `link`: what links between nodes are thought to be; only how latency and
    bandwidth compare matters. A step not newer than the last one changes nothing."""
    if step <= state.rates.step:
        return state, ()
    took: dict[str, float] = defaultdict(float)
    expected: dict[str, float] = defaultdict(float)
    for transfer in transfers:
        took[transfer.name] += transfer.seconds
        expected[transfer.name] += link.latency + transfer.size / link.bandwidth
    costs = {name: seconds / expected[name] for name, seconds in took.items()}
    if not costs:
        return state, ()
    settings = _for_links(settings)
    first = dict(state.first)
    for name, cost in costs.items():
        if len(first.get(name, ())) < HISTORY:
            first[name] = (*first.get(name, ()), math.log(cost))
    if len(costs) >= FEW:
        level = math.log(fleet_cost(costs, state.rates.rates, max(settings.noise, state.rates.noise)))
        residuals = {name: math.log(cost) - level for name, cost in costs.items()}
    else:
        residuals = {name: math.log(cost) - median(first[name]) for name, cost in costs.items()}
    rates = msgspec.structs.replace(state.rates, step=step)
    rates, changes = judged(rates, residuals, settings, "a normal link for the same bytes")
    return LinkState(rates=rates, first=first), changes


def _for_links(settings: DetectSettings) -> DetectSettings:
    return msgspec.structs.replace(
        settings,
        slow=settings.link,
        recovered=math.sqrt(settings.link),
        slowdown_change=settings.link - 1,
        noise=min(0.9, ROUGHER * settings.noise),
        refine=2 * ROUGHER * settings.refine,
    )
