"""Plans of the shared format: against the reference, against brute force, at scale, and what they prove."""

import json
import math
import random
import subprocess
import sys
from itertools import product

import elasticd_planner
import msgspec
import pytest
from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.convert import rates_of, task_of
from elasticd_planner.problem_files.file_format import Planned, TableProblem, load
from elasticd_planner.problem_files.solve import figures, solve
from elasticd_planner.search.large import LargeSearch
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import Invalid

from tests import sizes
from tests.planner import table_brute
from tests.planner.tables import REFERENCE, golden, large, small

ROWS = REFERENCE["rows"]
THREE = {"n0/0": 2.57, "n1/0": 5.42, "n2/0": 12.53}
FEW = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (4, 1), (5,), (2, 3))


def check(problem: TableProblem, planned: Planned) -> None:
    """What every plan of the format keeps, by its formulas."""
    assert planned.plan is not None
    assert planned.figures is not None
    model, memory = problem.model, problem.model.memory
    rates = rates_of(problem)
    steady = step = 0.0
    for pipeline in planned.plan.pipelines:
        depth = len(pipeline.stages)
        assert pipeline.micro_batches >= depth
        times = []
        for position, stage in enumerate(pipeline.stages):
            width = len(stage.devices)
            assert width in model.tp_slowdown
            assert len({node_of(device) for device in stage.devices}) == 1
            parts = [share / sum(stage.shares) for share in stage.shares]
            worst = max(part * rates.get(d, 1.0) for part, d in zip(parts, stage.devices, strict=True))
            if not model.uneven_shares:
                assert len(set(stage.shares)) == 1
            times.append(stage.layers * model.tp_slowdown[width] * width * worst)
            if memory is not None:
                table = memory.layer_mib_by_stage
                size = table[max(0, len(table) - (depth - position))] * stage.layers
                size += memory.embedding_mib if position in (0, depth - 1) else 0
                (room,) = {n.memory_mib for n in problem.cluster.nodes if n.name == node_of(stage.devices[0])}
                needed = size * model.tp_full * max(parts) + memory.fixed_mib
                assert needed <= (room - memory.reserve_mib) * (1 + 1e-6)
        steady = max(steady, pipeline.micro_batches * max(times))
        step = max(step, (pipeline.micro_batches - 1) * max(times) + sum(times))
    assert planned.figures.steady == pytest.approx(steady)
    assert planned.figures.step == pytest.approx(step)
    value = steady if planned.objective == "steady" else step
    assert planned.figures.bound <= value * (1 + 1e-9)
    assert planned.figures.gap == pytest.approx(value / planned.figures.bound - 1, abs=1e-9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['problem']}-{row['rates']}")
def test_golden_rows_are_no_worse_than_the_reference(row: dict[str, object]) -> None:
    problem = golden(row["problem"], row["rates"])  # type: ignore[arg-type]
    planned = solve(problem, "steady", ideal=False)
    check(problem, planned)
    assert planned.figures is not None
    assert planned.figures.steady <= row["reference_objective"] * (1 + 1e-6)  # type: ignore[operator]
    if "reference_step" in row:
        stepped = solve(problem, "step", ideal=False)
        check(problem, stepped)
        assert stepped.figures is not None
        assert stepped.figures.step < row["reference_step"]  # type: ignore[operator]


@pytest.mark.parametrize("name", ["70b", "110b"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("uneven", [False, True])
def test_the_proved_gap_with_stragglers_is_small(name: str, count: int, uneven: bool) -> None:
    rates = dict(list(THREE.items())[:count])
    problem = golden(name, rates, uneven=uneven)
    planned = solve(problem, ideal=False)
    check(problem, planned)
    assert planned.figures is not None
    assert planned.figures.gap <= 0.025


@pytest.mark.parametrize(
    ("name", "objective"),
    sizes.beside(
        [("70b", "step"), ("110b", "steady")],
        list(product(("32b", "70b", "110b"), ("step", "steady"))),
    ),
)
def test_what_is_free_is_never_slower_than_what_is_pinned(name: str, objective: Objective) -> None:
    for rates in ({"n0/0": 2.57}, THREE):
        pinned = solve(golden(name, rates), objective, ideal=False).figures
        free = solve(golden(name, rates, pins=None), objective, ideal=False).figures
        assert pinned is not None
        assert free is not None
        if objective == "step":
            assert free.step <= pinned.step * (1 + 2.5e-4)
        else:
            assert free.steady <= pinned.steady * (1 + 2.5e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", ["step", "steady"])
def test_small_problems_are_planned_as_brute_force_does(seed: int, objective: Objective) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        problem = small(rng, FEW)
        least = table_brute.best(problem, objective)
        planned = solve(problem, objective, ideal=False)
        if planned.plan is None:
            assert math.isinf(least)
            assert planned.refusal
            continue
        check(problem, planned)
        assert planned.figures is not None
        found = planned.figures.steady if objective == "steady" else planned.figures.step
        assert found == pytest.approx(least)
        assert LargeSearch(task_of(problem, objective)).lower() <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_at_scale_never_beats_the_bound_nor_brute_force(seed: int) -> None:
    """The search that large problems get, on problems that can be enumerated."""
    rng = random.Random(100 + seed)
    for _ in range(15):
        problem = small(rng, FEW)
        task = task_of(problem, "step")
        found = LargeSearch(task).run()
        least = table_brute.best(problem, "step")
        if found is not None:
            assert found.seconds >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("devices", "slow", "pinned"),
    sizes.beside(
        [(112, 3, True), (1024, 10, False)],
        [(*size, pinned) for size in [(112, 3), (248, 4), (256, 10), (1024, 10)] for pinned in (True, False)],
    ),
)
def test_large_clusters_have_plans_that_keep_the_rules(devices: int, slow: int, pinned: bool) -> None:
    problem = large(devices, slow, pinned=pinned, uneven=slow % 2 == 0)
    planned = solve(problem, ideal=False)
    check(problem, planned)
    assert planned.figures is not None
    assert planned.figures.gap < 0.12
    assert planned.candidates < 4000


def test_nodes_of_two_speeds_and_two_memories_are_planned() -> None:
    text = msgspec.to_builtins(golden("70b", pins=None))
    for index, node in enumerate(text["cluster"]["nodes"]):
        node["speed"] = 1.0 if index % 2 else 0.5
        node["memory_mib"] = 81252 if index % 2 else 60000
    problem = load(json.dumps(text))
    planned = solve(problem, ideal=False)
    check(problem, planned)
    healthy = solve(golden("70b", pins=None), ideal=False).figures
    assert planned.figures is not None
    assert healthy is not None
    assert healthy.step < planned.figures.step < 2 * healthy.step


@pytest.mark.parametrize("devices", [(14,), (7, 7, 8), (11, 11, 9), (1,) * 13])
def test_any_device_count_works(devices: tuple[int, ...]) -> None:
    text = msgspec.to_builtins(golden("32b", pins=None))
    text["cluster"]["nodes"] = [
        {"name": f"n{i}", "devices": n, "memory_mib": 120000} for i, n in enumerate(devices)
    ]
    text["rates"] = {"n0/0": 3.0}
    problem = load(json.dumps(text))
    check(problem, solve(problem, ideal=False))


def test_a_group_that_fits_in_no_node_crosses_them() -> None:
    text = msgspec.to_builtins(golden("70b", pins=None))
    text["cluster"]["nodes"] = [{"name": f"n{i}", "devices": 4, "memory_mib": 81252} for i in range(8)]
    text["model"]["tp_slowdown"] = {"8": 1.0}
    planned = solve(load(json.dumps(text)), ideal=False)
    assert planned.plan is not None
    assert {len(stage.devices) for _, _, stage in planned.plan.walk()} == {8}


def test_a_node_that_lost_a_device_is_divided_freely_where_sizes_are_pinned() -> None:
    text = msgspec.to_builtins(golden("70b"))
    text["rates"] = {"n0/0": None}
    planned = solve(load(json.dumps(text)), ideal=False)
    assert planned.plan is not None
    used = planned.plan.nodes
    assert "n0" in used
    assert "n0/0" in planned.plan.idle


def test_a_whole_slow_node_is_used_for_less_or_left_idle() -> None:
    rates = {f"n0/{i}": 12.53 for i in range(8)}
    problem = golden("70b", rates, pins=None)
    planned = solve(problem, ideal=False)
    check(problem, planned)
    dead = solve(golden("70b", {}, pins=None), ideal=False)
    assert planned.plan is not None
    assert dead.figures is not None
    assert planned.figures is not None
    assert planned.figures.step < 8 / 7 * dead.figures.step * 1.05


def test_the_same_problem_has_the_same_digest_in_every_process() -> None:
    problem = golden("110b", THREE, uneven=True)
    mine = elasticd_planner.plan(problem)
    code = "import sys, elasticd_planner; print(elasticd_planner.plan(sys.stdin.read()).digest)"
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=msgspec.json.encode(problem).decode(),
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert done.stdout.strip() == mine.digest


def test_pinned_pipelines_that_cannot_be_are_refused_by_name() -> None:
    text = msgspec.to_builtins(golden("70b"))
    text["pins"] = {"tp": 8, "dp": 8}
    refusal = solve(load(json.dumps(text)), ideal=False).refusal
    assert refusal.startswith("does not fit: the nearest plan needs ")
    assert "GiB more on n" in refusal
    assert "more nodes" in refusal or "one more node" in refusal
    with pytest.raises(Invalid, match="does not fit"):
        elasticd_planner.plan(json.dumps(text))


def test_figures_of_a_plan_are_the_same_from_the_plan_alone() -> None:
    problem = golden("32b", {"n0/0": 2.57}, uneven=True)
    planned = solve(problem, ideal=False)
    assert planned.plan is not None
    assert planned.figures is not None
    assert figures(planned.plan, task_of(problem)) == (planned.figures.steady, planned.figures.step)
