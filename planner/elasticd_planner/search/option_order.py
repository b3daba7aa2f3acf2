"""Which settings a search tries, and in what order.

Up to EXACT_DEVICES devices every setting whose bound can beat the best plan so far is enumerated, until the
budget of all enumerations is spent. Beyond, and from there on, one setting is changed at a time, since searches
take long and settings are many: micro-batches and recomputation first, under the preferred state policy, then
policies, then micro-batches and recomputation once more; the running plan's setting before all. With ZeRO the
number of pipelines climbs from that of the best plan so far while that helps. But for the first, settings are
searched briefly, like the best plan; the one that wins is searched thoroughly in the end. Every setting tried
gives a real plan. Deterministic: what is equal goes by the order in which settings are listed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.options import Setting, Settings, current_setting
from elasticd_planner.spec.plan import Plan, StatePolicy

#: Number of pipelines, and the size of most groups.
Form = tuple[int, int]


class Evaluate(Protocol):
    """Searches a setting (like a plan of this form, or thoroughly) and says its seconds, inf where there is
    no plan, and the form of its plan."""

    def __call__(self, setting: Setting, like: Form | None) -> tuple[float, Form | None]: ...


def form(plan: Plan) -> Form:
    """How many pipelines a plan has, and the size of most of its devices' groups."""
    sizes = Counter(len(stage.devices) for _, _, stage in plan.walk() for _ in stage.devices)
    return len(plan.pipelines), sizes.most_common(1)[0][0]


class Walk:
    """One search over settings. slack: how much worse than the best (as a fraction) a plan may be and still
    count."""

    def __init__(
        self, settings: Settings, evaluate: Evaluate, *, slack: float, stop: Callable[[], bool] | None
    ) -> None:
        self.settings, self._evaluate, self.slack = settings, evaluate, slack
        self.stop = stop or (lambda: False)
        self._known: dict[Setting, float] = {}
        self.best: tuple[float, Setting] | None = None
        self.form: Form | None = None

    def every(self, ended: Callable[[], bool]) -> bool:
        """All settings, best bound first, but for those that cannot beat the best. Whether these were all:
        not where it `ended` before."""
        listed = self.settings.listed
        ranked = sorted((self.settings.bound(setting), i) for i, setting in enumerate(listed))
        for bound, index in ranked:
            if self._over(bound):
                return True
            if ended():
                return False
            self._try(listed[index], None)
        return True

    def some(self) -> None:
        """One thing at a time."""
        listed = self.settings.listed
        current = current_setting(self.settings.problem)
        if current in listed:
            self._try(current, None)
        states = tuple(dict.fromkeys(setting.state for setting in listed))
        ways = tuple(dict.fromkeys((setting.micro_batch, setting.recompute) for setting in listed))
        bounds = {way: min(self.settings.bound(s) for s in self._of(*way, states[0])) for way in ways}
        ranked = sorted(ways, key=lambda way: (bounds[way], ways.index(way)))
        for way in ranked:
            self._policy(*way, states[0])
        size, again = self._way(ways)
        for state in states[1:]:
            self._policy(size, again, state)
        if len(states) > 1 and self.best is not None:
            state = self.best[1].state
            near = [way for way in ranked if size <= 2 * way[0] <= 4 * size]
            for way in near:
                self._policy(*way, state)
        if self.best is not None and not self.stop():
            setting = self.best[1]
            del self._known[setting]
            self._try(setting, None)

    def _way(self, ways: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
        """Micro-batches and recomputation of the best plan; where none fits, what asks the least memory."""
        if self.best is not None:
            return self.best[1].micro_batch, self.best[1].recompute
        return min(size for size, _ in ways), any(again for _, again in ways)

    def _of(self, size: int, again: bool, state: StatePolicy) -> list[Setting]:
        wanted = (size, again, state)
        return [s for s in self.settings.listed if (s.micro_batch, s.recompute, s.state) == wanted]

    def _policy(self, size: int, again: bool, state: StatePolicy) -> None:
        """The settings of one policy: the number of pipelines climbs from that of the best plan."""
        listed = [s for s in self._of(size, again, state) if math.isfinite(self.settings.bound(s))]
        if not listed:
            return
        wanted = self.form[0] if self.form is not None else 1
        start = min(range(len(listed)), key=lambda i: (abs((listed[i].pipelines or wanted) - wanted), i))
        now = self._try(listed[start], self.form)
        for step in (1, -1):
            at, seconds = start + step, now
            while 0 <= at < len(listed):
                found = self._try(listed[at], self.form)
                if found >= seconds and math.isfinite(seconds):
                    break
                at, seconds = at + step, found

    def _over(self, bound: float) -> bool:
        """Whether a setting of this bound need not be tried."""
        if not math.isfinite(bound):
            return True
        return self.best is not None and (bound > self.best[0] * (1 + self.slack) * (1 + EQUAL) or self.stop())

    def _try(self, setting: Setting, like: Form | None) -> float:
        if setting in self._known:
            return self._known[setting]
        if self._over(self.settings.bound(setting)):
            return math.inf
        if like is not None and setting.pipelines is not None:
            like = (setting.pipelines, like[1])
        seconds, found = self._evaluate(setting, like)
        self._known[setting] = seconds
        if math.isfinite(seconds) and (self.best is None or seconds < self.best[0] * (1 - EQUAL)):
            self.best, self.form = (seconds, setting), found
        return seconds
