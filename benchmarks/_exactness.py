"""Plans of jobs under the exact time: the planner's seconds beside events, its plans beside brute force.

The events know nothing of the cost model: times of passes are added up here from the profile, member by member,
with half of a block's collectives in each pass. Random plans and problems come from fixed seeds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from _results import Row, row
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.cost.schedule_timeline import played_seconds
from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from tests.planner import jobs, schedule_brute

PLANS, PROBLEMS = 500, 330


def exactness_rows(plans: int = PLANS, problems: int = PROBLEMS) -> Iterator[Row]:
    """The schedule, small problems, their bounds, and the time that a job of the demo's size takes to plan."""
    yield from schedule_rows(plans)
    yield from small_job_rows(problems)
    yield from quick_rows()


def schedule_rows(plans: int) -> list[Row]:
    """What the planner predicts of random plans beside the schedule played event by event."""
    rng = np.random.default_rng(11)
    apart = []
    for _ in range(plans):
        cluster, rates, profile, made = _plan(rng)
        predicted = step_seconds(made, cluster, rates, ProfileCost(profile))
        apart.append(abs(predicted / _played(made, cluster, rates, profile) - 1))
    name = f"prediction beside the schedule's events, {plans} random plans"
    worst = max(apart)
    return [
        row(f"{name}: worst", worst, "", kind="simulated", goal="<= 0.02", met=worst <= 0.02),
        row(f"{name}: mean", statistics.fmean(apart), "", kind="simulated"),
    ]


def _played(made: Plan, cluster: Cluster, rates: dict[str, float], profile: ModelProfile) -> float:
    """Seconds of the slowest pipeline by events, and of the reduction after it."""
    ends = []
    pipelines = made.pipelines
    for pipeline in pipelines:
        ahead, back = zip(*(_passes(stage, cluster, rates, profile) for stage in pipeline.stages), strict=True)
        hops = []
        for a, b in pairwise(pipeline.stages):
            link = cluster.reach((*a.devices, *b.devices))
            hops.append(link.latency + profile.boundary_bytes * profile.tokens / link.bandwidth)
        ends.append(played_seconds(ahead, back, hops, pipeline.micro_batches))
    held = profile.gradient_bytes / min(sum(len(s.devices) for s in p.stages) for p in pipelines)
    link, count = cluster.reach(made.members), len(pipelines)
    reduction = 2 * (count - 1) * (link.latency + held / count / link.bandwidth)
    return max(ends) + reduction + profile.overhead_seconds


def _passes(
    stage: Stage, cluster: Cluster, rates: dict[str, float], profile: ModelProfile
) -> tuple[float, float]:
    """Forward and backward of one micro-batch: the slowest member's computation, and the collectives."""
    sections = [(profile.block, stage.layers)]
    if stage.start == 0:
        sections.append((profile.embed, 1))
    if stage.stop == profile.layers:
        sections.append((profile.head, 1))
    compute, waits = 0.0, 0.0
    link, width = cluster.reach(stage.devices), len(stage.devices)
    size = profile.boundary_bytes * profile.tokens / width
    ring = 2 * (width - 1) * (link.latency + size / link.bandwidth) if width > 1 else 0.0
    for section, count in sections:
        compute += count * max(
            profile.tokens * section.seconds * stage.fraction(i) * rates.get(device, 1.0)
            for i, device in enumerate(stage.devices)
        )
        waits += count * section.collectives * ring
    return compute * profile.forward + waits / 2, compute * (1 - profile.forward) + waits / 2


def _plan(rng: np.random.Generator) -> tuple[Cluster, dict[str, float], ModelProfile, Plan]:
    """One to three pipelines of one to eight stages on nodes of four, groups of one to four with any shares,
    layers cut anywhere, a fifth of the devices slow, links from fast to slow."""
    depths = [int(rng.integers(1, 9)) for _ in range(int(rng.integers(1, 4)))]
    nodes = tuple(
        Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=1 << 40) for i in range(4)))
        for n in range(sum(depths))
    )
    between = Link(bandwidth=float(rng.choice([2e9, 2.5e10])), latency=2e-5)
    inside = Link(bandwidth=float(rng.choice([2e10, 2e11])), latency=1e-5)
    cluster = Cluster(nodes=nodes, inside=inside, between=between)
    profile = ModelProfile(
        name="random",
        layers=int(rng.integers(max(depths), 12 * max(depths) + 1)),
        share_units=64,
        tokens=4096.0,
        block=SectionProfile(seconds=float(rng.uniform(2e-6, 4e-5)), cut_bytes=100_000_000, collectives=4),
        embed=SectionProfile(cut_bytes=100_000_000, collectives=1),
        head=SectionProfile(seconds=float(rng.uniform(0, 2e-5)), cut_bytes=100_000_000, collectives=1),
        boundary_bytes=16384.0,
    )
    rates = {d.name: float(rng.uniform(1.2, 5)) for d in cluster.devices if rng.random() < 0.2}
    free = list(nodes)
    pipelines = []
    for depth in depths:
        cuts = np.sort(rng.choice(np.arange(1, profile.layers), depth - 1, replace=False)).tolist()
        stages = []
        while len(stages) < depth:
            left, start = free.pop(), 0
            while start < 4 and len(stages) < depth:  # neighbouring stages share nodes, or do not
                width = min(int(rng.integers(1, 5)), 4 - start)
                stages.append(tuple(d.name for d in left.devices[start : start + width]))
                start += width
        bounds = pairwise([0, *cuts, profile.layers])
        made = tuple(
            Stage(start=a, stop=b, devices=names, shares=tuple(int(rng.integers(8, 25)) for _ in names))
            for (a, b), names in zip(bounds, stages, strict=True)
        )
        pipelines.append(Pipeline(stages=made, micro_batches=int(rng.integers(1, 65))))
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=tuple(pipelines)),))
    total = sum(pipeline.micro_batches for pipeline in pipelines)
    return cluster, rates, profile, Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=total)


def small_job_rows(problems: int) -> list[Row]:
    """Plans and bounds of small problems beside brute force under exact time."""
    rng = random.Random(12)
    gaps: list[float] = []
    wrong = broken = 0
    for _ in range(problems):
        problem = jobs.small(rng)
        least, answer = schedule_brute.best(problem), plan(problem)
        if answer.plan is None or math.isinf(least):
            wrong += (answer.plan is None) != math.isinf(least)
            continue
        assert answer.plan.prediction is not None
        gaps.append(max(0.0, answer.plan.prediction.step_seconds / least - 1))
        broken += answer.plan.prediction.bound_seconds > least * (1 + 1e-9)
    words = f"{problems} small job problems, exact time"
    mean, worst = statistics.fmean(gaps), max(gaps)
    return [
        row(f"{words}: mean gap to brute force", mean, "", goal="<= 0.0005", met=mean <= 5e-4),
        row(f"{words}: worst gap", worst, "", goal="<= 0.005", met=worst <= 5e-3),
        row(f"{words}: wrongly refused or wrongly accepted", wrong, "problems", goal="<= 0", met=not wrong),
        row(f"{words}: bound above brute force", broken, "problems", goal="<= 0", met=not broken),
    ]


def quick_rows() -> list[Row]:
    """Seconds to plan jobs of up to eight devices."""
    return [
        _timed("4 devices on 2 nodes, one slow, 8 layers", (2, 2), 8, {"n0/0": 2.5}),
        _timed("8 devices on 2 nodes, one slow, 16 layers", (4, 4), 16, {"n0/0": 2.5}),
        _timed(
            "8 devices on 2 nodes, three slow, 16 layers", (4, 4), 16, {"n0/0": 2.5, "n0/1": 1.7, "n1/0": 5}
        ),
    ]


def _timed(name: str, sizes: Sequence[int], layers: int, rates: dict[str, float]) -> Row:
    nodes = tuple(
        Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=1 << 40) for i in range(size)))
        for n, size in enumerate(sizes)
    )
    profile = ModelProfile(
        name="timed",
        layers=layers,
        share_units=8,
        tokens=256.0,
        block=SectionProfile(seconds=3e-4, cut_bytes=800_000, collectives=4),
        head=SectionProfile(seconds=4e-5, cut_bytes=100_000, collectives=1),
        boundary_bytes=4096.0,
    )
    cluster = Cluster(nodes=nodes, between=Link(bandwidth=1e8, latency=1e-3))
    problem = Problem(cluster=cluster, profile=profile, global_batch=16, micro_batch=1, rates=rates)
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        plan(problem)
        spent.append(time.perf_counter() - start)
    middle = statistics.median(spent)
    noise = (max(spent) - min(spent)) / middle
    return row(f"job of {name}: planned", middle, "s", goal="<= 1", met=middle <= 1, noise=noise)
