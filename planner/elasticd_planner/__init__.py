"""The planner: the shared vocabulary (cluster, model, layout, plan, boxes), cost, search, detection, policy.

Pure: no torch, clock, IO or logging. Every decision is a function of its arguments. The public names below are
loaded when they are first used: whoever imports a module of the planner does not wait for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticd_planner.cost.model_profile import ModelProfile
    from elasticd_planner.layout.layouts import Layouts
    from elasticd_planner.problem import Objective, Problem
    from elasticd_planner.problem_files.file_format import TableProblem
    from elasticd_planner.spec.box import Box
    from elasticd_planner.spec.cluster import Cluster
    from elasticd_planner.spec.plan import Pipeline, Plan, Stage

__all__ = ["Box", "Cluster", "Layouts", "ModelProfile", "Pipeline", "Plan", "Problem", "Stage", "plan"]


def plan(problem: Problem | TableProblem | str | bytes, objective: Objective = "step") -> Plan:
    """The best plan found of a problem: a job's (`problem.Problem`), or one of the shared format (a value or
    its JSON). Its prediction has the objective, in seconds or units, and a proved lower bound of it.

    Raises `value.Invalid` with what is wrong with the problem, or with what does not fit and what would help.
    """
    from msgspec import structs

    from elasticd_planner.problem_files import solve
    from elasticd_planner.problem_files.file_format import TableProblem, load
    from elasticd_planner.search import planner
    from elasticd_planner.value import Invalid

    if isinstance(problem, str | bytes):
        problem = load(problem)
    if isinstance(problem, TableProblem):
        planned = solve.solve(problem, objective, ideal=False)
        found, refusal = planned.plan, planned.refusal
    else:
        answer = planner.plan(problem if objective == "step" else structs.replace(problem, objective=objective))
        found, refusal = answer.plan, answer.refusal
    if found is None:
        raise Invalid(refusal)
    return found


def __getattr__(name: str) -> Any:
    """All public names are loaded with the first of them that is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'elasticd_planner' has no attribute {name!r}")
    from elasticd_planner.cost.model_profile import ModelProfile
    from elasticd_planner.layout.layouts import Layouts
    from elasticd_planner.problem import Problem
    from elasticd_planner.spec.box import Box
    from elasticd_planner.spec.cluster import Cluster
    from elasticd_planner.spec.plan import Pipeline, Plan, Stage

    values = (Box, Cluster, Layouts, ModelProfile, Pipeline, Plan, Problem, Stage)
    globals().update({value.__name__: value for value in values})
    return globals()[name]
