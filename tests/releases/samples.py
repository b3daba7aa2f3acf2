"""One sample of everything that other releases read: each field differs from its default where it may.

Values are made from the types of the fields, so that a new field or message needs nothing here; what checks
itself when it is made (a plan, a model) is given in `FIXED`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from elasticd_agent import streams
from elasticd_planner.boxes import Box
from elasticd_planner.cluster import Cluster, Device, Link, Node
from elasticd_planner.detect import DetectSettings
from elasticd_planner.formats import (
    BatchEntry,
    ClusterEntry,
    Figures,
    ModelEntry,
    NodeEntry,
    Planned,
    TableProblem,
)
from elasticd_planner.formats import answer as planning_answer
from elasticd_planner.plan import ModulePlan, Pipeline, Plan, Prediction, Stage, StatePolicy, Strategy
from elasticd_planner.policy import PolicySettings
from elasticd_planner.problem import Freedom, Problem
from elasticd_planner.profiles import ModelProfile, derive
from elasticd_planner.rules import ModelSpec
from elasticd_planner.timed import entry_of
from elasticd_planner.value import FILE_VERSION, StoredValue

from elasticd import messages, recording
from elasticd.checkpoints import manifest
from elasticd.coordinator import writer
from elasticd.demo import record, report
from elasticd.demo.scenario import Scenario
from elasticd.machines.coordinator import takeover
from elasticd.machines.job.effects import Note
from elasticd.machines.job.state import Settings
from elasticd.remembered import Remembered
from elasticd.runtime import memory_file
from elasticd.simulator.record import Outcome
from elasticd.store.leader import LeaderRecord
from elasticd.wire import Message
from tests.machines.cast import model

#: Whose classes are read by other releases; each module is imported, so that all subclasses are known.
MODULES = (messages, streams, manifest, writer, record, report, memory_file, Remembered, Outcome, LeaderRecord)

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
                                    devices=("n0/0", "n0/1"),
                                    shares=(3, 1),
                                    recompute=True,
                                    later=((2, 3),),
                                ),
                                Stage(start=1, stop=2, devices=("n1/0",), shares=(4,), later=((3, 4),)),
                            ),
                            micro_batches=4,
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
    binding={"n0/0": "a", "n0/1": "b", "n1/0": "c", "n1/1": "d"},
    prediction=Prediction(step_seconds=0.5, bound_seconds=0.4, memory={"n0/0": 1 << 30}),
    reason="n0/1 is slow",
    sequence=128,
)
CLUSTER = Cluster(
    nodes=(Node(name="n0", devices=tuple(Device(name=f"n0/{i}", memory=1 << 30) for i in range(2)), island=2),),
    inside=Link(bandwidth=2e9, latency=1e-4),
    within=Link(bandwidth=4e9, latency=1e-5),
)
PROFILE = derive(model(), 64.0, 1)
#: Values that check themselves, and those whose types say too little.
FIXED: dict[type, Any] = {
    Plan: PLAN,
    Cluster: CLUSTER,
    Device: Device(name="n0/0", memory=1 << 30),
    ModelSpec: model(),
    StatePolicy: StatePolicy(zero=2, replicas=2),
    Freedom: Freedom(micro_batches=(1, 2), recompute=True, interleave=2, tp=2, dp=1),
    Problem: Problem(
        cluster=CLUSTER,
        profile=PROFILE,
        global_batch=8,
        micro_batch=1,
        rates={"n0/1": 2.0},
        current=PLAN,
        freedom=Freedom(dp=1),
    ),
    ModelProfile: PROFILE,
    Scenario: Scenario(),
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
#: Fields whose values are checked, by class and name.
FIELDS: dict[tuple[str, str], Any] = {
    ("JobSpec", "global_batch"): 8,
    ("JobSpec", "micro_batch"): 2,
    ("Line", "body"): msgspec.Raw(b"{}"),
}

S = TypeVar("S", bound=msgspec.Struct)


class Golden(NamedTuple):
    """What other releases read: a tag and an encoded sample."""

    tag: str
    text: bytes


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Every message and stored value of this release, by tag."""
    found = [*_below(Message), *_below(StoredValue)]
    return {str(kind.__struct_config__.tag): kind for kind in found if kind.__module__.startswith("elasticd")}


def goldens() -> Iterator[Golden]:
    """A sample of every message and stored value, and of the files that have no class of their own."""
    for tag, kind in sorted(kinds().items()):
        if kind is not recording.Line:
            yield Golden(tag, msgspec.json.encode(sample(kind)))
    for line in _recording():
        yield Golden("recording-line", line.strip())
    figures = Figures(steady=1.0, step=2.0, bound=1.5, gap=0.5, ideal=0.75)
    answer = planning_answer(Planned(plan=PLAN, figures=figures, reason="r"), 0.25)
    yield Golden("planning-answer", msgspec.json.encode(answer))
    profile = {"type": "profile", "version": FILE_VERSION, "model": entry_of(PROFILE), "fit": {}}
    yield Golden("profile", msgspec.json.encode(profile))


def _recording() -> Iterator[bytes]:
    state = takeover(7, (), Settings(), 0.0)
    yield recording.began(state, 1.5, 2.5)
    for event in recording.EVENTS.values():
        yield recording.heard(sample(event), 1.5, 2.5)
    yield recording.told(sample(Note), 1.5, 2.5)


def sample(kind: type[S]) -> S:
    """A value of this class."""
    if kind in FIXED:
        found: S = FIXED[kind]
        return found
    hints = get_type_hints(kind)
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "version":
            continue
        fixed = FIELDS.get((kind.__name__, field.name))
        made = fixed if fixed is not None else _value(hints[field.name], field.name)
        if made == field.default and get_origin(hints[field.name]) is Literal:
            made = get_args(hints[field.name])[0]
        values[field.name] = not made if made is field.default is True else made
    return kind(**values)


def _value(kind: Any, name: str) -> Any:
    """Something of this type; `name` is the field's."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is bool:
        return True
    if kind in (int, float):
        return kind(3 + len(name) % 7)
    if kind is str:
        return f"{name} é"
    if kind is bytes:
        return b"\x00\xff" + name.encode()
    if kind is Any:
        return name
    if origin is Literal:
        return args[-1]
    if origin in (Union, types.UnionType):
        return _value(next(each for each in args if each is not type(None)), name)
    if origin is tuple:
        return tuple(_value(each, name) for each in (args[:1] if args[-1] is Ellipsis else args))
    if origin in (dict, list, frozenset, set):
        if origin is dict:
            return {_value(args[0], name): _value(args[1], name)}
        return origin([_value(args[0], name)])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return sample(kind)
    raise TypeError(f"no sample of {kind} for the field {name}: give one in FIXED")


def _below(kind: type) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
