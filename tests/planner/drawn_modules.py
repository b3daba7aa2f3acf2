"""Steps of plans of two or three modules, drawn at random, and what each device launches in such a step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise, product
from typing import Literal

import msgspec
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.activations import whole
from elasticd_planner.layout.flows import FlowMessage, flow
from elasticd_planner.layout.gradient_buckets import Bucket, buckets
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.module_order import ModuleAct, module_order, sum_places
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece, batch_plan, short_batch_plan
from elasticd_planner.spec.item_batch import ItemBatch, SampleItem, item_batch
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Edge, ModulePlan, Plan, Stage, Strategy

from tests.planner.drawn_plans import SPEC, drawn_plan
from tests.planner.launch_order import Join, Launch, Operation

DEVICES = tuple(f"n{node}/{local}" for node in range(4) for local in range(4))
#: Blocks of the module with the loss, and of modules of items.
LAYERS, LAYERS_OF_ITEMS = 8, 4
LOSS = "language"


@dataclass(frozen=True)
class ModuleStep:
    """A plan of several modules, and the batches of a step by module."""

    plan: Plan
    batches: Mapping[str, BatchPlan | ItemBatch]

    def order(self, *, backward: bool = True) -> tuple[ModuleAct, ...]:
        return module_order(self.plan, self.batches, passes, backward=backward)

    def component(self, device: str) -> tuple[ModuleAct, ...]:
        """The order that a device carries out its part of."""
        return module_order(self.plan, self.batches, passes, device=device)

    @property
    def trained(self) -> list[str]:
        """Modules that are trained, in the sequence of their sums."""
        modules = sorted(self.plan.modules, key=lambda module: bool(module.items))
        return [module.module for module in modules if module.trainable]

    def sum_places(self, order: Sequence[ModuleAct], *, chained: bool) -> dict[str, dict[str, int]]:
        """By module and parameter."""
        modules = [(self.plan.view(name), self.spec(name)) for name in self.trained]
        return sum_places(order, modules, chained=chained)

    def spec(self, module: str) -> ModelSpec:
        return msgspec.structs.replace(SPEC, layers=(0,) * self.plan.view(module).pipelines[0].layers)

    def devices(self, act: ModuleAct) -> tuple[str, ...]:
        """Those of the TP group that an act is of."""
        return self._devices[act[:4]]

    def numbers(self, pipeline: int, lane: int) -> list[int]:
        """The rows of which a lane of the module with the loss has a part."""
        batch = self.batches[LOSS]
        assert isinstance(batch, BatchPlan)
        return [number for number, row in enumerate(batch.pipelines[pipeline]) if row.lanes[lane]]

    def together(self, act: ModuleAct) -> tuple[str, ...]:
        """The devices of all lanes that exchange keys with a lane in a pass of the module with the loss."""
        batch = self.batches.get(act.module)
        if not isinstance(batch, BatchPlan) or not batch.packed:
            return ()
        row = batch.pipelines[act.pipeline][self.numbers(act.pipeline, act.lane)[act.act.micro_batch]]
        lanes = (act._replace(lane=lane) for lane in row.connected(act.lane))
        return tuple(device for lane in lanes for device in self.devices(lane))

    @cached_property
    def _devices(self) -> dict[tuple[object, ...], tuple[str, ...]]:
        return {
            (module.module, p, j, s): stage.devices
            for module in self.plan.modules
            for p, pipeline in enumerate(module.pipelines)
            for j, lane in enumerate(pipeline.by_lane)
            for s, stage in enumerate(lane.stages)
        }


def drawn_step(seed: int, *, short: bool = False, packed: bool = False) -> ModuleStep:
    """TP groups of unlike widths, lanes, pipelines of any depth, interleaved or not; modules that share all
    devices, some, or none; slow stages; micro-batches without items, samples whose items are not counted.

    Args:
        seed: of the step.
        short: it has fewer samples than the plan takes, so that lanes may have none.
        packed: its sequences are packed, and cut over the lanes of a pipeline.
    """
    rng = random.Random(f"modules {seed}")
    free = rng.sample(DEVICES, rng.randint(3, len(DEVICES)))
    loss = drawn_plan(seed, layers=LAYERS, devices=free[: rng.randint(3, len(free))], carriers=False)
    listed = [_module(rng, loss.module, LOSS, times=rng.random() < 0.9)]
    for name in ("vision", "audio")[: rng.randint(1, 2)]:
        pool = rng.choice([loss.members, free, [each for each in free if each not in loss.members] or free])
        own = rng.sample(pool, rng.randint(1, len(pool)))
        if len(own) < 3:
            made = Plan.from_json(_single(own))
        else:
            made = drawn_plan(rng.randint(0, 10**9), layers=LAYERS_OF_ITEMS, devices=own, carriers=False)
        module = _module(rng, made.module, name, times=rng.random() < 0.9)
        ahead = rng.choice([1, 1, 2, 3, 9])
        listed.append(
            msgspec.structs.replace(
                module,
                items=f"{name} clips",
                ahead=ahead,
                lead=rng.randint(0, ahead),
                trainable=rng.random() < 0.8,
            )
        )
    listed = [_serving(seed, module, len(loss.pipelines)) if module.items else module for module in listed]
    micro_batch = rng.randint(1, 2)
    rng.shuffle(listed)
    edges = tuple(Edge(source=module.module, target=LOSS) for module in listed if module.items)
    plan = Plan(
        number=1,
        strategies=(Strategy(modules=tuple(listed), edges=edges),),
        micro_batch=micro_batch,
        global_batch=loss.global_batch * micro_batch,
    )
    view = plan.view(LOSS)
    if short:
        batch = short_batch_plan(view, 0, range(rng.randint(1, plan.global_batch)))
    elif packed:
        batch = drawn_rows(seed, view)
    else:
        batch = batch_plan(view, 0, range(plan.global_batch))
    batches: dict[str, BatchPlan | ItemBatch] = {LOSS: batch}
    for module in listed:
        if module.items:
            batches[module.module] = _items(rng, plan, module, batch)
    return ModuleStep(plan, batches)


def drawn_rows(seed: int, view: Plan) -> BatchPlan:
    """Rows of sequences that are cut over any lanes, in any shares; a lane may have no part of a row."""
    rng, sample, pipelines = random.Random(f"rows {seed}"), 0, []
    for pipeline in view.pipelines:
        rows = []
        for _ in range(pipeline.micro_batches):
            lanes: list[list[SequencePiece]] = [[] for _ in pipeline.by_lane]
            for _ in range(rng.randint(1, 3)):
                length = rng.randint(len(lanes) * 2, 60)
                among = rng.sample(range(len(lanes)), rng.randint(1, len(lanes)))
                pairs = (length + 1) // 2
                ends = [0, *sorted(rng.sample(range(1, pairs), len(among) - 1)), pairs]
                for lane, (start, stop) in zip(among, pairwise(ends), strict=True):
                    lanes[lane].append(SequencePiece(sample, length, start, stop))
                sample += 1
            rows.append(BatchRow(lanes=tuple(map(tuple, lanes))))
        pipelines.append(tuple(rows))
    return BatchPlan(step=0, plan=view.number, pipelines=tuple(pipelines), packed=True)


def _serving(seed: int, module: ModulePlan, pipelines: int) -> ModulePlan:
    """The module whose pipelines serve some pipelines of the module with the loss alone, or all."""
    rng = random.Random(f"{module.module} {seed}")
    chosen = [tuple(sorted(rng.sample(range(pipelines), rng.randint(1, pipelines)))) for _ in module.pipelines]
    if rng.random() < 0.5 or len({*chain(*chosen)}) < pipelines:
        return module
    served = zip(module.pipelines, chosen, strict=True)
    listed = tuple(msgspec.structs.replace(pipeline, serves=serves) for pipeline, serves in served)
    return msgspec.structs.replace(module, pipelines=listed)


def _single(devices: Sequence[str]) -> bytes:
    """One pipeline of one stage."""
    stage = Stage(start=0, stop=LAYERS_OF_ITEMS, devices=tuple(devices), shares=(1,) * len(devices))
    pipelines = [{"stages": [msgspec.to_builtins(stage)], "micro_batches": 1}]
    strategies = [{"modules": [{"module": "model", "pipelines": pipelines}]}]
    plan = {"number": 1, "strategies": strategies, "micro_batch": 1, "global_batch": 1, "type": "plan"}
    return msgspec.json.encode(plan)


def _module(rng: random.Random, module: ModulePlan, name: str, *, times: bool) -> ModulePlan:
    """The module with another name, and times of its passes, of which some are far slower."""

    def timed(stage: Stage) -> Stage:
        forward = rng.randint(20, 1500) * rng.choice([1, 1, 1, 3])
        return msgspec.structs.replace(stage, microseconds=(forward, rng.randint(1, 3) * forward))

    pipelines = tuple(
        msgspec.structs.replace(pipeline, stages=tuple(map(timed, pipeline.stages))) if times else pipeline
        for pipeline in module.pipelines
    )
    return msgspec.structs.replace(module, module=name, pipelines=pipelines)


def _items(rng: random.Random, plan: Plan, module: ModulePlan, batch: BatchPlan) -> ItemBatch:
    lanes = sum(len(pipeline.micro_batches_by_lane) for pipeline in module.pipelines)
    slowdown = [rng.choice([64, 64, 64, 192]) for _ in range(lanes)]
    if rng.random() < 0.2:
        return item_batch(plan, module.module, batch, None, None, slowdown)
    some = rng.choice([0.0, 0.6, 1.0])
    counts = {sample: rng.randint(0, 5) if rng.random() < some else 0 for sample in batch.samples()}
    rows = {
        SampleItem(sample, number): rng.randint(1, 2000)
        for sample, count in counts.items()
        for number in range(count)
    }
    return item_batch(plan, module.module, batch, counts, rows if rng.random() < 0.8 else None, slowdown)


#: When a rank launches the sum of a bucket: at its place in the order, or after its own passes.
Sums = Literal["placed", "own"]


def logs(
    step: ModuleStep, order: Sequence[ModuleAct], sums: Sums = "placed", *, component: bool = False
) -> dict[str, list[Launch | Join]]:
    """What each device launches by this order: a collective in each pass of several devices, and one of all
    lanes that exchange keys in it; messages of what the receiving devices lack, and sums of gradients. Two
    modules share communicators of the same members."""
    made: dict[str, list[Launch | Join]] = {device: [] for device in step.plan.members}
    waiting: dict[tuple[str, ModuleAct], list[str]] = defaultdict(list)  # messages that a pass needs
    after = _sums(step, order, sums, chained=component)
    summed: list[tuple[str, str]] = []
    sends: list[ModuleAct] = []
    receives: list[ModuleAct] = []

    def launch(place: int) -> None:
        for name, bucket, who in after[place]:
            for device in who:
                made[device].append(Launch(f"reduce {bucket.devices}", (Operation(name, bucket.devices),)))
                summed.append((device, name))

    launch(-1)  # of a device without a pass
    for index, act in enumerate(order):
        devices = step.devices(act)
        if act.act.what == "send":
            sends = [*(sends if index and order[index - 1].act.what == "send" else ()), act]
        elif act.act.what == "receive":
            receives = [*(receives if order[index - 1].act.what == "receive" else ()), act]
            if index + 1 == len(order) or order[index + 1].act.what != "receive":
                _message(made, waiting, step, sends, receives)
        elif act.act.what == "pass":
            for device in devices:
                made[device] += [Join(name) for name in waiting[device, act]]
            if members := step.together(act):
                row = step.numbers(act.pipeline, act.lane)[act.act.micro_batch]
                name = f"keys {act.pipeline} {act.stage} {act.act.kind} {act.act.chunk} row {row}: {members}"
                for device in devices:
                    launched = Launch(f"context {act[1]} {act[3]}", (Operation(name, members),))
                    made[device] += [launched, Join(name)]
            if len(devices) > 1:
                name = f"inside {act}"
                for device in devices:
                    made[device] += [Launch(f"tensor {devices}", (Operation(name, devices),)), Join(name)]
        launch(index)
    for device, name in summed:
        made[device].append(Join(name))
    return made


def _message(
    made: dict[str, list[Launch | Join]],
    waiting: dict[tuple[str, ModuleAct], list[str]],
    step: ModuleStep,
    sends: Sequence[ModuleAct],
    receives: Sequence[ModuleAct],
) -> None:
    """Both ends of a message. Lanes that pass a row together each have an end of their own."""
    ways: list[tuple[ModuleAct, ModuleAct, Operation]] = []
    for sender, receiver in product(sends, receives):
        if receiver.group is None and sender.lane != receiver.lane:
            continue
        for message in _forth(step.devices(sender), step.devices(receiver)):
            for to in message.destinations:
                name = f"{sender} to {receiver}: {message.source} {to}"
                waiting[to, pass_of(receiver)].append(name)
                ways.append((sender, receiver, Operation(name, (message.source, to))))
    use = "activation" if sends[0].act.kind == "forward" else "gradient"
    for end, (acts, number) in enumerate(((sends, 0), (receives, 1))):
        for act in acts:
            own: dict[str, list[Operation]] = defaultdict(list)
            for way in ways:
                if way[end] == act:
                    own[way[2].members[number]].append(way[2])
            for device, operations in own.items():
                if act.group is not None:  # a round of the mesh of an edge
                    made[device].append(Launch(f"items of {act.group.module}", tuple(operations)))
                    continue
                for operation in operations:
                    made[device].append(Launch(f"{use} {operation.members}", (operation,)))


def pass_of(act: ModuleAct) -> ModuleAct:
    """The pass that a message is of, at the end of this act."""
    return act._replace(act=act.act._replace(what="pass"), group=None)


@lru_cache(maxsize=1024)
def _forth(source: tuple[str, ...], target: tuple[str, ...]) -> tuple[FlowMessage, ...]:
    return flow(whole(source), whole(target)).forth


def _sums(
    step: ModuleStep, order: Sequence[ModuleAct], sums: Sums, *, chained: bool
) -> dict[int, list[tuple[str, Bucket, Sequence[str]]]]:
    """By place in the order the sums that are launched after it, and by which devices."""
    found: dict[int, list[tuple[str, Bucket, Sequence[str]]]] = defaultdict(list)
    places = step.sum_places(order, chained=chained)
    for module in step.trained:
        layouts = Layouts(step.spec(module), step.plan.view(module))
        listed = buckets(layouts, reductions(layouts), most=1 << 12)
        last: dict[str, int] = {}  # of each device the place of its last pass of the module
        for index, act in enumerate(order):
            if act.module == module and act.act.what == "pass":
                last |= dict.fromkeys(step.devices(act), index)
        for number, bucket in enumerate(listed):
            name, place = f"sum {number} of {module}", places[module][bucket.pieces[-1].name]
            if sums == "placed":
                found[place].append((name, bucket, bucket.devices))
                continue
            for device in bucket.devices:
                found[last.get(device, len(order) - 1)].append((name, bucket, (device,)))
    return found
