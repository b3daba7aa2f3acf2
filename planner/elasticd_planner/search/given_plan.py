"""A plan that a job gives instead of having it searched for: with what holds under every plan of the job, and
whether the devices can run it."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from elasticd_planner.problem import Answer, Problem, SearchSpace
from elasticd_planner.readable import readable
from elasticd_planner.search.recompute import flagged
from elasticd_planner.search.sequence_parallel import sliced
from elasticd_planner.spec.cluster import Cluster, rate_of
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.plan_summary import some


def answer(
    problem: Problem, as_given: Callable[[Plan], Plan | str], search: Callable[[Problem], Answer]
) -> Answer:
    """The answer where a job gives a plan: that plan, or one near to it where devices cannot run it.

    Args:
        problem: with the given plan.
        as_given: that plan with its prediction and reason, or why it cannot be.
        search: answers the problem without it.
    """
    assert problem.given is not None
    given = under(problem.given, problem.search_space)
    made = missing(given, problem) or as_given(given)
    if isinstance(made, Plan):
        return Answer(plan=made, candidates=1)
    wrong = f"the plan that the job gives cannot be: {made}"
    if problem.only_given:
        return Answer(plan=None, refusal=wrong, candidates=1)
    found = search(msgspec.structs.replace(problem, given=None, current=problem.current or given))
    if found.plan is None:
        return found
    return msgspec.structs.replace(found, plan=found.plan.replace(reason=f"{found.plan.reason}; {wrong}"))


def under(plan: Plan, space: SearchSpace) -> Plan:
    """The plan with what holds under every plan of a job: the layout of the optimizer's state, and where all
    stages have them, recomputation (of modules that are trained) and sequence parallelism."""
    modules = []
    for module in plan.modules:
        pipelines = module.pipelines
        if space.recompute == "always" and module.trainable:
            pipelines = flagged(pipelines, on=True)
        if space.sequence_parallel == "always":
            pipelines = sliced(pipelines, on=True)
        modules.append(msgspec.structs.replace(module, pipelines=pipelines))
    state = space.states[0]
    return plan.with_modules(modules, state=state, carriers=plan.carriers if state.zero else ())


def missing(plan: Plan, problem: Problem) -> str:
    """Why the devices of a problem cannot run a plan, in words; an empty string if they can."""
    there = {device.name for device in problem.cluster.devices}
    if away := [name for name in plan.members if name not in there]:
        return f"it needs {some(away)}, and the devices that are there are {some(sorted(there))}"
    if dead := [name for name in plan.members if math.isinf(rate_of(problem.rates, name))]:
        return f"{some(dead)} cannot be used: as good as dead by what was measured"
    return ""


def lacking(memory: dict[str, int], cluster: Cluster) -> str:
    """Which device has not the memory that a plan needs there, in words; an empty string if all have it."""
    short = {name: need - cluster.device(name).memory for name, need in memory.items()}
    name = max(short, key=lambda device: short[device])
    if short[name] <= 0:
        return ""
    return (
        f"does not fit: {name} would need {readable(memory[name])}, and has "
        f"{readable(cluster.device(name).memory)}"
    )
