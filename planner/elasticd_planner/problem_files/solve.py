"""Planning problems of the shared format solved: the best plan, or the one to change to from a running plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from elasticd_planner.cost.model import (
    memory_by_device,
    pipeline_seconds,
    stage_seconds,
    steady_seconds,
    step_seconds,
)
from elasticd_planner.cost.table_cost import MIB, TableCost
from elasticd_planner.grouping.node_partitions import kinds
from elasticd_planner.placement.state_bytes import SectionBytes, StateBytes, weights_of
from elasticd_planner.placement.state_movement import bytes_to_move, strategy
from elasticd_planner.placement.stay_close import nearest
from elasticd_planner.placement.tp_rank_order import lined_up
from elasticd_planner.problem_files.convert import (
    cluster_of,
    problem_of,
    rates_of,
    solve_timed,
    timed_task,
    yardstick,
)
from elasticd_planner.problem_files.file_format import Figures, Objective, Planned, TableProblem
from elasticd_planner.search.exhaustive.enumeration import Exact, Pins
from elasticd_planner.search.exhaustive.pipeline_shapes import Combination
from elasticd_planner.search.infeasible import explain_infeasible
from elasticd_planner.search.large import Wide
from elasticd_planner.search.options import form
from elasticd_planner.search.planner import TOLERANCE
from elasticd_planner.search.refine import Finisher
from elasticd_planner.search.task import ENUMERATED, EXACT_DEVICES, MANY, Task
from elasticd_planner.spec.cluster import rate_of
from elasticd_planner.spec.plan import Pipeline, Plan, Prediction, Stage
from elasticd_planner.spec.plan_summary import describe
from elasticd_planner.value import Value, refuse


def cost_of(problem: TableProblem) -> TableCost:
    model, memory = problem.model, problem.model.memory
    return TableCost(
        layers=model.layers,
        slowdown=tuple(sorted(model.tp_slowdown.items())),
        full=model.tp_full,
        uneven=model.uneven_shares,
        layer_bytes=tuple(size * MIB for size in memory.layer_mib_by_stage) if memory else (0.0,),
        embedding=memory.embedding_mib * MIB if memory else 0.0,
        fixed=memory.fixed_mib * MIB if memory else 0.0,
        reserve=memory.reserve_mib * MIB if memory else 0.0,
    )


def task_of(problem: TableProblem, objective: Objective = "step", plan: Plan | None = None) -> Task:
    """What the search is given; in seconds, of the setting that `plan` has."""
    if problem.model.times is not None:
        return timed_task(problem, objective, plan)
    return Task(
        cluster=cluster_of(problem),
        rates=rates_of(problem),
        cost=cost_of(problem),
        layers=problem.model.layers,
        micro_batches=problem.batch.micro_batches,
        steady=objective == "steady",
        deep=True,
        tp=problem.pins.tp,
        dp=problem.pins.dp,
    )


def solve(
    problem: TableProblem,
    objective: Objective = "step",
    *,
    number: int = 0,
    ideal: bool = True,
    like: Plan | None = None,
    stop: Callable[[], bool] | None = None,
) -> Planned:
    """The best plan found, or the reason why there is none. `ideal`: whether the healthy problem is planned
    too, for the yardstick (NaN where it is not). `like`: the plan before a rate moved: plans with as many
    pipelines and groups of the same size are tried first, and no others where there is one."""
    if problem.model.times is not None:
        return solve_timed(problem, objective, number=number, ideal=ideal, stop=stop)
    task = task_of(problem, objective)
    wide = Wide(task, stop)
    pipelines, candidates, proved = _pipelines(task, wide, like)
    if pipelines is None:
        return Planned(plan=None, objective=objective, refusal=explain_infeasible(task), candidates=candidates)
    used = {device for pipeline in pipelines for stage in pipeline.stages for device in stage.devices}
    made = Plan(
        number=number,
        strategies=(strategy(pipelines, "model"),),
        micro_batch=problem.batch.size,
        global_batch=problem.batch.global_batch,
        idle=tuple(d.name for d in task.cluster.devices if d.name not in used),
    )
    steady, step = figures(made, task)
    value = steady if objective == "steady" else step
    bound = value if proved else min(wide.lower(value), value)
    reason = describe(made, task.rates)
    made = made.replace(
        prediction=Prediction(
            step_seconds=value, bound_seconds=bound, memory=memory_by_device(made, task.cost)
        ),
        reason=reason,
    )
    return Planned(
        plan=made,
        figures=Figures(
            steady=steady,
            step=step,
            bound=bound,
            gap=value / bound - 1 if bound else 0.0,
            ideal=yardstick(problem, objective, value, solve) if ideal else math.nan,
        ),
        objective=objective,
        reason=reason,
        candidates=candidates,
    )


def _pipelines(task: Task, wide: Wide, like: Plan | None) -> tuple[tuple[Pipeline, ...] | None, int, bool]:
    """The pipelines, what was looked at, and whether they are the best of all: up to EXACT_DEVICES devices
    every plan is enumerated, unless there are too many."""
    listed: list[tuple[Pipeline, ...] | None] = []
    candidates = 0
    if sum(kind.devices * len(kind.nodes) for kind in wide.kinds) <= EXACT_DEVICES and not _joined(task):
        exact = Exact(
            task.cluster,
            task.rates,
            task.cost,
            layers=task.layers,
            micro_batches=task.micro_batches,
            pins=Pins(tp=task.tp, dp=task.dp, deep=task.deep, steady=task.steady),
            budget=ENUMERATED,
        )
        best = next(iter(exact.run()), None)
        found = named(exact, best) if best is not None else None
        if exact.complete:
            return found, exact.candidates, isinstance(task.cost, TableCost)
        listed, candidates = [found], exact.candidates
    wide.run(form(like) if like is not None else None)
    finisher = Finisher(task)
    listed += [finisher.pipelines(found.pipelines) for found in wide.near()]
    made = [pipelines for pipelines in listed if pipelines is not None]
    best_made = min(made, key=lambda pipelines: _objective(pipelines, task), default=None)
    return best_made, candidates + wide.candidates, False


def _objective(pipelines: tuple[Pipeline, ...], task: Task) -> float:
    given = (task.cluster, task.rates, task.cost)
    if task.steady:
        return max(p.micro_batches * max(stage_seconds(p, *given)) for p in pipelines)
    return max(pipeline_seconds(p, *given) for p in pipelines)


def _joined(task: Task) -> bool:
    """Whether groups must cross nodes."""
    widest = max((len(node.devices) for node in task.cluster.nodes), default=0)
    return not task.cost.widths(widest)


def named(exact: Exact, combination: Combination) -> tuple[Pipeline, ...]:
    """The pipelines of a combination with devices taken in order."""
    free = [list(alike.devices) for alike in exact.alike]
    made = []
    for part, m in zip(combination.parts, combination.micro_batches, strict=True):
        shape = min(exact.shapes[part], key=lambda shape: float(shape.seconds[m - 1]))
        # The steady figure asks for the least slowest stage, as very many micro-batches would.
        layers_of = shape.layers(exact.layers, MANY if exact.pins.steady else m)
        stages = []
        start = 0
        for group, layers in zip(shape.groups, layers_of, strict=True):
            devices = tuple(free[index].pop(0) for index, _ in group.members)
            stages.append(Stage(start=start, stop=start + layers, devices=devices, shares=group.shares))
            start += layers
        made.append(Pipeline(stages=tuple(stages), micro_batches=m))
    return tuple(made)


def figures(plan: Plan, task: Task) -> tuple[float, float]:
    """(steady, step) of a plan."""
    given = (task.cluster, task.rates, task.cost)
    return steady_seconds(plan, *given), step_seconds(plan, *given)


class Near(Value, frozen=True, kw_only=True):
    """The plan that was chosen; the figure of the current plan at the problem's rates (None: it cannot run);
    bytes that move from it to the chosen one (None where the problem does not say what a layer weighs)."""

    planned: Planned
    current: float | None
    moved: int | None


def state_bytes(given: TableProblem) -> StateBytes | None:
    """What a problem says that its layers weigh: from `model.state`, else about, from the memory of a last
    stage (activations of one micro-batch are in it)."""
    if given.model.state is not None:
        return weights_of(problem_of(given).profile)
    memory = given.model.memory
    if memory is None:
        return None
    full = given.model.tp_full * MIB
    edge = SectionBytes(cut=round(memory.embedding_mib * full))
    layer = SectionBytes(cut=round(memory.layer_mib_by_stage[-1] * full))
    return StateBytes(layer=layer, embedding=edge, head=edge, holds="memory of a last stage")


def solve_near(given: TableProblem, objective: Objective, current: Plan) -> Near:
    """The plan to change to from `current`. Raises Invalid where that is of another model or batch."""
    _check(given, current)
    task = task_of(given, objective, current)
    usable = _allowed(given, task, current) and _usable(task, current)
    known = _value(current, task, objective) if usable else None
    if given.model.times is not None:
        planned = solve_timed(given, objective, current=current if usable else None)
    else:
        planned = _near_units(given, objective, current, task, usable)
    weighs, moved = state_bytes(given), None
    if weighs is not None and planned.plan is not None:
        moved = bytes_to_move(weighs.profile(given.model.layers), current, planned.plan)
    return Near(planned=planned, current=known, moved=moved)


def _check(given: TableProblem, current: Plan) -> None:
    layers = current.modules[0].pipelines[0].layers
    if layers != given.model.layers:
        refuse(f"the current plan has {layers} layers, the problem {given.model.layers}")
    if given.model.times is None and any(p.chunks > 1 for p in current.modules[0].pipelines):
        refuse("the current plan has interleaved stages, of which units know no time: give model.times")
    if current.global_batch != given.batch.global_batch:
        refuse(
            f"the current plan is for a global batch of {current.global_batch}, the problem for "
            f"{given.batch.global_batch}"
        )


def _allowed(given: TableProblem, task: Task, current: Plan) -> bool:
    """Whether the problem and its pins let the plan be one of its own."""
    pins, pipelines = given.pins, current.modules[0].pipelines
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    widths = {len(stage.devices) for stage in stages}
    if not widths <= set(task.cost.widths(max(widths))) or pins.dp not in (None, len(pipelines)):
        return False
    if given.batch.micro_batch not in (None, current.micro_batch):
        return False
    slow = {name.rpartition("/")[0] for name, rate in task.rates.items() if rate > 1}
    normal = {len(s.devices) for s in stages if not slow & {name.rpartition("/")[0] for name in s.devices}}
    return pins.tp is None or normal <= {pins.tp}


def _usable(task: Task, current: Plan) -> bool:
    """Whether its members live and have the memory."""
    room = {device.name: device.memory for device in task.cluster.devices}
    if any(name not in room or math.isinf(rate_of(task.rates, name)) for name in current.members):
        return False
    return all(size <= room[name] for name, size in memory_by_device(current, task.cost).items())


def _value(plan: Plan, task: Task, objective: Objective) -> float:
    steady, step = figures(plan, task)
    return steady if objective == "steady" else step


def _near_units(given: TableProblem, objective: Objective, current: Plan, task: Task, usable: bool) -> Planned:
    """The best plan, and the best one of the current plan's form, each on the devices that hold most of what
    they need; and the current plan itself."""
    best = solve(given, objective)
    if best.plan is None or best.figures is None:
        return best
    alike = solve(given, objective, ideal=False, like=current)
    weighs = state_bytes(given) or StateBytes(layer=SectionBytes(cut=MIB))  # unknown: layers count alike
    profile, forms = weighs.profile(given.model.layers), kinds(task.cluster, task.rates, task.cost)
    options = [current] if usable else []
    for plan in (best.plan, alike.plan):
        if plan is not None:
            pipelines = nearest(plan.modules[0].pipelines, forms, profile, current)
            pipelines = lined_up(pipelines, task.cluster, task.rates, profile, current)
            options.append(_with(plan, pipelines, task))
    limit = min(_value(option, task, objective) for option in options) * (1 + TOLERANCE)
    close = [option for option in options if _value(option, task, objective) <= limit]
    chosen = min(close, key=lambda option: bytes_to_move(profile, current, option))
    steady, step = figures(chosen, task)
    value = steady if objective == "steady" else step
    bound = min(best.figures.bound, value)
    prediction = Prediction(step_seconds=value, bound_seconds=bound, memory=memory_by_device(chosen, task.cost))
    found = msgspec.structs.replace(
        best.figures, steady=steady, step=step, bound=bound, gap=value / bound - 1 if bound else 0.0
    )
    reason = describe(chosen, task.rates)
    made = chosen.replace(prediction=prediction, reason=reason)
    return msgspec.structs.replace(best, plan=made, figures=found, reason=reason)


def _with(plan: Plan, pipelines: tuple[Pipeline, ...], task: Task) -> Plan:
    """The plan on other devices."""
    used = {name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices}
    idle = tuple(device.name for device in task.cluster.devices if device.name not in used)
    return plan.replace(strategies=(strategy(pipelines, plan.modules[0].module),), idle=idle)
