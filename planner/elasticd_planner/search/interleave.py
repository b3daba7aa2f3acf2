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
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Answer, Problem, with_current
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
    return plan.with_pipelines(flattened(plan.pipelines))


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

        made = tuple(map(improved, given.pipelines))
        return given if made == given.pipelines else given.with_pipelines(made)

    def seconds(self, pipeline: Pipeline) -> float:
        """Seconds of the pipeline by the schedule, before what comes after the pipelines."""
        return pipeline_seconds(pipeline, self.task.cluster, self.task.rates, self.task.cost)


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
            yield msgspec.structs.replace(with_current(problem, plain), search_space=search_space)


def best(problem: Problem, found: Sequence[Answer], tolerance: float) -> Answer:
    """The best answer that plans of plain stages lead to; of near-equal plans the one that moves least. (The
    steady state has no filling and draining, and nothing to gain.)

    Args:
        problem: with the running plan.
        found: answers, the first of them to the problem near that plan without its interleaved stages.
        tolerance: plans within this fraction of the best count as equal to it if there is a running one.
    """
    first, current = found[0], problem.current
    most = problem.search_space.interleave if problem.objective == "step" else 1
    running = current is not None and plain(current) is not current
    now = first.current_seconds
    if running and now is not None:
        assert current is not None
        now = _task(problem, current).seconds(current)
    plans = [one.plan for one in found if one.plan is not None and one.plan.prediction is not None]
    if not plans or most == 1:
        return msgspec.structs.replace(first, current_seconds=now)
    options = list[tuple[Plan, Task]]()
    for made in plans:
        task = _task(problem, made)
        options += [(made, task), (Interleaving(task=task, most=most).plan(made), task)]
        if running and current is not None and _is_chunked(made, current, most):
            options.append((made.replace(strategies=current.strategies), task))
    seconds = [task.seconds(option) for option, task in options]
    near = min(seconds) * (1 + (tolerance if current is not None else 0.0)) * (1 + EQUAL)

    def preference(at: int) -> tuple[int, float, int]:
        option, _ = options[at]
        moved = bytes_to_move(problem.profile, current, option) if current is not None else 0
        return moved, round(seconds[at], 12), at

    at = min((at for at, spent in enumerate(seconds) if spent <= near), key=preference)
    chosen, task = options[at]
    assert chosen.prediction is not None
    prediction = Prediction(
        step_seconds=seconds[at],
        bound_seconds=min(chosen.prediction.bound_seconds, seconds[at], _least(problem)),
        memory=memory_by_device(chosen, task.cost),
    )
    return msgspec.structs.replace(
        first,
        plan=chosen.replace(prediction=prediction, reason=describe(chosen, problem.rates, problem.packed)),
        current_seconds=now,
        candidates=sum(one.candidates for one in found) + len(options) - len(plans),
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
