"""Layouts whose times others published, beside what the planner predicts for them.

make bench NAME=published                       # all tables
make bench NAME=published ARGS="--only scaling" # some; the results keep the others as they are

Each table trains a model under a layout that its authors name. A device's FLOP/s are fitted on one row of
each model, which the row's name says; every other row of the model is then predicted, nothing else fitted.
Links and the bandwidth of devices' memory are those of the machines' data sheets. *recompute*: Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models (2022), table 5, and the bytes of a layer's
activations by its table 2. *scaling*: Jiang et al., MegaScale (2024), table 2. *sizes*: Narayanan et al.,
Efficient Large-Scale Language Model Training on GPU Clusters (2021), table 1, one FLOP/s for all ten models;
its stages are interleaved (section 5.1) in an unnamed number of chunks: two are taken, three where a stage
has three layers. *fsdp*: torchtitan's tables of December 2024, whose parameters are sharded; the planner
keeps them whole.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
from _frame import PLANNER, Part, run  # noqa: E402
from _results import Row, row  # noqa: E402
from elasticd_planner.cost.model_profile import ModelProfile, Numbers, derive, suited  # noqa: E402
from elasticd_planner.placement.state_movement import strategy  # noqa: E402
from elasticd_planner.problem import Problem  # noqa: E402
from elasticd_planner.search.planner import plan  # noqa: E402
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node  # noqa: E402
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units  # noqa: E402
from elasticd_planner.spec.plan import Pipeline, Plan, Stage, StatePolicy  # noqa: E402

from tests.planner.real_models import spec_of  # noqa: E402

#: Within so much of the published figure a prediction counts as right: in seconds, and in bytes.
SECONDS, BYTES = 0.05, 0.15
#: Units: what was predicted over what was published.
OF_SECONDS, OF_BYTES = "of the seconds", "of the bytes"
#: Devices of a node of each of these machines.
NODE = 8
#: Bytes of a device: the layouts are known to fit.
MEMORY = 1 << 44


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Links of one direction, bytes a second for each device."""

    inside: float
    between: float
    memory: float  # bandwidth of a device's memory


#: NVLink 3 and eight HDR InfiniBand ports of a node, 80 GB of HBM2e; NVLink 4 and 400 Gb/s a device, HBM3.
A100 = Machine(inside=300e9, between=25e9, memory=2.0e12)
H100 = Machine(inside=450e9, between=50e9, memory=3.35e12)


#: Bytes that a softmax and a dropout of half precision move for a pair of tokens in a head: forward they read
#: and write (4), and read, write and write a mask (5); backward they read two and write (6), and read, read the
#: mask and write (5). Kernels of today make no such matrices.
SCORES_FORWARD, SCORES_BACKWARD = 9, 11

#: Every copy has all of the optimizer's state; each has a part of it, one copy in all.
PLAIN, SHARDED = StatePolicy(), StatePolicy(zero=1, replicas=1)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a table."""

    name: str
    spec: ModelSpec
    devices: int
    seconds: float  # of a step
    batch: int  # samples of a step
    tokens: int = 2048  # of a sample
    micro_batch: int = 1
    tp: int = 8
    stages: int = 1
    chunks: int = 1  # of a stage
    recompute: bool = False
    sequence_parallel: bool = False
    state: StatePolicy = PLAIN
    machine: Machine = A100
    overlap: bool = False  # gradients are reduced during the last backward pass
    dropouts: int = 0  # of a block, over its activation
    scores: bool = False  # whether attention makes matrices of tokens by tokens
    core_again: bool = False  # whether its core, the part with these, is recomputed alone

    def profile(self, flops: float) -> ModelProfile:
        """The planner's own, from shapes, in mixed precision."""
        profile = suited(
            derive(
                self.spec,
                self.tokens,
                self.micro_batch,
                flops,
                memory_bandwidth=self.machine.memory,
                dropouts=self.dropouts,
            ),
            Numbers(compute=self.spec.dtype),
        )
        block = profile.block
        if self.scores:
            moved = SCORES_BACKWARD + SCORES_FORWARD * (1 + self.core_again)
            seconds = moved * self.spec.units[0].count * self.tokens / self.machine.memory
            seconds += self.core_again * 2 * self.spec.width * self.tokens / flops
            block = msgspec.structs.replace(block, seconds=block.seconds + seconds)
        return msgspec.structs.replace(profile, block=block, overlap=self.overlap)

    def predicted(self, flops: float) -> float:
        """Seconds of a step on devices of so many FLOP/s."""
        layout = self.plan()
        problem = Problem(
            cluster=self.cluster(),
            profile=self.profile(flops),
            global_batch=self.batch,
            micro_batch=self.micro_batch,
            given=layout,
            only_given=True,
        )
        answer = plan(problem)
        assert answer.plan is not None, answer.refusal
        assert answer.plan.prediction is not None
        return answer.plan.prediction.step_seconds

    def cluster(self) -> Cluster:
        """Nodes of eight."""
        count = -(-self.devices // NODE)
        return Cluster(
            nodes=tuple(
                Node(
                    name=f"n{n}",
                    devices=tuple(
                        Device(name=f"n{n}/{i}", memory=MEMORY)
                        for i in range(min(NODE, self.devices - n * NODE))
                    ),
                )
                for n in range(count)
            ),
            inside=Link(bandwidth=self.machine.inside, latency=5e-6),
            between=Link(bandwidth=self.machine.between, latency=1e-5),
        )

    def plan(self) -> Plan:
        """TP groups of neighbours, then the pipelines' stages, then the copies, as Megatron numbers ranks."""
        names = [device.name for device in self.cluster().devices]
        copies = self.devices // (self.tp * self.stages)
        groups = [tuple(names[i : i + self.tp]) for i in range(0, self.devices, self.tp)]
        borders = self._borders()
        pipelines = tuple(
            Pipeline(
                stages=tuple(
                    self._stage(groups[stage * copies + copy], borders, stage) for stage in range(self.stages)
                ),
                micro_batches=self.batch // self.micro_batch // copies,
            )
            for copy in range(copies)
        )
        return Plan(
            number=1,
            strategies=(strategy(pipelines),),
            micro_batch=self.micro_batch,
            global_batch=self.batch,
            state=self.state,
        )

    def _borders(self) -> list[tuple[int, int]]:
        """The chunks of layers, in order."""
        count, layers = self.stages * self.chunks, len(self.spec.layers)
        return list(itertools.pairwise(layers * i // count for i in range(count + 1)))

    def _stage(self, devices: tuple[str, ...], borders: Sequence[tuple[int, int]], index: int) -> Stage:
        first, *later = borders[index :: self.stages]
        return Stage(
            start=first[0],
            stop=first[1],
            later=tuple(later),
            devices=devices,
            shares=(self.spec.units[0].count // self.tp,) * self.tp,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel and self.tp > 1,
        )


def gpt(
    name: str, width: int, layers: int, heads: int, vocabulary: int = 51200, tokens: int = 2048
) -> ModelSpec:
    """GPT as Megatron trains it: learned positions, a hidden layer of four times the width, a tied head."""
    heads_cut, columns, rows = (Cut(dim=0, units=kind) for kind in ("heads", "columns", "rows"))

    def parameter(part: str, *shape: int, cut: Cut | None = None) -> Parameter:
        return Parameter(name=part, shape=shape, dtype="float16", cut=cut)

    def norm(part: str) -> tuple[Parameter, Parameter]:
        return parameter(f"{part}.weight", width), parameter(f"{part}.bias", width)

    block = (
        *norm("norm_1"),
        *(parameter(part, width, width, cut=heads_cut) for part in "qkv"),
        parameter("o", width, width, cut=Cut(dim=1, units="heads")),
        *norm("norm_2"),
        parameter("up", 4 * width, width, cut=columns),
        parameter("down", width, 4 * width, cut=Cut(dim=1, units="columns")),
    )
    return ModelSpec(
        name=name,
        embed=(parameter("tokens", vocabulary, width, cut=rows), parameter("positions", tokens, width)),
        kinds=(block,),
        layers=(0,) * layers,
        head=(*norm("norm"), parameter("output", vocabulary, width, cut=rows)),
        units=(
            Units(kind="heads", count=heads),
            Units(kind="columns", count=4 * width),
            Units(kind="rows", count=vocabulary),
        ),
        ties=(("head.output", "embed.tokens"),),
        width=width,
        dtype="float16",
    )


def fitted(measured: Published) -> float:
    """The FLOP/s of a device by which a row's prediction is what was published."""
    # Seconds are nearly linear in the seconds of one operation.
    before, operation = 1e-14, 5e-15
    short = measured.predicted(1 / before) - measured.seconds
    while abs(short) > 1e-6 * measured.seconds:
        off = measured.predicted(1 / operation) - measured.seconds
        before, operation = operation, operation - off * (operation - before) / (off - short)
        short = off
    return 1 / before


def compared(title: str, rows: Sequence[Published], *, on: int = 0) -> Iterator[Row]:
    """The rows of one model, by the FLOP/s of the one that is fitted on."""
    flops = fitted(rows[on])
    for index, one in enumerate(rows):
        if index == on:
            continue
        ratio = one.predicted(flops) / one.seconds
        yield row(
            f"{title}: {one.name}, fitted on {rows[on].name}",
            ratio,
            OF_SECONDS,
            kind="simulated",
            goal=f"{1 - SECONDS:g} to {1 + SECONDS:g}",
            met=abs(ratio - 1) <= SECONDS,
        )


def recompute_rows() -> Iterator[Row]:
    """Table 5: every block recomputed, and only attention's core with sequence parallelism."""
    models = (
        (gpt("22B", 6144, 48, 64), 8, 1, 1, 4, 4, 1.42, 1.10),
        (gpt("175B", 12288, 96, 96), 64, 8, 3, 64, 1, 18.13, 13.75),
        (gpt("530B", 20480, 105, 128), 280, 35, 3, 280, 1, 49.05, 37.83),
        (gpt("1T", 25600, 128, 160), 512, 64, 1, 512, 1, 94.42, 71.49),
    )
    for spec, devices, stages, chunks, batch, micro_batch, whole, selective in models:
        both = [
            Published(
                name=name,
                spec=spec,
                devices=devices,
                stages=stages,
                chunks=chunks,
                batch=batch,
                micro_batch=micro_batch,
                seconds=seconds,
                recompute=recompute,
                sequence_parallel=not recompute,
                dropouts=2,
                scores=True,
                core_again=not recompute,
            )
            for name, seconds, recompute in (
                ("every block recomputed", whole, True),
                ("sequence parallel, attention's core recomputed", selective, False),
            )
        ]
        yield from compared(f"Korthikanti 2022, {spec.name} on {devices} A100, TP 8, PP {stages}", both)
        yield from _activations(spec, both[1])


def _activations(spec: ModelSpec, one: Published) -> Iterator[Row]:
    """Table 2: 34 s b h / t bytes of a layer with sequence parallelism, s b h (10 + 24 / t) without."""
    profile = one.profile(1e14)
    share = profile.share_units // one.tp
    for words, sliced, formula in (
        ("sequence parallel", True, 34 / one.tp),
        ("without sequence parallelism", False, 10 + 24 / one.tp),
    ):
        counted = profile.activation_bytes(profile.block, share, sliced=sliced)
        ratio = counted / (formula * one.tokens * one.micro_batch * spec.width)
        yield row(
            f"Korthikanti 2022, {spec.name}, TP 8: activations of a layer, {words}",
            ratio,
            OF_BYTES,
            kind="simulated",
            goal=f"{1 - BYTES:g} to {1 + BYTES:g}",
            met=abs(ratio - 1) <= BYTES,
        )


def scaling_rows() -> Iterator[Row]:
    """Table 2: a model of 175B with a batch of 768 on four numbers of devices, and of 6,144 on four more."""
    spec = gpt("175B", 12288, 96, 128, vocabulary=64000)
    times = {
        "Megatron-LM": ({256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9}, {3072: 29.02, 6144: 14.78}),
        "MegaScale": ({256: 32.0, 512: 16.5, 768: 11.5, 1024: 8.9}, {3072: 23.66, 6144: 12.21}),
    }
    for system, tables in times.items():
        for batch, table in zip((768, 6144), tables, strict=True):
            rows = [
                Published(
                    name=f"{devices:,} A100",
                    spec=spec,
                    devices=devices,
                    stages=8,
                    chunks=6,
                    batch=batch,
                    seconds=seconds,
                    sequence_parallel=True,
                    state=SHARDED,
                    overlap=system == "MegaScale",
                )
                for devices, seconds in table.items()
            ]
            title = f"MegaScale 2024, {system}, 175B, batch {batch:,}, TP 8, PP 8 in 6 chunks"
            yield from compared(title, rows)


def size_rows() -> Iterator[Row]:
    """Table 1: ten models, each block recomputed; seconds by its formula for floating-point operations."""
    table = (
        ("1.7B", 2304, 24, 24, 1, 1, 32, 512, 137),
        ("3.6B", 3072, 30, 32, 2, 1, 64, 512, 138),
        ("7.5B", 4096, 36, 32, 4, 1, 128, 512, 142),
        ("18.4B", 6144, 40, 48, 8, 1, 256, 1024, 135),
        ("39.1B", 8192, 48, 64, 8, 2, 512, 1536, 138),
        ("76.1B", 10240, 60, 80, 8, 4, 1024, 1792, 140),
        ("145.6B", 12288, 80, 96, 8, 8, 1536, 2304, 148),
        ("310.1B", 16384, 96, 128, 8, 16, 1920, 2160, 155),
        ("529.6B", 20480, 105, 128, 8, 35, 2520, 2520, 163),
        ("1008B", 25600, 128, 160, 8, 64, 3072, 3072, 163),
    )
    rows = []
    for name, width, layers, heads, tp, stages, devices, batch, teraflops in table:
        per_token = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        rows.append(
            Published(
                name=name,
                spec=gpt(name, width, layers, heads),
                devices=devices,
                tp=tp,
                stages=stages,
                chunks=1 if stages == 1 else 3 if layers == 3 * stages else 2,
                batch=batch,
                seconds=per_token * 2048 * batch / (devices * teraflops * 1e12),
                recompute=True,
                dropouts=2,
                scores=True,
            )
        )
    yield from compared("Narayanan 2021, one FLOP/s for all models", rows, on=6)


def fsdp_rows() -> Iterator[Row]:
    """Tables 1 and 3: Llama-3.1-8B on 8 and 128 H100, two samples of 8,192 tokens a device."""
    for words, few, many in (("eager", 5762, 5605), ("compiled", 6667, 6514)):
        rows = [
            Published(
                name=f"{devices} H100",
                spec=spec_of("Llama-3.1-8B"),
                devices=devices,
                tp=1,
                batch=2 * devices,
                micro_batch=2,
                tokens=8192,
                seconds=2 * 8192 / tokens,
                state=SHARDED,
                machine=H100,
                overlap=True,
            )
            for devices, tokens in ((8, few), (128, many))
        ]
        yield from compared(f"torchtitan 2024, Llama-3.1-8B, FSDP, {words}", rows)


def _part(rows: Callable[[], Iterator[Row]]) -> Part:
    def some(smallest: bool = False) -> Iterator[Row]:
        yield from itertools.islice(rows(), 1) if smallest else _counted(rows())

    return Part(some, PLANNER, {"smallest": True})


def _counted(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, and then how many of them are met, of seconds and of bytes."""
    met: dict[str, list[bool]] = {}
    for one in rows:
        met.setdefault(one.unit, []).append(bool(one.met))
        title = one.name.partition(",")[0]
        yield one
    for unit, flags in met.items():
        within = SECONDS if unit == OF_SECONDS else BYTES
        name = f"{title}: within {within:.0%} of the published {unit.split()[-1]}, of {len(flags)}"
        yield row(name, sum(flags), "rows", kind="simulated")


PARTS = {
    "recompute": _part(recompute_rows),
    "scaling": _part(scaling_rows),
    "sizes": _part(size_rows),
    "fsdp": _part(fsdp_rows),
}

if __name__ == "__main__":
    sys.exit(run("published", __doc__, PARTS))
