"""The cast of the coordinator's machine tests: a model, nodes, workers, and how fast they really are."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import ModelProfile, derive
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.profiling.samples import MeasuredBytes, ModelBytes
from elasticd_planner.search.planner import answer as search
from elasticd_planner.spec.cluster import Cluster, Device, Node, node_of
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sequence_lengths import bucket

from elasticd.records import JobSpec, NodeRecord
from elasticd.wire.coordinator import FromClient
from elasticd.wire.worker import (
    Copy,
    DrainNotice,
    Finished,
    FromWorker,
    InDoubt,
    PeersLost,
    Prepared,
    Raised,
    Refused,
    StateReport,
    StayedOnPlan,
    Switched,
)

JOB = "demo"
MEMORY = 3_000_000
Outcome = (
    Prepared
    | Refused
    | Switched
    | StayedOnPlan
    | InDoubt
    | PeersLost
    | StateReport
    | Finished
    | Raised
    | DrainNotice
)


def model(layers: int = 8) -> ModelSpec:
    """A decoder in shapes: attention with 8 heads over 4 kv-heads, a gated MLP, a head of its own."""
    width, ffn = 64, 192
    heads, ffn_cut = Cut(dim=0, units="heads"), Cut(dim=0, units="ffn")
    block = (
        Parameter(name="norm", shape=(width,), dtype="float32"),
        Parameter(name="q", shape=(width, width), dtype="float32", cut=heads),
        Parameter(
            name="kv", shape=(width, width), dtype="float32", cut=Cut(dim=0, units="kv_heads"), replicas="add"
        ),
        Parameter(name="o", shape=(width, width), dtype="float32", cut=Cut(dim=1, units="heads")),
        Parameter(name="up", shape=(ffn, width), dtype="float32", cut=ffn_cut),
        Parameter(name="down", shape=(width, ffn), dtype="float32", cut=Cut(dim=1, units="ffn")),
    )
    vocabulary = (Parameter(name="weight", shape=(256, width), dtype="float32"),)
    units = (
        Units(kind="heads", count=8),
        Units(kind="kv_heads", count=4, follows="heads"),
        Units(kind="ffn", count=192),
    )
    return ModelSpec(
        name="tiny",
        embed=vocabulary,
        kinds=(block,),
        layers=(0,) * layers,
        head=vocabulary,
        units=units,
        width=width,
    )


def _bytes() -> ModelBytes:
    """What the job's first worker says that sections keep: little beside the state, which fills the memory of
    these tests' devices. Of a block 2,304 bytes of a token are cut, and 1,024 are not."""
    tokens, activation = 64, 64 * 4
    blocks = tuple(
        MeasuredBytes(
            section="block",
            share=share,
            tokens=tokens,
            kept=round(2304 * share + 1024) * tokens,
            kept_recomputed=activation * tokens,
        )
        for share in (1.0, 0.5)
    )
    ends = (
        MeasuredBytes(section=s, share=1.0, tokens=tokens, kept=activation * tokens) for s in ("embed", "head")
    )
    return ModelBytes(sections=(*blocks, *ends))


def _truth() -> ModelProfile:
    """What the devices really do: 1 ms for a token in a whole block; the planner is not told."""
    derived = derive(model(), 64.0, 1)
    return msgspec.structs.replace(derived, block=msgspec.structs.replace(derived.block, seconds=1e-3))


TRUTH = _truth()


def spec(**changes: object) -> JobSpec:
    values = {
        "job": JOB,
        "model": model(),
        "global_batch": 8,
        "micro_batch": 1,
        "samples": 1000,
        "sample_tokens": 64.0,
        "seed": 0,
        "measured_bytes": _bytes(),
    }
    return JobSpec(**{**values, **changes})  # type: ignore[arg-type]


def node_record(
    name: str, devices: int = 2, memory: int = MEMORY, agent: str = "", snapshots: str = ""
) -> NodeRecord:
    return NodeRecord(
        node=name,
        devices=tuple(Device(name=f"{name}/{i}", memory=memory) for i in range(devices)),
        address="127.0.0.1",
        agent=agent or f"agent-{name}",
        emulated=True,
        snapshots=snapshots,
    )


@dataclass
class FakeWorker:
    """A worker's side of the protocol: it prepares, votes, swaps or keeps, and says so."""

    device: str
    incarnation: str
    plan: int = 0
    prepared: int = 0
    aborted: int = 0
    fence: int = 0
    copies: tuple[Copy, ...] = ()
    said: list[Outcome] = field(default_factory=list)
    #: The proposals of which it has said that it goes on under the old plan.
    kept: set[int] = field(default_factory=set)
    alive: bool = True

    @property
    def node(self) -> str:
        return node_of(self.device)

    def up(self, body: FromWorker) -> FromClient:
        return FromClient(
            client=f"w{self.device}", job=JOB, device=self.device, incarnation=self.incarnation, body=body
        )


#: Answers of the planner and times of plans, shared by all worlds: a life is lived many times.
ANSWERS: dict[bytes, Answer] = {}
SECONDS: dict[tuple[str, tuple[tuple[str, float], ...]], tuple[float, float]] = {}


def answer_to(problem: Problem) -> Answer:
    """The real planner's answer."""
    key = msgspec.json.encode(problem)
    if key not in ANSWERS:
        ANSWERS[key] = search(problem)
    return ANSWERS[key]


def true_seconds(plan: Plan, records: dict[str, NodeRecord], rates: dict[str, float]) -> tuple[float, float]:
    """What a step of this plan really takes, and the reduction in it."""
    key = (plan.digest, tuple(sorted(rates.items())))
    if key not in SECONDS:
        cluster = Cluster(nodes=tuple(Node(name=name, devices=r.devices) for name, r in records.items()))
        free = ProfileCost(msgspec.structs.replace(TRUTH, reduction_scale=0.0))
        total = step_seconds(plan, cluster, rates, ProfileCost(TRUTH))
        SECONDS[key] = (total, total - step_seconds(plan, cluster, rates, free))
    return SECONDS[key]


def measurement(
    plan: Plan, device: str, records: dict[str, NodeRecord], rates: dict[str, float], *, length: int, step: int
) -> Measurement:
    """As a device of this rate would make it: 1 ms for a token in a whole layer, sequences of `length`."""
    place = plan.places[device]
    stage, pipeline = plan.stage(place), plan.pipeline(place)
    samples = plan.micro_batch * pipeline.micro_batches
    tokens = length * samples
    work = tokens * stage.layers * stage.fraction(place.position)
    total, reduction = true_seconds(plan, records, rates)
    return Measurement(
        device=device,
        plan=plan.number,
        step=step,
        tokens=tokens,
        block_seconds=work * 1e-3 * rates.get(device, 1.0),
        block_work=work,
        squares=float(tokens * length),
        longest=length,
        lengths={bucket(length): samples},
        step_seconds=total,
        reduce_seconds=reduction,
        micro_batches=pipeline.micro_batches,
    )
