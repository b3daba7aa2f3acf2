"""A scenario as one value: cluster, model, what happens when, how long; and how it is read from TOML.

    steps = 120                      # or: hours = 24
    [cluster]  nodes, devices (of each), memory, flops, inside, between ...
    [model]    preset, or layers, width, heads, hidden ...; tokens, global_batch, micro_batch
    [[module]] an encoder beside that model: name, items, items_a_sample, rows, trained; layers, width ...
    [[fault]]  kind = "slow", device = "n0/0", factor = 2.57, step = 20      # or: seconds = 3600
    [random]   faults drawn from the seed
    [data]     of a job that packs: corpus = "wikipedia", or quantiles, lognormal, file; row_tokens, cut ...
    [times], [restart], [detect], [policy]

docs/simulator.md says what each key means. Whatever is wrong is refused with the key and its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile, derive
from elasticd_planner.detection.lengths import attention_rise, evaluated
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.problem import ModuleProblem
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node, check_levels
from elasticd_planner.spec.expert_load import ExpertLoad, costed
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.sample_packing import linear_of
from elasticd_planner.spec.sequence_lengths import Lengths, even
from elasticd_planner.value import Value, refuse

from elasticd.chaos.faults import KINDS, REAL, Fault
from elasticd.config.tree import ConfigError, section, text_of, toml, with_keys
from elasticd.records import ModuleSpec
from elasticd.simulator.scenarios.corpus import BASELINES, Corpus
from elasticd.simulator.scenarios.expert_drift import ExpertDrift
from elasticd.simulator.scenarios.model_shapes import PRESETS, Shapes, model_spec
from elasticd.simulator.scenarios.random_faults import RandomFaults, draw

#: The name of the module with the loss of a model of several.
LOSS_MODULE = "language"


class ClusterShape(Value, frozen=True, kw_only=True):
    """Equal nodes n0, n1, ... with `devices` each. flops: operations per second that a normal device really
    reaches on this model; assumed: what the coordinator takes it for until it has measured (as from a data
    sheet). inside, between: the links, by bandwidth (bytes/s) and latency (s). levels: further levels of links,
    the nearest first, each with name, link and groups of nodes."""

    nodes: int
    devices: int
    memory: int = 80 * 2**30
    flops: float = 1.5e14
    assumed: float = 2e14
    inside: Link = Link(bandwidth=2e11, latency=1e-5)
    between: Link = Link(bandwidth=2.5e10, latency=2e-5)
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            refuse(f"nodes = {self.nodes} and devices = {self.devices} must be at least 1")
        if not (self.memory > 0 and self.flops > 0 and self.assumed > 0):
            refuse("memory, flops and assumed must be positive")
        check_levels(self.levels)
        known = {f"n{n}" for n in range(self.nodes)}
        for level in self.levels:
            for node in level.group_of:
                if node not in known:
                    refuse(
                        f"level {level.name} has {node!r}, which is none of the nodes n0 to n{self.nodes - 1}"
                    )

    def cluster(self) -> Cluster:
        """The planner's value of this cluster, with devices n0/0, n0/1, ... in order. The speed of its devices
        is not in it."""
        nodes = []
        for n in range(self.nodes):
            held = tuple(Device(name=f"n{n}/{i}", memory=self.memory) for i in range(self.devices))
            nodes.append(Node(name=f"n{n}", devices=held))
        return Cluster(nodes=tuple(nodes), inside=self.inside, between=self.between, levels=self.levels)


class ItemModule(Value, frozen=True, kw_only=True):
    """An encoder beside the model that has the loss, and what samples bring it."""

    name: str
    shapes: Shapes
    items: str = "images"  # the key under which a sample has them
    items_a_sample: float = 1.0  # in the mean
    rows: int = 256  # [tokens] of an item
    trained: bool = True  # False: it is frozen

    def __post_init__(self) -> None:
        if not self.name or not self.items or self.name == LOSS_MODULE:
            refuse(f"module {self.name!r}: it needs a name (not {LOSS_MODULE!r}) and the name of its items")
        if not 0 < self.items_a_sample < 10_000 or self.rows < 1:
            refuse(
                f"module {self.name}: items_a_sample = {self.items_a_sample} must be above 0 and "
                f"rows = {self.rows} at least 1"
            )


class Training(Value, frozen=True, kw_only=True):
    """The model: shapes by name, samples of `tokens`, a batch; and encoders beside it."""

    name: str
    shapes: Shapes
    tokens: int = 4096
    global_batch: int = 64
    micro_batch: int = 1
    modules: tuple[ItemModule, ...] = ()

    def __post_init__(self) -> None:
        names = [module.name for module in self.modules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            refuse(f"two modules are named {twice[0]!r}: give each a name of its own")
        if self.tokens < 1 or self.micro_batch < 1 or self.global_batch < 1:
            refuse("tokens, global_batch and micro_batch must be at least 1")
        if self.global_batch % self.micro_batch:
            refuse(
                f"global_batch = {self.global_batch} does not divide into micro-batches of {self.micro_batch}"
            )

    def spec(self) -> ModelSpec:
        """The specification that a job of this model would send to its coordinator."""
        return model_spec(self.name, self.shapes)

    @property
    def module(self) -> str:
        """The name of the module with the loss in plans."""
        return LOSS_MODULE if self.modules else "model"

    def module_specs(self, items_a_sample: Mapping[str, float]) -> tuple[ModuleSpec, ...]:
        """The modules that a job would send, with the items of a sample in its dataset; none of a model of
        one."""
        if not self.modules:
            return ()
        takes = {module.items: module.name for module in self.modules}
        items = (
            ModuleSpec(
                name=module.name,
                model=model_spec(module.name, module.shapes, trained=module.trained),
                items=module.items,
                items_a_sample=items_a_sample[module.name],
                rows_an_item=module.rows,
            )
            for module in self.modules
        )
        return (ModuleSpec(name=LOSS_MODULE, model=self.spec(), takes=takes), *items)


class Times(Value, frozen=True, kw_only=True):
    """Seconds of what is modelled beside training. planning, planning_per_device: the planner takes so long.
    prepare: groups and modules of a proposal, beside training; pause: a switch costs that without any bytes;
    message: from one process to another; patience: until a collective fails that waits for a node; overhead:
    fixed part of a step; noise: spread of a device's computation from step to step (standard deviation of its
    logarithm)."""

    planning: float = 0.3
    planning_per_device: float = 0.003
    prepare: float = 2.0
    pause: float = 0.5
    message: float = 0.001
    patience: float = 600.0
    overhead: float = 0.0
    noise: float = 0.01

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < 3600:
                refuse(f"{name} = {getattr(self, name)} must be between 0 and 3600")


class Restart(Value, frozen=True, kw_only=True):
    """The costs of the baseline that restarts on the nodes without slow devices: seconds until it trains again
    (measured with torchrun: 18 to 24), and the steps since its last checkpoint."""

    seconds: float = 21.0
    checkpoint_steps: int = 50

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.checkpoint_steps < 1:
            refuse("seconds must not be negative and checkpoint_steps at least 1")


class Scenario(Value, frozen=True, kw_only=True):
    """All of it. `data`: the sequences of a job that packs them (None: all are alike). `experts`: how the load
    of the model's experts drifts, of which every step is played. `settle`: after so many steps in which nothing
    changed, and nothing is under way, steps are counted and not played until the next event of the script; None
    plays every step."""

    name: str
    cluster: ClusterShape
    model: Training
    data: Corpus | None = None
    experts: ExpertDrift | None = None
    seed: int = 0
    steps: int | None = None
    hours: float | None = None
    settle: int | None = 12
    faults: tuple[Fault, ...] = ()
    times: Times = Times()
    restart: Restart = Restart()
    detect: DetectSettings = DetectSettings()
    policy: PolicySettings = PolicySettings()

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.hours is None):
            refuse("give either steps or hours: how long does it run?")
        if (self.steps is not None and self.steps < 1) or (self.hours is not None and not self.hours > 0):
            refuse("steps must be at least 1, hours positive")
        if self.seed < 0 or (self.settle is not None and self.settle < 1):
            refuse("seed must not be negative, settle at least 1")
        if self.model.modules and self.data is not None:
            refuse("sequences are packed in models of one module: leave out [data] or [[module]]")
        if not self.model.modules and any(fault.items for fault in self.faults):
            refuse("a shift of items is of a model of several modules: add [[module]], or shift tokens")
        if self.experts is not None and not self.model.shapes.experts:
            refuse("[experts] is of a model with experts: add experts = N to [model]")
        if self.model.shapes.experts:
            msgspec.structs.force_setattr(self, "settle", None)
        nodes, devices = self.cluster.nodes, self.cluster.devices
        known = {f"n{n}" for n in range(nodes)}
        for number, fault in enumerate(self.faults, start=1):
            if fault.kind in REAL:
                refuse(f"fault {number}: kind = {fault.kind!r} is done to real clusters alone (`make soak`)")
            node, _, index = fault.device.partition("/")
            named = fault.node or node
            wrong = fault.device and not (index.isdigit() and int(index) < devices)
            if KINDS[fault.kind][0] and (named not in known or wrong):
                what = f"device = {fault.device!r}" if fault.device else f"node = {fault.node!r}"
                refuse(
                    f"fault {number}: {what} is not in the cluster: it has n0/0 to n{nodes - 1}/{devices - 1}"
                )

    @property
    def seconds(self) -> float | None:
        """The virtual seconds that the run lasts; None where `steps` says when it ends."""
        return None if self.hours is None else self.hours * 3600

    def truth(self, tokens: int | None = None) -> ModelProfile:
        """The seconds that a normal device really takes for samples of so many tokens (the scenario's at
        first): nobody tells the coordinator."""
        model, spec = self.model, self.model.spec()
        mean = tokens or model.tokens
        made = derive(spec, mean, model.micro_batch, flops=self.cluster.flops)
        if self.data is None:
            return made
        return evaluated(made, even(mean), self.lengths(mean), attention_rise(spec), rows=True)

    def expert_load(self) -> ExpertLoad | None:
        """Rows of experts of a step in which all are alike, and what they cost; None: the model has none."""
        shapes, model = self.model.shapes, self.model
        if not shapes.experts:
            return None
        rows = model.global_batch * model.tokens * shapes.chosen / shapes.experts
        every = dict.fromkeys(range(shapes.layers), (rows,) * shapes.experts)
        return costed(model.spec(), model.tokens, every, shapes.chosen)

    def item_modules(self) -> tuple[ModuleProblem, ...]:
        """The true profiles of the modules of items, and their items in samples at first."""
        return tuple(
            ModuleProblem(
                name=module.name,
                profile=derive(
                    model_spec(module.name, module.shapes), module.rows, 1, flops=self.cluster.flops
                ),
                items=module.items,
                items_a_sample=module.items_a_sample,
                rows_an_item=module.rows,
                trained=module.trained,
            )
            for module in self.model.modules
        )

    def lengths(self, tokens: int) -> Lengths:
        """Of the sequences of steps, of so many tokens in the mean."""
        assert self.data is not None
        return self.data.typical(tokens / self.data.mean, self.model.global_batch)

    def packed(self, tokens: int) -> PackedSequences | None:
        """The description of these sequences that a job would send its coordinator; None: it does not pack
        them."""
        if self.data is None:
            return None
        return PackedSequences(
            sequences=self.model.global_batch,
            lengths=self.lengths(tokens),
            longest=self.data.longest,
            linear=linear_of(self.model.spec()),
            row_tokens=self.data.row_tokens,
            cut=self.data.cut,
            least=self.data.least,
        )


def load(path: str | Path, seed: int | None = None) -> Scenario:
    """The scenario in a file, its own seed unless one is given. Raises ConfigError."""
    return parse(text_of(path, f"the scenario {path}"), str(path), seed)


def parse(text: str, source: str, seed: int | None = None) -> Scenario:
    """The scenario in TOML `text`; `source` names it in messages. Raises ConfigError."""
    rest = toml(text, source)
    if seed is not None:
        rest["seed"] = seed
    cluster = with_keys(ClusterShape, _table(rest, "cluster", source), f"{source}: [cluster]")
    # What moves goes over all nodes' links at once; [policy] may say otherwise.
    policy = PolicySettings(bandwidth=cluster.between.bandwidth * cluster.nodes)
    values: dict[str, Any] = {
        "name": rest.pop("name", Path(source).stem),
        "cluster": cluster,
        "model": _training(
            _table(rest, "model", source), _modules(rest.pop("module", []), source), f"{source}: [model]"
        ),
        "data": _corpus(rest, source),
        "experts": section("experts", ExpertDrift(), rest.pop("experts"), source)
        if "experts" in rest
        else None,
        "times": section("times", Times(), rest.pop("times", {}), source),
        "restart": section("restart", Restart(), rest.pop("restart", {}), source),
        "detect": section("detect", DetectSettings(), rest.pop("detect", {}), source),
        "policy": section("policy", policy, rest.pop("policy", {}), source),
    }
    if (data := values["data"]) is not None:  # a sample has as many tokens as these
        model = msgspec.structs.replace(values["model"], tokens=max(1, round(data.mean)))
        values["model"] = model
    drawn = section("random", RandomFaults(), rest.pop("random", {}), source)
    given = rest.pop("fault", [])
    if not isinstance(given, list):
        raise ConfigError(f"{source}: fault must be a list: write [[fault]] above each one")
    faults = [with_keys(Fault, body, f"{source}: fault {n}") for n, body in enumerate(given, start=1)]
    made = with_keys(Scenario, {**rest, **values, "faults": tuple(faults)}, source)
    if made.policy.interleave > 1:
        said = (
            f"{source}: [policy] interleave = {made.policy.interleave}: the simulator plays plain stages alone"
        )
        raise ConfigError(f"{said}; leave it out")
    if not drawn.any:
        return made
    if made.seconds is None:
        raise ConfigError(f"{source}: [random] needs hours: steps do not say how long it runs")
    names = [device.name for device in made.cluster.cluster().devices]
    return msgspec.structs.replace(made, faults=(*made.faults, *draw(drawn, names, made.seconds, made.seed)))


def _table(rest: dict[str, Any], name: str, source: str) -> Mapping[str, Any]:
    body = rest.pop(name, None)
    if not isinstance(body, dict):
        raise ConfigError(f"{source}: the section [{name}] is missing: see docs/simulator.md")
    return body


def _corpus(rest: dict[str, Any], source: str) -> Corpus | None:
    """The section [data], if there is one. Its `file` has the lengths of sequences, beside the scenario."""
    body = rest.pop("data", None)
    if body is None:
        return None
    where = f"{source}: [data]"
    if not isinstance(body, dict):
        raise ConfigError(f"{where} must be a section: see docs/simulator.md")
    given = dict(body)
    if (name := given.pop("file", None)) is not None:
        path = Path(source).parent / str(name)
        words = text_of(path, f"the lengths {path}").replace(",", " ").split()
        if not words or not all(word.isdigit() for word in words):
            raise ConfigError(f"{where} file = {name!r} must have the tokens of each sequence, as 512 60 4096")
        given["lengths"] = tuple(map(int, words))
    made = with_keys(Corpus, given, where)
    wrong = [each for each in made.baselines if each not in BASELINES]
    if wrong:
        raise ConfigError(f"{where} baselines: {wrong[0]!r} must be one of {', '.join(BASELINES)}")
    return made


def _modules(listed: object, source: str) -> tuple[ItemModule, ...]:
    if not isinstance(listed, list):
        raise ConfigError(f"{source}: module must be a list: write [[module]] above each one")
    found = []
    for number, body in enumerate(listed, start=1):
        where = f"{source}: module {number}"
        preset, shapes, rest = _shapes(body, where)
        found.append(with_keys(ItemModule, {"name": preset or "", **rest, "shapes": shapes}, where))
    return tuple(found)


def _training(body: Mapping[str, Any], modules: tuple[ItemModule, ...], where: str) -> Training:
    """A preset's shapes, or those given; the rest is the batch."""
    preset, shapes, batch = _shapes(body, where)
    return with_keys(
        Training, {"name": preset or "model", **batch, "shapes": shapes, "modules": modules}, where
    )


def _shapes(body: Mapping[str, Any], where: str) -> tuple[str | None, Shapes, dict[str, Any]]:
    """A preset and its shapes, or those that are given; and the other keys."""
    shape_keys = {field.name for field in msgspec.structs.fields(Shapes)}
    rest = {key: value for key, value in body.items() if key not in shape_keys and key != "preset"}
    shapes = {key: value for key, value in body.items() if key in shape_keys}
    preset = body.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"{where} preset = {preset!r} must be one of {', '.join(PRESETS)}")
    if preset is not None and shapes:
        raise ConfigError(f"{where} preset = {preset!r} has shapes of its own: leave out {', '.join(shapes)}")
    return preset, with_keys(Shapes, shapes, where) if preset is None else PRESETS[preset], rest
