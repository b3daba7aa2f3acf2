"""A lower bound of plans of several modules: seconds that no plan of a problem beats.

A step takes no less than

- the passes of the module with the loss alone, and around them the forward pass of an item that the first
  micro-batch needs, and the backward pass of one of the last. (Where samples have less than one item in the
  mean, these micro-batches may need none.)
- all work of all modules over the speed of all devices;

and what comes after the passes of the module with the loss. The least over the settings and the numbers of
pipelines of the larger of the two is the bound. On few devices all plans of the module with the loss alone are
enumerated, with the quickest shares that there could be (`ExhaustiveSearch`, relaxed): what the best of them
takes is no more than that module takes beside others. Where sequences are packed, the bound is the work alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import EQUAL
from elasticd_planner.problem import Problem
from elasticd_planner.search.exhaustive import ExhaustiveSearch
from elasticd_planner.search.infeasible import most_copies
from elasticd_planner.search.large import LargeSearch
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.options import Settings, task_of
from elasticd_planner.search.task import EXACT_DEVICES, Task, alive
from elasticd_planner.spec.cluster import rate_of
from elasticd_planner.spec.plan import Prediction

#: Times of played passes are whole microseconds: no bound is nearer to them than by this part.
ROUNDED = 1e-3

#: Numbers of pipelines whose passes are bounded one by one; of more these many, and those between are no
#: quicker than the next larger one.
NUMBERS = 16

#: So many plans of the module with the loss are looked at, of all settings: one of 24 drawn problems of eight
#: devices needed 520,000.
LOOKED_AT = 600_000


class ModuleBound:
    """The bound of one problem."""

    def __init__(self, problem: Problem, costs: ModuleCosts, alone: Prediction | None = None) -> None:
        """
        Args:
            problem: of several modules.
            costs: of its plans.
            alone: of the best plan of the module with the loss by itself on all devices, where there is one.
        """
        self._problem, self._costs, self._alone = problem, costs, alone
        self._rates = [rate_of(problem.rates, device.name) for device in alive(problem)]
        self._speed = sum(1 / rate for rate in self._rates)
        self._left = LOOKED_AT

    def seconds(self, known: float) -> float:
        """Seconds that no plan beats; `known`: those of a plan."""
        if self._costs.rows is not None:
            return min(known, (self._costs.rows.cost.bound() + self.item_seconds) * (1 - ROUNDED))
        problem, bound = msgspec.structs.replace(self._problem, modules=(), given=None, current=None), known
        for setting in Settings(problem).listed:
            task = task_of(setting.problem(problem), hopeful=True)
            if setting.pipelines is None or setting.pipelines <= most_copies(task):
                numbers = None if setting.pipelines is None else [setting.pipelines]
                bound = min(bound, self._least(task, numbers, bound))
        return bound

    def _least(self, task: Task, numbers: Sequence[int] | None, known: float) -> float:
        """Of one setting."""
        search = LargeSearch(task)
        numbers = numbers or search._numbers(every=True)
        work, around = task.work_bound + self.item_seconds, self._around(task)
        passes, alone = _Passes(search, numbers), self._least_alone(task, known - around)
        for number in numbers:
            after = search._least_after(number)
            low = max(after + max(work, passes.of(number) + around), alone + around)
            known = min(known, low * (1 - ROUNDED))
        return known

    def _least_alone(self, task: Task, known: float) -> float:
        """Seconds of a step that no plan of the module with the loss by itself beats: `known` where none beats
        these. On few devices by enumeration, if there are not too many plans to look at."""
        low = 0.0
        if self._alone is not None:
            low, known = self._alone.bound_seconds, min(known, self._alone.step_seconds)
        if low >= known * (1 - EQUAL) or self._problem.search_space.interleave > 1 or self._left <= 0:
            return low
        least, spent = least_enumerated(task, known, self._left)
        self._left -= spent
        return max(low, least)

    @property
    def item_seconds(self) -> float:
        """Work of all items of a step over the speed of all devices."""
        modules = self._problem.modules
        return sum(self._costs.item_work(each) * self._costs.step_items(each) for each in modules) / self._speed

    def _around(self, task: Task) -> float:
        """The least seconds of the passes of an item before and after those of the module with the loss."""
        found, links = 0.0, task.cluster.links
        for module in self._problem.modules:
            if module.items_a_sample < 1:
                continue
            profile = self._costs.item_profile(module.name)
            cost, quickest = ProfileCost(profile), math.inf
            for width in cost.widths(len(self._rates)):
                for link in links:
                    group = cost.group((min(self._rates),) * width, (1,) * width, link)
                    seconds = profile.layers * group.block + group.embed + group.head
                    quickest = min(quickest, seconds if module.trained else seconds * profile.forward)
            found = max(found, quickest)
        return found


def least_enumerated(task: Task, known: float, budget: int) -> tuple[float, int]:
    """Seconds that no plan of one module beats, whatever shares its devices have.

    Args:
        task: of one setting.
        known: seconds of a plan, which it gives where none beats these.
        budget: plans that may be looked at.

    Returns:
        The seconds, 0 where there are too many devices or plans; and how many plans were looked at.
    """
    if len(alive(task)) > EXACT_DEVICES or task.crosses_nodes:
        return 0.0, 0
    equal = replace(task, cost=task.cost.equal())
    exact = ExhaustiveSearch(equal, best=known, budget=budget, relaxed=equal.cost is not task.cost)
    exact.run()
    return exact.best if exact.proved else 0.0, exact.spent


class _Passes:
    """Seconds that the passes of the module with the loss alone take at least, by the number of pipelines."""

    def __init__(self, search: LargeSearch, numbers: Sequence[int]) -> None:
        self._search = search
        some = len(numbers) > NUMBERS
        places = {round((len(numbers) - 1) * (k / NUMBERS) ** 2) for k in range(NUMBERS + 1)}
        self._numbers = sorted(numbers[place] for place in places) if some else list(numbers)
        self._known: dict[int, float] = {}

    def of(self, pipelines: int) -> float:
        """More pipelines never raise the bound."""
        number = self._numbers[bisect_left(self._numbers, pipelines)]
        if number not in self._known:
            search = self._search
            self._known[number] = (
                search._proved(number) - search._least_after(number)
                if search.devices <= EXACT_DEVICES
                else search.bound(number, search.task.fixed_tp)
            )
        return self._known[number]
