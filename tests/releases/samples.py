"""Samples of everything that other releases read: each field differs from its default where it may.

Values are made from the types of the fields, so that a new field or message needs nothing here; what checks
itself when it is made (a plan, a model) is given in `FIXED`. A field whose type is a Literal or a union has
alternatives: `goldens` gives one sample of each class, then more until the samples have every alternative.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from elasticd_agent.snapshots import transfer
from elasticd_planner.cost.model_profile import ExpertProfile, ModelProfile, derive
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.problem import MeshProblem, ModuleProblem, Problem, SearchSpace
from elasticd_planner.problem_files import file_format
from elasticd_planner.problem_files.file_format import (
    BatchEntry,
    ClusterEntry,
    Figures,
    InnerLinks,
    ItemModuleEntry,
    LinkEntry,
    LinksEntry,
    ModelEntry,
    NodeEntry,
    PinsEntry,
    Planned,
    TableProblem,
)
from elasticd_planner.problem_files.file_format import answer as planning_answer
from elasticd_planner.problem_files.profile_file import _File
from elasticd_planner.problem_files.times import (
    CollectiveTimes,
    RecomputeEntry,
    SectionState,
    SectionTimes,
    StateEntry,
    TimedModel,
    TimesEntry,
    entry_of,
)
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor, Placement
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import (
    Edge,
    ModulePlan,
    PackedLane,
    Pipeline,
    Plan,
    Prediction,
    Stage,
    StatePolicy,
    Strategy,
)
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import FILE_VERSION, StoredValue
from msgspec import inspect

from elasticd import recording
from elasticd.checkpoints import manifest
from elasticd.cli.moves import answered
from elasticd.codec.decoding import decode_stored
from elasticd.codec.message import Message
from elasticd.coordinator import store_writer
from elasticd.coordinator.events import event_pages
from elasticd.demo import record, report
from elasticd.demo.scenario import DemoScenario
from elasticd.machines.coordinator.machine import takeover
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.runtime.snapshot import memory_file
from elasticd.simulator.results.result import Outcome
from elasticd.store.leader import LeaderRecord
from elasticd.store.state_file import Remembered
from elasticd.wire import coordinator
from tests.machines.cast import model

#: Whose classes are read by other releases; each module is imported, so that all subclasses are known.
MODULES = (
    *(coordinator, transfer, manifest, store_writer, event_pages, record, report, memory_file),
    *(Remembered, Outcome, LeaderRecord),
)

PLAN = Plan(
    number=3,
    strategies=(
        Strategy(
            modules=(
                ModulePlan(
                    module="decoder",
                    pipelines=(
                        Pipeline(
                            stages=(
                                Stage(
                                    start=0,
                                    stop=1,
                                    devices=("n0/0", "n0/1", "n3/0"),
                                    shares=(3, 1, 4),
                                    recompute=True,
                                    later=((2, 3),),
                                    sequence_parallel=True,
                                    lanes=(2, 1),
                                ),
                                Stage(
                                    start=1,
                                    stop=2,
                                    devices=("n1/0", "n3/1"),
                                    shares=(4, 4),
                                    later=((3, 4),),
                                    lanes=(1, 1),
                                ),
                            ),
                            micro_batches=4,
                            rows=(3, 1),
                            packed=(PackedLane(capacity=4096, slowdown=96), PackedLane(capacity=8192)),
                        ),
                    ),
                ),
            ),
        ),
    ),
    micro_batch=2,
    global_batch=8,
    state=StatePolicy(zero=1, replicas=2),
    carriers=("n1/1",),
    idle=("n2/0",),
    binding={"n0/0": "a", "n0/1": "b", "n1/0": "c", "n1/1": "d", "n3/0": "e", "n3/1": "f"},
    prediction=Prediction(step_seconds=0.5, bound_seconds=0.4, memory={"n0/0": 1 << 30}),
    reason="n0/1 is slow",
    sequence=128,
)
#: A plan of two modules.
MODULES = Plan(
    number=4,
    strategies=(
        Strategy(
            modules=(
                ModulePlan(
                    module="vision",
                    pipelines=(
                        Pipeline(
                            stages=(
                                Stage(start=0, stop=2, devices=("n0/0",), shares=(1,), microseconds=(700, 0)),
                            ),
                            micro_batches=1,
                        ),
                    ),
                    trainable=False,
                    items="images",
                    ahead=3,
                    lead=1,
                ),
                ModulePlan(
                    module="language",
                    pipelines=(
                        Pipeline(
                            stages=(
                                Stage(
                                    start=0,
                                    stop=4,
                                    devices=("n0/0", "n0/1"),
                                    shares=(3, 1),
                                    microseconds=(1000, 2000),
                                    experts=((), ((0, 3), (1, 2)), (), ((0, 1, 2, 3), (2,))),
                                    splits=((), (), (), ((2, 49152, 16384),)),
                                    slowdowns=(64, 80),
                                ),
                            ),
                            micro_batches=4,
                        ),
                    ),
                ),
            ),
            edges=(Edge(source="vision", target="language"),),
        ),
    ),
    micro_batch=2,
    global_batch=8,
    binding={"n0/0": "a", "n0/1": "b"},
    prediction=Prediction(step_seconds=0.5, bound_seconds=0.4),
)
CLUSTER = Cluster(
    nodes=(Node(name="n0", devices=tuple(Device(name=f"n0/{i}", memory=1 << 30) for i in range(2)), island=2),),
    inside=Link(bandwidth=2e9, latency=1e-4),
    within=Link(bandwidth=4e9, latency=1e-5),
)
LINK = LinkEntry(gb_per_s=8.0, latency_us=3.0)
PROFILE = derive(model(), 64.0, 1)
#: Values that check themselves, and those whose types say too little.
MESHES = (AllowedMesh(names=("replicate", "shard"), sizes=(0, 2)), AllowedMesh(names=("shard",)))
MESH_PLAN = MeshPlan(
    number=3,
    names=("replicate", "shard"),
    shape=(1, 2),
    members=("n0/0", "n0/1"),
    samples=(3, 5),
    idle=("n1/0",),
    binding={"n0/0": "one é", "n0/1": "two"},
    prediction=Prediction(step_seconds=1.5, bound_seconds=1.25, memory={"n0/0": 7}),
    reason="reason é",
)
FIXED: dict[type, Any] = {
    Plan: PLAN,
    Cluster: CLUSTER,
    Device: Device(name="n0/0", memory=1 << 30),
    Lengths: Lengths(mean=1000.0, effective=9000.0, longest=60_000.0),
    PackedSequences: PackedSequences(
        sequences=512.0,
        lengths=Lengths(mean=1000.0, effective=9000.0, longest=60_000.0),
        longest=131_072,
        sample="sample 7",
        linear=49_152,
        row_tokens=8192,
        cut=False,
        least=1024,
    ),
    ModelSpec: model(),
    ExpertProfile: ExpertProfile(part=0.625, chosen=2, count=4),
    MeshPlan: MESH_PLAN,
    MeshModel: MeshModel(
        meshes=MESHES,
        tensors=(
            MeshTensor(
                name="up.weight é",
                shape=(3, 4),
                dtype="bfloat16",
                kind="frozen",
                placements=((Placement(), Placement(dim=1, strided=True)), (Placement(dim=0),)),
            ),
        ),
    ),
    MeshProblem: MeshProblem(
        cluster=CLUSTER,
        meshes=MESHES,
        global_batch=8,
        rates={CLUSTER.devices[0].name: 1.5},
        current=MESH_PLAN,
        sample_seconds=0.25,
        other_seconds=0.5,
    ),
    StatePolicy: StatePolicy(zero=2, replicas=2),
    SearchSpace: SearchSpace(
        micro_batches=(1, 2),
        recompute=True,
        sequence_parallel=True,
        interleave=2,
        lanes=2,
        fixed_tp=2,
        fixed_dp=1,
    ),
    Problem: Problem(
        cluster=CLUSTER,
        profile=PROFILE,
        global_batch=8,
        micro_batch=1,
        rates={"n0/1": 2.0},
        current=PLAN,
        search_space=SearchSpace(fixed_dp=1),
    ),
    ModelProfile: PROFILE,
    DemoScenario: DemoScenario(),
    DetectSettings: DetectSettings(),
    PolicySettings: PolicySettings(),
    Box: Box(start=(0, 2), stop=(4, 6)),
    TableProblem: TableProblem(
        cluster=ClusterEntry(nodes=(NodeEntry(name="n0", devices=2, memory_mib=1024.0),)),
        model=ModelEntry(name="m", layers=4, tp_full=2, tp_slowdown={1: 1.9, 2: 1.0}, uneven_shares=True),
        batch=BatchEntry(global_batch=8, micro_batch=1),
        rates={"n0/1": 2.0},
    ),
}
TIMES = TimesEntry(
    block=SectionTimes(seconds_per_token=1e-4, tp_slowdown={1: 1.5, 2: 1.25}, collectives=2),
    boundary_bytes=64.0,
    collectives={2: CollectiveTimes(seconds=1e-5)},
)
#: One more value of classes whose fields exclude each other.
MORE: dict[type, Any] = {
    Plan: MODULES,
    Problem: Problem(
        cluster=CLUSTER,
        profile=PROFILE,
        global_batch=8,
        micro_batch=1,
        module="language",
        modules=(
            ModuleProblem(
                name="vision",
                profile=PROFILE,
                items="images",
                items_a_sample=1.5,
                rows_an_item=576.0,
                trained=False,
            ),
        ),
        experts=ExpertLoad(rows={0: (96.0, 31.5, 8.0, 64.5)}, part=0.75, expert_bytes=4096, replicas=2),
    ),
    TableProblem: TableProblem(
        cluster=ClusterEntry(
            nodes=(
                NodeEntry(
                    name="n0", devices=4, memory_mib=1024.0, island=2, links=InnerLinks(island=LINK, node=LINK)
                ),
            ),
            links=LinksEntry(island=LINK, node=LINK, network=LINK),
        ),
        model=ModelEntry(
            name="m",
            layers=4,
            times=TimesEntry(
                block=SectionTimes(
                    seconds_per_token=1e-4, fixed_seconds=1e-3, tp_slowdown={1: 1.5, 2: 1.25}, collectives=2
                ),
                boundary_bytes=64.0,
                collectives={2: CollectiveTimes(seconds=1e-5, seconds_per_token=1e-7)},
                forward=0.25,
                optimizer_seconds_per_byte=1e-9,
                overhead_seconds=1e-3,
                overlap=True,
            ),
            state=StateEntry(
                block=SectionState(
                    cut_bytes=64, grouped_bytes=32, whole_bytes=16, cut_activation=8.0, whole_activation=4.0
                ),
                tied_bytes=16,
                gradient=2.0,
                optimizer=3.0,
                fixed_mib=1.0,
                reserve_mib=2.0,
            ),
            recompute=RecomputeEntry(slowdown=1.5, kept_activation=2.0),
            units=8,
            groups=4,
        ),
        batch=BatchEntry(global_batch=8, micro_batch=1, sequence=16.0),
        pins=PinsEntry(
            tp=2, dp=1, zero=1, replicas=2, recompute=True, interleave=2, lanes=2, sequence_parallel=True
        ),
        module="language",
        modules=(
            ItemModuleEntry(
                name="vision",
                model=TimedModel(
                    name="vit",
                    layers=2,
                    times=TIMES,
                    units=8,
                    groups=4,
                    uneven_shares=False,
                    state=StateEntry(block=SectionState(cut_bytes=64)),
                    recompute=RecomputeEntry(slowdown=1.5, kept_activation=2.0),
                ),
                items="images",
                items_a_sample=1.5,
                rows_an_item=576.0,
                trained=False,
            ),
            ItemModuleEntry(
                name="audio",
                model=TimedModel(name="conformer", layers=2, times=TIMES),
                items="clips",
                items_a_sample=0.5,
                rows_an_item=64.0,
            ),
        ),
    ),
}
#: Fields whose values are checked, by class and name.
FIELDS: dict[tuple[str, str], Any] = {
    ("JobSpec", "global_batch"): 8,
    ("JobSpec", "micro_batch"): 2,
    ("MeasuredBytes", "share"): 0.5,
    ("Line", "body"): msgspec.Raw(b"{}"),
}

#: The values of a recording's lines, by what the line is.
BODIES = {"began": recording.Line.state, "heard": recording.Line.event, "told": recording.Line.note}

S = TypeVar("S", bound=msgspec.Struct)


class Golden(NamedTuple):
    """What other releases read: a tag and an encoded sample."""

    tag: str
    text: bytes
    full: bytes = b""  # JSON of all that the reader keeps, defaults too, where that is not the same as `text`


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Every message and stored value of this release, by tag."""
    found: dict[str, type[msgspec.Struct]] = {}
    for kind in (*_below(Message), *_below(StoredValue)):
        if kind.__module__.startswith("elasticd"):  # one below another with its tag is never encoded
            found.setdefault(str(kind.__struct_config__.tag), kind)
    return found


@functools.cache
def goldens() -> tuple[Golden, ...]:
    """A sample of every message and stored value, and of the files that have no class of their own; then
    samples with the alternatives that those lack. Raises LookupError where no sample can have one."""
    # Decoded and encoded once, so that a float is written as one: some values are made of integers.
    first = [
        golden._replace(text=encoded(decoded(golden))) if golden.tag in kinds() else golden
        for golden in _first()
    ]
    return tuple(map(_with_full, (*first, *_others(first))))


def _with_full(golden: Golden) -> Golden:
    text, full = msgspec.json.decode(golden.text), read_back(golden)
    return golden if full == text else golden._replace(full=msgspec.json.encode(full))


def _first() -> Iterator[Golden]:
    for tag, kind in sorted(kinds().items()):
        if kind is not recording.Line:
            yield Golden(tag, msgspec.json.encode(sample(kind)))
        if kind in MORE:
            yield Golden(tag, msgspec.json.encode(MORE[kind]))
    for line in _recording():
        yield Golden("recording-line", line.strip())
    figures = Figures(steady=1.0, step=2.0, bound=1.5, gap=0.5, ideal=0.75)
    answer = planning_answer(Planned(plan=PLAN, figures=figures, reason="r"), 0.25)
    yield Golden("planning-answer", msgspec.json.encode(answer))
    profile = {"type": "profile", "version": FILE_VERSION, "model": entry_of(PROFILE), "fit": {}}
    yield Golden("profile", msgspec.json.encode(profile))


def _recording() -> Iterator[bytes]:
    state = takeover(7, (), JobSettings(), 0.0)
    yield recording.began(state, 1.5, 2.5)
    for event in recording.EVENTS.values():
        yield recording.heard(sample(event), 1.5, 2.5)
    yield recording.told(sample(CoordinatorNote), 1.5, 2.5)


# -- one sample ------------------------------------------------------------------------------------------------


@functools.cache
def _type(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def sample(kind: type[S]) -> S:
    """A value of this class."""
    if kind in FIXED:
        found: S = FIXED[kind]
        return found
    values = {}
    for field in _fields(_type(kind)):
        if field.name == "version":
            continue
        fixed = FIELDS.get((kind.__name__, field.name))
        made = fixed if fixed is not None else _value(field.type, field.name)
        if made == field.default and isinstance(field.type, inspect.LiteralType):
            made = field.type.values[0]
        values[field.name] = not made if made is field.default is True else made
    return kind(**values)


def _value(kind: inspect.Type, name: str) -> Any:
    """Something of this type; `name` is the field's."""
    match kind:
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 3 + len(name) % 7
        case inspect.FloatType():
            return float(3 + len(name) % 7)
        case inspect.StrType():
            return f"{name} é"
        case inspect.BytesType():
            return b"\x00\xff" + name.encode()
        case inspect.AnyType():
            return name
        case inspect.LiteralType(values=values):
            return values[-1]
        case inspect.UnionType(types=arms):
            return _value(next(arm for arm in arms if not isinstance(arm, inspect.NoneType)), name)
        case inspect.TupleType(item_types=items):
            return tuple(_value(item, name) for item in items)
        case inspect.VarTupleType(item_type=item):
            return (_value(item, name),)
        case inspect.ListType(item_type=item):
            return [_value(item, name)]
        case inspect.SetType(item_type=item) | inspect.FrozenSetType(item_type=item):
            return frozenset([_value(item, name)])
        case inspect.DictType(key_type=key, value_type=item):
            return {_value(key, name): _value(item, name)}
        case inspect.StructType(cls=cls):
            return sample(cls)
    raise TypeError(f"no sample of {kind} for the field {name}: give one in FIXED")


def _fields(kind: inspect.Type) -> tuple[inspect.Field, ...]:
    assert isinstance(kind, inspect.StructType), f"{kind} is no struct"
    return kind.fields


def _below(kind: type) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


# -- alternatives of fields ------------------------------------------------------------------------------------


class Alternative(NamedTuple):
    """One value of a Literal, or one arm of a union."""

    place: str  # of the type: "Health.network[0]"
    name: str  # of the arm, or the value of the Literal

    def __str__(self) -> str:
        return f"{self.place} = {self.name}"


class Found(NamedTuple):
    """An alternative that JSON has, and where."""

    alternative: Alternative
    path: tuple[Any, ...]  # keys and indices
    others: dict[Alternative, inspect.Type]  # the type of each alternative that may be there


def alternatives(*roots: type) -> set[Alternative]:
    """All that values of these classes, and the values inside them, may have."""
    found: set[Alternative] = set()
    seen: set[type] = set()

    def visit(kind: inspect.Type, place: str) -> None:
        if isinstance(kind, inspect.StructType):
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    visit(field.type, f"{kind.cls.__name__}.{field.name}")
            return
        found.update(_choices(kind, place))
        for part, inner in _parts(kind):
            visit(inner, place + part)

    for root in roots:
        visit(_type(root), root.__name__)
    return found


def alternatives_in(
    kind: inspect.Type, raw: Any, place: str = "", path: tuple[Any, ...] = ()
) -> Iterator[Found]:
    """Those that this JSON of this type has."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            held = raw.get(field.encode_name, inspect.UNSET) if isinstance(raw, dict) else inspect.UNSET
            if held is inspect.UNSET and kind.cls.__struct_config__.omit_defaults:
                held = msgspec.to_builtins(_default(field))
            if held is not inspect.UNSET:
                inner = f"{kind.cls.__name__}.{field.name}"
                yield from alternatives_in(field.type, held, inner, (*path, field.encode_name))
        return
    choices = _choices(kind, place)
    if choices:
        yield Found(Alternative(place, _arm(kind, raw)), path, choices)
    for part, inner in _parts(kind):
        if isinstance(kind, inspect.UnionType):
            if _name(inner) == _arm(kind, raw):
                yield from alternatives_in(inner, raw, place + part, path)
        elif isinstance(kind, inspect.TupleType):
            index = int(part[1:-1])
            yield from alternatives_in(inner, raw[index], place + part, (*path, index))
        elif part == "{}":
            for key, held in raw.items():
                yield from alternatives_in(inner, held, place + part, (*path, key))
        elif part == "[]":
            for index, held in enumerate(raw):
                yield from alternatives_in(inner, held, place + part, (*path, index))


def _parts(kind: inspect.Type) -> list[tuple[str, inspect.Type]]:
    """The types inside a type, and what each adds to its place."""
    match kind:
        case inspect.UnionType(types=arms):
            return [("", arm) for arm in arms if not isinstance(arm, inspect.LiteralType)]
        case inspect.TupleType(item_types=items):
            return [(f"[{index}]", item) for index, item in enumerate(items)]
        case inspect.DictType(value_type=item):
            return [("{}", item)]
        case inspect.CollectionType(item_type=item):
            return [("[]", item)]
    return []


def _choices(kind: inspect.Type, place: str) -> dict[Alternative, inspect.Type]:
    """The alternatives of a Literal or a union, each with its type."""
    if isinstance(kind, inspect.LiteralType):
        return {Alternative(place, repr(value)): inspect.LiteralType((value,)) for value in kind.values}
    found: dict[Alternative, inspect.Type] = {}
    if isinstance(kind, inspect.UnionType):
        for arm in kind.types:
            if isinstance(arm, inspect.LiteralType):
                found |= _choices(arm, place)
            else:
                found[Alternative(place, _name(arm))] = arm
    return found


def _name(arm: inspect.Type) -> str:
    return arm.cls.__name__ if isinstance(arm, inspect.StructType) else type(arm).__name__.removesuffix("Type")


def _arm(kind: inspect.Type, raw: Any) -> str:
    """The name of the alternative that this JSON is."""
    if isinstance(kind, inspect.LiteralType):
        return repr(raw)
    assert isinstance(kind, inspect.UnionType)
    for arm in kind.types:
        if isinstance(arm, inspect.LiteralType):
            if raw in arm.values:
                return repr(raw)
        elif isinstance(arm, inspect.StructType) and isinstance(raw, dict) and "type" in raw:
            if raw["type"] == arm.tag:
                return _name(arm)
        else:
            try:
                msgspec.convert(raw, _python(arm))
            except msgspec.ValidationError:
                continue
            return _name(arm)
    raise LookupError(f"{raw!r} is none of {kind}")


def _python(kind: inspect.Type) -> Any:
    """A type of Python whose JSON looks like that of this arm of a union."""
    match kind:
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return bool
        case inspect.IntType():
            return int
        case inspect.FloatType():
            return float
        case inspect.StrType() | inspect.BytesType():
            return str
        case inspect.StructType() | inspect.DictType():
            return dict
        case inspect.CollectionType() | inspect.TupleType():
            return list
    raise TypeError(f"no JSON of {kind} is known")


def _default(field: inspect.Field) -> Any:
    return field.default_factory() if field.default is inspect.NODEFAULT else field.default


def all_alternatives() -> set[Alternative]:
    """Those of every message, stored value, event and note."""
    return alternatives(*kinds().values(), *recording.EVENTS.values(), CoordinatorNote)


def found_in(golden: Golden) -> list[Found]:
    """The alternatives that a golden line has."""
    kind = kinds().get(golden.tag)
    if kind is None:
        return []
    raw = msgspec.json.decode(golden.text)
    found = list(alternatives_in(_type(kind), raw))
    if kind is recording.Line and raw["what"] != "began":
        body = CoordinatorNote if raw["what"] == "told" else recording.EVENTS[raw["kind"]]
        found += alternatives_in(_type(body), raw["body"], path=("body",))
    return found


def _others(first: Iterable[Golden]) -> Iterator[Golden]:
    """A line for each alternative that the lines so far lack: the shortest line that can be changed."""
    lines = sorted(first, key=lambda golden: len(golden.text))
    places = [(golden, found) for golden in lines for found in found_in(golden)]
    has = {found.alternative for _, found in places}
    for wanted in sorted(all_alternatives()):
        if wanted in has:
            continue
        made = (_with(golden, found, wanted) for golden, found in places if wanted in found.others)
        line = next((golden for golden in made if golden is not None), None)
        if line is None:
            raise LookupError(f"no sample has {wanted}: give one in FIXED that may have it")
        yield line
        has |= {found.alternative for found in found_in(line)}


def _with(golden: Golden, found: Found, wanted: Alternative) -> Golden | None:
    """This line with another alternative; None where the value's own checks refuse it."""
    raw = msgspec.json.decode(golden.text)
    holder = raw
    for key in found.path[:-1]:
        holder = holder[key]
    try:
        made = _value(found.others[wanted], str(found.path[-1]))
        holder[found.path[-1]] = msgspec.to_builtins(made, str_keys=True)
        changed = golden._replace(text=msgspec.json.encode(raw))
        changed = changed._replace(text=encoded(decoded(changed)))
    except ValueError:
        return None
    return changed if wanted in {each.alternative for each in found_in(changed)} else None


# -- what a reader keeps ---------------------------------------------------------------------------------------


class Omitting(dict[str, Any]):
    """All fields of a value whose class leaves defaults out when it is written."""


def decoded(golden: Golden) -> Any:
    """By the decoder that a receiver has today."""
    if golden.tag == "profile":
        return msgspec.json.decode(golden.text, type=_File)
    if golden.tag == "planning-answer":
        return answered(golden.text, "golden")
    kind = kinds()[golden.tag]
    if issubclass(kind, Message):
        return msgspec.json.decode(golden.text, type=kind)
    if kind is Plan:
        return Plan.from_json(golden.text)
    if kind is file_format.TableProblem:
        return file_format.load(golden.text)
    return decode_stored(golden.text, kind)


def encoded(value: Any) -> bytes:
    """A message or stored value as this release writes it."""
    if not isinstance(value, recording.Line):
        return msgspec.json.encode(value)
    body = BODIES[value.what](value)
    if value.what == "heard":
        return recording.heard(body, value.at, value.time).strip()  # type: ignore[arg-type]
    return getattr(recording, value.what)(body, value.at, value.time).strip()  # type: ignore[no-any-return]


def read_back(golden: Golden) -> Any:
    """JSON of all fields of the decoded line, defaults too."""
    value = decoded(golden)
    found = _full(value)
    if isinstance(value, recording.Line):
        found["body"] = _full(BODIES[value.what](value))
    return found


def _full(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        found = Omitting() if config.omit_defaults else {}
        if config.tag is not None:
            found[config.tag_field] = config.tag
        for field in msgspec.structs.fields(value):
            found[field.encode_name] = _full(getattr(value, field.name))
        return found
    if isinstance(value, dict):
        return {msgspec.to_builtins({key: 0}, str_keys=True).popitem()[0]: _full(value[key]) for key in value}
    if dataclasses.is_dataclass(value):
        return {field.name: _full(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [_full(each) for each in value]
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # as recordings have it
    return msgspec.to_builtins(value, str_keys=True)
