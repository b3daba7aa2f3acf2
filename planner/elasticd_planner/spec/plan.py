"""The plan: which device trains which part of the model, and the invariants that every plan keeps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from elasticd_planner.numeric import Bools, Floats, Ints
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import StoredValue, Value, refuse

#: Version of the JSON form of a plan; a reader accepts its own and all older ones. Only plans with interleaved
#: stages, or of a 0.1 leader whose chaos shifted the data, have version 2: a release that does not know these
#: refuses them.
PLAN_VERSION = 2

#: Blocks [start, stop).
Span = tuple[int, int]


def spanned(spans: Iterable[Span]) -> str:
    """Blocks for people, the last ones included: "0-3, 6"."""
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans)


class Stage(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks [start, stop) on one TP group; `shares` is an integer weight for each member. With `recompute`
    a block's activations are made again in the backward pass instead of kept. In an interleaved pipeline the
    group has `later` blocks, too: one more chunk for each further turn of a micro-batch through the stages."""

    start: int
    stop: int
    devices: tuple[str, ...]
    shares: tuple[int, ...]
    recompute: bool = False
    later: tuple[Span, ...] = ()

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

    @property
    def chunks(self) -> tuple[Span, ...]:
        """Its blocks, a span for each turn of a micro-batch through the pipeline."""
        return ((self.start, self.stop), *self.later)

    @property
    def layers(self) -> int:
        """How many blocks it has, in all chunks."""
        return sum(stop - start for start, stop in self.chunks)

    @property
    def named(self) -> str:
        """Its blocks for people: "0-3", or "0-1, 4-5" of two chunks."""
        return spanned(self.chunks)

    def fraction(self, position: int) -> float:
        """The part of each layer that the member at `position` holds."""
        return self.shares[position] / sum(self.shares)


class Pipeline(Value, frozen=True, kw_only=True):
    """Stages in order, and how many micro-batches of a step pass through them: once, or in an interleaved
    pipeline once for each chunk that its stages have (Narayanan et al., 2021, section 2.2)."""

    stages: tuple[Stage, ...]
    micro_batches: int

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
        micro-batch meets them, so that as many numbers as stages make a plain pipeline."""
        spans, depth = tuple(pairwise(accumulate(layers, initial=0))), len(self.stages)
        stages = []
        for at, stage in enumerate(self.stages):
            (start, stop), *later = spans[at::depth]
            stages.append(msgspec.structs.replace(stage, start=start, stop=stop, later=tuple(later)))
        return Pipeline(stages=tuple(stages), micro_batches=self.micro_batches)

    @property
    def chunks(self) -> int:
        """How often a micro-batch passes through the stages: 1 but in an interleaved pipeline."""
        return len(self.stages[0].chunks)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The blocks of all chunks as a micro-batch meets them: of each stage the first, of each the second."""
        return tuple(stage.chunks[c] for c in range(self.chunks) for stage in self.stages)

    @property
    def layers(self) -> int:
        """How many blocks the model has: every pipeline has all of them."""
        return self.spans[-1][1]


class ModulePlan(Value, frozen=True, kw_only=True):
    """The pipelines of one module; a plain language model has one module."""

    module: str
    pipelines: tuple[Pipeline, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        if not self.pipelines:
            refuse(f"module {self.module}: needs at least one pipeline")
        if len({pipeline.layers for pipeline in self.pipelines}) != 1:
            refuse(f"module {self.module}: its pipelines hold different numbers of layers")


class Edge(Value, frozen=True, kw_only=True):
    """The output of one module feeds another."""

    source: str
    target: str


class Strategy(Value, frozen=True, kw_only=True):
    """The modules of a step and the edges between them."""

    modules: tuple[ModulePlan, ...]
    edges: tuple[Edge, ...] = ()


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
    """What the planner expects of a plan: seconds a step, a lower bound of it over all plans of the problem,
    and the bytes of the fullest device by device name."""

    step_seconds: float
    bound_seconds: float
    memory: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How far from optimal the plan can be at most, as a fraction."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0


class Place(NamedTuple):
    """Where a device stands in a plan."""

    module: int
    pipeline: int
    stage: int
    position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The members that compute, in rank order, and their TP groups. Of a member: its `group`, and the `part` of
    each layer that it holds. Of a group: its width, its layers, its micro-batches in a step, its pipeline
    (counted over all modules), whether it makes activations again, whether it is first or last."""

    group: Ints  # [members]
    part: Floats  # [members]
    width: Ints  # [groups]; and all below
    layers: Ints
    micro_batches: Ints
    pipeline: Ints
    recompute: Bools
    first: Bools
    last: Bools

    @classmethod
    def of(cls, plan: Plan) -> Seats:
        """The members of a plan that compute."""
        pipelines = [pipeline for module in plan.modules for pipeline in module.pipelines]
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
            pipeline=np.repeat(np.arange(len(pipelines)), counts),
            recompute=np.array([stage.recompute for stage in stages]),
            first=np.array([stage.start == 0 for stage in stages]),
            last=np.array([stage.chunks[-1][1] for stage in stages]) == np.repeat(layers, counts),
        )


class Plan(StoredValue, frozen=True, kw_only=True, dict=True, tag="plan"):
    """A layout of the whole job. It changes slowly and lives in the store.

    `binding` ties each member device to one incarnation of a worker; `carriers` are members that compute
    nothing and hold replicas of state alone; `idle` devices are standby. `sequence`: tokens of the sequences
    that the chaos of a 0.1 leader has samples read in (0: as the dataset has them); until 0.3.
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

    def __post_init__(self) -> None:
        if len(self.strategies) != 1:
            refuse(f"plan {self.number}: exactly one strategy is supported, not {len(self.strategies)}")
        if not 1 <= self.version <= PLAN_VERSION:
            refuse(
                f"plan {self.number}: version {self.version} of the format; this elasticd reads versions 1 to "
                f"{PLAN_VERSION}: upgrade it"
            )
        interleaved = any(stage.later for _, _, stage in self.walk())
        msgspec.structs.force_setattr(self, "version", PLAN_VERSION if interleaved or self.sequence else 1)
        if self.number < 0 or self.micro_batch < 1:
            refuse(f"plan {self.number}: number and micro-batch size must be positive")
        devices = [*(name for name, _ in self._placed()), *self.carriers]
        counts = Counter(devices)
        twice = sorted({name for name in counts if counts[name] > 1} | ({*devices} & {*self.idle}))
        if twice:
            refuse(f"plan {self.number}: device {twice[0]} is placed twice")
        if self.carriers and not self.state.zero:
            refuse(f"plan {self.number}: {self.carriers[0]} carries replicas, which zero 0 does not have")
        for module in self.modules:
            samples = sum(pipeline.micro_batches for pipeline in module.pipelines) * self.micro_batch
            if samples != self.global_batch:
                refuse(
                    f"plan {self.number}: module {module.module} takes {samples} samples a step, "
                    f"the global batch is {self.global_batch}"
                )
        if self.binding and set(self.binding) != set(devices):
            refuse(f"plan {self.number}: binding must name exactly the members {sorted(devices)}")

    def _placed(self) -> list[tuple[str, Place]]:
        return [
            (device, Place(m, p, s, position))
            for m, module in enumerate(self.modules)
            for p, pipeline in enumerate(module.pipelines)
            for s, stage in enumerate(pipeline.stages)
            for position, device in enumerate(stage.devices)
        ]

    @property
    def modules(self) -> tuple[ModulePlan, ...]:
        """The modules of the one strategy."""
        return self.strategies[0].modules

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines of the first module; a plain language model has no other."""
        return self.modules[0].pipelines

    def walk(self) -> Iterator[tuple[ModulePlan, Pipeline, Stage]]:
        """Every stage with its module and its pipeline, in rank order."""
        for module in self.modules:
            for pipeline in module.pipelines:
                for stage in pipeline.stages:
                    yield module, pipeline, stage

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of each member that computes, in rank order: by (module, pipeline, stage, position)."""
        return dict(self._placed())

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The members in rank order: those that compute, then the carriers by name."""
        return (*self.places, *sorted(self.carriers))

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
        """The pipeline of a place."""
        return self.modules[place.module].pipelines[place.pipeline]

    def stage(self, place: Place) -> Stage:
        """The stage of a place."""
        return self.pipeline(place).stages[place.stage]

    def replace(self, **changes: Any) -> Plan:
        """The plan with other values of some fields, checked anew."""
        return msgspec.structs.replace(self, **changes)

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
