"""The costs of the modules of a problem: seconds of a step by the order of its passes, and bytes by device.

A step is played as ranks carry it out (`layout.module_order`), with the mean number of items in each sample,
which are dealt to lanes as in a step. Messages have their time, of which that order knows nothing. What comes
after all passes is added. Where sequences are packed, those of a mean step are dealt to rows first
(`module_rows`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from elasticd_planner.cost.item_messages import kept_messages
from elasticd_planner.cost.memory import fits, memory_by_device
from elasticd_planner.cost.model import KnownCosts, after_seconds, stage_times, step_seconds
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.module_order import (
    Delay,
    ModulePassTime,
    Work,
    module_pass_times,
    step_microseconds,
)
from elasticd_planner.layout.module_passes import ROWS, ModulePass, PassGroup
from elasticd_planner.numeric import Floats
from elasticd_planner.problem import ModuleProblem, Problem
from elasticd_planner.search.item_flow import components
from elasticd_planner.search.module_rows import PackedRows
from elasticd_planner.spec.batch import BatchPlan, batch_plan
from elasticd_planner.spec.item_batch import GroupId, ItemBatch, SampleItem, item_batch
from elasticd_planner.spec.plan import NO_TIMES, ModulePlan, Pipeline, Plan, Stage

#: Of a mean step so many items are dealt one by one; where there are more, some of a sample go together.
MOST_ITEMS = 4096

#: Of a step with more passes of the module with the loss than these a part is played.
MOST_PASSES = 12_288

#: Devices times samples of a step of which all passes are played.
MOST_PLAYED = 1 << 16

#: The slowdown of a normal lane [64ths].
NORMAL = 64

#: A lane keeps at most so many items more than its part of those that are needed: items are whole.
UNEVEN_ITEMS = 1


def item_profile(module: ModuleProblem) -> ModelProfile:
    """The profile of a module whose micro-batches are single items. One that is not trained keeps nothing of
    its passes, and has no gradients and no optimizer state."""
    profile = module.profile.sized(module.rows_an_item)
    if module.trained:
        return profile
    kept = {"cut_activation": 0.0, "whole_activation": 0.0, "recomputed_activation": 0.0}
    sections = {
        name: msgspec.structs.replace(getattr(profile, name), **kept) for name in ("embed", "block", "head")
    }
    return msgspec.structs.replace(profile, gradient_factor=0.0, optimizer_factor=0.0, **sections)


def predicted_seconds(plan: Plan, problem: Problem) -> float:
    """Seconds of a mean step of a running plan of several modules: see `ModuleCosts.running_seconds`."""
    return ModuleCosts(problem).running_seconds(plan)


class ModuleCosts:
    """What the plans of one problem cost."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.modules = {module.name: module for module in problem.modules}
        self._profiles = {name: item_profile(module) for name, module in self.modules.items()}
        self._known: dict[tuple[str, float], KnownCosts] = defaultdict(KnownCosts)
        #: Of packed sequences; None: samples are padded.
        self.rows = PackedRows(problem) if problem.packed is not None else None

    def item_profile(self, name: str) -> ModelProfile:
        """The profile of a module of items, of micro-batches of one item."""
        return self._profiles[name]

    def cost(self, view: Plan) -> ProfileCost:
        """The cost of the module of a view, under that plan. Of a module of items a micro-batch is an item; of
        packed sequences it is a row of a lane, of the mean size. That of the module with the loss is of its
        experts' load, if the problem has one."""
        name, problem, load = view.module.module, self.problem, None
        if name in self.modules:
            profile = self._profiles[name]
        elif self.rows is not None:
            profile, load = problem.profile.sized(self.rows.row_tokens(view)), problem.experts
        else:
            profile, load = problem.profile, problem.experts
            if view.micro_batch != problem.micro_batch:
                profile = profile.sized(profile.tokens / problem.micro_batch * view.micro_batch)
        near = problem.cluster.within or problem.cluster.inside
        return ProfileCost(
            profile,
            state=view.state,
            pipelines=len(view.by_lane),
            members=len(view.members),
            near=near,
            load=load,
        ).under(view)

    def lane_seconds(self, view: Plan) -> list[tuple[Floats, Floats]]:
        """Seconds of a micro-batch, or of an item, on the stages of each lane: forward, backward [stage]."""
        name, cost = view.module.module, self.cost(view)
        known, module = self._known[name, cost.profile.tokens], self.modules.get(name)
        found = []
        for lane in view.by_lane:
            times = stage_times(lane, self.problem.cluster, self.problem.rates, cost, known)
            forward, backward = (
                part.reshape(lane.chunks, -1).sum(0) for part in (times.forward, times.backward)
            )
            trained = module is None or module.trained
            found.append((forward, backward if trained else np.zeros_like(backward)))
        return found

    def timed(self, plan: Plan) -> Plan:
        """The plan with the times of its passes. Lanes of a stage have one time: that of the slowest; where
        rows are packed, of the slowest if each took as long as a lane without slowdown."""
        listed = []
        for module in plan.modules:
            view = plan.view(module.module)
            scale = 1e6
            if module.items:
                scale *= ROWS / self.modules[module.module].rows_an_item
            elif self.rows is not None:
                scale *= ROWS / self.rows.row_tokens(view)
            lanes = iter(self.lane_seconds(view))
            pipelines = []
            for pipeline in module.pipelines:
                both = [next(lanes) for _ in pipeline.micro_batches_by_lane]
                if pipeline.packed:
                    both = [
                        (forward * NORMAL / lane.slowdown, backward * NORMAL / lane.slowdown)
                        for (forward, backward), lane in zip(both, pipeline.packed, strict=True)
                    ]
                forward, backward = (np.max(part, axis=0) * scale for part in zip(*both, strict=True))
                stages = tuple(
                    msgspec.structs.replace(stage, microseconds=(max(1, round(f)), round(b)))
                    for stage, f, b in zip(pipeline.stages, forward.tolist(), backward.tolist(), strict=True)
                )
                pipelines.append(msgspec.structs.replace(pipeline, stages=stages))
            rows = max(1, round(self.modules[module.module].rows_an_item)) if module.items else 0
            listed.append(msgspec.structs.replace(module, pipelines=tuple(pipelines), item_rows=rows))
        return plan.with_modules(listed)

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds of a mean step of a plan with times; they may be inf where they are above the limit. Of a
        large job a part is played, see `_part`."""
        part, share = self._part(plan)
        batches, after = self.batches(part, share), self.after_seconds(plan)
        most, delay = 1e6 * (limit - after) / self._each, self._delay(part, batches)
        end = step_microseconds(part, batches, passes, delay, work=self._work, limit=most)
        return end / 1e6 * self._each + after

    @property
    def _work(self) -> Work | None:
        """The work of a piece of a sequence, by which rows take their time; None: samples are padded."""
        return None if self.rows is None else self.rows.work

    @property
    def _each(self) -> float:
        """The samples of a step that one of those that are played stands for."""
        return 1.0 if self.rows is None else self.rows.each

    def running_seconds(self, plan: Plan) -> float:
        """Seconds of a mean step of a plan whose passes take what the profiles say now, in the order that the
        plan's own times make: those that it was made with, perhaps by a guess. A plan that says no times, as
        one that is read from an answer, has the order of those of now."""
        if all(stage.microseconds == NO_TIMES for _, _, stage in plan.walk()):
            return self.seconds(self.timed(plan))
        part, share = self._part(plan)
        batches = self.batches(part, share)
        end = step_microseconds(
            part, batches, passes, self._delay(part, batches), actual=self.timed(part), work=self._work
        )
        return end / 1e6 * self._each + self.after_seconds(plan)

    def pass_times(
        self, plan: Plan, batches: Mapping[str, BatchPlan | ItemBatch]
    ) -> tuple[ModulePassTime, ...]:
        """When the passes of a step of a plan with times run."""
        return module_pass_times(plan, batches, passes, delay=self._delay(plan, batches), work=self._work)

    def busy_seconds(
        self, plan: Plan, batches: Mapping[str, BatchPlan | ItemBatch] | None = None
    ) -> dict[str, list[list[float]]]:
        """Seconds that each stage computes in a step, by module and lane.

        Args:
            plan: of all modules, or of one alone.
            batches: of the step; None: of a mean step, whose items lanes share by their weights.
        """
        found = {}
        for module in plan.modules:
            counts: list[float] = [lane.micro_batches for lane in module.by_lane]
            if module.items and batches is None:
                each = self.step_items(self.modules[module.module]) / sum(counts)
                counts = [count * each for count in counts]
            elif not module.items and self.rows is not None:
                counts = self._row_counts(plan.view(module.module), batches)
            elif batches is not None and isinstance(batch := batches[module.module], ItemBatch):
                mean = self.modules[module.module].rows_an_item
                listed = [groups for pipeline in batch.pipelines for groups in pipeline]
                counts = [sum(group.rows for group in groups) / mean for groups in listed]
            times = self.lane_seconds(plan.view(module.module))
            found[module.module] = [
                ((forward + backward) * count).tolist()
                for (forward, backward), count in zip(times, counts, strict=True)
            ]
        return found

    def _row_counts(self, view: Plan, batches: Mapping[str, BatchPlan | ItemBatch] | None) -> list[float]:
        """The rows of mean size and work that each lane has in a step."""
        assert self.rows is not None
        mean, batch = self.rows.row_tokens(view), None if batches is None else batches[view.module.module]
        if not isinstance(batch, BatchPlan):
            return [work * self.rows.each / mean for work in self.rows.dealt(view).work]
        return [
            sum(self.rows.work(piece) for row in rows for piece in row.lanes[lane]) / mean
            for pipeline, rows in zip(view.pipelines, batch.pipelines, strict=True)
            for lane in range(len(pipeline.micro_batches_by_lane))
        ]

    def played(self, plan: Plan, batches: Mapping[str, BatchPlan | ItemBatch]) -> tuple[ModulePassTime, ...]:
        """When the passes of a step run, which ranks order by the plan's times, and which take what they cost
        here."""
        delay, actual = self._delay(plan, batches), self.timed(plan)
        return module_pass_times(plan, batches, passes, delay=delay, actual=actual, work=self._work)

    def _delay(self, plan: Plan, batches: Mapping[str, BatchPlan | ItemBatch]) -> Delay:
        """The time of messages [us]: between two stages of the module with the loss as its cost has it; of the
        rows of an item, or of their gradient, by the slowest link between both ends."""
        members, reach = plan.members, self.problem.cluster.reach
        cost = self.cost(plan.view(self.problem.module))
        items = {name: batch.pipelines for name, batch in batches.items() if isinstance(batch, ItemBatch)}
        known: dict[tuple[PassGroup, PassGroup], tuple[float, float]] = {}  # of any message, and of each row

        def timed(sender: PassGroup, receiver: PassGroup, module: str) -> tuple[float, float]:
            if {*receiver.devices} <= {*sender.devices}:  # all of it is there
                return 0.0, 0.0
            link = reach(members[device] for device in (*sender.devices, *receiver.devices))
            if module in items:
                size = self.modules[module].output_row_bytes
                return 1e6 * link.latency, 1e6 * size / link.bandwidth
            return 1e6 * cost.boundary(link) / 2, 0.0

        def delay(sender: ModulePass, receiver: ModulePass, name: GroupId | None) -> int:
            key = sender.group, receiver.group
            if key not in known:
                known[key] = timed(*key, sender.group.key[0] if name is None else name.module)
            once, each = known[key]
            if not each:
                return round(once)
            module, pipeline, lane, _ = sender.group.key
            number = sender.index
            if name is not None:
                module, pipeline, lane, number = name
            return round(once + each * items[module][pipeline][lane][number].rows)

        return delay

    def _part(self, plan: Plan) -> tuple[Plan, float]:
        """A part of a large plan that stands for all of it, and how many times more items its samples have, so
        that its lanes of items have their part of the work: each n-th pipeline by time, the slowest among them,
        with the lanes of items on its devices, and each n-th of the other lanes of items."""
        loss = plan.loss_module
        count = sum(2 * pipeline.micro_batches * len(pipeline.stages) for pipeline in loss.pipelines)
        every = math.ceil(count / MOST_PASSES)
        if every == 1:
            return plan, 1.0
        parts = components(plan)
        if len(parts) == 1:  # each pipeline stands for others, as where lanes serve all
            parts = [[p] for p in range(len(loss.pipelines))]
        chosen = _some(parts, loss.pipelines, every)
        kept = tuple(loss.pipelines[p] for p in chosen)
        number = {p: at for at, p in enumerate(chosen)}
        devices, inside = _devices(loss.pipelines), _devices(kept)
        whole = sum(pipeline.micro_batches for pipeline in loss.pipelines)
        samples = round(plan.global_batch * sum(pipeline.micro_batches for pipeline in kept) / whole)
        modules, part = [], 0.0
        for module in plan.modules:
            if not module.items:
                modules.append(msgspec.structs.replace(module, pipelines=kept))
                continue
            if len(parts) < len(loss.pipelines) and any(lane.serves for lane in module.pipelines):
                lanes = [
                    msgspec.structs.replace(lane, serves=tuple(number[p] for p in lane.serves))
                    for lane in module.pipelines
                    if {*lane.serves} <= {*chosen}
                ]
                part = max(part, samples / plan.global_batch)  # as many lanes as samples
                modules.append(msgspec.structs.replace(module, pipelines=tuple(lanes)))
                continue
            beside = [lane for lane in module.pipelines if _devices([lane]) & devices]
            others = [lane for lane in module.pipelines if not _devices([lane]) & devices]
            lanes = [lane for lane in beside if _devices([lane]) & inside] + others[::every]
            if not lanes:
                return plan, 1.0
            weights = [sum(lane.micro_batches for lane in listed) for listed in (lanes, module.pipelines)]
            part = max(part, weights[0] / weights[1])
            lanes = [msgspec.structs.replace(lane, serves=()) for lane in lanes]
            modules.append(msgspec.structs.replace(module, pipelines=tuple(lanes)))
        smaller = plan.with_modules(modules, global_batch=samples, carriers=(), idle=(), prediction=None)
        return smaller, part * plan.global_batch / samples

    def after_seconds(self, plan: Plan) -> float:
        """Seconds after all passes: each device reduces and updates the modules that it is in, one by one."""
        by_device: dict[str, float] = defaultdict(float)
        for module in plan.modules:
            view = plan.view(module.module)
            if module.trainable:
                seconds = after_seconds(view, self.problem.cluster, self.cost(view))
                for device in view.members:
                    by_device[device] += seconds
        return max(by_device.values(), default=0.0)

    def step_items(self, module: ModuleProblem) -> int:
        """The items of a mean step, of whole groups."""
        samples = self.problem.global_batch if self.rows is None else self.rows.packed.sequences
        items = module.items_a_sample * samples
        together = _together(items)
        return math.floor(items / together) * together

    def batches(
        self,
        plan: Plan,
        share: float = 1.0,
        items: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> dict[str, BatchPlan | ItemBatch]:
        """The samples and items of a step.

        Args:
            plan: that deals them.
            share: so many times the items in each sample that there are in the mean.
            items: of a step that is known the rows of the items of each sample, by what they are called. Those
                that are not there are of a mean step.
        """
        view, samples = plan.view(self.problem.module), plan.global_batch
        if self.rows is None:
            batch = batch_plan(view, 0, range(samples))
        else:
            batch = self.rows.dealt(view, samples / self.problem.global_batch).batch
            samples = self.rows.samples(samples / self.problem.global_batch)
        found: dict[str, BatchPlan | ItemBatch] = {self.problem.module: batch}
        for module in self.problem.modules:
            known = (items or {}).get(module.items)
            rows = self._mean_rows(samples, module, share) if known is None else known
            counts = {sample: len(each) for sample, each in enumerate(rows)}
            costs = {
                SampleItem(sample, n): row for sample, each in enumerate(rows) for n, row in enumerate(each)
            }
            found[module.name] = item_batch(plan, module.name, batch, counts, costs)
        return found

    @staticmethod
    def _mean_rows(samples: int, module: ModuleProblem, share: float) -> list[list[int]]:
        """Of each sample of a mean step the rows of its items. Where there are many some go together."""
        items = module.items_a_sample * share
        together = _together(items * samples)
        each = items / together
        ends = [math.floor(each * sample) for sample in range(samples + 1)]
        size = max(1, round(module.rows_an_item * together))
        return [[size] * (stop - start) for start, stop in pairwise(ends)]

    def kept_items(self, plan: Plan, module: ModulePlan) -> list[int]:
        """The most items that each lane of a module keeps, over all its pipelines: its part of the items of
        `ahead` micro-batches of each lane of the module with the loss, and of those under way there."""
        given, alive = self.modules[module.module], self._alive_samples(plan, module.ahead)
        weights = [lane.micro_batches for lane in module.by_lane]
        items = given.items_a_sample * sum(alive)
        kept = [math.ceil(items * weight / sum(weights)) + UNEVEN_ITEMS for weight in weights]
        if not any(lane.serves for lane in module.pipelines):
            return kept
        # A lane of few pipelines may have to take more of their items than it would of those of all.
        need = [samples * given.items_a_sample for samples in alive]
        have = [0] * len(need)
        for lane in module.by_lane:
            for p in lane.serves:
                have[p] += lane.micro_batches
        own = [sum(need[p] * lane.micro_batches / have[p] for p in lane.serves) for lane in module.by_lane]
        return [max(least, math.ceil(each) + UNEVEN_ITEMS) for least, each in zip(kept, own, strict=True)]

    def _alive_samples(self, plan: Plan, ahead: int) -> list[int]:
        """By pipeline of the module with the loss the samples of its micro-batches that are needed ahead, and
        of those under way."""
        view, samples = plan.view(self.problem.module), list[int]()
        for p, pipeline in enumerate(view.pipelines):
            counts = [
                min(lane.micro_batches, ahead + len(lane.stages) * lane.chunks) for lane in pipeline.by_lane
            ]
            if self.rows is None:
                samples.append(sum(counts) * plan.micro_batch)
            else:
                samples.append(math.ceil(self.rows.dealt(view).alive(p, max(counts)) * self.rows.each))
        return samples

    def roomy(self, plan: Plan) -> Plan:
        """The plan with as many tokens in its packed rows as memory leaves beside modules of items; as it is
        where that is no more."""
        assert self.rows is not None
        memory = self.problem.cluster.memory
        widest = self.rows.with_memory(plan, memory)
        for draft in (plan,) if widest is None else (widest, plan):  # wider rows have more items
            left, own = dict(memory), self.rows.cost.memory(draft.loss_view)
            for device, size in self.memory(draft).items():
                left[device] -= size - own.get(device, 0)
            longer = self.rows.with_memory(plan, left)
            if longer is not None and fits(self.memory(longer), self.problem.cluster):
                return longer
        return plan

    def memory(self, plan: Plan) -> dict[str, int]:
        """Bytes that each member needs, of all modules that it is in."""
        view = plan.view(self.problem.module)
        needed = memory_by_device(view, self.cost(view)) if self.rows is None else self.rows.cost.memory(view)
        needed |= {device: self._carried(plan) for device in plan.carriers}
        for module in plan.modules:
            if module.items:
                for device, size in self.item_memory(plan, module).items():
                    needed[device] = needed.get(device, self._fixed(module.module)) + size
        for module in plan.modules:
            if module.items:
                given = self.modules[module.module]
                needs = self._lane_samples(plan)
                items = [given.items_a_sample * samples for samples in needs]
                for device, kept in kept_messages(plan, module, items, self.output_bytes(given)).items():
                    needed[device] += math.ceil(kept)
        return needed

    def _lane_samples(self, plan: Plan) -> list[float]:
        """Samples of a mean step whose items each lane of the module with the loss takes."""
        view = plan.view(self.problem.module)
        if self.rows is None:
            return [lane.micro_batches * plan.micro_batch for lane in view.by_lane]
        return [pieces * self.rows.each for pieces in self.rows.dealt(view).pieces]

    def output_bytes(self, module: ModuleProblem) -> float:
        """Bytes of what a module gives of an item, in the mean."""
        return module.output_row_bytes * module.rows_an_item

    def _carried(self, plan: Plan) -> int:
        view = plan.view(self.problem.module)
        return memory_by_device(view.replace(carriers=plan.carriers), self.cost(view))[plan.carriers[0]]

    def _fixed(self, name: str) -> int:
        return math.ceil(self._profiles[name].fixed_bytes)

    def item_memory(
        self, plan: Plan, module: ModulePlan, kept_items: Sequence[int] | None = None
    ) -> dict[str, int]:
        """Bytes that a module of items adds on each of its devices: without `fixed_bytes`, which a device needs
        once, and with the outputs that are kept until their gradients come.

        Args:
            plan: of all modules.
            module: of items.
            kept_items: how many items each lane keeps; None: as `kept_items` says.
        """
        view = plan.view(module.module)
        cost, known = self.cost(view), dict[tuple[object, ...], int]()
        output_bytes = self.output_bytes(self.modules[module.module])
        found = {}
        for lane, kept in zip(module.by_lane, kept_items or self.kept_items(plan, module), strict=True):
            for index, stage in enumerate(lane.stages):
                for position, device in enumerate(stage.devices):
                    key = stage.chunks, stage.shares, position, stage.recompute, stage.sliced, index, kept
                    if key not in known:
                        known[key] = self._item_bytes(
                            cost.for_stage(stage), stage, position, lane, kept, output_bytes
                        )
                    found[device] = known[key]
        return found

    def _item_bytes(
        self, cost: ProfileCost, stage: Stage, position: int, lane: Pipeline, kept: int, output_bytes: float
    ) -> int:
        first, last = stage.start == 0, stage.chunks[-1][1] == lane.layers
        size = cost.memory(stage.layers, stage.shares, position, first=first, last=last, in_flight=kept)
        outputs = output_bytes * kept if last else 0.0
        return math.ceil(size - cost.profile.fixed_bytes + outputs)

    def busy(self, plan: Plan) -> dict[str, float]:
        """Seconds of a mean step that each device spends in passes, of all modules of a plan."""
        found: dict[str, float] = defaultdict(float)
        rows = self.busy_seconds(plan)
        for module in plan.modules:
            for lane, row in zip(module.by_lane, rows[module.module], strict=True):
                for stage, seconds in zip(lane.stages, row, strict=True):
                    for device in stage.devices:
                        found[device] += seconds
        return dict(found)

    def passes_seconds(self, view: Plan) -> float:
        """Seconds of a step of the module with the loss alone, without what comes after its passes."""
        if self.rows is not None:
            return self.rows.cost.seconds(view) - after_seconds(view, self.problem.cluster, self.rows.cost.cost)
        cost, cluster = self.cost(view), self.problem.cluster
        return step_seconds(view, cluster, self.problem.rates, cost) - after_seconds(view, cluster, cost)

    def item_work(self, module: ModuleProblem) -> float:
        """Seconds of an item on a normal device, of the TP size that wastes least."""
        profile = msgspec.structs.replace(self._profiles[module.name], overhead_seconds=0.0)
        seconds = ProfileCost(profile).bound((1.0,) * profile.share_units, 1) * profile.share_units
        return seconds if module.trained else seconds * profile.forward

    def state_bytes(self, module: ModuleProblem) -> float:
        """Bytes of a whole module: parameters, gradients and optimizer state."""
        profile = self._profiles[module.name]
        return profile.parameter_bytes * profile.state_factor


def _together(items: float) -> int:
    """The number of items of a sample that go together where a step has so many."""
    return max(1, math.ceil(items / MOST_ITEMS))


def _some(parts: Sequence[Sequence[int]], pipelines: Sequence[Pipeline], every: int) -> list[int]:
    """Every n-th of these parts, that of the slowest pipeline among them."""
    slowest = [max(_steady_microseconds(pipelines[p]) for p in part) for part in parts]
    order = sorted(range(len(parts)), key=lambda at: -slowest[at])
    return sorted(p for at in order[::every] for p in parts[at])


def _steady_microseconds(pipeline: Pipeline) -> int:
    """The time of a pipeline's micro-batches on its slowest stage."""
    return pipeline.micro_batches * max(sum(stage.microseconds) for stage in pipeline.stages)


def _devices(pipelines: Iterable[Pipeline]) -> set[str]:
    return {device for pipeline in pipelines for stage in pipeline.stages for device in stage.devices}
