"""The same scenario without elasticd: no reaction, restart without the slow nodes, and the bound.

Each runs the script in its own time: a fault at a step comes when that run is there. Time is continuous here,
a step takes what it takes in the mean over noise, and the plans are the planner's own, made from the true
profile: the baselines lose nothing by bad planning.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from elasticd_planner.cluster import Cluster
from elasticd_planner.plan import Plan
from elasticd_planner.policy import decide
from elasticd_planner.problem import Problem
from elasticd_planner.profiled import ProfileCost
from elasticd_planner.profiles import ModelProfile

from elasticd.simulator.faults import Fault
from elasticd.simulator.planning import Planner
from elasticd.simulator.record import Totals, rounded
from elasticd.simulator.scenario import Scenario
from elasticd.simulator.truth import Truth


def baselines(
    scenario: Scenario, cluster: Cluster, profile: ModelProfile, planner: Planner
) -> tuple[Totals, ...]:
    """In the order in which they are shown."""
    given = _Given(scenario=scenario, cluster=cluster, profile=profile, planner=planner)
    healthy = given.plan(cluster)
    if healthy is None:  # then elasticd's run said so
        return (Bound(given).run("bound"),)
    return (
        Still(given, healthy).run("no reaction"),
        Restarting(given, healthy).run("restart without the slow nodes"),
        Bound(given).run("bound"),
    )


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What all baselines share."""

    scenario: Scenario
    cluster: Cluster
    profile: ModelProfile
    planner: Planner

    def plan(self, cluster: Cluster) -> Plan | None:
        """The best plan on healthy devices, or None where the model does not fit."""
        model = self.scenario.model
        problem = Problem(
            cluster=cluster,
            profile=self.profile,
            global_batch=model.global_batch,
            micro_batch=model.micro_batch,
        )
        return self.planner.answer(problem).plan

    def truth(self) -> Truth:
        times = self.scenario.times
        return Truth(
            self.cluster,
            self.profile,
            seed=self.scenario.seed,
            noise=times.noise,
            overhead=times.overhead,
        )


class Run(ABC):
    """One run: from event to event at a speed that only changes there."""

    def __init__(self, given: _Given) -> None:
        self.given, self.scenario = given, given.scenario
        self.truth = given.truth()
        self.now = self.done = self.paused = self.lost = 0.0
        self.switches = 0
        self.note = ""
        self.react_at = math.inf

    @abstractmethod
    def step_seconds(self) -> float:
        """Of a step as things are."""

    def changed(self) -> None:  # noqa: B027
        """The devices' speeds changed, which nobody has noticed yet; most runs never do."""

    def react(self) -> None:  # noqa: B027
        """What the run does at `react_at` steps, once it has noticed."""

    def run(self, name: str) -> Totals:
        scenario = self.scenario
        by_step = sorted((f for f in scenario.faults if f.step is not None), key=lambda f: f.step or 0)
        by_time = sorted((f for f in scenario.faults if f.seconds is not None), key=lambda f: f.seconds or 0.0)
        steps = math.inf if scenario.steps is None else float(scenario.steps)
        until = math.inf if scenario.seconds is None else scenario.seconds
        while self.done < steps and self.now < until:
            each = self.step_seconds()
            next_step = min(steps, float(by_step[0].step or 0) if by_step else math.inf, self.react_at)
            next_time = min(until, (by_time[0].seconds or 0.0) if by_time else math.inf)
            ahead = (next_step - self.done) * each
            if self.now + ahead <= next_time:
                self.now, self.done = self.now + ahead, next_step
            else:
                self.done, self.now = (
                    self.done + max(0.0, next_time - self.now) / each,
                    max(self.now, next_time),
                )
            self._happen(by_step, by_time)
        tokens = self.done * scenario.model.tokens * scenario.model.global_batch
        return Totals(
            name=name,
            seconds=rounded(self.now),
            steps=rounded(self.done),
            tokens_per_second=rounded(tokens / self.now) if self.now else 0.0,
            switches=self.switches,
            pause_seconds=rounded(self.paused),
            lost_steps=rounded(self.lost),
            note=self.note,
        )

    def _happen(self, by_step: list[Fault], by_time: list[Fault]) -> None:
        struck = False
        while by_step and (by_step[0].step or 0) <= self.done:
            struck = self._strike(by_step.pop(0)) or struck
        while by_time and (by_time[0].seconds or 0.0) <= self.now:
            struck = self._strike(by_time.pop(0)) or struck
        if struck:
            self.changed()
        elif self.done >= self.react_at:
            self.react_at = math.inf
            self.react()

    def _strike(self, fault: Fault) -> bool:
        if not fault.speed:
            return False
        names = [n for n in self.truth.names if n == fault.device or n.rpartition("/")[0] == fault.node]
        self.truth.slow(names, fault.factor if fault.kind == "slow" else 1.0)
        return True


class Bound(Run):
    """No plan is faster than this at any moment."""

    def step_seconds(self) -> float:
        model = self.scenario.model
        rates = self.truth.factors.tolist()
        return ProfileCost(self.given.profile).bound(rates, model.global_batch // model.micro_batch)


class Still(Run):
    """The healthy plan, whatever happens."""

    def __init__(self, given: _Given, plan: Plan) -> None:
        super().__init__(given)
        self.plan = plan
        self._known: dict[tuple[str, bytes], float] = {}

    def step_seconds(self) -> float:
        return self.seconds_of(self.plan)

    def seconds_of(self, plan: Plan) -> float:
        key = (plan.digest, self.truth.factors.tobytes())
        if key not in self._known:
            self._known[key] = self.truth.typical(plan)
        return self._known[key]


class Restarting(Still):
    """Notices as soon as elasticd can, and restarts from the last checkpoint on the nodes without a slow
    device where the policy finds that it pays; back on all nodes when they have recovered."""

    def __init__(self, given: _Given, plan: Plan) -> None:
        super().__init__(given, plan)
        self._plans: dict[frozenset[str], Plan | None] = {frozenset(): plan}

    def changed(self) -> None:
        self.react_at = self.done + self.scenario.detect.window // 2 + 1

    def react(self) -> None:
        slow = frozenset(name.rpartition("/")[0] for name in self._noticed())
        target = self._without(slow)
        if target is None:
            self.note = f"the model does not fit without {', '.join(sorted(slow))}: it stayed"
        if target is None or target.digest == self.plan.digest:
            return
        restart = self.scenario.restart
        now = self.step_seconds()
        lost = self.done % restart.checkpoint_steps
        price = restart.seconds + lost * now
        settings = msgspec.structs.replace(self.scenario.policy, pause_seconds=price)
        if not decide(settings, now, self.seconds_of(target), 0).replan:
            return
        self.plan = target
        self.now += price
        self.paused += restart.seconds
        self.lost += lost
        self.switches += 1

    def _noticed(self) -> Mapping[str, float]:
        least = self.scenario.detect.slow
        return {name: rate for name, rate in self.truth.rates.items() if rate >= least}

    def _without(self, slow: frozenset[str]) -> Plan | None:
        if slow not in self._plans:
            nodes = tuple(node for node in self.given.cluster.nodes if node.name not in slow)
            left = msgspec.structs.replace(self.given.cluster, nodes=nodes)
            self._plans[slow] = self.given.plan(left) if nodes else None
        return self._plans[slow]
