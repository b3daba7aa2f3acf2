"""Problems of the shared format in seconds (`model.times`): made into a job's problem, and planned.

They are free in what their keys allow: micro-batch size without `batch.micro_batch`, ZeRO with `model.state`,
recomputation with `model.recompute`; pins fix each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from elasticd_planner.cost.model import steady_seconds, step_seconds
from elasticd_planner.cost.table_cost import MIB
from elasticd_planner.problem import Freedom, Problem
from elasticd_planner.problem_files.file_format import Figures, NodeEntry, Objective, Planned, TableProblem
from elasticd_planner.problem_files.times import profile_of
from elasticd_planner.search.options import Setting, task_of
from elasticd_planner.search.planner import plan as search
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import refuse

#: Replicas that are tried where they are not pinned: one, and as many as survive the loss of a node.
REPLICAS = (1, 2)

UNIT = "seconds"


def problem_of(given: TableProblem) -> Problem:
    """A job's problem from a file's. Dead devices are left in the cluster, with an infinite rate."""
    model, batch = given.model, given.batch
    if model.times is None or batch.sequence is None:
        refuse("model.times is missing: the problem is in units")
    profile = profile_of(
        name=model.name,
        layers=model.layers,
        tokens=batch.sequence * batch.size,
        times=model.times,
        state=model.state,
        recompute=model.recompute,
        units=model.units,
        groups=model.groups,
        uneven=model.uneven_shares,
    )
    return Problem(
        cluster=cluster_of(given),
        profile=profile,
        global_batch=batch.global_batch,
        micro_batch=batch.size,
        rates=rates_of(given),
        freedom=freedom_of(given),
    )


def cluster_of(given: TableProblem) -> Cluster:
    links = given.cluster.links
    levels = {
        level: entry.link
        for level, entry in (
            ("within", links.island if links else None),
            ("inside", links.node if links else None),
            ("between", links.network if links else None),
        )
        if entry is not None
    }
    return Cluster(nodes=tuple(map(_node, given.cluster.nodes)), **levels)


def _node(entry: NodeEntry) -> Node:
    own = entry.links
    inside: Link | None = own.node.link if own and own.node else None
    within: Link | None = own.island.link if own and own.island else None
    return Node(
        name=entry.name,
        devices=tuple(
            Device(name=f"{entry.name}/{i}", memory=math.floor(entry.memory_mib * MIB))
            for i in range(entry.devices)
        ),
        island=entry.island or 0,
        inside=inside,
        within=within,
    )


def rates_of(problem: TableProblem) -> dict[str, float]:
    """Effective rates: how slow a device is, over how fast its node is."""
    found = {}
    for node in problem.cluster.nodes:
        for i in range(node.devices):
            rate = problem.rates.get(f"{node.name}/{i}", 1.0)
            known = math.inf if rate is None else rate / node.speed
            if known != 1.0:
                found[f"{node.name}/{i}"] = known
    return found


def freedom_of(given: TableProblem) -> Freedom:
    pins, batch = given.pins, given.batch
    sizes = [n for n in range(1, batch.global_batch + 1) if batch.global_batch % n == 0]
    if batch.micro_batch is not None:
        sizes = [batch.micro_batch]
    least = pins.dp or 1
    may = given.model.recompute is not None and pins.recompute is not False
    return Freedom(
        micro_batches=tuple(size for size in sizes if batch.global_batch // size >= least),
        states=tuple(_states(given)),
        recompute="always" if pins.recompute else may,
        interleave=pins.interleave or 1,
        tp=pins.tp,
        dp=pins.dp,
    )


def _states(given: TableProblem) -> list[StatePolicy]:
    """Policies in the order of preference: the simplest first."""
    pins = given.pins
    stages = (0, 1, 2) if pins.zero is None else (pins.zero,)
    if given.model.state is None:
        stages = (0,)
    made = []
    for zero in stages:
        if zero == 0:
            made += [StatePolicy()] if pins.replicas is None else []
            continue
        for replicas in REPLICAS if pins.replicas is None else (pins.replicas,):
            made.append(StatePolicy(zero=zero, replicas=replicas))
    return made


def timed_task(given: TableProblem, objective: Objective, plan: Plan | None = None) -> Task:
    """The task that a plan of this problem was made for (without one: of the simplest setting)."""
    problem = problem_of(given)
    setting = Setting(
        micro_batch=plan.micro_batch if plan is not None else given.batch.size,
        state=plan.state if plan is not None else problem.freedom.states[0],
        recompute=False,
        pipelines=len(plan.pipelines) if plan is not None else given.pins.dp,
    )
    return task_of(setting.problem(problem), steady=objective == "steady")


def solve_timed(
    problem: TableProblem,
    objective: Objective,
    *,
    number: int = 0,
    ideal: bool = True,
    current: Plan | None = None,
    stop: Callable[[], bool] | None = None,
) -> Planned:
    """The best plan found, or the reason why there is none; figures are seconds. `current`: the plan that
    near-equal ones are compared with."""
    steady = objective == "steady"
    given = msgspec.structs.replace(problem_of(problem), current=current)
    answer = search(given, number, stop=stop, steady=steady)
    plan = answer.plan
    if plan is None or plan.prediction is None:
        return Planned(
            plan=None, objective=objective, unit=UNIT, refusal=answer.refusal, candidates=answer.candidates
        )
    task = timed_task(problem, objective, plan)
    value, bound = plan.prediction.step_seconds, plan.prediction.bound_seconds
    return Planned(
        plan=plan,
        figures=Figures(
            steady=steady_seconds(plan, task.cluster, task.rates, task.cost),
            step=step_seconds(plan, task.cluster, task.rates, task.cost),
            bound=bound,
            gap=plan.prediction.gap,
            ideal=yardstick(problem, objective, value, solve_timed) if ideal else math.nan,
        ),
        objective=objective,
        unit=UNIT,
        reason=plan.reason,
        candidates=answer.candidates,
    )


class Solver(Protocol):
    """`solve.solve`, or `solve_timed`."""

    def __call__(self, problem: TableProblem, objective: Objective, *, ideal: bool) -> Planned: ...


def yardstick(given: TableProblem, objective: Objective, value: float, solver: Solver) -> float:
    """Healthy x N / sum(1 / x); dead devices have no speed. `value`: of this problem's own plan."""
    names = [f"{node.name}/{i}" for node in given.cluster.nodes for i in range(node.devices)]
    rates = [given.rates.get(name, 1.0) for name in names]
    speed = sum(1 / rate for rate in rates if rate is not None)
    if not given.rates or not speed:
        return value
    healthy = solver(msgspec.structs.replace(given, rates={}), objective, ideal=False)
    if healthy.figures is None:
        return math.nan
    base = healthy.figures.steady if objective == "steady" else healthy.figures.step
    return base * len(rates) / speed
