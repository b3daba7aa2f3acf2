"""The true work of modelled devices on a model of several modules: each step's passes, in their order.

The items of a step are dealt by the same code as in workers, by slowdowns that lanes agree on after each step.
Ranks order the passes by the times that the plan expects; they are played in that order at the devices' true
speeds. Numbers of items are drawn by (seed, step) around their mean where devices have noise; without it all
samples have as near the mean as whole numbers can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from elasticd_planner.batching.item_dealing import ItemDealing, LaneSpeeds
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.layout.module_order import ModulePassTime
from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.problem import ModuleProblem, Problem
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.spec.batch import BatchPlan, batch_plan
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.item_batch import ItemBatch, SampleItem, item_batch
from elasticd_planner.spec.measurement import Measurement, ModuleMeasurement
from elasticd_planner.spec.plan import Plan

from elasticd.chaos.faults import Fault
from elasticd.simulator.devices.device_model import FORWARD, MOST_KEPT, TYPICAL, DeviceModel, StepTimes
from elasticd.simulator.devices.expert_loads import ExpertLoads
from elasticd.simulator.devices.plan_arrays import Compiled, compiled

#: By module what it takes in a step.
Batches = Mapping[str, BatchPlan | ItemBatch]


@dataclass(frozen=True, kw_only=True)
class ModulePart:
    """The work of each member of a module's view in a step, in the order of the view's members [members]."""

    items: Ints  # micro-batches, or items, of its lane
    tokens: Ints  # of them
    squares: Floats  # the sum of their squares
    work: Floats  # tokens x layers x share of the layer
    block: Floats  # seconds; and below
    embed: Floats
    head: Floats
    tensor: Floats  # in the TP group's collectives, waiting for slower members included

    @property
    def own(self) -> Floats:
        """Seconds of computation."""
        return self.block + self.embed + self.head


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """A step of all modules."""

    seconds: float
    parts: dict[str, ModulePart]
    last: dict[str, float]  # by member: when its last pass ends [s]


class ModuleTruth(DeviceModel):
    """The cluster as it is, of a job of several modules. A shift to so many items gives each sample as many of
    each kind, in the mean."""

    def __init__(
        self,
        cluster: Cluster,
        of: Callable[[int], ModelProfile],
        tokens: int,
        modules: tuple[ModuleProblem, ...],
        loss: str,
        *,
        global_batch: int,
        micro_batch: int,
        follow: bool,
        loads: ExpertLoads | None = None,
        seed: int,
        noise: float,
        overhead: float,
    ):
        """
        Args:
            cluster: as for `DeviceModel`, like `of`, `tokens`, `seed`, `noise`, `overhead`.
            of: of the module with the loss.
            tokens: of a sample.
            modules: those of items, with what a normal device takes.
            loss: the name of the module with the loss.
            global_batch: samples of a step.
            micro_batch: samples of a micro-batch.
            follow: whether the shares of lanes follow their speeds.
            loads: of the experts of the module with the loss, if it has some.
        """
        super().__init__(cluster, of, tokens, seed=seed, noise=noise, overhead=overhead)
        self.modules = self._planned_modules = modules
        self._loss, self._global_batch, self._micro_batch = loss, global_batch, micro_batch
        self._follow, self.loads, self._at = follow, loads, 0
        self._dealing: tuple[str, dict[str, ItemDealing]] = ("", {})  # under the plan of this digest
        self._parts: dict[str, ModulePart] = {}  # of the last step
        self._compiled: dict[tuple[str, str, int], Compiled] = {}
        self._known: dict[object, PlayedStep] = {}

    @property
    def sizes(self) -> tuple[float, ...]:
        """The tokens of a sample and its items of each module in the mean, which shifts change."""
        return self.tokens, *(module.items_a_sample for module in self.modules)

    def profile_of(self, module: str) -> ModelProfile:
        """The profile of a normal device for a module."""
        return next((each.profile for each in self.modules if each.name == module), self.profile)

    def strike(self, fault: Fault) -> None:
        """As `DeviceModel.strike`; a shift may be of the items."""
        if fault.kind == "shift" and fault.items:
            self.modules = tuple(
                msgspec.structs.replace(module, items_a_sample=fault.items) for module in self.modules
            )
        else:
            super().strike(fault)

    def overfull(self, plan: Plan) -> str:
        """A member that needs more memory than it has, or the empty string. It can only be one once samples are
        longer, or have more items, than was planned first."""
        before = (self._planned, *(module.items_a_sample for module in self._planned_modules))
        if all(now <= planned for now, planned in zip(self.sizes, before, strict=True)):
            return ""
        room = self.cluster.memory
        needed = self._costs(np.ones(len(self.names))).memory(plan)
        return next((name for name, size in needed.items() if size > room[name]), "")

    def step(self, plan: Plan, step: int) -> StepTimes:
        """The time of step number `step`, after which lanes agree on slowdowns."""
        self._at = step
        dealing = self._dealing_of(plan)
        speeds = {name: each.of(step) for name, each in dealing.items()}
        played = self._played(plan, step, speeds)
        self._parts = played.parts
        for name, each in dealing.items():
            ratios = dict.fromkeys(plan.members, 0.0)
            part, members = played.parts[name], plan.view(name).members
            for device, spent, tokens, squares in zip(
                members, part.own.tolist(), part.tokens.tolist(), part.squares.tolist(), strict=True
            ):
                ratios[device] = each.ratio(device, spent, tokens, squares)
            if self._follow:
                each.voted(step, list(ratios.values()))
        return self._step_times(plan, played)

    def typical(self, plan: Plan) -> float:
        """Seconds of a step in the mean over noise and batches, with the shares that lanes have now. With a
        load of experts they are those of the newest step."""
        digest, dealing = self._dealing
        speeds = {
            module.name: dealing[module.name].of(1 << 40) if digest == plan.digest else LaneSpeeds()
            for module in self.modules
        }
        if self.loads is not None:
            return self._played(plan, self._at, speeds).seconds
        key = (plan.digest, self.sizes, self.factors.tobytes(), tuple(speeds.values()))
        if key not in self._means:
            if len(self._means) > MOST_KEPT:
                self._means.clear()
            count = TYPICAL if self._noise else 1
            seconds = [self._played(plan, step, speeds).seconds for step in range(count)]
            self._means[key] = float(np.mean(seconds))
        return self._means[key]

    def measurements(self, plan: Plan, step: int, times: StepTimes) -> list[Measurement]:
        """The reports of the members of the last step, in rank order."""
        found, seconds = [], float(times.seconds)
        places = {
            name: {device: at for at, device in enumerate(plan.view(name).members)} for name in self._parts
        }
        reduce = dict(zip(plan.members, times.reduce.tolist(), strict=True))
        for device in plan.members:
            own = {name: at[device] for name, at in places.items() if device in at}
            spent = sum(
                float(part.own[at] + part.tensor[at])
                for name, at in own.items()
                for part in (self._parts[name],)
            )
            part, at = self._parts[self._loss], own.get(self._loss)
            found.append(
                Measurement(
                    device=device,
                    plan=plan.number,
                    step=step,
                    tokens=int(part.tokens[at]) if at is not None else 0,
                    block_seconds=float(part.block[at]) if at is not None else 0.0,
                    block_work=float(part.work[at]) if at is not None else 0.0,
                    embed_seconds=float(part.embed[at]) if at is not None else 0.0,
                    head_seconds=float(part.head[at]) if at is not None else 0.0,
                    tensor_seconds=float(part.tensor[at]) if at is not None else 0.0,
                    boundary_seconds=max(0.0, seconds - spent - reduce[device]),
                    reduce_seconds=reduce[device],
                    step_seconds=seconds,
                    micro_batches=int(part.items[at]) if at is not None else 0,
                    modules={
                        name: self._reported(name, at, device)
                        for name, at in own.items()
                        if name != self._loss and self._parts[name].items[at]
                    },
                )
            )
        if self.loads is None:
            return found
        return self.loads.reported(plan.view(self._loss), step, found)

    # -- one step

    def _reported(self, name: str, at: int, device: str) -> ModuleMeasurement:
        part = self._parts[name]
        return ModuleMeasurement(
            block_seconds=float(part.block[at]),
            block_work=float(part.work[at]),
            tokens=int(part.tokens[at]),
            items=int(part.items[at]),
            squares=float(part.squares[at]),
            embed_seconds=float(part.embed[at]),
            head_seconds=float(part.head[at]),
            tensor_seconds=float(part.tensor[at]),
            slowdown=self._dealing[1][name].slowdown_of(device) if self._follow else 0,
        )

    def _dealing_of(self, plan: Plan) -> dict[str, ItemDealing]:
        """By module how its items are dealt under a plan; another plan begins anew."""
        if self._dealing[0] != plan.digest:
            made = {module.name: ItemDealing(plan, module.name) for module in self.modules}
            self._dealing = plan.digest, made
        return self._dealing[1]

    def _costs(self, unit: Floats, load: ExpertLoad | None = None) -> ModuleCosts:
        """Of this cluster, each device so many times slower than normal, under a load of experts."""
        return ModuleCosts(
            Problem(
                cluster=self.cluster,
                profile=self.profile,
                global_batch=self._global_batch,
                micro_batch=self._micro_batch,
                rates=dict(zip(self.names, unit.tolist(), strict=True)),
                module=self._loss,
                modules=self.modules,
                experts=load,
            )
        )

    def _counts(self, module: ModuleProblem, number: int, step: int) -> list[int]:
        """The items of each sample of a step."""
        mean, samples = module.items_a_sample, self._global_batch
        if self._noise:
            rng = np.random.Generator(np.random.Philox(key=[self._seed, step], counter=[number + 1, 0, 0, 0]))
            return [int(count) for count in rng.poisson(mean, samples)]
        ends = [int(mean * sample) for sample in range(samples + 1)]
        return [after - before for before, after in pairwise(ends)]

    def _batches(self, plan: Plan, step: int, speeds: Mapping[str, LaneSpeeds]) -> Batches:
        batch = batch_plan(plan.view(self._loss), step, range(self._global_batch))
        found: dict[str, BatchPlan | ItemBatch] = {self._loss: batch}
        for number, module in enumerate(self.modules):
            counts = dict(enumerate(self._counts(module, number, step)))
            rows = {
                SampleItem(sample, item): max(1, round(module.rows_an_item))
                for sample, count in counts.items()
                for item in range(count)
            }
            found[module.name] = item_batch(plan, module.name, batch, counts, rows, *speeds[module.name])
        return found

    def _played(self, plan: Plan, step: int, speeds: Mapping[str, LaneSpeeds]) -> PlayedStep:
        """Plays a step. Without noise and experts all are alike under the same plan, sizes and speeds."""
        key = plan.digest, self.sizes, self.factors.tobytes(), tuple(speeds.values())
        alike, load = not self._noise and self.loads is None, None
        if alike and key in self._known:
            return self._known[key]
        if self.loads is not None:
            load = self.loads.load(step)
        unit, batches = self.factors * self.noise(step), self._batches(plan, step, speeds)
        costs = self._costs(unit, load)
        times = costs.played(plan, batches)
        last = _last(plan, times)
        seconds = max(last.values()) + costs.after_seconds(plan) + self._overhead
        parts = {name: self._part(plan, name, batch, unit, load) for name, batch in batches.items()}
        played = PlayedStep(seconds=seconds, parts=parts, last=last)
        if alike:
            if len(self._known) > MOST_KEPT:
                self._known.clear()
            self._known[key] = played
        return played

    def _part(
        self, plan: Plan, name: str, batch: BatchPlan | ItemBatch, unit: Floats, load: ExpertLoad | None
    ) -> ModulePart:
        """The work of the members of a module's view."""
        view, profile = plan.view(name), self.profile_of(name)
        key = plan.digest, name, self.tokens
        if key not in self._compiled:
            if len(self._compiled) > MOST_KEPT:
                self._compiled.clear()
            self._compiled[key] = compiled(view, profile, self.cluster, self._index)
        shape = self._compiled[key]
        items, tokens, squares = _sizes(view, batch, profile)
        lane = shape.pipeline
        speed = tokens[lane] * shape.fraction * unit[shape.devices]
        if not view.module.trainable:
            speed = speed * FORWARD
        block = speed * profile.block.seconds * shape.layers
        experts, waited = np.zeros(len(block)), np.zeros(len(shape.stage_start))
        if load is not None and self.loads is not None and name == self._loss:
            work, busiest = self.loads.work(view, shape, unit, load)
            experts, block = block * load.part * work, block * (1 - load.part)
            waited = tokens[lane][shape.stage_start] * profile.block.seconds * load.part * busiest
        embed = np.where(shape.first, speed * profile.embed.seconds, 0.0)
        head = np.where(shape.last, speed * profile.head.seconds, 0.0)
        own = block + embed + head
        slowest = (np.maximum.reduceat(own, shape.stage_start) + waited)[shape.stage_of]
        block, own = block + experts, own + experts
        return ModulePart(
            items=items[lane],
            tokens=tokens[lane],
            squares=squares[lane],
            work=tokens[lane] * shape.layers * shape.fraction,
            block=block,
            embed=embed,
            head=head,
            tensor=slowest - own + shape.waits[shape.stage_of] * items[lane],
        )

    def _step_times(self, plan: Plan, played: PlayedStep) -> StepTimes:
        """Of the module with the loss, by its members; the reduction by all members of the plan."""
        part, total = played.parts[self._loss], played.seconds - self._overhead
        return StepTimes(
            seconds=np.array(played.seconds),
            block=part.block,
            embed=part.embed,
            head=part.head,
            tensor=part.tensor,
            reduce=np.array([total - played.last.get(device, total) for device in plan.members]),
        )


def _last(plan: Plan, times: tuple[ModulePassTime, ...]) -> dict[str, float]:
    """By device the end of its last pass [s]."""
    devices = {
        (module.module, p, j, s): stage.devices
        for module in plan.modules
        for p, pipeline in enumerate(module.pipelines)
        for j, lane in enumerate(pipeline.by_lane)
        for s, stage in enumerate(lane.stages)
    }
    found: dict[str, float] = {}
    for time in times:
        for device in devices[time.act[:4]]:
            found[device] = max(found.get(device, 0.0), time.stop / 1e6)
    return found


def _sizes(view: Plan, batch: BatchPlan | ItemBatch, profile: ModelProfile) -> tuple[Ints, Ints, Floats]:
    """Items, or micro-batches, of each lane of a view; their tokens; the sum of the squares of these."""
    if isinstance(batch, ItemBatch):
        rows = [[group.rows for group in groups] for lanes in batch.pipelines for groups in lanes]
    else:
        rows = [[round(profile.tokens)] * lane.micro_batches for lane in view.by_lane]
    return (
        np.array([len(listed) for listed in rows]),
        np.array([sum(listed) for listed in rows]),
        np.array([float(sum(each * each for each in listed)) for listed in rows]),
    )
