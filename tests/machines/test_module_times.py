"""A plan of several modules is replaced by one of the same layout where the order of its passes, made with
times that were guessed, costs more than the switch; and then it stays."""

from __future__ import annotations

from typing import cast

import msgspec
from elasticd_planner.policy.policy import Decision
from elasticd_planner.problem import Answer
from elasticd_planner.spec.plan import Plan, Prediction
from hypothesis import given
from hypothesis import strategies as st

from elasticd.machines.job import replan
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, JobState
from elasticd.machines.job.state.parts.plan_requests import Basis, Deferred
from elasticd.machines.job.state.transaction import Transaction
from tests.planner.models import cluster
from tests.planner.test_module_measurements import BOTH, problem_of, profiles

PROBLEM = problem_of(BOTH, profiles(), cluster(1, 2))
SETTINGS = JobSettings()


def timed(plan: Plan, vision: int) -> Plan:
    """The plan with these times of passes of the encoders."""
    modules = []
    for module in plan.modules:
        pipelines = tuple(
            msgspec.structs.replace(
                pipeline,
                stages=tuple(
                    msgspec.structs.replace(
                        stage, microseconds=(vision, 2 * vision) if module.items else (9, 18)
                    )
                    for stage in pipeline.stages
                ),
            )
            for pipeline in module.pipelines
        )
        modules.append(msgspec.structs.replace(module, pipelines=pipelines))
    return plan.replace(strategies=(msgspec.structs.replace(plan.strategies[0], modules=tuple(modules)),))


def decided(running: Plan, new: Plan, now: float, then: float) -> Decision:
    """The decision on a plan of `then` seconds a step, where the running one takes `now`."""

    class Asked:
        """A turn that is only asked."""

        job = JobState(job="j", phase=JobPhase.RUNNING, since=0.0, plan=running)
        settings, nodes = SETTINGS, {}  # type: ignore[var-annotated]

    prediction = Prediction(step_seconds=then, bound_seconds=0.0, memory={})
    answer = Answer(plan=new.replace(prediction=prediction), current_seconds=now)
    basis = Basis(devices=PROBLEM.cluster.devices, rates={}, profile=PROBLEM.profile)
    found = Deferred(basis=basis, problem=PROBLEM, answer=answer, step=0)
    assert answer.plan is not None
    return replan._worth_it(cast(Transaction, Asked()), running, answer.plan, found)


@given(now=st.floats(0.01, 10), part=st.floats(0.5, 1.2), vision=st.integers(1, 10_000))
def test_times_alone_are_a_new_plan_where_that_pays_and_never_back(
    now: float, part: float, vision: int
) -> None:
    policy, then = SETTINGS.policy, now * part
    running, new = timed(BOTH, 500), timed(BOTH, vision)
    decision = decided(running, new, now, then)
    pays = (now - then) * policy.horizon_steps > policy.pause_seconds
    if vision == 500:
        assert not decision.replan
    elif now - then < policy.minimum_saving * now:
        assert (decision.replan, decision.reason) == (False, "it is the best plan still")
    elif pays:
        assert decision.replan
        assert decision.reason.startswith(
            "the same layout, with passes in the order of the times that they take"
        )
    # The new one takes `then` in its own order: the same answer is no reason, nor is the old order.
    assert not decided(new, new, then, then).replan
    if decision.replan:
        assert not decided(new, running, then, now).replan
