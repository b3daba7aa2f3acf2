"""The communication of one step of a plan: operators, devices, bytes by level of links, and seconds.

Every list comes from the functions that the runtime derives its own operations from: borders of stages
(`flows`), layouts around the cut modules of a TP group (`activations`), buckets of gradients
(`gradient_buckets`), and what ZeRO delivers (`gradient_reduction`).

What the host tells others (votes, headers of activations, sample ids) is not data, and not listed. Of what a TP
group exchanges, a model's description says how many sums of the activation a block makes, and no more: the
logits that a head gathers (`Column(gather=True)`) are not listed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from elasticd_planner.layout.activations import slices, terms, whole
from elasticd_planner.layout.channels import own_sets
from elasticd_planner.layout.flows import FlowMessage, TensorFlow, between, stage_flows
from elasticd_planner.layout.gradient_buckets import buckets
from elasticd_planner.layout.gradient_reduction import (
    Delivery,
    buffers_away,
    gradients_away,
    reductions,
    values_back,
)
from elasticd_planner.layout.layouts import Layouts, sections_of
from elasticd_planner.layout.link_traffic import Flow, Level, busiest_seconds, bytes_by_level
from elasticd_planner.layout.optimizer_sharding import divided
from elasticd_planner.layout.resolve import Cell, Communication, Operation, dual, resolve
from elasticd_planner.spec.box import Box, TensorLayout
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.model import ModelSpec, item_size
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.value import Value

#: What an operation is for. In a step: activations between stages and their gradients, what a module of items
#: makes for the module with the loss and the gradients of that, sums inside of TP
#: groups, rows that go to experts of other lanes and their gradients, sums of gradients, and what ZeRO and
#: replicas need besides. In a switch: parameters, state, buffers.
Purpose = Literal[
    "activations",
    "activation gradients",
    "items",
    "item gradients",
    "tensor parallelism",
    "keys of cut sequences",
    "expert rows",
    "expert gradients",
    "gradients",
    "gradients to keepers",
    "updated parameters",
    "buffers",
    "parameters",
    "optimizer state",
]


class PlanOperation(Value, frozen=True, kw_only=True):
    """Operations of one kind, for one purpose, on one set of devices."""

    purpose: Purpose
    operation: Operation
    devices: tuple[str, ...]  #: of a send the first is the source
    times: int  #: how many there are
    size: int  #: bytes of their tensors, all together, each tensor once
    bytes: dict[Level, int]  #: that go over links, by level
    seconds: float | None = None  #: one after the other; None: the cluster's links are not known


class Communications(Value, frozen=True, kw_only=True):
    """All operations of a step, or of a switch."""

    operations: tuple[PlanOperation, ...]
    #: Of the busiest device, by purpose. Purposes overlap in time: they have no sum.
    seconds: dict[Purpose, float] = msgspec.field(default_factory=dict)

    @property
    def purposes(self) -> tuple[Purpose, ...]:
        """Those that there are, in order."""
        return tuple(dict.fromkeys(operation.purpose for operation in self.operations))

    def bytes(self, purpose: Purpose | None = None) -> dict[Level, int]:
        """Bytes that go over links by level, for one purpose or for all."""
        total: dict[Level, int] = defaultdict(int)
        for operation in self.operations:
            if purpose in (None, operation.purpose):
                for level, size in operation.bytes.items():
                    total[level] += size
        return dict(total)


def explain_step(
    layouts: Layouts,
    cluster: Cluster | None = None,
    *,
    tokens: int = 0,
    boundary: float = 0.0,
    gradients: str | None = None,
    keys: Iterable[Flow] = (),
    experts: Iterable[tuple[Purpose, Flow]] = (),
    passes: Sequence[Mapping[int, int]] = (),
) -> Communications:
    """The communication of one step of a plan of one module, or of a view.

    Args:
        layouts: of the plan.
        cluster: its links; with it there are seconds.
        tokens: of a micro-batch.
        boundary: bytes that a token brings over a boundary of stages (0: one activation, by the model).
        gradients: the dtype that they are summed in, and of master weights; None: that of each parameter.
        keys: what lanes send each other for the sequences that they share (`batching.explained_keys`).
        experts: what they send to each other's experts (`cost.expert_messages`).
        passes: of each lane, over all pipelines, how many it has by their tokens; empty: the micro-batches that
            the plan says.
    """
    spec, plan = layouts.spec, layouts.plan
    one = spec.width * item_size(spec.dtype)
    trained, flows = plan.module.trainable, list[tuple[Purpose, Flow]]()
    for lane, counts in zip(
        plan.by_lane, passes or [{tokens: p.micro_batches} for p in plan.by_lane], strict=True
    ):
        for length, count in counts.items():
            for stage in lane.stages if one else ():
                inside = _inside(spec, lane, stage, length, trained=trained)
                flows += [("tensor parallelism", flow._replace(times=flow.times * count)) for flow in inside]
            if size := round(length * (boundary or one)):
                flows += _between(lane, size, count, trained=trained)
    flows += [("keys of cut sequences", flow) for flow in keys]
    flows += experts
    flows += _reduced(layouts, gradients)
    return listed(flows, cluster)


def listed(flows: Iterable[tuple[Purpose, Flow]], cluster: Cluster | None) -> Communications:
    """Operations of one kind and purpose on one set of devices as one, in an order of purposes."""
    together: dict[tuple[Purpose, Operation, tuple[str, ...]], list[Flow]] = defaultdict(list)
    by_purpose: dict[Purpose, list[Flow]] = defaultdict(list)
    for purpose, flow in flows:
        together[purpose, flow.step.operation, flow.step.devices].append(flow)
        by_purpose[purpose].append(flow)
    found = [
        PlanOperation(
            purpose=purpose,
            operation=operation,
            devices=devices,
            times=sum(flow.times for flow in own),
            size=sum(_elements(flow.step) * flow.itemsize * flow.times for flow in own),
            bytes=bytes_by_level(own, cluster),
            seconds=busiest_seconds(own, cluster) if cluster is not None else None,
        )
        for (purpose, operation, devices), own in together.items()
    ]
    order = [purpose for purpose in _ORDER if purpose in by_purpose]
    return Communications(
        operations=tuple(sorted(found, key=lambda operation: order.index(operation.purpose))),
        seconds={purpose: busiest_seconds(by_purpose[purpose], cluster) for purpose in order}
        if cluster
        else {},
    )


_ORDER: tuple[Purpose, ...] = get_args(Purpose)


def message(devices: Sequence[str], elements: int) -> Communication:
    """A send of so many elements from the first of some devices to the others."""
    cell = Cell(box=Box.whole((elements,)), sources=tuple(devices[:1]), needers=tuple(devices[1:]))
    return Communication(operation="send", devices=tuple(devices), cells=(cell,))


def _elements(step: Communication) -> int:
    return sum(cell.box.size for cell in step.cells)


# -- between stages --------------------------------------------------------------------------------------------


def _between(lane: Pipeline, size: int, passes: int, *, trained: bool) -> Iterator[tuple[Purpose, Flow]]:
    """Activations of `size` bytes, and their gradients, at each boundary of the stages of one lane."""
    for flow, turns in stage_flows(lane):
        yield from _both_ways(flow, ("activations", "activation gradients"), size, turns * passes, trained)


def _both_ways(
    flow: TensorFlow, purposes: tuple[Purpose, Purpose], size: int, times: int, trained: bool
) -> Iterator[tuple[Purpose, Flow]]:
    """A tensor of `size` bytes forth and, where something before the border is trained, its gradient back."""
    ways: list[tuple[Purpose, Sequence[FlowMessage]]] = [(purposes[0], flow.forth)]
    if trained:
        ways.append((purposes[1], flow.back))
    for purpose, sent in ways:
        for each in sent:
            yield purpose, Flow(message((each.source, *each.destinations), size), 1, times)


# -- between modules -------------------------------------------------------------------------------------------

#: The name of what goes between modules, beside the names of modules.
BETWEEN = "between modules"


class ModuleSizes(Value, frozen=True, kw_only=True):
    """The messages of a module in a step, besides its parameters."""

    tokens: int = 0  #: of a micro-batch; of a module of items its batch says it
    boundary: float = (
        0.0  #: bytes that a token brings over a boundary of stages (0: one activation, by the model)
    )
    output: float = 0.0  #: of a module of items: bytes that a row brings to the module with the loss
    gradients: str | None = None  #: the dtype that they are summed in; None: that of each parameter


def explain_modules(
    layouts: Layouts,
    cluster: Cluster | None,
    sizes: Mapping[str, ModuleSizes],
    batches: Mapping[str, ItemBatch],
) -> dict[str, Communications]:
    """The communication of one step of a plan of several modules: by module, and `BETWEEN` them.

    Args:
        layouts: of all modules.
        cluster: its links; with it there are seconds.
        sizes: of each module.
        batches: the items of the step, of each module of items.
    """
    found = {}
    for name, view in layouts.views.items():
        size, passes = sizes[name], list[Counter[int]]()
        if name in batches:
            lanes = [lane for pipeline in batches[name].pipelines for lane in pipeline]
            passes = [Counter(group.rows for group in groups) for groups in lanes]
        found[name] = explain_step(
            view,
            cluster,
            tokens=size.tokens,
            boundary=size.boundary,
            gradients=size.gradients,
            passes=passes,
        )
    flows = (flow for name, batch in batches.items() for flow in _of_items(layouts.plan, batch, sizes[name]))
    return found | {BETWEEN: listed(flows, cluster)}


def _of_items(plan: Plan, batch: ItemBatch, size: ModuleSizes) -> Iterator[tuple[Purpose, Flow]]:
    """The outputs of each group of items to the first stage that needs them, and gradients back."""
    source, target = plan.view(batch.module), plan.loss_view
    known: dict[tuple[int, int, int, int], TensorFlow] = {}
    for name, group in batch.walk():
        for lane in group.lanes:
            ends = name.pipeline, name.lane, group.pipeline, lane
            if ends not in known:
                near = source.pipelines[name.pipeline].by_lane[name.lane].stages[-1]
                far = target.pipelines[group.pipeline].by_lane[lane].stages[0]
                known[ends] = between(near.devices, far.devices)
            if count := round(group.rows * size.output):
                trained = source.module.trainable
                yield from _both_ways(known[ends], ("items", "item gradients"), count, 1, trained)


# -- inside of TP groups ---------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """From one layout to another in the forward pass, and back, as `Redistribution` of the runtime has it."""

    source: TensorLayout
    target: TensorLayout
    add: bool = False  #: members use the target in ways of their own

    def forward(self) -> tuple[Communication, ...]:
        return resolve(self.source, self.target)

    def backward(self) -> tuple[Communication, ...]:
        return resolve(dual(self.target, add=self.add), dual(self.source))


def _inside(spec: ModelSpec, pipeline: Pipeline, stage: Stage, tokens: int, *, trained: bool) -> Iterator[Flow]:
    """The exchange of one TP group for a micro-batch; one that is not trained has forward passes alone."""
    if len(stage.devices) == 1:
        return
    devices, item, sliced = stage.devices, item_size(spec.dtype), stage.sequence_parallel
    length, itemsize = (tokens, spec.width * item) if sliced else (tokens * spec.width, item)
    all_ = whole(devices, length)
    mine = slices(devices, divided(length, stage.shares)) if sliced else all_
    gathers, cuts = _Way(mine, all_), _Way(all_, mine)
    steps: list[tuple[Communication, int]] = []
    for section, count in _sections(spec, stage):
        here = mine if section.startswith("blocks.") else all_
        enters, leaves = _Way(here, all_, add=True), _Way(terms(devices, length), here)
        cut = any(parameter.cut is not None for parameter in spec.section(section))
        if section == "embed":  # ids have no gradient
            own = [*(leaves.forward() if cut else ()), *cuts.forward(), *(cuts.backward() if trained else ())]
        elif section == "head":  # its output is not summed
            own = [*gathers.forward()]
            own += [*(enters.backward() if cut else ()), *gathers.backward()] if trained else []
        else:
            own = [*_block(enters, leaves, stage, trained=trained)] * spec.collectives if cut else []
        steps += [(step, count) for step in own]
    # What goes to another stage is of all tokens.
    crossed = sum((start > 0) + (stop < pipeline.layers) for start, stop in stage.chunks)
    steps += [(step, crossed) for step in gathers.forward()]
    for step, count in steps:
        if step.operation != "keep" and count:
            yield Flow(step, itemsize, count)


def _block(enters: _Way, leaves: _Way, stage: Stage, *, trained: bool) -> Iterator[Communication]:
    """Around one part of a block that is cut, as its attention: forth and back."""
    forward = (*enters.forward(), *leaves.forward())
    yield from forward
    if not trained:
        return
    if stage.recompute:
        yield from forward
    if stage.sequence_parallel:  # of what a member gathered it keeps its slice alone, and gathers it again
        yield from enters.forward()
    yield from (*leaves.backward(), *enters.backward())


def _sections(spec: ModelSpec, stage: Stage) -> Iterator[tuple[str, int]]:
    """The sections of a stage, one block of each kind with the number of them."""
    kinds: dict[int, list[str]] = defaultdict(list)
    for section in sections_of(spec, stage):
        if section.startswith("blocks."):
            kinds[spec.layers[int(section.removeprefix("blocks."))]].append(section)
        else:
            yield section, 1
    for sections in kinds.values():
        yield sections[0], len(sections)


# -- gradients and state ---------------------------------------------------------------------------------------


def _reduced(layouts: Layouts, dtype: str | None) -> Iterator[tuple[Purpose, Flow]]:
    def summed(name: str) -> str:
        return dtype or layouts.rule(name).dtype

    own = own_sets(layouts)
    for each in buckets(layouts, reductions(layouts), summed):
        if each.devices not in own:  # terms to one device, and the sum back
            others = [device for device in each.devices if device != each.counter]
            sends = [*((device, each.counter) for device in others), (each.counter, *others)]
            for devices in sends:
                yield "gradients", Flow(message(devices, each.size), item_size(each.dtype))
            continue
        cell = Cell(box=Box.whole((each.size,)), sources=each.devices, needers=each.devices)
        step = Communication(operation="all_reduce", devices=each.devices, cells=(cell,))
        yield "gradients", Flow(step, item_size(each.dtype), two_level=True)
    for away in gradients_away(layouts):
        yield "gradients to keepers", _delivered(layouts, away, dtype)
    for back in values_back(layouts):
        yield "updated parameters", _delivered(layouts, back)
    for copies in buffers_away(layouts):
        yield "buffers", _delivered(layouts, copies)


def _delivered(layouts: Layouts, delivery: Delivery, dtype: str | None = None) -> Flow:
    elements = sum(box.size for _, box in delivery.pieces)
    step = message((delivery.source, *delivery.destinations), elements)
    return Flow(step, item_size(dtype or layouts.rule(delivery.pieces[0][0]).dtype))
