"""The simulator's figures: shipped scenarios beside baselines, the recurrence, speed.

make bench NAME=simulator                       # all of examples/scenarios
make bench NAME=simulator ARGS="--only small walk-70b" # some; the results keep the others as they are
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import msgspec
import numpy as np
from _frame import PLANNER, Part, run
from _results import Row, row
from elasticd_planner.cost.schedule_timeline import one_f_one_b_seconds, played_seconds
from elasticd_planner.problem import Answer, Problem

from elasticd.simulator.planning import Planner
from elasticd.simulator.results.result import Outcome, Totals
from elasticd.simulator.run import Simulation
from elasticd.simulator.scenarios.scenario import Times, load

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _seeds  # noqa: E402

from tests.machines.stop_scene import END_SECONDS, StopScene  # noqa: E402
from tests.machines.walk import whole  # noqa: E402

SCENARIOS = ROOT / "examples" / "scenarios"
PIPELINES = 500
#: Stops with deaths before, meanwhile, or as the last checkpoint is made.
STOPS = 1000
#: Seeds of the simulated soak in one run, beside those of runs before.
SEEDS = 1000
#: Seconds of wall time that a scenario may take.
WALL_SECONDS = {"day-1024": 120.0}


class Timed(Planner):
    """The planner that the simulation asks, with a stopwatch beside it: processor seconds of each call."""

    def __init__(self, times: Times) -> None:
        super().__init__(times)
        self.spent: list[float] = []

    def plan(self, problem: Problem) -> Answer:
        """The answer of the planner, whose processor seconds are kept."""
        began = time.process_time()
        answer = super().plan(problem)
        self.spent.append(time.process_time() - began)
        return answer


def scenario(path: Path, steps: int | None = None) -> Iterator[Row]:
    """Totals beside the baselines and the bound; and how long it took to find out, and what of that planned.
    steps: for which it is played, without its faults."""
    began, busy = time.perf_counter(), time.process_time()
    given = load(path)
    if steps is not None:
        given = msgspec.structs.replace(given, steps=steps, hours=None, faults=())
    planner = Timed(given.times)
    simulation = Simulation(given, planner=planner)
    outcome = simulation.play()
    spent, busy = time.perf_counter() - began, time.process_time() - busy
    name = path.stem
    if outcome.stopped:
        yield row(f"{name}: {outcome.stopped}", None, "", kind="simulated")
        return
    ours, *others = outcome.totals
    for total in outcome.totals:
        yield row(f"{name}: {total.name}", total.tokens_per_second, "tokens/s", kind="simulated")
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
    most = WALL_SECONDS.get(name)
    yield row(
        f"{name}: wall time of the simulation",
        spent,
        "s",
        goal=None if most is None else f"<= {most:g}",
        met=None if most is None else spent <= most,
    )
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


def schedule(pipelines: int = PIPELINES) -> Iterator[Row]:
    """The recurrence that the planner's seconds come from, beside the schedule played event by event, and its
    speed. (What the planner predicts of whole plans is beside the events in `make bench NAME=planner`.)"""
    rng = np.random.default_rng(0)
    worst = max(_error(rng) for _ in range(pipelines))
    name = f"recurrence beside the schedule, worst of {pipelines} random pipelines"
    yield row(name, worst, "fraction", kind="simulated", goal="<= 1e-9", met=worst <= 1e-9)
    times = rng.uniform(0.5, 1.5, (1000, 8))
    began = time.perf_counter()
    one_f_one_b_seconds(times, 2 * times, 0.05 * times[:, 1:], 64)
    yield row(
        "recurrence, 8 stages and 64 micro-batches, each of 1,000", (time.perf_counter() - began) * 1e3, "µs"
    )


def _error(rng: np.random.Generator) -> float:
    """Of one pipeline: layers cut anywhere, a fifth of the stages slow, some of them recompute."""
    stages, micro_batches = int(rng.integers(1, 9)), int(rng.integers(1, 65))
    slow = np.where(rng.random(stages) < 0.2, rng.uniform(1.2, 4, stages), 1.0)
    forward = rng.integers(1, 25, stages) * slow * rng.uniform(0.9, 1.1, stages)
    backward = forward * np.where(rng.random(stages) < 0.5, 2.0, 3.0)
    boundary = rng.uniform(0, 2, stages - 1)
    played = played_seconds(forward, backward, boundary, micro_batches)
    return abs(float(one_f_one_b_seconds(forward, backward, boundary, micro_batches)) / played - 1)


def stops(scenes: int = STOPS) -> Iterator[Row]:
    """Seconds from a user's stop to the job's end after one or two deaths of workers and nodes, members or
    standbys, and the steps that are lost though somebody who lives holds them."""
    for deaths in (1, 2):
        seconds, lost = [], 0
        for seed in range(scenes):
            scene = StopScene(seed, deaths)
            scene.play()
            seconds.append(scene.seconds)
            lost = max(lost, scene.lost_steps if whole(scene) else 0)
        most = "one death" if deaths == 1 else "one or two deaths"
        name = f"stop after {most}, {scenes} drawn"
        longest = max(seconds)
        yield row(f"{name}: median", statistics.median(seconds), "s", kind="simulated")
        yield row(
            f"{name}: longest",
            longest,
            "s",
            kind="simulated",
            goal=f"<= {END_SECONDS:g}",
            met=longest <= END_SECONDS,
        )
        yield row(f"{name}: steps lost", lost, "", kind="simulated", goal="<= 0", met=lost == 0)


_PLAYED = (*PLANNER, "elasticd/machines", "elasticd/simulator")
PARTS = {
    "schedule": Part(schedule, PLANNER, {"pipelines": 10}),
    "seeds": Part(
        partial(_seeds.rows, count=SEEDS),
        _seeds.MEASURED,
        {"count": 2, "path": Path(gettempdir()) / "elasticd-benchmarks" / "seeds.jsonl"},
    ),
    "stops": Part(stops, ("elasticd/machines", "tests/machines/stop_scene.py"), {"scenes": 4}),
    **{
        path.stem: Part(partial(scenario, path), (*_PLAYED, f"examples/scenarios/{path.name}"), {"steps": 30})
        for path in sorted(SCENARIOS.glob("*.toml"))
    },
}

if __name__ == "__main__":
    sys.exit(run("simulator", __doc__, PARTS))
