"""The same scenario without elasticd: no reaction, restart without the slow nodes, and the bound.

Each runs the script in its own time: a fault at a step comes when that run is there. Time is continuous here,
a step takes what it takes in the mean over noise, and the plans are the planner's own, made from the true
profile: the baselines lose nothing by bad planning. Neither goes on without a member that died: both then start
again from their last checkpoint on the whole nodes that are left, as elasticd does only for lack of state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from elasticd_planner.batching.packed_batch import CutOptions
from elasticd_planner.policy.policy import decide
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_packing import linear_of

from elasticd.chaos.faults import Fault
from elasticd.simulator.devices.device_model import TYPICAL, DeviceModel
from elasticd.simulator.devices.expert_loads import ExpertLoads
from elasticd.simulator.devices.expert_truth import ExpertTruth
from elasticd.simulator.devices.module_truth import ModuleTruth
from elasticd.simulator.devices.packed_truth import PackedTruth, PackedWork
from elasticd.simulator.planning import Planner
from elasticd.simulator.results.packed_baselines import PLANNERS
from elasticd.simulator.results.packed_baselines import Planner as Planned
from elasticd.simulator.results.progress import Trained
from elasticd.simulator.results.result import Totals, rounded
from elasticd.simulator.results.throughput_bound import Bounds
from elasticd.simulator.scenarios.expert_drift import ExpertDrift
from elasticd.simulator.scenarios.scenario import Scenario


def truth_of(scenario: Scenario, *, follow: bool = True) -> DeviceModel:
    """The modelled cluster at the beginning. `follow`: whether the shares of lanes follow their speeds, where
    the scenario lets them."""
    cluster, model, data = scenario.cluster.cluster(), scenario.model, scenario.data
    rest = {"noise": scenario.times.noise, "overhead": scenario.times.overhead}
    loads = None
    if (even := scenario.expert_load()) is not None:
        drift = scenario.experts or ExpertDrift()
        loads = ExpertLoads(even, zipf=drift.zipf, drift=drift.drift, seed=scenario.seed)
    if model.modules:
        return ModuleTruth(
            cluster,
            scenario.truth,
            model.tokens,
            scenario.item_modules(),
            model.module,
            global_batch=model.global_batch,
            micro_batch=model.micro_batch,
            follow=follow,
            loads=loads,
            seed=scenario.seed,
            **rest,
        )
    if loads is not None and data is None:
        return ExpertTruth(cluster, scenario.truth, model.tokens, loads, seed=scenario.seed, **rest)
    if data is None:
        return DeviceModel(cluster, scenario.truth, model.tokens, seed=scenario.seed, **rest)
    linear = linear_of(model.spec())
    work = PackedWork(
        drawn=lambda step, scale: data.drawn(scenario.seed, step, model.global_batch, scale),
        mean=data.mean,
        linear=linear,
        effective=lru_cache(lambda scale: data.typical(scale, model.global_batch).effective),
        row_tokens=data.row_tokens or None,
        cut=CutOptions(least=data.least, fixed=data.least * linear) if data.cut else None,
        fixed=data.least * linear,
        follow=data.follow and follow,
    )
    return PackedTruth(cluster, scenario.truth, model.tokens, work, loads, seed=scenario.seed, **rest)


def baselines(scenario: Scenario, bounds: Bounds, planner: Planner) -> tuple[Totals, ...]:
    """In the order in which they are shown."""
    given = Given(scenario=scenario, bounds=bounds, planner=planner)
    if given.plan(given.truth(), frozenset()) is None:  # then elasticd's run said so
        return (Bound(given).run("bound"),)
    others = scenario.data.baselines if scenario.data is not None else ()
    return (
        Still(given).run("no reaction"),
        Restarting(given).run("restart without the slow nodes"),
        *(Dealt(given, PLANNERS[name]).run(name) for name in others),
        Bound(given).run("bound"),
    )


@dataclass(frozen=True, kw_only=True)
class Given:
    """The inputs that all baselines share."""

    scenario: Scenario
    bounds: Bounds
    planner: Planner

    def plan(self, truth: DeviceModel, without: frozenset[str]) -> Plan | None:
        """The best plan on healthy devices of the other nodes, or None where the model does not fit there."""
        model = self.scenario.model
        nodes = tuple(node for node in truth.cluster.nodes if node.name not in without)
        if not nodes:
            return None
        problem = Problem(
            cluster=msgspec.structs.replace(truth.cluster, nodes=nodes),
            profile=truth.profile,
            global_batch=model.global_batch,
            micro_batch=model.micro_batch,
            packed=self.scenario.packed(truth.tokens),
            module=model.module,
            modules=truth.modules,
            search_space=SearchSpace(lanes=len(truth.names) if self.scenario.data is not None else 1),
        )
        best = self.planner.answer(problem).plan
        assert best is None or isinstance(best, Plan)
        return best

    def truth(self) -> DeviceModel:
        """A modelled cluster for one run alone. Devices that the script kills at step 0 are dead in it from the
        beginning."""
        made = truth_of(self.scenario, follow=False)  # that is a reaction
        for fault in self.scenario.faults:
            if fault.kind == "kill" and fault.step == 0:
                made.strike(fault)
        return made


class BaselineRun(ABC):
    """One run: from event to event at a speed that only changes there."""

    def __init__(self, given: Given) -> None:
        self.given, self.scenario = given, given.scenario
        self.truth = given.truth()
        self.trained = Trained()
        self.now = self.paused = self.down = 0.0
        self.switches = self.restarts = 0
        self.note = ""
        self.react_at = math.inf

    @abstractmethod
    def step_seconds(self) -> float:
        """Of a step as things are; infinite where nobody trains."""

    def changed(self, fault: Fault) -> None:  # noqa: B027
        """Something happened to the devices, which nobody has noticed yet; most runs never do."""

    def react(self) -> None:  # noqa: B027
        """Reacts at `react_at` steps, once the run has noticed the change."""

    def run(self, name: str) -> Totals:
        """Plays the scenario to its last step or hour and returns the totals under `name`. A run in which
        nobody trains and no later fault could change that ends early. Call it once."""
        scenario = self.scenario
        by_step = sorted((f for f in scenario.faults if f.step is not None), key=lambda f: f.step or 0)
        by_time = sorted((f for f in scenario.faults if f.seconds is not None), key=lambda f: f.seconds or 0.0)
        steps = math.inf if scenario.steps is None else float(scenario.steps)
        until = math.inf if scenario.seconds is None else scenario.seconds
        while self.trained.steps < steps and self.now < until:
            each = self.step_seconds()
            next_step = min(steps, float(by_step[0].step or 0) if by_step else math.inf, self.react_at)
            next_time = min(until, (by_time[0].seconds or 0.0) if by_time else math.inf)
            ahead = max(0.0, next_step - self.trained.steps)
            if math.isinf(each) and math.isinf(next_time):
                break  # nothing brings back what is missing
            if not math.isinf(each) and self.now + ahead * each <= next_time:
                self.now += ahead * each
                self._train(ahead)
            else:
                self._train(max(0.0, next_time - self.now) / each)
                self.now = max(self.now, next_time)
            self._happen(by_step, by_time)
        self.now = min(self.now, until)
        return Totals(
            name=name,
            seconds=rounded(self.now),
            steps=rounded(self.trained.steps),
            tokens_per_second=rounded(self.trained.tokens / self.now) if self.now else 0.0,
            switches=self.switches,
            pause_seconds=rounded(self.paused),
            restarts=self.restarts,
            down_seconds=rounded(self.down),
            lost_steps=rounded(self.trained.lost),
            note=self.note,
        )

    def _train(self, steps: float) -> None:
        self.trained.add(steps, self.truth.tokens * self.scenario.model.global_batch)

    def _happen(self, by_step: list[Fault], by_time: list[Fault]) -> None:
        noticed = self.trained.steps >= self.react_at
        while by_step and (by_step[0].step or 0) <= self.trained.steps:
            noticed = not self._strike(by_step.pop(0)) and noticed
        while by_time and (by_time[0].seconds or 0.0) <= self.now:
            noticed = not self._strike(by_time.pop(0)) and noticed
        if noticed:
            self.react_at = math.inf
            self.react()

    def _strike(self, fault: Fault) -> bool:
        """Returns True if it is one that this run may ever notice."""
        if fault.kind not in ("slow", "recover", "kill", "join", "shift", "partition"):
            return False
        self.truth.strike(fault)
        self.changed(fault)
        return True


class Bound(BaselineRun):
    """No plan is faster than this at any moment."""

    def step_seconds(self) -> float:
        """The bound at the devices' present speeds, in seconds; infinite where no device lives."""
        return self.given.bounds.seconds(self.truth.speeds, self.truth.profile, self.truth.modules)


class Still(BaselineRun):
    """The healthy plan, whatever becomes slow."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._plans: dict[tuple[frozenset[str], tuple[float, ...]], Plan | None] = {}
        self._cut: dict[str, float] = {}
        self.plan = self.without(self.dead())

    def step_seconds(self) -> float:
        """Mean seconds of a step under the plan in force; infinite while the job waits for nodes."""
        return self.truth.typical(self.plan) if self.plan is not None else math.inf

    def dead(self) -> frozenset[str]:
        """Nodes on which torchrun cannot be started: a device is dead, or nobody reaches them."""
        cut = {name for name, until in self._cut.items() if until > self.now}
        return frozenset(cut | {node_of(name) for name in self.truth.dead})

    def without(self, nodes: frozenset[str]) -> Plan | None:
        """The plan on all nodes but these, or None where the model does not fit there. Plans are kept, by nodes
        and tokens of a sample."""
        key = (nodes, self.truth.sizes)
        if key not in self._plans:
            self._plans[key] = self.given.plan(self.truth, nodes)
        return self._plans[key]

    def changed(self, fault: Fault) -> None:
        """A device that dies, a partition longer than a collective's patience, or samples too long for the
        memory make this run start again from its last checkpoint. A shorter partition costs its own seconds. A
        slow device changes no plan."""
        patience = self.scenario.times.patience
        if fault.kind == "partition":
            self._cut[fault.node] = self.now + fault.lasts
        if self.plan is None:
            if fault.kind == "join":
                self._again(0.0, self.dead())
            return
        hit = (fault.node or node_of(fault.device)) in self.plan.nodes
        if fault.kind == "kill" and hit:
            self._again(patience if fault.node else 0.0, self.dead())
        elif fault.kind == "partition" and hit and fault.lasts > patience:
            self._again(patience, self.dead())
        elif fault.kind == "partition" and hit:
            self.now += fault.lasts
        elif fault.kind == "shift" and self.truth.overfull(self.plan):
            self._again(0.0, self.dead())

    def _again(self, waited: float, without: frozenset[str]) -> None:
        """From the last checkpoint, on the other nodes."""
        self.trained.back_to(self.scenario.restart.checkpoint_steps)
        self.plan = self.chosen(without)
        self.now += waited + self.scenario.restart.seconds
        self.down += waited + self.scenario.restart.seconds
        self.restarts += 1
        if self.plan is None:
            self.note = f"the model does not fit without {_listed(without)}: it waits for them"

    def chosen(self, without: frozenset[str]) -> Plan | None:
        """The plan of a start that cannot be avoided."""
        return self.without(without)


class Dealt(Still):
    """The healthy plan, whose lanes get their sequences by another planner of these, at the mean of some steps.
    That planner knows nothing of slow devices, and its own time is not counted. A plan of several stages is
    none that it can deal to."""

    def __init__(self, given: Given, planner: Planned) -> None:
        super().__init__(given)
        self._planner = planner
        self._known: dict[tuple[str, int, bytes], float] = {}

    def step_seconds(self) -> float:
        """Mean seconds of a step; infinite while the job waits for nodes."""
        plan, truth = self.plan, self.truth
        if plan is None:
            return math.inf
        assert isinstance(truth, PackedTruth)
        if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
            self.note = "it deals to lanes of one stage, and the plan has several: not played"
            return math.inf
        key = plan.digest, truth.tokens, truth.factors.tobytes()
        if key not in self._known:
            gang = truth.gang(plan)
            drawn = [truth.work.drawn(step, truth.scale) for step in range(TYPICAL)]
            units = [float(self._planner(lengths, gang)) for lengths in drawn]
            self._known[key] = truth.unit * sum(units) / len(units) + truth.beside(plan)
        return self._known[key]


class Restarting(Still):
    """Notices as soon as elasticd can, and restarts from the last checkpoint on the nodes without a slow
    device where the policy finds that it pays; back on all nodes when they have recovered."""

    def changed(self, fault: Fault) -> None:
        """As `Still.changed`. A change of speed or a node that joins is noticed `detect.min_steps` steps
        later."""
        super().changed(fault)
        if fault.speed or fault.kind == "join":
            self.react_at = self.trained.steps + self.scenario.detect.min_steps

    def react(self) -> None:
        """Restarts on the plan without the slow nodes if `decide` says that it pays. Its price is the restart
        and the steps since the last checkpoint."""
        slow = self._slow()
        target = self.without(slow | self.dead())
        if target is None:
            self.note = f"the model does not fit without {_listed(slow | self.dead())}: it stayed"
        if target is None or self.plan is None or target.digest == self.plan.digest:
            return
        restart = self.scenario.restart
        now = self.step_seconds()
        lost = self.trained.steps % restart.checkpoint_steps
        price = restart.seconds + lost * now
        settings = msgspec.structs.replace(self.scenario.policy, pause_seconds=price)
        if not decide(settings, now, self.truth.typical(target), 0).replan:
            return
        self.trained.back_to(restart.checkpoint_steps)
        self.plan = target
        self.now += restart.seconds
        self.paused += restart.seconds
        self.switches += 1

    def chosen(self, without: frozenset[str]) -> Plan | None:
        """The quicker one of the plans with and without the slow nodes."""
        found = [p for p in (self.without(without), self.without(without | self._slow())) if p is not None]
        return min(found, key=self.truth.typical, default=None)

    def _slow(self) -> frozenset[str]:
        least = self.scenario.detect.slow
        return frozenset(node_of(name) for name, rate in self.truth.rates.items() if rate >= least)


def _listed(nodes: frozenset[str]) -> str:
    return ", ".join(sorted(nodes, key=lambda name: (len(name), name)))
