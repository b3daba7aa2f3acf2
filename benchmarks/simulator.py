"""The simulator's figures: shipped scenarios beside baselines, the schedule against the cost model, speed.

make bench NAME=simulator                       # all of examples/scenarios
make bench NAME=simulator ARGS="small walk-70b" # some of them
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from _results import Row, finish, row
from elasticd_planner.cluster import Cluster, Device, Link, Node
from elasticd_planner.cost import reach, step_seconds
from elasticd_planner.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.profiled import ProfileCost
from elasticd_planner.profiles import ModelProfile, SectionProfile
from elasticd_planner.rules import apportion
from elasticd_planner.timeline import one_f_one_b_seconds, simulate

from elasticd.simulator.planning import Planner
from elasticd.simulator.record import Outcome, Totals
from elasticd.simulator.run import Simulation
from elasticd.simulator.scenario import Times, load

SCENARIOS = Path(__file__).resolve().parents[1] / "examples" / "scenarios"
PLANS = 500


def main(names: Sequence[str]) -> int:
    found = sorted(SCENARIOS.glob("*.toml"))
    chosen = [path for path in found if not names or path.stem in names]
    rows = [*schedule(), *(each for path in chosen for each in scenario(path))]
    return finish("simulator", rows)


class Timed(Planner):
    """The planner that the simulation asks, with a stopwatch beside it: processor seconds of each call."""

    def __init__(self, times: Times) -> None:
        super().__init__(times)
        self.spent: list[float] = []

    def plan(self, problem: Problem) -> Answer:
        began = time.process_time()
        answer = super().plan(problem)
        self.spent.append(time.process_time() - began)
        return answer


def scenario(path: Path) -> Iterator[Row]:
    """Totals beside the baselines and the bound; and how long it took to find out, and what of that planned."""
    began, busy = time.perf_counter(), time.process_time()
    given = load(path)
    planner = Timed(given.times)
    simulation = Simulation(given, planner=planner)
    outcome = simulation.play()
    spent, busy = time.perf_counter() - began, time.process_time() - busy
    name = path.stem
    if outcome.stopped:
        yield row(f"{name}: {outcome.stopped}", None, "", kind="simulated")
        return
    ours, *others = outcome.totals
    for run in outcome.totals:
        yield row(f"{name}: {run.name}", run.tokens_per_second, "tokens/s", kind="simulated")
    for other in others:
        ratio = ours.tokens_per_second / other.tokens_per_second
        bound = other.name == "bound"
        yield row(
            f"{name}: throughput over {other.name}",
            ratio,
            "ratio",
            kind="simulated",
            goal="<= 1" if bound else ">= 1",
            met=ratio <= 1 if bound else ratio >= 1,
        )
    yield from costs(name, outcome, len(planner.spent), ours.plans)
    yield row(f"{name}: planning, each call", statistics.median(planner.spent), "s of processor")
    yield row(f"{name}: wall time of the simulation", spent, "s")
    yield row(f"{name}: processor time", busy, "s")
    yield row(f"{name}: of it planning", sum(planner.spent), "s")


def costs(name: str, outcome: Outcome, calls: int, plans: int) -> Iterator[Row]:
    """What elasticd's total includes, in simulated time, and how often the planner was asked."""
    ours = outcome.totals[0]
    yield row(f"{name}: pauses of switches", _pause(ours), "s a switch", kind="simulated")
    yield row(f"{name}: switches", ours.switches, "", kind="simulated")
    yield row(f"{name}: moved", ours.bytes_moved / 2**30, "GiB", kind="simulated")
    yield row(f"{name}: planning, beside training", ours.planning_seconds, "s", kind="simulated")
    yield row(f"{name}: plans asked for", plans, "", kind="simulated")
    yield row(f"{name}: calls of the planner, baselines included", calls, "")
    if ours.recoveries:
        yield row(f"{name}: recoveries", ours.recoveries, "", kind="simulated")
        yield row(f"{name}: a recovery", ours.recovery_seconds / ours.recoveries, "s", kind="simulated")
    if ours.restarts:
        yield row(f"{name}: starts after state was lost", ours.restarts, "", kind="simulated")
        yield row(f"{name}: without a job", ours.down_seconds, "s", kind="simulated")
        yield row(f"{name}: steps done again", ours.lost_steps, "", kind="simulated")


def _pause(ours: Totals) -> float:
    return ours.pause_seconds / ours.switches if ours.switches else 0.0


def schedule() -> Iterator[Row]:
    """The cost model's step beside the schedule played event by event; the recurrence's error and speed."""
    rng = np.random.default_rng(0)
    differences, errors = zip(*(_compared(rng) for _ in range(PLANS)), strict=True)
    worst = max(abs(difference) for difference in differences)
    within = sum(abs(difference) <= 0.02 for difference in differences) / PLANS
    yield row(
        f"cost model beside the schedule, worst of {PLANS} random plans",
        worst,
        "fraction",
        kind="simulated",
        goal="<= 0.02",
        met=worst <= 0.02,
    )
    yield row("of these within 2 %", within, "fraction", kind="simulated")
    yield row(
        "recurrence beside the schedule, worst", max(errors), "fraction", goal="<= 1e-9", met=max(errors) < 1e-9
    )
    times = rng.uniform(0.5, 1.5, (1000, 8))
    began = time.perf_counter()
    one_f_one_b_seconds(times, 2 * times, 0.05 * times[:, 1:], 64)
    yield row(
        "recurrence, 8 stages and 64 micro-batches, each of 1,000", (time.perf_counter() - began) * 1e3, "µs"
    )


def _compared(rng: np.random.Generator) -> tuple[float, float]:
    """One random plan of one pipeline: (cost / schedule - 1, error of the recurrence)."""
    micro_batches = int(rng.integers(1, 65))
    cluster, rates, profile, plan = _random(rng, micro_batches)
    stages = plan.modules[0].pipelines[0].stages
    cost = ProfileCost(profile)
    own = []
    for stage in stages:
        speed = [rates.get(name, 1.0) for name in stage.devices]
        group = cost.group(speed, stage.shares, cluster.inside)
        own.append(stage.layers * group.block + (group.head if stage.stop == profile.layers else 0.0))
    ends = [(a.devices[0], b.devices[0]) for a, b in pairwise(stages)]
    boundary = [cost.boundary(reach(cluster, pair)) / 2 for pair in ends]
    forward = np.array(own) / 3
    each = np.repeat(forward[:, None], micro_batches, axis=1)
    played = simulate(each, 2 * each, boundary).seconds
    exact = float(one_f_one_b_seconds(forward, 2 * forward, boundary, micro_batches))
    return step_seconds(plan, cluster, rates, cost) / played - 1, abs(exact / played - 1)


def _random(
    rng: np.random.Generator, micro_batches: int
) -> tuple[Cluster, dict[str, float], ModelProfile, Plan]:
    """A stage on each of some nodes, layers cut anywhere, a fifth of the devices slow."""
    stages = int(rng.integers(1, 9))
    nodes = tuple(
        Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=1 << 40) for i in range(size)))
        for n, size in enumerate(rng.integers(1, 5, stages))
    )
    inside, between = Link(bandwidth=2e11, latency=1e-5), Link(bandwidth=2.5e10, latency=2e-5)
    cluster = Cluster(nodes=nodes, inside=inside, between=between)
    profile = ModelProfile(
        name="random",
        layers=int(rng.integers(2 * stages, 12 * stages + 1)),
        share_units=64,
        tokens=4096.0,
        block=SectionProfile(seconds=float(rng.uniform(2e-6, 4e-5)), collectives=4),
        head=SectionProfile(seconds=float(rng.uniform(0, 2e-5))),
        boundary_bytes=16384.0,
    )
    rates = {d.name: float(rng.uniform(1.2, 4)) for d in cluster.devices if rng.random() < 0.2}
    cuts = np.sort(rng.choice(np.arange(1, profile.layers), stages - 1, replace=False)).tolist()
    made = tuple(
        Stage(
            start=start,
            stop=stop,
            devices=tuple(device.name for device in node.devices),
            shares=apportion(64, (1,) * len(node.devices)),
        )
        for node, (start, stop) in zip(nodes, pairwise([0, *cuts, profile.layers]), strict=True)
    )
    line = Pipeline(stages=made, micro_batches=micro_batches)
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=(line,)),))
    plan = Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=micro_batches)
    return cluster, rates, profile, plan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
