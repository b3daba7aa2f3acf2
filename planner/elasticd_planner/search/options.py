"""Settings of a search besides the layout: micro-batch size, state policy, recomputation, and with ZeRO the
number of pipelines, on which its memory depends. Each setting is one search with a cost of its own.

Simpler settings are listed first; `option_order` tries them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import EQUAL
from elasticd_planner.problem import Answer, Freedom, Problem
from elasticd_planner.search.infeasible import explain, readable, shortage
from elasticd_planner.search.large import DEEPEST, Wide
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import Device, rate_of
from elasticd_planner.spec.plan import StatePolicy

#: Up to so many devices every number of pipelines is a setting; of more those that leave equal parts, about.
ALL_NUMBERS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One choice of what a plan is made under. pipelines: None where the search is free to choose."""

    micro_batch: int
    state: StatePolicy
    recompute: bool
    pipelines: int | None

    def problem(self, problem: Problem) -> Problem:
        """The problem with this setting alone."""
        profile = problem.profile
        if self.micro_batch != problem.micro_batch:
            profile = profile.sized(profile.tokens / problem.micro_batch * self.micro_batch)
        freedom = Freedom(
            states=(self.state,),
            recompute=self.recompute and problem.freedom.recompute,
            tp=problem.freedom.tp,
            dp=self.pipelines,
        )
        return msgspec.structs.replace(problem, profile=profile, micro_batch=self.micro_batch, freedom=freedom)

    def __str__(self) -> str:
        words = [f"micro-batches of {self.micro_batch}"]
        if self.state.zero:
            count = self.state.replicas or 0
            words.append(f"ZeRO {self.state.zero} with {count} replica{'s' if count > 1 else ''}")
        if self.recompute:
            words.append("recomputation")
        if self.pipelines is not None:
            words.append(f"{self.pipelines} pipeline{'s' if self.pipelines > 1 else ''}")
        return ", ".join(words)


def alive(problem: Problem) -> tuple[Device, ...]:
    """The devices that can be used."""
    return tuple(d for d in problem.cluster.devices if math.isfinite(rate_of(problem.rates, d.name)))


def task_of(
    problem: Problem, *, steady: bool = False, members: int | None = None, hopeful: bool = False
) -> Task:
    """What the search is given of a problem with one setting. members: devices that replicas are spread over
    (None: all that are alive). hopeful: for bounds, with the memory of recomputation and the time without,
    since stages that have room do not recompute."""
    freedom = problem.freedom
    profile = problem.profile
    if hopeful and freedom.recompute is True:
        profile = msgspec.structs.replace(profile, recompute_factor=1.0)
    micro_batches = problem.global_batch // problem.micro_batch
    cost = ProfileCost(
        profile,
        state=freedom.states[0],
        recompute=bool(freedom.recompute),
        pipelines=freedom.dp or 1,
        micro_batches=micro_batches,
        members=members or len(alive(problem)),
        near=problem.cluster.within or problem.cluster.inside,
    )
    return Task(
        cluster=problem.cluster,
        rates=problem.rates,
        cost=cost,
        layers=profile.layers,
        micro_batches=micro_batches,
        steady=steady,
        tp=freedom.tp,
        dp=freedom.dp,
    )


def listed(problem: Problem) -> Iterator[Setting]:
    """Every setting that the problem's freedom allows, simpler ones first."""
    freedom = problem.freedom
    again = (False, True) if freedom.recompute is True else (bool(freedom.recompute),)
    plain = any(not state.zero for state in freedom.states)
    for recompute, state in product(again, freedom.states):
        for size in freedom.micro_batches or (problem.micro_batch,):
            for number in _numbers(problem, size, state, plain):
                yield Setting(micro_batch=size, state=state, recompute=recompute, pipelines=number)


def current_setting(problem: Problem) -> Setting | None:
    """What the current plan was made under; None where it is not of this problem's batch."""
    plan = problem.current
    if plan is None or plan.global_batch != problem.global_batch:
        return None
    pipelines = plan.modules[0].pipelines
    return Setting(
        micro_batch=plan.micro_batch,
        state=plan.state,
        recompute=any(stage.recompute for pipeline in pipelines for stage in pipeline.stages),
        pipelines=len(pipelines) if plan.state.zero else problem.freedom.dp,
    )


def _numbers(problem: Problem, size: int, state: StatePolicy, plain: bool) -> Iterable[int | None]:
    """Numbers of pipelines that are settings of their own: with ZeRO, since memory depends on them. One
    pipeline with one replica is what there is without ZeRO."""
    if problem.freedom.dp is not None or not state.zero:
        return (problem.freedom.dp,)
    devices = len(alive(problem))
    most = min(devices, problem.global_batch // size)
    first = 2 if plain and state.replicas == 1 else 1
    if devices <= ALL_NUMBERS:
        return range(first, most + 1)
    parts = {base << k for base in (1, 3) for k in range(devices.bit_length())}
    return sorted({devices // part for part in parts if first <= devices // part <= most})


class Settings:
    """The settings of a problem and their bounds."""

    def __init__(self, problem: Problem, *, steady: bool = False) -> None:
        self.problem, self.steady = problem, steady
        self.listed = tuple(listed(problem))
        self._searches: dict[tuple[int, bool], Wide] = {}
        self._bounds: dict[Setting, float] = {}

    def bound(self, setting: Setting) -> float:
        """Seconds that no plan of a setting can beat; inf where its pipelines cannot hold the model at all."""
        if setting not in self._bounds:
            self._bounds[setting] = self._bound(setting)
        return self._bounds[setting]

    def _bound(self, setting: Setting) -> float:
        """By groups (`bound`), by all work over all speed, and by the way of one micro-batch through the
        quickest group that there is."""
        task = task_of(setting.problem(self.problem), steady=self.steady, hopeful=True)
        if setting.pipelines is not None and not roomy(task, setting.pipelines):
            return math.inf
        key = (setting.micro_batch, setting.recompute)
        if key not in self._searches:
            self._searches[key] = Wide(task)
        wide = self._searches[key]
        quickest = max(pace for kind in wide.kinds for pace, groups, _ in kind.paces if groups == 1)
        if setting.pipelines is None:
            low, numbers = Wide(task).lower(), [1, min(wide.devices, task.micro_batches)]
        else:
            low, numbers = wide.bound(setting.pipelines, task.tp), [setting.pipelines]
        after = min(
            task.cost.after(d, max(1, wide.devices // d), link) for d in numbers for link in task.cluster.links
        )
        rates = [rate_of(task.rates, device.name) for device in alive(self.problem)]
        most = task.cost.bound(rates, task.micro_batches)
        return max(low if setting.pipelines is None else low + after, most, task.layers / quickest + after)

    def closed(self, answer: Answer, tried: int) -> Answer:
        """The answer with the bound over all settings."""
        plan = answer.plan
        if plan is None or plan.prediction is None or len(self.listed) == 1:
            return answer
        seconds = plan.prediction.step_seconds
        least = min(seconds, *(self.bound(setting) for setting in self.listed))
        made = plan.replace(prediction=msgspec.structs.replace(plan.prediction, bound_seconds=least))
        return msgspec.structs.replace(answer, plan=made, candidates=tried)

    def refusal(self, refused: Sequence[Answer]) -> str:
        """Why no setting has a plan: of those that ask the least memory the one that comes nearest."""
        if len(self.listed) == 1 and refused:
            return refused[0].refusal
        size = min(setting.micro_batch for setting in self.listed)
        again = any(setting.recompute for setting in self.listed)
        fewest = min(setting.pipelines or 1 for setting in self.listed)
        found = []
        for setting in self.listed:
            lean = setting.micro_batch == size and setting.recompute == again
            if lean and (setting.pipelines or 1) == fewest:
                problem = setting.problem(self.problem)
                short = shortage(problem, task_of(problem, steady=self.steady))
                found += [(*short, str(setting))] if short is not None else []
        if not found:
            return explain(self.problem, task_of(self.listed[0].problem(self.problem), steady=self.steady))
        missing, device, words = min(found)
        if missing <= 0:
            return f"no plan was found within the search's limits, even with {words}; unpin tp or dp"
        lacking = f"{readable(missing)} more on {device}"
        return f"does not fit: the smallest plan needs {lacking}, with {words}; add a node"


def roomy(task: Task, pipelines: int) -> bool:
    """Whether so many pipelines can hold the model, each layer at the least bytes that any stage needs."""
    layer, empty = math.inf, math.inf
    devices = [d for d in task.cluster.devices if math.isfinite(rate_of(task.rates, d.name))]
    most = min(len(devices), DEEPEST)
    for width in task.cost.widths(most):
        shares = task.cost.shares((1.0,) * width)[0]
        for in_flight in (1, min(task.layers, most)):
            none, one = (
                task.cost.memory(n, shares, 0, first=False, last=False, in_flight=in_flight) for n in (0, 1)
            )
            layer, empty = min(layer, (one - none) * width), min(empty, none)
    room = sum(max(0.0, device.memory - empty) for device in devices)
    return layer * task.layers * pipelines <= room * (1 + EQUAL)
