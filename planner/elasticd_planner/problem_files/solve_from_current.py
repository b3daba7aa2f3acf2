"""Problems from files planned close to a plan that runs: of near-equal plans the one that moves least."""

from __future__ import annotations

import math

import msgspec

from elasticd_planner.cost.model import memory_by_device
from elasticd_planner.cost.table_cost import MIB
from elasticd_planner.grouping.node_partitions import kinds
from elasticd_planner.placement.state_bytes import SectionBytes, StateBytes, weights_of
from elasticd_planner.placement.state_movement import bytes_to_move, strategy
from elasticd_planner.placement.stay_close import nearest
from elasticd_planner.placement.tp_rank_order import lined_up
from elasticd_planner.problem_files.convert import problem_of, solve_timed
from elasticd_planner.problem_files.file_format import Objective, Planned, TableProblem
from elasticd_planner.problem_files.solve import figures, solve, task_of
from elasticd_planner.search.planner import TOLERANCE
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import node_of, rate_of
from elasticd_planner.spec.plan import Pipeline, Plan, Prediction
from elasticd_planner.spec.plan_summary import describe
from elasticd_planner.value import Value, refuse


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
    layers = current.pipelines[0].layers
    if layers != given.model.layers:
        refuse(f"the current plan has {layers} layers, the problem {given.model.layers}")
    if given.model.times is None and any(p.chunks > 1 for p in current.pipelines):
        refuse("the current plan has interleaved stages, of which units know no time: give model.times")
    if current.global_batch != given.batch.global_batch:
        refuse(
            f"the current plan is for a global batch of {current.global_batch}, the problem for "
            f"{given.batch.global_batch}"
        )


def _allowed(given: TableProblem, task: Task, current: Plan) -> bool:
    """Whether the problem and its pins let the plan be one of its own."""
    pins, pipelines = given.pins, current.pipelines
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    widths = {len(stage.devices) for stage in stages}
    if not widths <= set(task.cost.widths(max(widths))) or pins.dp not in (None, len(pipelines)):
        return False
    if given.batch.micro_batch not in (None, current.micro_batch):
        return False
    slow = {node_of(name) for name, rate in task.rates.items() if rate > 1}
    normal = {len(s.devices) for s in stages if not slow & {node_of(name) for name in s.devices}}
    return pins.tp is None or normal <= {pins.tp}


def _usable(task: Task, current: Plan) -> bool:
    """Whether its members live and have the memory."""
    room = task.cluster.memory
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
            pipelines = nearest(plan.pipelines, forms, profile, current)
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
