"""The plan: which device trains which part of the model, and the invariants that every plan keeps."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from elasticd_planner.numeric import Bools, Floats, Ints
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import StoredValue, Value, refuse

#: Version of the JSON form of a plan; a reader accepts its own and all older ones. A plan has the lowest
#: version that can say what it has, so that an older release refuses what it does not know, and nothing else.
#: 2: interleaved stages, or a 0.1 leader whose chaos shifted the data. 3: stages of several lanes, sequence
#: parallelism, devices in several modules, packed rows. 4: modules of items, times of passes, experts placed.
PLAN_VERSION = 4

#: Times of the passes of a stage that are not known.
NO_TIMES = (0, 0)

#: Blocks [start, stop).
Span = tuple[int, int]

#: The experts of one block that each device of a stage has, in order.
HeldExperts = tuple[tuple[int, ...], ...]

#: Of experts of one block that several devices have: the expert, and the part of its rows that each of these
#: takes, in the order of the devices. Parts are relative to their sum.
SplitExperts = tuple[tuple[int, ...], ...]


def spanned(spans: Iterable[Span]) -> str:
    """Blocks for people, the last ones included: "0-3, 6"."""
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans)


class Stage(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks [start, stop) on one or more TP groups, which are its lanes. Each lane has a copy of the blocks: a
    member holds the part of them that its share is of the shares of its lane."""

    start: int
    stop: int
    devices: tuple[str, ...]  # those of lane 0, then those of lane 1, ...
    shares: tuple[int, ...]  # an integer weight for each device
    recompute: bool = False  # a block's activations are made again in the backward pass instead of kept
    # Of an interleaved pipeline: one more chunk of blocks for each further turn of a micro-batch through the
    # stages.
    later: tuple[Span, ...] = ()
    lanes: tuple[int, ...] = ()  # how many devices each lane has; empty: there is one lane
    # Each member of a lane has a slice of the tokens between the cut modules of a block (Korthikanti et al.,
    # 2022). It says nothing of a lane of one.
    sequence_parallel: bool = False
    # [us] of a forward and of a backward pass of a micro-batch through all chunks; of a packed pipeline, of
    # 1,024 tokens of a row on a lane of slowdown 64; of a module of items, of 1,024 rows. Predicted, and for
    # the order of passes alone; (0, 0): not known.
    microseconds: tuple[int, int] = NO_TIMES
    # Of each block, chunk by chunk, the experts that each device has, in the order of `devices`. A device may
    # have any, or none; an expert may be on several. Empty of a block, or at all: each lane has all experts,
    # divided by its shares.
    experts: tuple[HeldExperts, ...] = ()
    # Of each block, likewise, in which parts the rows of experts on several devices are divided; of those that
    # are not named, or of no block at all: equally.
    splits: tuple[SplitExperts, ...] = ()
    # [64ths] of a normal device's time, of each device: where a lane has all experts its devices divide the
    # rows of experts on several of them by these in each pass anew. Empty: they divide them as `splits` say.
    slowdowns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        before = 0
        for start, stop in self.chunks:
            if not before <= start < stop:
                refuse(f"stage: layers [{start}, {stop}) must not be empty, and come after those before them")
            before = stop
        if not self.devices or len(self.devices) != len(self.shares):
            refuse(f"stage: {len(self.devices)} devices need as many shares, not {len(self.shares)}")
        if any(share < 1 for share in self.shares):
            refuse(f"stage: shares must be positive integers, not {self.shares}")
        if self.lanes and (sum(self.lanes) != len(self.devices) or min(self.lanes) < 1):
            refuse(f"stage: lanes of {self.lanes} devices must have one each and be {len(self.devices)} in all")
        if len(self.lanes) == 1:  # one way to write one lane
            msgspec.structs.force_setattr(self, "lanes", ())
        if min(self.microseconds) < 0:
            refuse(f"stage: microseconds of its passes must not be negative, not {self.microseconds}")
        if self.microseconds == NO_TIMES:  # the one that is left out of JSON
            msgspec.structs.force_setattr(self, "microseconds", NO_TIMES)
        self._check_experts()

    def _check_experts(self) -> None:
        if not any(self.experts):  # one way to write that none are placed
            msgspec.structs.force_setattr(self, "experts", ())
        if not any(self.splits):
            msgspec.structs.force_setattr(self, "splits", ())
        if self.splits and len(self.splits) != len(self.experts):
            refuse(f"stage: splits must say of each of its {self.layers} blocks how its experts are divided")
        if not self.experts:
            msgspec.structs.force_setattr(self, "slowdowns", ())
            return
        if self.slowdowns and (len(self.slowdowns) != len(self.devices) or min(self.slowdowns) < 1):
            refuse(f"stage: slowdowns must be one of each device, from 1, not {self.slowdowns}")
        if len(self.experts) != self.layers:
            refuse(f"stage: experts must say of each of its {self.layers} blocks who has which")
        for block, held in zip(self._blocks, self.experts, strict=True):
            if held and len(held) != len(self.devices):
                refuse(
                    f"stage: experts of block {block} must be those of each of its {len(self.devices)} "
                    f"devices, not of {len(held)}"
                )
            for device, own in zip(self.devices, held, strict=False):
                twice = next((expert for expert, count in Counter(own).items() if count > 1), None)
                if twice is not None:
                    refuse(f"stage: {device} has expert {twice} of block {block} twice")
                if own != tuple(sorted(own)) or (own and own[0] < 0):
                    refuse(
                        f"stage: the experts of block {block} on {device} must be in order, from 0, not {own}"
                    )
            divided = [split[:1] for split in self.splits_of(block)]
            if len({*divided}) < len(divided):
                refuse(f"stage: block {block} has two splits of one expert: give one for each")
            for split in self.splits_of(block):
                _check_split(split, held, block)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of devices of each lane."""
        return self.lanes or (len(self.devices),)

    @property
    def by_lane(self) -> tuple[Stage, ...]:
        """A stage of a single lane for each lane, of its devices alone."""
        if not self.lanes:
            return (self,)
        return tuple(
            msgspec.structs.replace(
                self,
                devices=self.devices[first:stop],
                shares=self.shares[first:stop],
                lanes=(),
                experts=tuple(held[first:stop] for held in self.experts),
                splits=tuple(
                    _splits_on(splits, held, first, stop)
                    for splits, held in zip(self.splits, self.experts, strict=False)
                ),
                slowdowns=self.slowdowns[first:stop],
            )
            for first, stop in pairwise(accumulate(self.lanes, initial=0))
        )

    @property
    def chunks(self) -> tuple[Span, ...]:
        """Its blocks, a span for each turn of a micro-batch through the pipeline."""
        return ((self.start, self.stop), *self.later)

    @property
    def layers(self) -> int:
        """The number of its blocks, in all chunks."""
        return sum(stop - start for start, stop in self.chunks)

    def experts_of(self, block: int) -> HeldExperts:
        """The experts of a block of the model that each of its devices has; empty: none are placed."""
        return self.experts[self._blocks.index(block)] if self.experts else ()

    def splits_of(self, block: int) -> SplitExperts:
        """In which parts rows of experts of a block are divided, where these are not equal."""
        return self.splits[self._blocks.index(block)] if self.splits else ()

    @property
    def _blocks(self) -> list[int]:
        return [block for chunk in self.chunks for block in range(*chunk)]

    @property
    def shared_blocks(self) -> tuple[int, ...]:
        """The blocks of the model of which a lane lacks experts that other lanes have."""
        ends = [0, *accumulate(self.widths)]
        found = []
        for block, held in zip(self._blocks, self.experts, strict=False):
            lanes = [{*chain.from_iterable(held[first:stop])} for first, stop in pairwise(ends)]
            if any(lane != lanes[0] for lane in lanes):
                found.append(block)
        return tuple(found)

    @property
    def named(self) -> str:
        """Its blocks for people: "0-3", or "0-1, 4-5" of two chunks."""
        return spanned(self.chunks)

    @property
    def sliced(self) -> bool:
        """True if its members have slices of the tokens between the cut modules of a block."""
        return self.sequence_parallel and max(self.widths) > 1

    def fraction(self, position: int) -> float:
        """The part of each layer that the device at `position` holds."""
        ends = [0, *accumulate(self.widths)]
        lane = bisect_right(ends, position) - 1
        return self.shares[position] / sum(self.shares[ends[lane] : ends[lane + 1]])


def _check_split(split: tuple[int, ...], held: HeldExperts, block: int) -> None:
    """Refuses what does not divide the rows of an expert of a block among its devices."""
    holders = sum(split[0] in own for own in held) if split else 0
    if holders < 2 or len(split) != 1 + holders or min(split) < 0 or not any(split[1:]):
        refuse(
            f"stage: a split of block {block} must be an expert that several devices have, and for each of "
            f"them a part of its rows, at least one above 0, not {split}"
        )


def _splits_on(splits: SplitExperts, held: HeldExperts, first: int, stop: int) -> SplitExperts:
    """The parts that devices [first, stop) take, as far as several of them have an expert."""
    found = []
    for expert, *parts in splits:
        places = [place for place, own in enumerate(held) if expert in own]
        own_parts = [part for place, part in zip(places, parts, strict=True) if first <= place < stop]
        if len(own_parts) > 1 and any(own_parts):
            found.append((expert, *own_parts))
    return tuple(found)


class PackedLane(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a step's packed rows that a lane takes."""

    capacity: int  # [tokens] of a row that its memory holds
    # [64ths] of a normal lane's time that it takes for the same work, by which it gets its first shares.
    slowdown: int = 64

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.slowdown < 1:
            refuse(f"packed lane: capacity and slowdown must be at least 1, not {self}")


class Pipeline(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Stages in order, and how many micro-batches of a step pass through them: once, or in an interleaved
    pipeline once for each chunk that its stages have (Narayanan et al., 2021, section 2.2).

    All stages have the same number of lanes. Lane j of a stage hands its activations on to lane j of the next
    one, so that lanes are data-parallel copies of the pipeline with the same borders."""

    stages: tuple[Stage, ...]
    micro_batches: int  # of all lanes; of a packed plan the rows that are expected
    rows: tuple[int, ...] = ()  # how many micro-batches each lane has; empty: there is one lane
    packed: tuple[PackedLane, ...] = ()  # of a packed plan: each lane's; empty: the plan is none
    # Of a module of items: the pipelines of the module with the loss whose items it takes; empty: all.
    serves: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].start != 0:
            refuse("pipeline: the first stage must start at layer 0")
        if len({len(stage.chunks) for stage in self.stages}) != 1:
            refuse("pipeline: its stages are interleaved, so that all need the same number of chunks")
        if self.chunks > 1 and len(self.stages) == 1:
            refuse("pipeline: a single stage has nothing to interleave with; give it one chunk")
        for before, after in pairwise(self.spans):
            if before[1] != after[0]:
                refuse(f"pipeline: a stage ends at layer {before[1]}, the next starts at {after[0]}")
        if self.micro_batches < 1:
            refuse(f"pipeline: micro_batches must be at least 1, not {self.micro_batches}")
        self._check_lanes()

    @property
    def shares_experts(self) -> bool:
        """Returns True if a lane of a stage lacks experts that other lanes have."""
        return any(stage.shared_blocks for stage in self.stages)

    def _check_lanes(self) -> None:
        if self.packed and len(self.packed) != len(self.micro_batches_by_lane):
            refuse(f"pipeline: {len(self.micro_batches_by_lane)} lanes, and {len(self.packed)} are packed")
        if not self.rows and not any(stage.lanes for stage in self.stages):
            return
        counts = [len(stage.widths) for stage in self.stages]
        lanes = counts[0]
        if len({*counts}) != 1:
            refuse(
                "pipeline: lane j of a stage hands on to lane j of the next, so that all stages need the same "
                f"number of lanes, not {', '.join(map(str, counts))}"
            )
        if self.micro_batches < lanes:
            refuse(
                f"pipeline: {lanes} lanes need a micro-batch each, and its part of the batch is "
                f"{self.micro_batches}: give it fewer lanes, or make micro-batches smaller"
            )
        given = self.micro_batches_by_lane
        if len(given) != lanes or sum(given) != self.micro_batches or min(given) < 1:
            refuse(
                f"pipeline: rows {self.rows} must say how many of its {self.micro_batches} micro-batches each "
                f"of {lanes} lane{'s' if lanes > 1 else ''} has, at least 1"
            )
        if len(self.rows) == 1:
            msgspec.structs.force_setattr(self, "rows", ())

    @classmethod
    def from_layers(
        cls,
        groups: Iterable[tuple[tuple[str, ...], tuple[int, ...]]],
        layers: Sequence[int],
        micro_batches: int,
    ) -> Pipeline:
        """Stages of these TP groups (devices and their shares) in order, with so many layers each."""
        stages = tuple(
            Stage(start=at, stop=at + 1, devices=devices, shares=shares)
            for at, (devices, shares) in enumerate(groups)
        )
        return cls(stages=stages, micro_batches=micro_batches).with_layers(layers)

    def with_layers(self, layers: Sequence[int]) -> Pipeline:
        """The same TP groups with other layers: a number for each chunk of layers, in the order in which a
        micro-batch meets them, so that as many numbers as stages make a plain pipeline. Times of passes and
        placed experts were those of the layers before: there are none any more."""
        spans, depth = tuple(pairwise(accumulate(layers, initial=0))), len(self.stages)
        stages = []
        for at, stage in enumerate(self.stages):
            (start, stop), *later = spans[at::depth]
            layers_of = {"start": start, "stop": stop, "later": tuple(later)}
            stages.append(
                msgspec.structs.replace(stage, microseconds=NO_TIMES, experts=(), splits=(), **layers_of)
            )
        return msgspec.structs.replace(self, stages=tuple(stages))

    def with_stages(self, change: Callable[[Stage], Stage]) -> Pipeline:
        """The pipeline with each stage changed."""
        return msgspec.structs.replace(self, stages=tuple(map(change, self.stages)))

    @property
    def untimed(self) -> Pipeline:
        """The pipeline without the times of its passes."""
        return self.with_stages(lambda stage: msgspec.structs.replace(stage, microseconds=NO_TIMES))

    @property
    def micro_batches_by_lane(self) -> tuple[int, ...]:
        """The number of a step's micro-batches that each lane has."""
        return self.rows or (self.micro_batches,)

    @property
    def by_lane(self) -> tuple[Pipeline, ...]:
        """A pipeline of a single lane for each lane: its part of each stage, and its micro-batches."""
        if not self.rows:
            return (self,)
        stages = zip(*(stage.by_lane for stage in self.stages), strict=True)
        packed = [self.packed[j : j + 1] for j in range(len(self.rows))]
        return tuple(
            Pipeline(stages=own, micro_batches=count, packed=lane, serves=self.serves)
            for own, count, lane in zip(stages, self.rows, packed, strict=True)
        )

    @property
    def chunks(self) -> int:
        """The number of times that a micro-batch passes through the stages: 1 but in an interleaved
        pipeline."""
        return len(self.stages[0].chunks)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The blocks of all chunks as a micro-batch meets them: of each stage the first, of each the second."""
        return tuple(stage.chunks[c] for c in range(self.chunks) for stage in self.stages)

    @property
    def layers(self) -> int:
        """The number of blocks of the model: every pipeline has all of them."""
        return self.spans[-1][1]


def _trained() -> bool:
    return True


class ModulePlan(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The pipelines of one module; a plain language model has one module, which takes samples.

    A module of items (images, clips) takes those of the step's samples, one by one, and feeds the module that
    takes the samples. Its `micro_batches` are weights: a lane with twice as many gets twice as much.
    """

    module: str
    pipelines: tuple[Pipeline, ...]
    trainable: bool = msgspec.field(default_factory=_trained)  # never left out of JSON: release 0.1 did not
    items: str = ""  # what it takes of a sample: "images"; empty: it takes the samples
    # [micro-batches] Its passes run so many micro-batches at most before the module with the loss needs them;
    # that many outputs are kept.
    ahead: int = 1
    # [micro-batches] So many before they are needed its passes go before those of the module with the loss, and
    # not only where devices wait.
    lead: int = 0
    # [tokens] That blocks work on, of an item in the mean, as predicted: one whose rows are not known counts as
    # so many (0: 1,024).
    item_rows: int = 0

    def __post_init__(self) -> None:
        if not self.pipelines:
            refuse(f"module {self.module}: needs at least one pipeline")
        if len({pipeline.layers for pipeline in self.pipelines}) != 1:
            refuse(f"module {self.module}: its pipelines hold different numbers of layers")
        if self.ahead < 1:
            refuse(f"module {self.module}: ahead must be at least 1 micro-batch, not {self.ahead}")
        if not 0 <= self.lead <= self.ahead:
            refuse(f"module {self.module}: lead must be from 0 to ahead, {self.ahead}, not {self.lead}")
        if self.item_rows < 0:
            refuse(f"module {self.module}: item_rows must not be negative, not {self.item_rows}")
        if not self.items and (self.ahead, self.lead, self.item_rows) != (1, 0, 0):
            refuse(
                f"module {self.module}: ahead, lead and item_rows are of modules of items, and it takes samples"
            )

    @property
    def by_lane(self) -> tuple[Pipeline, ...]:
        """The lanes of its pipelines, each as a pipeline of its own."""
        return tuple(lane for pipeline in self.pipelines for lane in pipeline.by_lane)


class Edge(Value, frozen=True, kw_only=True):
    """The output of one module feeds another."""

    source: str
    target: str


class Strategy(Value, frozen=True, kw_only=True):
    """The modules of a step and the edges between them.

    Of several modules exactly one takes samples, and has the loss. The others take items, and each feeds that
    one directly.
    """

    modules: tuple[ModulePlan, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        if len(self.modules) == 1 and not self.edges:
            return
        names = Counter(module.module for module in self.modules)
        for name, count in names.items():
            if count > 1:
                refuse(f"strategy: {count} modules are named {name!r}; give each a name of its own")
        for edge in self.edges:
            for name in edge.source, edge.target:
                if name not in names:
                    refuse(f"strategy: the edge {edge.source} -> {edge.target}: there is no module {name!r}")
        try:
            TopologicalSorter({name: self._sources(name) for name in names}).prepare()
        except CycleError as error:
            refuse(f"strategy: modules feed each other in a cycle: {' -> '.join(error.args[1])}")
        if len(names) > 1:
            self._check_edges()

    @property
    def divided(self) -> bool:
        """Returns True if lanes of items serve some pipelines alone. A rank then orders its own component."""
        return any(pipeline.serves for module in self.modules for pipeline in module.pipelines)

    @property
    def untimed(self) -> Strategy:
        """The same without the times of passes: two that are alike in this place the same on each device."""
        modules = []
        for module in self.modules:
            pipelines = tuple(pipeline.untimed for pipeline in module.pipelines)
            modules.append(msgspec.structs.replace(module, pipelines=pipelines))
        return msgspec.structs.replace(self, modules=tuple(modules))

    def _sources(self, name: str) -> list[str]:
        return [edge.source for edge in self.edges if edge.target == name]

    def _check_edges(self) -> None:
        takes_samples = [module.module for module in self.modules if not module.items]
        if len(takes_samples) != 1:
            refuse(
                "strategy: of several modules one takes samples and has the loss, and each other one names its "
                f"items; here {len(takes_samples)} take samples: {', '.join(takes_samples) or 'none'}"
            )
        loss = takes_samples[0]
        for edge in self.edges:
            if edge.target != loss:
                refuse(
                    f"strategy: {edge.source} feeds {edge.target}, and modules of items feed {loss} directly: "
                    "encoders of encoders are not supported yet"
                )
        for module in self.modules:
            count = sum(edge.source == module.module for edge in self.edges)
            if module.items and count != 1:
                refuse(
                    f"strategy: module {module.module} takes {module.items} and has {count} edges: it needs "
                    f"one, to {loss}"
                )
        self._check_serves()

    def _check_serves(self) -> None:
        pipelines = next(len(module.pipelines) for module in self.modules if not module.items)
        for module in self.modules:
            served: set[int] = set()
            for pipeline in module.pipelines:
                own = {*pipeline.serves} or {*range(pipelines)}
                if pipeline.serves and not module.items:
                    refuse(
                        f"strategy: a pipeline serves others in modules of items, and {module.module} is none"
                    )
                if not own <= {*range(pipelines)}:
                    refuse(
                        f"strategy: a pipeline of {module.module} serves {pipeline.serves}, and the module "
                        f"with the loss has the pipelines 0 to {pipelines - 1}"
                    )
                served |= own
            if module.items and (missing := {*range(pipelines)} - served):
                refuse(f"strategy: no pipeline of {module.module} serves pipeline {min(missing)}")


class StatePolicy(Value, frozen=True, kw_only=True):
    """The layout of master weights and optimizer state, apart from that of the parameters.

    zero: 0, they are wherever the parameter is (plain data parallel); 1, each box of them is on `replicas`
    devices, on as many different nodes where there are so many; 2, gradients too are kept there alone.
    replicas: None with zero 0, else at least 1 (with 2 or more no single node's loss loses state).
    """

    zero: int = 0
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2):
            refuse(f"state policy: zero must be 0, 1 or 2, not {self.zero}")
        if self.zero == 0 and self.replicas is not None:
            refuse(
                "state policy: replicas go with zero 1 or 2; with 0 every holder of a parameter has its state"
            )
        if self.zero and (self.replicas is None or self.replicas < 1):
            refuse(f"state policy: zero {self.zero} needs replicas of at least 1, not {self.replicas}")


class Prediction(Value, frozen=True, kw_only=True):
    """The planner's prediction of a plan: seconds a step, a lower bound of it over all plans of the problem,
    and the bytes of the fullest device by device name."""

    step_seconds: float
    bound_seconds: float
    memory: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def gap(self) -> float:
        """The plan's largest possible distance from the optimum, as a fraction."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0


class Place(NamedTuple):
    """The place of a device in the pipelines of a module."""

    pipeline: int
    stage: int
    position: int  # in the TP group of its lane
    lane: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The members that compute, in rank order, and their TP groups. Of a member: its `group`, and the `part` of
    each layer that it holds. Of a group: its width, its layers, its micro-batches in a step, its lane (counted
    over all pipelines), whether it makes activations again, whether its members have slices of the tokens,
    whether it is first or last."""

    group: Ints  # [members]
    part: Floats  # [members]
    width: Ints  # [groups]; and all below
    layers: Ints
    micro_batches: Ints
    lane: Ints
    recompute: Bools
    sliced: Bools
    first: Bools
    last: Bools

    @classmethod
    def of(cls, plan: Plan) -> Seats:
        """The members of a plan of one module that compute."""
        pipelines = plan.by_lane
        stages = [stage for _, _, stage in plan.walk()]
        counts, layers = zip(*((len(pipeline.stages), pipeline.layers) for pipeline in pipelines), strict=True)
        width = np.array([len(stage.devices) for stage in stages])
        shares = np.fromiter(
            chain.from_iterable(stage.shares for stage in stages), np.float64, int(width.sum())
        )
        group = np.repeat(np.arange(len(stages)), width)
        start = np.cumsum(width) - width
        return cls(
            group=group,
            part=shares / np.add.reduceat(shares, start)[group],
            width=width,
            layers=np.array([stage.layers for stage in stages]),
            micro_batches=np.repeat([pipeline.micro_batches for pipeline in pipelines], counts),
            lane=np.repeat(np.arange(len(pipelines)), counts),
            recompute=np.array([stage.recompute for stage in stages]),
            sliced=np.array([stage.sliced for stage in stages]),
            first=np.array([stage.start == 0 for stage in stages]),
            last=np.array([stage.chunks[-1][1] for stage in stages]) == np.repeat(layers, counts),
        )


class Plan(StoredValue, frozen=True, kw_only=True, dict=True, tag="plan"):
    """A layout of the whole job. It changes slowly and lives in the store.

    `binding` ties each member device to one incarnation of a worker; `carriers` are members that compute
    nothing and hold replicas of state alone; `idle` devices are standby. `sequence`: tokens of the sequences
    that the chaos of a 0.1 leader has samples read in (0: as the dataset has them); until 0.3. `version` is the
    oldest that says all that is in the plan.
    """

    number: int
    strategies: tuple[Strategy, ...]
    micro_batch: int
    global_batch: int
    state: StatePolicy = StatePolicy()
    carriers: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    binding: dict[str, str] = msgspec.field(default_factory=dict)
    prediction: Prediction | None = None
    reason: str = ""
    sequence: int = 0
    version: int = 1
    newest: ClassVar[int] = PLAN_VERSION

    def __post_init__(self) -> None:
        if len(self.strategies) != 1:
            refuse(f"plan {self.number}: exactly one strategy is supported, not {len(self.strategies)}")
        if not 1 <= self.version <= PLAN_VERSION:
            refuse(
                f"plan {self.number}: version {self.version} of the format; this elasticd reads versions 1 to "
                f"{PLAN_VERSION}: upgrade it"
            )
        msgspec.structs.force_setattr(self, "version", self._least_version())
        if self.number < 0 or self.micro_batch < 1:
            refuse(f"plan {self.number}: number and micro-batch size must be positive")
        devices = {*self._computing, *self.carriers}
        carrying = {*self._computing} & {*self.carriers}
        listed = (*map(_devices_of, self.modules), self.carriers)
        twice = {device for names in listed for device, count in Counter(names).items() if count > 1}
        if twice := twice | carrying | devices & {*self.idle}:
            refuse(f"plan {self.number}: device {min(twice)} is placed twice")
        if self.carriers and not self.state.zero:
            refuse(f"plan {self.number}: {self.carriers[0]} carries replicas, which zero 0 does not have")
        self._check_packed()
        for module in self.modules:
            if module.items or module.pipelines[0].packed:  # rows of as many sequences as fit; weights
                continue
            samples = sum(pipeline.micro_batches for pipeline in module.pipelines) * self.micro_batch
            if samples != self.global_batch:
                refuse(
                    f"plan {self.number}: module {module.module} takes {samples} samples a step, "
                    f"the global batch is {self.global_batch}"
                )
        if self.binding and set(self.binding) != devices:
            refuse(f"plan {self.number}: binding must name exactly the members {sorted(devices)}")

    def _check_packed(self) -> None:
        for module in self.modules:
            packed = {bool(pipeline.packed) for pipeline in module.pipelines}
            if len(packed) > 1:
                refuse(f"plan {self.number}: some of its pipelines are packed, and others are not")
            if module.items and True in packed:
                refuse(
                    f"plan {self.number}: module {module.module} takes {module.items}, one at a time: only the "
                    "module with the loss has packed rows"
                )

    def _least_version(self) -> int:
        pipelines = [pipeline for module in self.modules for pipeline in module.pipelines]
        stages = [stage for pipeline in pipelines for stage in pipeline.stages]
        timed = any(stage.microseconds != NO_TIMES or stage.experts for stage in stages)
        if timed or any(module.items for module in self.modules):
            return 4
        sliced = any(stage.sequence_parallel for stage in stages)
        lanes = any(pipeline.rows or pipeline.packed for pipeline in pipelines)
        if sliced or lanes or sum(len(_devices_of(module)) for module in self.modules) > len(self._computing):
            return 3
        return 2 if self.sequence or any(pipeline.chunks > 1 for pipeline in pipelines) else 1

    @property
    def modules(self) -> tuple[ModulePlan, ...]:
        """The modules of the one strategy."""
        return self.strategies[0].modules

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Which module's output feeds which other one."""
        return self.strategies[0].edges

    @property
    def module(self) -> ModulePlan:
        """The module of a plan that has one. Refuses a plan of several: each of them has a `view`."""
        if len(self.modules) > 1:
            names = ", ".join(module.module for module in self.modules)
            refuse(f"plan {self.number}: it has the modules {names}, each of which has pipelines of its own")
        return self.modules[0]

    @property
    def loss_module(self) -> ModulePlan:
        """The module that takes samples, and has the loss. Refuses the view of a module of items."""
        found = next((module for module in self.modules if not module.items), None)
        if found is None:
            refuse(f"plan {self.number}: module {self.modules[0].module} takes items, and has no loss")
        return found

    def view(self, name: str) -> Plan:
        """The plan of one of its modules alone: that module's pipelines, and the devices that compute in them.

        Its members are in the order that they have there. The module with the loss has the carriers. A plan of
        one module is its own view.
        """
        if len(self.modules) == 1 and self.modules[0].module == name:
            return self
        if name not in self._views:
            module = next((module for module in self.modules if module.module == name), None)
            if module is None:
                refuse(f"plan {self.number}: it has no module {name!r}")
            self._views[name] = self._view(module)
        return self._views[name]

    def _view(self, module: ModulePlan) -> Plan:
        carriers = () if module.items else self.carriers
        members = (*_devices_of(module), *carriers)
        return self.replace(
            strategies=(Strategy(modules=(module,)),),
            carriers=carriers,
            idle=(),
            binding={device: self.binding[device] for device in members if self.binding},
            prediction=None,
        )

    @cached_property
    def _views(self) -> dict[str, Plan]:
        """Those that were asked for."""
        return {}

    @cached_property
    def loss_view(self) -> Plan:
        """The view of the module that has the loss; a plan of one module is its own."""
        return self if len(self.modules) == 1 else self.view(self.loss_module.module)

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines of a plan of one module."""
        return self.module.pipelines

    @property
    def packed(self) -> bool:
        """True if it says of the lanes of the module with the loss which packed rows they hold."""
        return any(module.pipelines[0].packed for module in self.modules)

    @cached_property
    def _lanes(self) -> tuple[tuple[Pipeline, ...], ...]:
        """By pipeline and lane, of a plan of one module."""
        return tuple(pipeline.by_lane for pipeline in self.pipelines)

    @cached_property
    def by_lane(self) -> tuple[Pipeline, ...]:
        """The pipelines of a plan of one module lane by lane, each lane as a pipeline of its own: the copies of
        the module."""
        return tuple(chain.from_iterable(self._lanes))

    def walk(self) -> Iterator[tuple[ModulePlan, Pipeline, Stage]]:
        """Every TP group in rank order: its module, and the pipeline and the stage of its lane alone."""
        for module in self.modules:
            for lane in module.by_lane:
                for stage in lane.stages:
                    yield module, lane, stage

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of each member that computes, in rank order, in a plan of one module: by pipeline, lane,
        stage, position."""
        return {
            device: Place(p, s, position, j)
            for p, lanes in enumerate(self._lanes)
            for j, lane in enumerate(lanes)
            for s, stage in enumerate(lane.stages)
            for position, device in enumerate(stage.devices)
        }

    @cached_property
    def _computing(self) -> tuple[str, ...]:
        """The members that compute, in rank order: those of the first module, then others of the second, ..."""
        return tuple(dict.fromkeys(chain.from_iterable(map(_devices_of, self.modules))))

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The members in rank order: those that compute, then the carriers by name."""
        return (*self._computing, *sorted(self.carriers))

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that its members are on."""
        return frozenset(map(node_of, self.members))

    @property
    def tp_widths(self) -> set[int]:
        """The numbers of devices of its TP groups, those of one device left out."""
        return {len(stage.devices) for _, _, stage in self.walk()} - {1}

    @cached_property
    def seats(self) -> Seats:
        """The same members in columns."""
        return Seats.of(self)

    def rank(self, device: str) -> int:
        """The rank of a member. Raises ValueError for any other device."""
        return self.members.index(device)

    def pipeline(self, place: Place) -> Pipeline:
        """The pipeline of a place, as far as its lane goes: its TP groups and its micro-batches alone."""
        return self._lanes[place.pipeline][place.lane]

    def stage(self, place: Place) -> Stage:
        """The stage of a place, likewise: its TP group alone."""
        return self.pipeline(place).stages[place.stage]

    def replace(self, **changes: Any) -> Plan:
        """The plan with other values of some fields, checked anew."""
        return msgspec.structs.replace(self, **changes)

    def with_modules(self, modules: Iterable[ModulePlan], **changes: Any) -> Plan:
        """The plan with other modules between the same edges, and other values of some fields."""
        strategy = msgspec.structs.replace(self.strategies[0], modules=tuple(modules))
        return self.replace(strategies=(strategy,), **changes)

    def with_pipelines(self, pipelines: Iterable[Pipeline], **changes: Any) -> Plan:
        """The plan with other pipelines of the module with the loss, and other values of some fields."""
        loss = self.loss_module
        changed = msgspec.structs.replace(loss, pipelines=tuple(pipelines))
        return self.with_modules((changed if each is loss else each for each in self.modules), **changes)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over layout, batch, state policy and binding: equal digests train alike."""
        body = (
            self.strategies,
            self.state,
            self.micro_batch,
            self.global_batch,
            sorted(self.binding.items()),
            *([sorted(self.carriers)] if self.carriers else []),
            *([self.sequence] if self.sequence else []),
        )
        return hashlib.sha256(msgspec.json.encode(body)).hexdigest()[:16]

    def to_json(self) -> bytes:
        """The plan as JSON, which `from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Plan:
        """Raises `msgspec.ValidationError` (a ValueError) that names the key and what is wrong."""
        return _decoder.decode(text)


def _devices_of(module: ModulePlan) -> list[str]:
    """The devices of a module's TP groups, in rank order."""
    return [device for lane in module.by_lane for stage in lane.stages for device in stage.devices]


#: Made with the module: two threads that first decode a class at one moment end the process (msgspec 0.22).
_decoder = msgspec.json.Decoder(Plan)


def seats_of(plan: Plan, devices: tuple[str, ...]) -> Ints:
    """The rank of each of these devices among the members that compute [devices]; -1 of one that does not."""
    if devices is plan.members or devices == plan.members:
        found = np.arange(len(devices))
        found[len(plan.places) :] = -1
        return found
    ranks = {name: rank for rank, name in enumerate(plan.places)}
    return np.array([ranks.get(name, -1) for name in devices])
