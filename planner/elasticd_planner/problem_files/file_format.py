"""Planning problems as files: the shared format read and checked, and the answer written in it.

A problem is one JSON object (cluster, model, batch, pins, rates; docs/planner.md has the keys). Every refusal
names the key and the value. `solve.solve` plans it; `answer` is what `elasticd plan --json` prints.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.times import (
    SHARE_UNITS,
    RecomputeEntry,
    StateEntry,
    TimedModel,
    TimesEntry,
    all_positive,
    none_negative,
    positive,
)
from elasticd_planner.spec.cluster import LEAST_RATE, Level, Link, check_levels
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import FILE_VERSION, Invalid, StoredValue, Value, check_file_version, refuse

#: What a problem's figures are in: with `model.times`, and without.
SECONDS, UNITS = "seconds", "layer x micro-batch"


class LinkEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link: 1e9 bytes a second, and microseconds."""

    gb_per_s: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        all_positive(self, "gb_per_s")
        none_negative(self, "latency_us")

    @property
    def link(self) -> Link:
        """The link in bytes a second and seconds."""
        return Link(bandwidth=self.gb_per_s * 1e9, latency=self.latency_us / 1e6)


class InnerLinks(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's own links: inside an island, and between its islands."""

    island: LinkEntry | None = None
    node: LinkEntry | None = None


class LinksEntry(InnerLinks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links by level. Without `island` devices of an island talk as those of a node do."""

    network: LinkEntry | None = None


class LevelEntry(LinkEntry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of links between node and network, as "rack": its link, and the nodes of each of its groups."""

    name: str
    nodes: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        Level(name=self.name, link=self.link, groups=self.nodes)  # refuses what is no level

    @property
    def level(self) -> Level:
        """The level as the planner's value."""
        return Level(name=self.name, link=self.link, groups=self.nodes)


class NodeEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node: how many devices, their memory in MiB, their speed (1.0 normal, 0.5 half as fast), how many of
    them make an island (left out: the node has none), and links that differ from the cluster's."""

    name: str
    devices: int
    memory_mib: float
    speed: float = 1.0
    island: int | None = None
    links: InnerLinks | None = None

    def __post_init__(self) -> None:
        if self.island is not None and not 0 < self.island <= self.devices:
            refuse(f"island {self.island} is how many of the node's {self.devices} devices make an island")
        if not self.name or "/" in self.name:
            refuse(f"name {self.name!r} must not be empty and has no '/'")
        all_positive(self, "devices", "memory_mib", "speed")


class ClusterEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes, the links between devices, and further levels of links, the nearest first."""

    nodes: tuple[NodeEntry, ...]
    links: LinksEntry | None = None
    levels: tuple[LevelEntry, ...] = ()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names:
            refuse("nodes is empty: a cluster has at least one node")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            refuse(f"nodes: {twice[0]!r} is there twice")
        check_levels([entry.level for entry in self.levels])
        for level in self.levels:
            for node in (node for group in level.nodes for node in group):
                if node not in names:
                    refuse(f"levels: {level.name} has {node!r}, which is none of the nodes")


class MemoryEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MiB of a stage on a full group: of a layer by stage (the last entry is the last stage's), of embedding or
    head, and of every device; `reserve_mib` is left free."""

    layer_mib_by_stage: tuple[float, ...]
    embedding_mib: float = 0.0
    fixed_mib: float = 0.0
    reserve_mib: float = 0.0

    def __post_init__(self) -> None:
        if not self.layer_mib_by_stage:
            refuse("layer_mib_by_stage is empty: it has an entry for the last stage at least")
        for size in self.layer_mib_by_stage:
            positive("layer_mib_by_stage", size)
        none_negative(self, "embedding_mib", "fixed_mib", "reserve_mib")


class ModelEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers, and how many times longer one takes on a TP group of each size than on a full one; or measured
    times, state and recomputation (`times`), shares being in so many whole `units`, kv-heads in `groups`."""

    name: str
    layers: int
    tp_full: int = 0
    tp_slowdown: dict[int, float] = msgspec.field(default_factory=dict)
    memory: MemoryEntry | None = None
    uneven_shares: bool = False
    times: TimesEntry | None = None
    state: StateEntry | None = None
    recompute: RecomputeEntry | None = None
    units: int = SHARE_UNITS
    groups: int = 0

    def __post_init__(self) -> None:
        all_positive(self, "layers")
        if self.times is not None:
            self._check_timed()
            return
        for name, default in (("state", None), ("recompute", None), ("units", SHARE_UNITS), ("groups", 0)):
            if getattr(self, name) != default:
                refuse(f"{name} goes with times, which is missing")
        all_positive(self, "tp_full")
        if not self.tp_slowdown:
            refuse("tp_slowdown is empty: it names the sizes that TP groups may have")
        for size, slowdown in self.tp_slowdown.items():
            positive("tp_slowdown", size)
            positive(f"tp_slowdown.{size}", slowdown)

    def _check_timed(self) -> None:
        for name in ("tp_full", "tp_slowdown", "memory"):
            if getattr(self, name):
                refuse(f"{name} does not go with times: figures are then seconds, memory is model.state's")
        all_positive(self, "units")
        if not 0 <= self.groups <= self.units:
            refuse(f"groups {self.groups} are kv-heads that follow {self.units} units")
        widest = max(self.sizes, default=1)
        if widest > self.units:
            refuse(f"times.block.tp_slowdown.{widest}: a group of {widest} cannot share {self.units} units")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that TP groups may have; none: any."""
        return tuple(sorted(self.times.block.tp_slowdown if self.times is not None else self.tp_slowdown))


class BatchEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Samples of a step and of a micro-batch, tokens of a sample. Without `micro_batch` it is searched; in
    units it is 1, since units grow with the samples alone, so that no larger one is ever better."""

    global_batch: int
    micro_batch: int | None = None
    sequence: float | None = None

    def __post_init__(self) -> None:
        all_positive(self, "global_batch", "sequence", "micro_batch")
        if self.global_batch % self.size:
            refuse(f"global_batch {self.global_batch} does not divide into micro-batches of {self.micro_batch}")

    @property
    def size(self) -> int:
        """Samples of a micro-batch, 1 where the file does not say."""
        return self.micro_batch or 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, all pipelines together."""
        return self.global_batch // self.size


class PinsEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fixed choices: TP size on nodes of normal devices, number of pipelines, ZeRO stage, replicas of the
    optimizer state (with ZeRO), and whether blocks make their activations again. `interleave`: stages may have
    up to so many chunks of layers, where that takes less time; without it they have one. `lanes`: pipelines may
    have up to so many lanes; without it they have one. `sequence_parallel`: TP groups have slices of the tokens
    between cut modules, all of them (true) or those that do not fit otherwise ("plan"); without it none has."""

    tp: int | None = None
    dp: int | None = None
    zero: int | None = None
    replicas: int | None = None
    recompute: bool | None = None
    interleave: int | None = None
    lanes: int | None = None
    sequence_parallel: bool | Literal["plan"] | None = None

    def __post_init__(self) -> None:
        if self.zero not in (None, 0, 1, 2):
            refuse(f"zero {self.zero} must be 0, 1 or 2")
        all_positive(self, "replicas", "tp", "dp", "interleave", "lanes")
        if self.replicas is not None and self.zero == 0:
            refuse(f"replicas {self.replicas} go with zero 1 or 2; with 0 every holder has its state")


class ItemModuleEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module of items, as an encoder of images: its model with measured times, how many items a sample has
    and how many rows an item, both in the mean, and whether it is trained."""

    name: str
    model: TimedModel
    items: str
    items_a_sample: float
    rows_an_item: float
    trained: bool = True

    def __post_init__(self) -> None:
        all_positive(self, "items_a_sample", "rows_an_item")


class TableProblem(StoredValue, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="planning-problem"):
    """A whole problem. Rates by device name; null is a dead device. A file may leave tag and version
    out. `modules` are those of items beside `model`, which then has the loss and is called `module`."""

    cluster: ClusterEntry
    model: ModelEntry
    batch: BatchEntry
    pins: PinsEntry = PinsEntry()
    rates: dict[str, float | None] = msgspec.field(default_factory=dict)
    module: str = "model"
    modules: tuple[ItemModuleEntry, ...] = ()
    version: int = FILE_VERSION

    def __post_init__(self) -> None:
        check_file_version(self.version)
        if self.modules and self.model.times is None:
            refuse("modules go with model.times: units know nothing of items")
        sizes = list(self.model.sizes)
        if self.pins.tp is not None and sizes and self.pins.tp not in sizes:
            refuse(f"pins.tp {self.pins.tp} is none of the sizes in model's tp_slowdown: {sizes}")
        if self.model.times is None:
            self._check_units()
        else:
            self._check_seconds()
        if self.pins.dp is not None and self.pins.dp > self.batch.micro_batches:
            refuse(
                f"pins.dp {self.pins.dp} pipelines cannot share {self.batch.micro_batches} micro-batches: "
                "each needs one at least"
            )
        names = {f"{node.name}/{i}" for node in self.cluster.nodes for i in range(node.devices)}
        for name, rate in self.rates.items():
            if name not in names:
                refuse(f"rates: {name!r} is not a device of the cluster")
            if rate is not None and not LEAST_RATE <= rate < math.inf:
                refuse(
                    f"rates: {name} {rate} must be at least {LEAST_RATE:g}: it is how many times slower than "
                    "normal (1.0 normal, null dead)"
                )

    def _check_units(self) -> None:
        """Checks the keys that only problems in seconds have."""
        nodes = self.cluster.nodes
        given = {
            "cluster.links": self.cluster.links is not None,
            "cluster.levels": bool(self.cluster.levels),
            "cluster.nodes[].island": any(node.island is not None for node in nodes),
            "cluster.nodes[].links": any(node.links is not None for node in nodes),
            "batch.sequence": self.batch.sequence is not None,
        }
        given |= {f"pins.{name}": getattr(self.pins, name) is not None for name in TIMED_PINS}
        for name, there in given.items():
            if there:
                refuse(f"{name} goes with model.times: units know nothing of it")

    def _check_seconds(self) -> None:
        if self.batch.sequence is None:
            refuse("batch.sequence is missing: how many tokens a sample has, which model.times are for")
        for name in ("zero", "replicas"):
            if getattr(self.pins, name) and self.model.state is None:
                refuse(f"pins.{name} {getattr(self.pins, name)} needs model.state: the bytes that it is about")
        if self.pins.sequence_parallel == "plan" and self.model.state is None:
            refuse(
                'pins.sequence_parallel "plan" needs model.state: the bytes that say which TP groups do not '
                "fit without it"
            )
        if self.pins.recompute and self.model.recompute is None:
            refuse("pins.recompute true needs model.recompute: its time and what it keeps")


#: Pins of problems in seconds alone.
TIMED_PINS = ("zero", "replicas", "recompute", "interleave", "sequence_parallel")


def load(text: bytes | str) -> TableProblem:
    """A problem from its JSON; raises `Invalid` with the key and the value that are wrong."""
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Invalid(f"the problem is no JSON: {error}") from None
    try:
        return msgspec.convert(raw, type=TableProblem, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise Invalid(f"the problem is wrong: {located(str(error), raw)}") from None


def located(message: str, raw: Any) -> str:
    """msgspec's message with the key before it and the value after it: "batch.global_batch: ..."."""
    message = message.replace(" - at `key` in `$", " as a key - at `$")
    said, found, path = message.partition(" - at `$")
    if not found:
        return said
    path = path.rstrip("`").lstrip(".")
    value: Any = raw
    for name, index in re.findall(r"([A-Za-z_][\w]*)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            return f"{path}: {said}"
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return f"{path}: {said}"
    if isinstance(value, dict | list):
        return f"{path}: {said}"
    return f"{path}: {said} ({value!r} given)"


class Figures(Value, frozen=True, kw_only=True):
    """In seconds, or in units of a layer on a micro-batch: the plan by both objectives; of the chosen one a
    valid lower bound, how far above it the plan is at most, and the yardstick healthy x N / sum(1 / x)."""

    steady: float
    step: float
    bound: float
    gap: float
    ideal: float


class Planned(Value, frozen=True, kw_only=True):
    """A problem's plan with its figures and the reason; or the refusal."""

    plan: Plan | None
    figures: Figures | None = None
    objective: Objective = "step"
    unit: str = UNITS
    reason: str = ""
    refusal: str = ""
    candidates: int = 0


def answer(planned: Planned, planning_seconds: float) -> dict[str, Any]:
    """The answer as JSON values, as `elasticd plan --json` prints it. Refused problems have no answer."""
    if planned.plan is None or planned.figures is None:
        raise Invalid(planned.refusal)
    plan = planned.plan
    modules = [
        {
            "module": module.module,
            **({"items": module.items, "ahead": module.ahead, "lead": module.lead} if module.items else {}),
            **({} if module.trainable else {"trained": False}),
            "pipelines": [
                {
                    "micro_batches": pipeline.micro_batches,
                    **({"rows": list(pipeline.rows)} if pipeline.rows else {}),
                    **({"serves": list(pipeline.serves)} if pipeline.serves else {}),
                    "stages": [
                        {
                            "devices": list(stage.devices),
                            "shares": [stage.fraction(i) for i in range(len(stage.devices))],
                            "layers": [stage.start, stage.stop],
                            **({"later": [list(span) for span in stage.later]} if stage.later else {}),
                            **({"recompute": True} if stage.recompute else {}),
                            **({"sequence_parallel": True} if stage.sequence_parallel else {}),
                            **({"lanes": list(stage.lanes)} if stage.lanes else {}),
                            **({"experts": stage.experts} if stage.experts else {}),
                            **({"splits": stage.splits} if stage.splits else {}),
                            **({"slowdowns": list(stage.slowdowns)} if stage.slowdowns else {}),
                        }
                        for stage in pipeline.stages
                    ],
                }
                for pipeline in module.pipelines
            ],
        }
        for module in plan.modules
    ]
    return {
        "type": "planning-answer",
        "version": FILE_VERSION,
        "figures": msgspec.to_builtins(planned.figures),
        "plan": {
            "modules": modules,
            **({"carriers": list(plan.carriers)} if plan.carriers else {}),
            "idle": list(plan.idle),
            "micro_batch": plan.micro_batch,
            "global_batch": plan.global_batch,
            "state": msgspec.to_builtins(plan.state),
            "digest": plan.digest,
        },
        "objective": planned.objective,
        "unit": planned.unit,
        "planning_seconds": planning_seconds,
        "reason": planned.reason,
    }
