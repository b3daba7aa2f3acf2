"""Planning problems of the shared format solved: the best plan, or the one to change to from a running plan.

A problem in seconds and one in units go the same way: `convert` makes the search's problem of it, and the
planner plans that (`search.planner`). Figures are computed from the plan alone.
"""

from __future__ import annotations

import math

import msgspec

from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.pipeline_time import Steady
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Answer, Objective
from elasticd_planner.problem_files.convert import problem_of, state_bytes, task_of
from elasticd_planner.problem_files.file_format import SECONDS, UNITS, Figures, Planned, TableProblem
from elasticd_planner.search.module_cost import item_profile
from elasticd_planner.search.options import Watch, form
from elasticd_planner.search.planner import plan as search
from elasticd_planner.search.task import Task
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value, refuse


class Near(Value, frozen=True, kw_only=True):
    """The plan to change to from a running plan."""

    planned: Planned  # the chosen plan
    current: float | None  # the figure of the running plan at the problem's rates; None: it cannot run
    moved: int | None  # bytes that move between the two; None: the problem does not say what a layer weighs


def solve(
    problem: TableProblem,
    objective: Objective = "step",
    *,
    ideal: bool = True,
    like: Plan | None = None,
    watch: Watch | None = None,
) -> Planned:
    """The best plan found, or the reason why there is none.

    Args:
        problem: the problem of a file.
        objective: what is minimised.
        ideal: whether the healthy problem is planned too, for the yardstick (NaN where it is not).
        like: the plan before a rate moved: plans with as many pipelines and TP groups of the same size are
            tried first, and no others where there is one.
        watch: hears how far the search is, that of the healthy problem left out.
    """
    return _solved(problem, objective, ideal=ideal, like=like, watch=watch)[0]


def solve_from_current(
    problem: TableProblem, objective: Objective, current: Plan, watch: Watch | None = None
) -> Near:
    """The plan to change to from `current`: of near-equal plans the one that moves the fewest bytes. `watch`
    hears how far the search is.

    Raises:
        Invalid: `current` is of another model or batch.
    """
    _check(problem, current)
    planned, answer = _solved(problem, objective, current=current, watch=watch)
    allowed = problem.batch.micro_batch in (None, current.micro_batch)
    moved, weights = None, state_bytes(problem)
    if weights is not None and planned.plan is not None:
        views = (plan.view(plan.loss_module.module) for plan in (current, planned.plan))
        moved = bytes_to_move(weights.profile(problem.model.layers), *views)
        moved += _moved_items(problem, current, planned.plan)
    return Near(planned=planned, current=answer.current_seconds if allowed else None, moved=moved)


def _moved_items(problem: TableProblem, old: Plan, new: Plan) -> int:
    """Bytes of modules of items that move between two plans."""
    before = {module.module for module in old.modules}
    return sum(
        bytes_to_move(
            item_profile(module),
            old.view(module.name) if module.name in before else None,
            new.view(module.name),
        )
        for module in problem_of(problem).modules
    )


def _solved(
    problem: TableProblem,
    objective: Objective,
    *,
    ideal: bool = True,
    current: Plan | None = None,
    like: Plan | None = None,
    watch: Watch | None = None,
) -> tuple[Planned, Answer]:
    given = msgspec.structs.replace(problem_of(problem), current=current, objective=objective)
    shape = form(like) if like is not None else None
    answer = search(given, like=shape, watch=watch)
    plan, found = answer.plan, None
    if plan is not None and plan.prediction is not None:
        value = plan.prediction.step_seconds
        steady, step = value, value
        if not problem.modules:
            steady, step = figures(plan, task_of(problem, plan=plan))
        found = Figures(
            steady=steady,
            step=step,
            bound=plan.prediction.bound_seconds,
            gap=plan.prediction.gap,
            ideal=_yardstick(problem, objective, value) if ideal else math.nan,
        )
    planned = Planned(
        plan=plan,
        figures=found,
        objective=objective,
        unit=UNITS if problem.model.times is None else SECONDS,
        reason=plan.reason if plan is not None else "",
        refusal=answer.refusal,
        candidates=answer.candidates,
    )
    return planned, answer


def _check(problem: TableProblem, current: Plan) -> None:
    layers = current.loss_module.pipelines[0].layers
    if layers != problem.model.layers:
        refuse(f"the current plan has {layers} layers, the problem {problem.model.layers}")
    if problem.model.times is None and any(p.chunks > 1 for p in current.loss_module.pipelines):
        refuse("the current plan has interleaved stages, of which units know no time: give model.times")
    if current.global_batch != problem.batch.global_batch:
        refuse(
            f"the current plan is for a global batch of {current.global_batch}, the problem for "
            f"{problem.batch.global_batch}"
        )


def figures(plan: Plan, task: Task) -> tuple[float, float]:
    """(steady, step) of a plan; the task is that of a step."""
    steady = step_seconds(plan, task.cluster, task.rates, task.cost.timed(Steady()))
    return steady, task.seconds(plan)


def _yardstick(problem: TableProblem, objective: Objective, value: float) -> float:
    """Healthy x N / sum(1 / x); dead devices have no speed. `value`: of this problem's own plan."""
    names = [f"{node.name}/{i}" for node in problem.cluster.nodes for i in range(node.devices)]
    rates = [problem.rates.get(name, 1.0) for name in names]
    speed = sum(1 / rate for rate in rates if rate is not None)
    if not problem.rates or not speed:
        return value
    healthy = solve(msgspec.structs.replace(problem, rates={}), objective, ideal=False)
    if healthy.figures is None:
        return math.nan
    base = healthy.figures.steady if objective == "steady" else healthy.figures.step
    return base * len(rates) / speed
