"""Packed batches on eight emulated devices: engines of the runtime in threads; blocks take the time of a table.

Losses and gradients are real, of a small model; what a block takes is slept, by tokens and by the length of the
sequences that they are of. Sequences are the files of Python's standard library from 4 KiB on, a token for each
512 bytes: of less a block takes longer in truth than by the table.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from _results import Row, row
from elasticd_planner.batching.batch_summary import lane_work
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.spec.sample_packing import linear_of

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.wire.worker import EmulatedSpeed

CONFIG = DecoderConfig(vocabulary=64, width=16, layers=2, heads=2, kv_heads=1, hidden=128)
DEVICES, BATCH, BYTES, SMALLEST, SEED = 8, 48, 512, 4096, 5
#: Seconds of a token in one block.
FORWARD, BACKWARD = 2e-3, 4e-3
#: A figure of which more sections took longer in truth than by the table is not valid.
LATE = 0.01
#: Steps at full speed, of which the first ones count for nothing; and steps with one device at half speed.
STEPS, WARM, SLOW_STEPS = 10, 2, 12
SLOW, FACTOR = "n0/1", 2.0
NAMES = tuple(f"n{device // 4}/{device % 4}" for device in range(DEVICES))


@cache
def attention_tokens() -> int:
    """The length at which attention takes as long as all else, as the dealing reads it off the model."""
    with torch.device("meta"):
        return linear_of(Decoder(CONFIG).describe().spec)


def _plan(*pipelines: Pipeline) -> Plan:
    modules = (ModulePlan(module="model", pipelines=pipelines),)
    batch = sum(pipeline.micro_batches for pipeline in pipelines)
    return Plan(number=1, strategies=(Strategy(modules=modules),), micro_batch=1, global_batch=batch)


#: One pipeline of eight lanes, and eight pipelines: the same devices.
LANES = _plan(
    Pipeline(
        stages=(Stage(start=0, stop=2, devices=NAMES, shares=(1,) * DEVICES, lanes=(1,) * DEVICES),),
        micro_batches=BATCH,
        rows=(BATCH // DEVICES,) * DEVICES,
    )
)
PIPELINES = _plan(
    *(
        Pipeline(stages=(Stage(start=0, stop=2, devices=(name,), shares=(1,)),), micro_batches=BATCH // DEVICES)
        for name in NAMES
    )
)


#: Four lanes, and sequences of one length for each of them, in rows that hold one or a quarter of each.
FOUR = _plan(
    Pipeline(
        stages=(Stage(start=0, stop=2, devices=NAMES[:4], shares=(1,) * 4, lanes=(1,) * 4),),
        micro_batches=4,
        rows=(1,) * 4,
    )
)
EVEN = 128


class Texts(Protocol):
    """Sequences of tokens that are known before they are read."""

    lengths: tuple[int, ...]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class Alike:
    """Sequences of one length."""

    lengths = (EVEN,) * 64

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(EVEN + 1) * (index + 1)) % CONFIG.vocabulary
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Files:
    """The standard library's files, none cut."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        listed = [path for path in folder.rglob("*.py") if "site-packages" not in path.parts]
        sizes = (path.stat().st_size for path in sorted(listed))
        self.lengths = tuple(size // BYTES for size in sizes if size >= SMALLEST)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.lengths[index] + 1) * (index + 1)) % CONFIG.vocabulary
        return {"inputs": ids[:-1], "targets": ids[1:]}


@cache
def files() -> Files:
    """Listed once."""
    return Files()


def recipe(data: DataOptions, texts: Texts, batch: int) -> Recipe:
    """The small model on some texts."""
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    return Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        dataset=texts,
        global_batch=batch,
        seed=SEED,
        data=data,
        connect=GlooCommunicators,
    )


class Ran(NamedTuple):
    """What came of some steps."""

    seconds: list[float]  # of each step
    work: list[list[float]]  # of each step, of each lane: seconds of a normal device
    late: float  # part of the sections that took longer in truth than by the table


def ran(
    plan: Plan, data: DataOptions, steps: int, slow_from: int | None = None, texts: Texts | None = None
) -> Ran:
    """Trains some steps; from one of them on a device takes twice the time."""

    def member(memory: MemoryPlanGroups) -> tuple[list[float], list[BatchPlan], tuple[int, int]]:
        made = recipe(data, texts if texts is not None else files(), plan.global_batch)
        layouts = Layouts(made.model.spec, plan)
        speed = EmulatedSpeed(forward=FORWARD, backward=BACKWARD, attention_tokens=attention_tokens())
        pacer = SpeedEmulator(speed)
        engine = Engine(made, layouts, cast(PlanGroups, memory), pacer)
        engine.adopt(first_state(made.model, layouts, memory.me, SEED))
        seconds, batches = [], []
        for step in range(steps):
            if step == slow_from and memory.me == SLOW:
                pacer.pace = EmulatedSpeed(
                    forward=FORWARD, backward=BACKWARD, attention_tokens=attention_tokens(), factor=FACTOR
                )
            batches.append(engine._batches.of(step))
            seconds.append(engine.step(step, lambda: 0).measurement.step_seconds)
        return seconds, batches, pacer.take()

    found = run_threads(plan.members, member)
    seconds, batches, _ = found[plan.members[0]]
    paced, late = (sum(counts) for counts in zip(*(each[2] for each in found.values()), strict=True))
    unit = (FORWARD + BACKWARD) * CONFIG.layers / attention_tokens()
    work = [[each * unit for each in lane_work(plan, batch, attention_tokens())] for batch in batches]
    return Ran(seconds, work, late / paced)


def emulated_rows(steps: int = STEPS, slow_steps: int = SLOW_STEPS) -> Iterator[Row]:
    """Throughput over the padded plan's and over the bound, and what a device at half speed costs."""
    padded = ran(PIPELINES, DataOptions(), steps)
    packed = ran(LANES, DataOptions(packing=Packing(least=8)), steps + slow_steps, slow_from=steps)
    counted = slice(WARM, steps)
    yield _ratio(
        "throughput of 8 emulated devices on the standard library's files, over the padded plan's",
        [statistics.fmean(padded.seconds[counted]) / statistics.fmean(packed.seconds[counted])],
        (padded, packed),
        least=1.35,
    )
    speed = [sum(work) / DEVICES / took for work, took in zip(packed.work, packed.seconds, strict=True)]
    title = "throughput of the same over its own bound: all work over all speed"
    yield _ratio(title, speed[counted], (packed,), least=0.90)
    place = NAMES.index(SLOW)
    share = 1 / FACTOR / (DEVICES - 1 + 1 / FACTOR)
    parts = [work[place] / sum(work) for work in packed.work[steps:]]
    follows = next((step for step, part in enumerate(parts) if abs(part / share - 1) <= 0.1), slow_steps)
    yield row(
        "one of 8 devices 2 x slow: steps until its share of tokens is within 10 % of its speed's",
        follows,
        "steps",
        goal="<= 4",
        met=follows <= 4,
        kind="emulated",
    )
    scale = DEVICES / (DEVICES - 1 + 1 / FACTOR)
    title = "the same: throughput over the bound of these devices, before any switch"
    yield _ratio(title, [each * scale for each in speed[steps + 4 :]], (packed,), least=0.88)
    whole = ran(FOUR, DataOptions(packing=Packing(cut=False)), steps, texts=Alike())
    cut = ran(FOUR, DataOptions(packing=Packing(tokens=EVEN // 2, least=8)), steps, texts=Alike())
    ratios = [a / b for a, b in zip(cut.seconds[counted], whole.seconds[counted], strict=True)]
    yield _ratio("step of sequences cut over 4 lanes over the same work uncut", ratios, (whole, cut), most=1.15)


def _ratio(
    name: str,
    values: Sequence[float],
    runs: Sequence[Ran],
    *,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    """A ratio with its goal. There is no figure, and the goal is missed, where it would not be valid."""
    goal = f">= {least:.2f}" if least is not None else f"<= {most:.2f}"
    if max(run.late for run in runs) > LATE:
        return row(name, None, "x", goal=goal, met=False, kind="emulated")
    value = statistics.median(values)
    met = value >= least if least is not None else value <= (most or 0.0)
    noise = statistics.pstdev(values) / value if len(values) > 1 else None
    return row(name, value, "x", goal=goal, met=met, kind="emulated", noise=noise)
