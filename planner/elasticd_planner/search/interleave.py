"""Interleaved stages where they take less time: a plan's pipelines with their layers in several chunks.

The search makes plans of plain stages: the best one, and where stages may be interleaved the best ones with
more pipelines and with fewer, since deep ones cost less then. Here each of their pipelines keeps its groups,
their order, and how many layers each of them has; only which layers those are changes: with v chunks, filling
and draining take a v-th. In turn each micro-batch crosses v times as many boundaries, and more activations are
kept, so the schedule itself is asked (`cost.pipeline_seconds`), and memory. What a pipeline needs depends on no
other, so that each has the number of chunks that is best for it. Deterministic; what is equal has fewer chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from elasticd_planner.cost.memory import fits, memory_by_device, pipeline_memory
from elasticd_planner.cost.model import pipeline_seconds
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.state_movement import bytes_to_move, strategy
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.search.options import current_setting, listed, task_of
from elasticd_planner.search.task import Task, alive, pipeline_signature
from elasticd_planner.spec.plan import Pipeline, Plan, Prediction
from elasticd_planner.spec.plan_summary import describe


def flattened(pipelines: Sequence[Pipeline]) -> tuple[Pipeline, ...]:
    """The same groups and numbers of layers, each stage's layers in one run."""
    return tuple(
        pipeline.with_layers([stage.layers for stage in pipeline.stages]) if pipeline.chunks > 1 else pipeline
        for pipeline in pipelines
    )


def plain(plan: Plan) -> Plan:
    """The same plan without interleaved stages; itself where it has none."""
    if all(pipeline.chunks == 1 for pipeline in plan.pipelines):
        return plan
    module = plan.module
    return plan.replace(strategies=(strategy(flattened(module.pipelines), module.module),))


def chunked(pipeline: Pipeline, chunks: int) -> Iterator[Pipeline]:
    """A plain pipeline with its stages' layers in so many chunks, as even as they can be: what is left over in
    the first ones, or in the last. None where a stage has not so many layers, or nothing to take turns with."""
    layers = [stage.layers for stage in pipeline.stages]
    if len(layers) == 1 or min(layers) < chunks:
        return
    first = [n // chunks + (chunk < n % chunks) for chunk in range(chunks) for n in layers]
    last = [n // chunks + (chunk >= chunks - n % chunks) for chunk in range(chunks) for n in layers]
    for sizes in (first, last) if first != last else (first,):
        yield pipeline.with_layers(sizes)


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """Chunks for the pipelines of one task, `most` at most to a stage."""

    task: Task
    most: int
    _known: dict[object, tuple[int, int]] = field(default_factory=dict)

    def plan(self, given: Plan) -> Plan:
        """A plan of plain stages with those of its pipelines interleaved that are quicker so, and fit."""
        module = given.module
        cost = self.task.cost.under(given)

        def improved(pipeline: Pipeline) -> Pipeline:
            options = {
                (chunks, which): option
                for chunks in range(2, self.most + 1)
                for which, option in enumerate(chunked(pipeline, chunks))
            }
            key = (pipeline_signature(self.task, pipeline.stages), pipeline.micro_batches)
            if key not in self._known:
                best, chosen = self.seconds(pipeline), (1, 0)
                for at, option in options.items():
                    if fits(pipeline_memory(option, cost), self.task.cluster):
                        seconds = self.seconds(option)
                        if seconds < best * (1 - EQUAL):
                            best, chosen = seconds, at
                self._known[key] = chosen
            return options.get(self._known[key], pipeline)

        made = tuple(improved(pipeline) for pipeline in module.pipelines)
        return given if made == module.pipelines else given.replace(strategies=(strategy(made, module.module),))

    def seconds(self, pipeline: Pipeline) -> float:
        """Seconds of the pipeline by the schedule, before what comes after the pipelines."""
        return pipeline_seconds(pipeline, self.task.cluster, self.task.rates, self.task.cost)


def plain_problem(problem: Problem) -> Problem:
    """What is searched: the same problem, near the running plan without its interleaved stages."""
    if problem.current is None:
        return problem
    return msgspec.structs.replace(problem, current=plain(problem.current))


def other_numbers(problem: Problem, found: Answer) -> Iterator[Problem]:
    """What is searched besides, where stages may be interleaved: other numbers of pipelines near the best, and
    that of the running plan."""
    space = problem.search_space
    chunked = space.interleave > 1 and problem.objective == "step"
    if not chunked or space.fixed_dp is not None or found.plan is None:
        return
    count = len(found.plan.pipelines)
    most = min(len(alive(problem)), found.plan.global_batch // found.plan.micro_batch)
    numbers = {count // 2, count - 1, count + 1, count * 2}
    if problem.current is not None:
        numbers.add(len(problem.current.pipelines))
    for number in sorted(numbers - {count}):
        if 1 <= number <= most:
            search_space = msgspec.structs.replace(problem.search_space, fixed_dp=number)
            yield msgspec.structs.replace(plain_problem(problem), search_space=search_space)


def best(problem: Problem, found: Sequence[Answer], tolerance: float) -> Answer:
    """The best answer that plans of plain stages lead to, the first of them being that of `plain_problem`; of
    near-equal ones the one that moves least."""
    answers = [_answer(problem, one, tolerance) for one in found]
    first = answers[0]
    made = [(one.plan.prediction.step_seconds, one.plan) for one in answers if one.plan and one.plan.prediction]
    if len(made) < 2:
        return first
    near = min(made, key=lambda each: each[0])[0] * _slack(problem, tolerance)
    moves = [
        (_moved(problem, option), round(seconds, 12), at)
        for at, (seconds, option) in enumerate(made)
        if seconds <= near
    ]
    return msgspec.structs.replace(
        first, plan=made[min(moves)[2]][1], candidates=sum(one.candidates for one in answers)
    )


def _slack(problem: Problem, tolerance: float) -> float:
    return (1 + (tolerance if problem.current is not None else 0.0)) * (1 + EQUAL)


def _moved(problem: Problem, option: Plan) -> int:
    return bytes_to_move(problem.profile, problem.current, option) if problem.current is not None else 0


def _answer(problem: Problem, found: Answer, tolerance: float) -> Answer:
    """The answer to a problem whose stages may be interleaved, from the one of `plain_problem`: of near-equal
    plans the one that moves least. (The steady state has no filling and draining, and nothing to gain.)"""
    current, most = problem.current, problem.search_space.interleave
    most = most if problem.objective == "step" else 1
    running = current is not None and plain(current) is not current
    if not running and most == 1:
        return found
    now = found.current_seconds
    if running and now is not None:
        assert current is not None
        now = _task(problem, current).seconds(current)
    if found.plan is None or found.plan.prediction is None or most == 1:
        return msgspec.structs.replace(found, current_seconds=now)
    task = _task(problem, found.plan)
    options = [found.plan, Interleaving(task=task, most=most).plan(found.plan)]
    if running and current is not None and _is_chunked(found.plan, current, most):
        options.append(found.plan.replace(strategies=current.strategies))
    seconds = [task.seconds(option) for option in options]
    near = min(seconds) * _slack(problem, tolerance)
    moves = [_moved(problem, option) for option in options]
    close = [at for at, spent in enumerate(seconds) if spent <= near]
    chosen = min(close, key=lambda at: (moves[at], seconds[at]))
    prediction = Prediction(
        step_seconds=seconds[chosen],
        bound_seconds=min(found.plan.prediction.bound_seconds, seconds[chosen], _least(problem)),
        memory=memory_by_device(options[chosen], task.cost),
    )
    reason = describe(options[chosen], problem.rates)
    return msgspec.structs.replace(
        found,
        plan=options[chosen].replace(prediction=prediction, reason=reason),
        current_seconds=now,
        candidates=found.candidates + len(options) - 1,
    )


def _is_chunked(made: Plan, current: Plan, most: int) -> bool:
    """Whether a plan is what the running one is without its interleaved stages, which it may still have."""
    pipelines = current.pipelines
    allowed = max(pipeline.chunks for pipeline in pipelines) <= most
    return allowed and made.pipelines == flattened(pipelines)


def _task(problem: Problem, plan: Plan) -> Task:
    """The task of the setting that a plan was made under."""
    setting = current_setting(msgspec.structs.replace(problem, current=plan))
    assert setting is not None
    return task_of(setting.problem(problem))


def _least(problem: Problem) -> float:
    """Seconds that no plan can beat, interleaved or not: all work over all speed. What bounds plain stages
    besides is how they fill and drain."""
    tasks = (task_of(setting.problem(problem), hopeful=True) for setting in listed(problem))
    return min(task.work_bound for task in tasks)
