"""Recomputation only where memory demands it: a plan that recomputes everywhere, with it switched off again.

Where memory holds the layers wherever they are, no stage recomputes. Else, for each pipeline, stages are
switched off one at a time, the one that helps most first, layers being divided anew each time; then
micro-batches are dealt anew. Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from elasticd_planner.cost.memory import most_layers
from elasticd_planner.cost.model import stage_times
from elasticd_planner.numeric import EQUAL, Floats
from elasticd_planner.search.balance.layer_split import Terms, best_layers, split_layers
from elasticd_planner.search.balance.micro_batch_split import split_micro_batches
from elasticd_planner.search.task import Task, dealt, pipeline_signature
from elasticd_planner.spec.cluster import rate_of
from elasticd_planner.spec.plan import Pipeline, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveRecompute:
    """Switches recomputation off in pipelines of one task."""

    task: Task

    def pipelines(self, given: Sequence[Pipeline]) -> tuple[Pipeline, ...]:
        """The same groups and orders of stages, recomputing where it pays; never slower than given."""
        known: dict[object, Pipeline] = {}
        made = []
        for pipeline in given:
            key = (pipeline_signature(self.task, pipeline.stages), pipeline.micro_batches)
            if key not in known:
                known[key] = self._improved(pipeline)
            made.append(_named(known[key], pipeline))
        curves = [self._curve(pipeline) for pipeline in made]
        counts = split_micro_batches(curves, self.task.micro_batches)
        return tuple(made) if counts is None else dealt(made, counts)

    def _improved(self, pipeline: Pipeline) -> Pipeline:
        best, seconds = pipeline, self._seconds(pipeline)
        (plain,) = flagged([pipeline], on=False)
        terms = self._terms(plain.stages, pipeline.micro_batches)
        if all(term.most[0] > self.task.layers - len(terms) for term in terms):
            layers = self._layers(terms, pipeline.micro_batches, seconds)
            return pipeline if layers is None else plain.with_layers(layers)
        while True:
            options = []
            for index, stage in enumerate(best.stages):
                if stage.recompute:
                    option = self._without(best, index, seconds)
                    if option is not None:
                        options.append((self._seconds(option), index, option))
            if not options:
                return best
            found, _, option = min(options, key=lambda entry: (round(entry[0], 12), entry[1]))
            if found > seconds * (1 + EQUAL):
                return best
            best, seconds = option, found

    def _without(self, pipeline: Pipeline, index: int, limit: float) -> Pipeline | None:
        """The pipeline with one more stage that does not recompute; None: slower, or no room."""
        stages = list(pipeline.stages)
        stages[index] = msgspec.structs.replace(stages[index], recompute=False)
        layers = self._layers(self._terms(stages, pipeline.micro_batches), pipeline.micro_batches, limit)
        if layers is None:
            return None
        return msgspec.structs.replace(pipeline, stages=tuple(stages)).with_layers(layers)

    def _layers(self, terms: Sequence[Terms], micro_batches: int, limit: float) -> tuple[int, ...] | None:
        task = self.task
        timing = task.cost.timing
        if not timing.hidden:
            try:
                return split_layers(terms, task.layers, timing.counted(micro_batches))
            except ValueError:
                return None
        found = best_layers([terms], task.layers, micro_batches, limit, timing)[0]
        return found.layers if found is not None else None

    def _terms(self, stages: Sequence[Stage], micro_batches: int) -> list[Terms]:
        task, depth = self.task, len(stages)
        terms = []
        for position, stage in enumerate(stages):
            cost = task.cost.for_stage(stage)
            rates = [rate_of(task.rates, name) for name in stage.devices]
            group = cost.group(rates, stage.shares, task.cluster.reach(stage.devices))
            edges = {"first": position == 0, "last": position == depth - 1}
            hop = 0.0 if edges["last"] else task.hop(stage, stages[position + 1])
            memory = [task.cluster.memory[name] for name in stage.devices]
            flying = min(micro_batches, depth - position)
            most = most_layers(cost, stage.shares, memory, task.layers, **edges, in_flight=flying)
            terms.append(Terms.of(group, (most,) * depth, **edges, hop=hop))
        return terms

    def _seconds(self, pipeline: Pipeline) -> float:
        times = stage_times(pipeline, self.task.cluster, self.task.rates, self.task.cost)
        return float(self.task.cost.timing.seconds(times, pipeline.micro_batches))

    def _curve(self, pipeline: Pipeline) -> Floats:
        """Seconds by micro-batches; where more of them were in flight than memory is known to hold, never."""
        times = stage_times(pipeline, self.task.cluster, self.task.rates, self.task.cost)
        curve = self.task.cost.timing.curve(times, self.task.micro_batches)
        if pipeline.micro_batches < len(pipeline.stages):
            curve[pipeline.micro_batches :] = math.inf
        return curve


def _named(like: Pipeline, pipeline: Pipeline) -> Pipeline:
    """The layers and recomputation of one pipeline on the devices of another that is alike."""
    stages = tuple(
        msgspec.structs.replace(stage, devices=own.devices)
        for stage, own in zip(like.stages, pipeline.stages, strict=True)
    )
    return Pipeline(stages=stages, micro_batches=pipeline.micro_batches)


def flagged(pipelines: Sequence[Pipeline], *, on: bool) -> tuple[Pipeline, ...]:
    """The same pipelines with recomputation on, or off, in every stage."""

    def changed(stage: Stage) -> Stage:
        return msgspec.structs.replace(stage, recompute=on)

    return tuple(pipeline.with_stages(changed) for pipeline in pipelines)
