"""Two modules on eight emulated devices: engines of the runtime in threads, whose blocks take a set time.

Losses and gradients are real, of a small model in float64; what a block takes is slept, by the tokens of its
sample. The language model has 16 layers, of which a device has room for 6 and an encoder; the encoder takes as
long for the four images of a sample as four layers do. *Homogeneous*: the encoder is a part of the first stage
of each pipeline, whose layers and those of the others are the best division of all. Times of the table are long
beside the real work, so that a busy machine does not stretch them; where it does, no figure is valid.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from _results import Row, row
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem import ModuleProblem, Problem, SearchSpace
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Link
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.models.decoder import Block, Head, next_token_loss
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.wire.worker import EmulatedSpeed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner.drawn_module_problems import GIB, MIB, cluster_of
from tests.runtime.image_model import F64, IMAGE, PATCH, TEXT, VISION, Merge, Patches, Projector, model_of

#: Layers, tokens of a sample, its images, and rows of each: the encoder takes as long for them as four layers
#: of the language model for the sample.
LAYERS, ENCODER_LAYERS, TOKENS, IMAGES, ROWS = 16, 4, 24, 4, 6
#: Samples of a step, and layers that a device has room for beside an encoder.
BATCH, ROOM, SEED = 16, 6, 3
#: Seconds of a token in a layer, forward and backward.
FORWARD, BACKWARD = 0.1 / TOKENS, 0.2 / TOKENS
#: Steps of a run, of which the first counts for nothing: what is made once is in it. And of a run with a device
#: that becomes slow.
STEPS, SLOW_STEPS = 2, 4
#: All times of the table are multiplied by this.
SECONDS = 3.0
SLOW, FACTOR = "n0/1", 3.0
#: A figure of which more passes took longer in truth than by the table is not valid.
LATE = 0.01


def rows(smallest: bool = False) -> Iterator[Row]:
    """A planned step over the best homogeneous one; a slow device, without a switch and with."""
    steps, slow_steps, seconds = (1, 1, 0.2) if smallest else (STEPS, SLOW_STEPS, SECONDS)
    torch.set_num_threads(1)
    problem = asked({})
    ours, homogeneous = answer(problem), best_homogeneous(problem)
    costs = ModuleCosts(problem)
    predicted = costs.seconds(homogeneous) / costs.seconds(ours)
    planned, one_layout = Run.of(ours, steps, seconds), Run.of(homogeneous, steps, seconds)
    title = "8 emulated devices: throughput of our plan over the best homogeneous one, predicted"
    yield row(title, predicted, "x", kind="simulated")
    title = "8 emulated devices: throughput of our plan over the best homogeneous one, rebalanced"
    yield run_row(title, one_layout.step / planned.step, (planned, one_layout), least=1.15)
    title = "8 emulated devices: throughput of our plan over its prediction"
    yield run_row(title, costs.seconds(ours) * seconds / planned.step, (planned,))
    slow = {SLOW: FACTOR}
    problem = asked(slow)
    still = Run.of(ours, slow_steps, seconds, slow)
    title = "8 emulated devices, one 3 x slow, no switch: throughput over the bound of the plan"
    yield run_row(title, still_bound(problem, ours) * seconds / still.last, (still,), least=0.90)
    switched = answer(problem)
    moved = Run.of(switched, steps, seconds, slow)
    assert switched.prediction is not None
    bound = switched.prediction.bound_seconds * seconds
    title = "8 emulated devices, one 3 x slow, switched: prediction over the proved bound"
    yield row(title, bound / (switched.prediction.step_seconds * seconds), "x", kind="simulated")
    title = "8 emulated devices, one 3 x slow, switched: throughput over the proved bound"
    yield run_row(title, bound / moved.step, (moved,), least=0.90)
    title = "8 emulated devices, one 3 x slow, switched: throughput over that without a switch"
    yield run_row(title, still.last / moved.step, (still, moved))


def asked(rates: dict[str, float]) -> Problem:
    """The emulated devices as a problem of the planner: communication takes nothing."""
    per_token = FORWARD + BACKWARD
    language = ModelProfile(
        name="language",
        layers=LAYERS,
        share_units=TEXT.heads,
        tokens=float(TOKENS),
        block=SectionProfile(seconds=per_token, cut_bytes=GIB),
        gradient_factor=0.0,
        optimizer_factor=0.0,
        forward=FORWARD / per_token,
        widths=(1,),
    )
    vision = ModelProfile(
        name="vision",
        layers=ENCODER_LAYERS,
        share_units=VISION.heads,
        tokens=float(ROWS),
        block=SectionProfile(seconds=per_token, cut_bytes=MIB),
        gradient_factor=0.0,
        optimizer_factor=0.0,
        forward=FORWARD / per_token,
        widths=(1,),
    )
    cluster = cluster_of(2, 4, ROOM * GIB + GIB // 2)
    link = Link(bandwidth=1e15, latency=0.0)
    return Problem(
        cluster=Cluster(nodes=cluster.nodes, inside=link, between=link),
        profile=language,
        global_batch=BATCH,
        micro_batch=1,
        rates=rates,
        search_space=SearchSpace(fixed_tp=1),
        module="language",
        modules=(
            ModuleProblem(
                name="vision",
                profile=vision,
                items="images",
                items_a_sample=float(IMAGES),
                rows_an_item=float(ROWS),
            ),
        ),
    )


def answer(problem: Problem) -> Plan:
    """The planner's."""
    found = plan(problem)
    assert found.plan is not None, found.refusal
    print(found.plan.reason, file=sys.stderr)
    return found.plan


def best_homogeneous(problem: Problem) -> Plan:
    """Two pipelines of four stages, the first with the encoder of its own samples; or one of eight."""
    costs = ModuleCosts(problem)
    devices = [device.name for device in problem.cluster.devices]
    plans = []
    for copies in (1, 2):
        depth = len(devices) // copies
        for first in range(1, LAYERS - depth + 2):
            cuts = [0, *(first + (LAYERS - first) * s // (depth - 1) for s in range(depth))]
            layout = _homogeneous(cuts, [devices[at : at + depth] for at in range(0, len(devices), depth)])
            if max(b - a for a, b in pairwise(cuts)) <= ROOM:
                plans.append(costs.timed(layout))
    return min(plans, key=costs.seconds)


def _homogeneous(cuts: list[int], groups: list[list[str]]) -> Plan:
    language, vision = [], []
    for copy, devices in enumerate(groups):
        spans = zip(devices, pairwise(cuts), strict=True)
        stages = tuple(Stage(start=a, stop=b, devices=(name,), shares=(1,)) for name, (a, b) in spans)
        language.append(Pipeline(stages=stages, micro_batches=BATCH // len(groups)))
        whole = Stage(start=0, stop=ENCODER_LAYERS, devices=(devices[0],), shares=(1,))
        vision.append(Pipeline(stages=(whole,), micro_batches=1, serves=(copy,)))
    modules = (
        ModulePlan(module="vision", pipelines=tuple(vision), items="images", ahead=1, lead=0),
        ModulePlan(module="language", pipelines=tuple(language)),
    )
    strategy = Strategy(modules=modules, edges=(Edge(source="vision", target="language"),))
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=BATCH)


def still_bound(problem: Problem, made: Plan) -> float:
    """Seconds of a step that no dealing of images beats under a plan that stays: its language model alone, or
    all work of images in what that leaves of all devices."""
    costs = ModuleCosts(problem)
    view = made.view("language")
    busy = costs.busy(view)
    (forward, backward) = costs.lane_seconds(made.view("vision"))[-1]
    work, low = float((forward + backward).sum()) * BATCH * IMAGES, costs.passes_seconds(view)
    high = low + work
    for _ in range(50):
        middle = (low + high) / 2
        room = sum(
            max(0.0, middle - busy.get(device.name, 0.0)) / problem.rates.get(device.name, 1.0)
            for device in problem.cluster.devices
        )
        low, high = (low, middle) if room >= work else (middle, high)
    return high


class Run(NamedTuple):
    """What came of some steps."""

    seconds: list[float]  # of each step
    late: float  # part of the passes of blocks that took longer in truth than by the table

    @property
    def step(self) -> float:
        """Of a step after the first; of that where there is no other."""
        return statistics.median(self.seconds[1:] or self.seconds)

    @property
    def last(self) -> float:
        """Of the last step, when shares have followed."""
        return self.seconds[-1]

    @classmethod
    def of(
        cls,
        made: Plan,
        steps: int,
        seconds: float,
        slow: dict[str, float] | None = None,
        recipe: Recipe | None = None,
        times: tuple[float, float] = (FORWARD, BACKWARD),
    ) -> Run:
        """Trains some steps under a plan.

        Args:
            made: the plan.
            steps: how many.
            seconds: all times are multiplied by this.
            slow: slowdowns of devices.
            recipe: of the job; None: of two modules, as in this file.
            times: seconds of a token in a layer, forward and backward.
        """
        recipe = recipe or _recipe()

        def member(memory: MemoryPlanGroups) -> tuple[list[float], tuple[int, int]]:
            layouts = Layouts(recipe.model.specs, made)
            factor = (slow or {}).get(memory.me, 1.0)
            forward, backward = (each * seconds for each in times)
            speed = EmulatedSpeed(forward=forward, backward=backward, factor=factor)
            pacer = SpeedEmulator(speed)
            engine = Engine(recipe, layouts, cast(PlanGroups, memory), pacer)
            engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
            took = []
            for step in range(steps):
                took.append(engine.step(step, lambda: 0, lambda: 0).measurement.step_seconds)
                engine.settle()
            return took, pacer.take()

        found = run_threads(made.members, member)
        took, _ = found[made.members[0]]
        paced, late = (sum(counts) for counts in zip(*(each[1] for each in found.values()), strict=True))
        print(f"steps of {[round(each, 2) for each in took]} s, {late} of {paced} passes late", file=sys.stderr)
        return cls(took, late / paced)


class Pictures:
    """Samples with as many images each."""

    def __init__(self) -> None:
        self.counts = {"images": [IMAGES] * BATCH}

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, TEXT.vocabulary, (TOKENS,), generator=generator)
        ids[: IMAGES * ROWS] = IMAGE
        targets = torch.roll(ids, -1)
        return {
            "inputs": ids,
            "targets": targets,
            "images": [torch.randn(ROWS, PATCH, generator=generator, dtype=F64) for _ in range(IMAGES)],
        }


@cache
def _recipe() -> Recipe:
    """Once for all ranks."""
    vision = [Patches(), *(Block(VISION) for _ in range(ENCODER_LAYERS)), Projector()]
    language = [Merge(), *(Block(TEXT) for _ in range(LAYERS)), Head(TEXT)]
    return Recipe(
        model=model_of(vision, language),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        dataset=Pictures(),
        global_batch=BATCH,
        seed=SEED,
        connect=GlooCommunicators,
    )


def run_row(name: str, value: float, runs: tuple[Run, ...], *, least: float | None = None) -> Row:
    """A ratio with its goal. There is no figure, and the goal is missed, where it would not be valid."""
    goal = None if least is None else f">= {least:.2f}"
    if max(run.late for run in runs) > LATE:
        return row(name, None, "x", goal=goal, met=None if least is None else False, kind="emulated")
    return row(name, value, "x", goal=goal, met=None if least is None else value >= least, kind="emulated")
