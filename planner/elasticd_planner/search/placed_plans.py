"""Plans of a problem whose experts are placed, and their cost: padded, packed, and of several modules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import msgspec

from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.packed_cost import PackedCost
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import EQUAL
from elasticd_planner.problem import Problem
from elasticd_planner.search import packed
from elasticd_planner.search.module_bound import LOOKED_AT, ModuleBound, least_enumerated
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.modules import reason_of
from elasticd_planner.search.options import Settings, setting_of, task_of
from elasticd_planner.spec.plan import Pipeline, Plan
from elasticd_planner.spec.plan_summary import describe

#: Units of shares in the place of one, for a bound of all shares, and the part of it by which these are too
#: coarse, at most.
FINE, COARSE = 4096, 1e-4

#: By device the bytes that are left for further experts.
Room = Mapping[str, float]


class PlacedPlans(Protocol):
    """Plans of one problem under its load of experts."""

    def rooms(self, plan: Plan) -> Sequence[Room]:
        """The memory that a plan without placed experts leaves for more of them: each way that there is."""

    def plan_with(self, plan: Plan, pipelines: tuple[Pipeline, ...]) -> Plan | None:
        """The plan with these pipelines of the module with the loss, and with rows or times that follow from
        them; None where they do not hold the longest sequence."""

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step."""

    def memory(self, plan: Plan) -> dict[str, int]:
        """Bytes that each member needs."""

    def bound(self, plan: Plan, seconds: float) -> float:
        """Seconds that no plan beats, however experts are placed: at most `seconds`, those of a plan. The bound
        of a search is of even experts."""

    def reason(self, plan: Plan) -> str:
        """The plan in words."""


def placed_plans(problem: Problem) -> PlacedPlans:
    """The plans of a problem with a load of experts, by its kind."""
    if problem.modules:
        return ModulePlans(problem)
    return PackedPlans(problem) if problem.packed is not None else PaddedPlans(problem)


def _least_seconds(problem: Problem, known: float) -> float:
    """Seconds that no plan of one module beats, of shares as small as one likes: experts are divided so, and
    the plans of a search have whole units. `known`: those of a plan."""
    units = problem.profile.share_units
    fine = msgspec.structs.replace(
        problem.profile,
        uneven=True,
        share_units=FINE * units,
        widths=problem.profile.widths or tuple(range(1, units + 1)),
    )
    problem = msgspec.structs.replace(problem, profile=fine, experts=None, current=None)
    settings, left, least = Settings(problem), LOOKED_AT, known
    for setting in settings.listed:
        bound = settings.bound(setting)
        if bound < least * (1 - EQUAL) and left > 0 and problem.search_space.interleave == 1:
            task = task_of(setting.problem(problem), hopeful=True)
            enumerated, spent = least_enumerated(task, least, left)
            bound, left = max(bound, enumerated * (1 - COARSE)), left - spent
        least = min(least, bound)
    return least


def _left(problem: Problem, needed: Mapping[str, int]) -> dict[str, float]:
    """The memory that devices have beside what they need."""
    memory = problem.cluster.memory
    return {name: max(0.0, memory[name] - need) for name, need in needed.items() if name in memory}


@dataclass(frozen=True, slots=True)
class PaddedPlans:
    """Of a model of one module, whose samples are padded."""

    problem: Problem

    def rooms(self, plan: Plan) -> Sequence[Room]:
        """See `PlacedPlans`."""
        return (_left(self.problem, self.memory(plan)),)

    def plan_with(self, plan: Plan, pipelines: tuple[Pipeline, ...]) -> Plan | None:
        """See `PlacedPlans`."""
        return plan.with_pipelines(pipelines)

    def seconds(self, plan: Plan) -> float:
        """See `PlacedPlans`."""
        return step_seconds(plan, self.problem.cluster, self.problem.rates, self._cost(plan))

    def memory(self, plan: Plan) -> dict[str, int]:
        """See `PlacedPlans`."""
        return memory_by_device(plan, self._cost(plan))

    def bound(self, plan: Plan, seconds: float) -> float:
        """See `PlacedPlans`."""
        return _least_seconds(self.problem, seconds)

    def reason(self, plan: Plan) -> str:
        """See `PlacedPlans`."""
        return describe(plan, self.problem.rates, self.problem.packed)

    def _cost(self, plan: Plan) -> ProfileCost:
        cost = task_of(setting_of(plan, self.problem).problem(self.problem)).cost
        assert isinstance(cost, ProfileCost)
        return replace(cost, load=self.problem.experts)


@dataclass(frozen=True)
class PackedPlans:
    """Of a model of one module, whose sequences are packed in rows. Rows are as long as memory allows, so that
    more experts on a device leave less for them: placements that need no more memory are tried, too."""

    problem: Problem

    @cached_property
    def _cost(self) -> PackedCost:
        return packed.cost_of(self.problem)

    def rooms(self, plan: Plan) -> Sequence[Room]:
        """See `PlacedPlans`."""
        return tuple(dict.fromkeys(plan.members, room) for room in (0.0, math.inf))

    def plan_with(self, plan: Plan, pipelines: tuple[Pipeline, ...]) -> Plan | None:
        """See `PlacedPlans`. Of the running plan's pipelines it has the rows, too, as these were."""
        current = self.problem.current
        rows, _ = packed.with_rows(self.problem, self._cost, pipelines, plan.number)
        if rows is None:
            return None
        strategies = rows.strategies
        if current is not None and current.packed and packed.shape(rows) == packed.shape(current):
            strategies = current.strategies
        return plan.replace(strategies=strategies, carriers=rows.carriers, idle=rows.idle)

    def seconds(self, plan: Plan) -> float:
        """See `PlacedPlans`."""
        return self._cost.seconds(plan)

    def memory(self, plan: Plan) -> dict[str, int]:
        """See `PlacedPlans`."""
        return self._cost.memory(plan)

    def bound(self, plan: Plan, seconds: float) -> float:
        """See `PlacedPlans`."""
        return min(seconds, self._cost.bound())

    def reason(self, plan: Plan) -> str:
        """See `PlacedPlans`."""
        return describe(plan, self.problem.rates, self.problem.packed)


@dataclass(frozen=True)
class ModulePlans:
    """Of a model of several modules. The times of passes, by which ranks order them, are those of the load."""

    problem: Problem

    @cached_property
    def _costs(self) -> ModuleCosts:
        return ModuleCosts(self.problem)

    def rooms(self, plan: Plan) -> Sequence[Room]:
        """See `PlacedPlans`."""
        return (_left(self.problem, self.memory(plan)),)

    def plan_with(self, plan: Plan, pipelines: tuple[Pipeline, ...]) -> Plan | None:
        """See `PlacedPlans`. The running plan has its own times."""
        timed, current = self._costs.timed(plan.with_pipelines(pipelines)), self.problem.current
        if current is not None and current.strategies[0].untimed == timed.strategies[0].untimed:
            return timed.replace(strategies=current.strategies)
        return timed

    def seconds(self, plan: Plan) -> float:
        """See `PlacedPlans`."""
        return self._costs.running_seconds(plan)

    def memory(self, plan: Plan) -> dict[str, int]:
        """See `PlacedPlans`."""
        return self._costs.memory(plan)

    def bound(self, plan: Plan, seconds: float) -> float:
        """See `PlacedPlans`. The module with the loss alone, or all work over all speed."""
        items = ModuleBound(self.problem, self._costs).item_seconds
        if self._costs.rows is not None:
            return min(seconds, self._costs.rows.cost.bound() + items)
        loss = msgspec.structs.replace(self.problem, modules=(), given=None, current=None)
        task = task_of(setting_of(plan.loss_view, loss).problem(loss), hopeful=True)
        return min(seconds, max(task.work_bound + items, _least_seconds(loss, seconds)))

    def reason(self, plan: Plan) -> str:
        """See `PlacedPlans`."""
        return reason_of(plan, self.problem.rates)
