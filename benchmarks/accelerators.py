"""A device that is not the CPU: exactness, races and foreign memory, what a step costs beside a plain loop.

make bench NAME=accelerators                            # the suites take most of it
make bench NAME=accelerators ARGS='--only layouts step'  # parts; the results keep the others as they are

The device is vgpu (tests/accelerators): host memory that breaks where a GPU breaks. It says nothing of speed.
The last rows are of the CPU: a step now, over one of the commit before there were accelerators.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _frame import PRODUCT, TRAINING, Part, run
from _results import Row, row
from _step_before import ALONE, step_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from _gpu_programs import started  # noqa: E402
from elasticd_planner.layout.channels import MOST, channels_by_device  # noqa: E402
from elasticd_planner.layout.layouts import Layouts  # noqa: E402

from tests.accelerators import suites, test_engine_budget, test_nccl_drills, test_training, vgpu  # noqa: E402
from tests.planner.drawn_plans import SPEC, drawn_plan  # noqa: E402
from tests.runtime import gang, test_engine_parity  # noqa: E402

#: The last commit whose tensors were on the CPU whatever the machine has.
BASE = "aac28d2"
#: Drawn plans whose communicators are counted.
DRAWN = 1_000
#: Goals: difference of a weight from one process, waits of the host, and the ratio of launches.
APART, WAITS, LAUNCHES = 1e-10, 2, 1.03


def layout_rows(most: int | None = None) -> Iterator[Row]:
    """Each layout of the suite, or the first ones, in processes of its own, over gloo."""
    vgpu.library()
    _, _, weights = test_engine_parity.reference()
    noted = 0
    for name, plan in islice(test_training.PLANS.items(), most):
        results = gang.run(str(Path(test_training.__file__)), "worker", plan.members, plan, seconds=600)
        noted += sum(len(result["noted"]) for result in results.values())
        held = [each for result in results.values() for each in result["weights"].items()]
        apart = max(test_engine_parity.apart(weights, each) for each in held)
        title = f"largest difference of a weight: {name}"
        yield row(title, apart, "", goal=f"<= {APART:g}", met=apart <= APART)
    title = "layouts: races, foreign devices, memory freed too soon"
    yield row(title, noted, "", goal="0", met=noted == 0)


def suite_rows(names: Sequence[str] = tuple(suites.SUITES)) -> Iterator[Row]:
    """The suites, all sizes and seeds: their tests compare with one process to 1e-10, and note every fault of
    order and memory."""
    vgpu.library()
    for name in names:
        ran = suites.run(name)
        if ran.failed:
            print(ran.said, file=sys.stderr)
        yield row(f"tests on the device that pass: {name}", ran.passed, "")
        yield row(f"tests on the device that fail: {name}", ran.failed, "", goal="0", met=ran.failed == 0)


def communicator_rows(drawn: int = DRAWN, most_plans: int | None = None) -> Iterator[Row]:
    """Communicators of a device: predicted for drawn plans, on 16 devices and on 64; made by processes."""
    vgpu.library()
    most = [fullest(seed) for seed in range(drawn)]
    worst, title = max(most), f"communicators of a device, worst of {drawn:,} drawn plans"
    yield row(title, worst, "", goal=f"<= {MOST}", met=worst <= MOST)
    plans = {name: test_training.PLANS[name] for name in islice(test_engine_budget.HERE, most_plans)}
    made = exact = 0
    for plan in plans.values():
        predicted = channels_by_device(Layouts(test_engine_parity.make_recipe().model.spec, plan))
        results = gang.run(str(Path(test_training.__file__)), "worker", plan.members, plan, seconds=600)
        made += sum(result["communicators"] for result in results.values())
        exact += sum(result["communicators"] == len(predicted[name]) for name, result in results.items())
    ranks = sum(len(plan.members) for plan in plans.values())
    title = f"ranks that made the communicators that the plan says ({made} in all)"
    yield row(title, exact, "", goal=str(ranks), met=exact == ranks)


def fullest(seed: int) -> int:
    """The most communicators that a device has under a drawn plan."""
    large = tuple(f"n{node}/{local}" for node in range(8) for local in range(8))
    plan = drawn_plan(seed, devices=large) if seed % 2 else drawn_plan(seed)
    return max(map(len, channels_by_device(Layouts(SPEC, plan)).values()))


def drill_rows(most: int | None = None) -> Iterator[Row]:
    """A kill and a freeze in each phase of a step, in whole jobs whose communicators have NCCL's rules."""
    kept, rests, standing = 0, list[float](), list[float]()
    moments = [*test_nccl_drills.MOMENTS, *test_nccl_drills.CUT_MOMENTS]
    drills = [(moment, how) for moment in moments for how in test_nccl_drills.HOW][:most]
    vgpu.library()
    for moment, how in drills:
        try:
            found = test_nccl_drills.survived(moment, how)
        except AssertionError as error:
            print(f"{moment}, {how}: {error}", file=sys.stderr)
            continue
        kept += 1
        rests += found.rest
        standing.append(found.standing)
    title = "drills whose survivors went on exactly from the last decided step"
    yield row(title, kept, "", goal=str(len(drills)), met=kept == len(drills))
    for title, seconds in (
        ("drills: from the abort until the device is at rest", rests),
        ("drills: from the order to stop until the next plan stands", standing),
    ):
        if seconds:
            yield row(f"{title}, median", statistics.median(seconds), "s", kind="emulated")
            yield row(f"{title}, longest", max(seconds), "s", kind="emulated")


def wait_rows(most: int | None = None) -> Iterator[Row]:
    """Members of plans whose communicators have NCCL's rules."""
    vgpu.library()
    worst = 0
    for name in islice(test_engine_budget.HERE, most):
        plan = test_training.PLANS[name]
        found = gang.run(
            str(Path(test_engine_budget.__file__)), "counted_in_a_plan", plan.members, plan, seconds=600
        )
        worst = max(worst, *(waits for waits, _ in found.values()))
    title = "synchronizations in a step, worst member of two plans"
    yield row(title, worst, "", goal=f"<= {WAITS}", met=worst <= WAITS)


class OnGpu(NamedTuple):
    """A row that a GPU alone can say: its name, the figure's name in `_on_a_gpu`, unit and goal."""

    title: str
    figure: str
    unit: str
    limit: float
    at_least: bool = False

    @property
    def goal(self) -> str:
        """As it reads."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


ON_A_GPU = (
    OnGpu("one GPU: step over plain torch", "eager", "x", 1.02),
    OnGpu("one GPU: step over compiled torch, both compiled", "compiled", "x", 1.02),
    OnGpu(
        "one GPU: MFU of 953 M parameters, 4,096 tokens, bf16 under float32 masters, torchtitan's convention",
        "large: mfu, ours",
        "",
        0.45,
        at_least=True,
    ),
    OnGpu("one GPU: peak memory over plain torch's", "large: peak memory", "x", 1.02),
    OnGpu("one GPU: captured over plain torch captured", "captured", "x", 1.05),
    OnGpu("one GPU: device busy in a captured step", "captured: busy", "", 0.85, at_least=True),
    OnGpu("one GPU: step over one without telemetry", "telemetry", "x", 1.01),
    OnGpu("one GPU: step with a snapshot over one without", "snapshot", "x", 1.02),
    OnGpu("one GPU: the device stands still around the vote", "vote", "ms", 1.5),
    OnGpu("one GPU: D2H into the snapshot's memory over cudaMallocHost", "to_host", "x", 0.9, at_least=True),
    OnGpu(
        "inside one GPU: throughput with one rank on a third of its share over the bound",
        "shares: over the bound",
        "",
        0.90,
        at_least=True,
    ),
    OnGpu(
        "inside one GPU: from a kill to the next step", "shares: seconds from a kill to the next step", "s", 2
    ),
)


def gpu_rows() -> Iterator[Row]:
    """On a GPU the figures of `_on_a_gpu`, and its tests over NCCL; else what was not run, and why."""
    several = "several NCCL ranks: tests of parity, abort, a killed peer that do not pass"
    if not torch.cuda.is_available():
        reason = "not run: no GPU"
        for figure in ON_A_GPU:
            yield row(figure.title, reason, figure.unit, goal=figure.goal, met=False)
        yield row(several, reason, "", goal="0", met=False)
        return
    figures = dict[str, Any]()
    with started(sys.executable, str(ROOT / "benchmarks/_on_a_gpu.py")) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                said = json.loads(line)
                figures[said["figure"]] = said["value"]
    for figure in ON_A_GPU:
        value = figures.get(figure.figure)
        value, noise = value if isinstance(value, list) else (value, None)
        met = value is not None and (value >= figure.limit if figure.at_least else value <= figure.limit)
        title = f"{figure.title} ({figures.get('device')})"
        yield row(title, value, figure.unit, goal=figure.goal, met=met, noise=noise)
    tests = [value for name, value in figures.items() if name.startswith("nccl: test_")]
    failed = sum(value[0] != "passed" for value in tests)
    yield row(several, failed if tests else None, "", goal="0", met=bool(tests) and not failed)


def cost_rows() -> Iterator[Row]:
    """A step of one device, beside a plain loop of the same micro-batches."""
    vgpu.library()
    (found,) = gang.run(str(ROOT / "tests/accelerators/test_engine_budget.py"), "counted", ["alone"]).values()
    (plain_waits, plain), (waits, launches) = found
    yield row("waits of the host in a step: plain loop", plain_waits, "")
    met = waits <= plain_waits + WAITS
    yield row("waits of the host in a step", waits, "", goal=f"<= plain loop + {WAITS}", met=met)
    yield row("launches in a step: plain loop", plain, "")
    yield row("launches in a step", launches, "")
    over = launches / plain
    yield row("launches over the plain loop's", over, "x", goal=f"<= {LAUNCHES}", met=over <= LAUNCHES)


_VGPU = (*TRAINING, "tests/accelerators")
PARTS = {
    "layouts": Part(layout_rows, _VGPU, {"most": 1}),
    "communicators": Part(communicator_rows, _VGPU, {"drawn": 10, "most_plans": 1}),
    "waits": Part(wait_rows, _VGPU, {"most": 1}),
    "drills": Part(drill_rows, PRODUCT, {"most": 1}),
    "cost": Part(cost_rows, _VGPU),
    "step": Part(partial(step_rows, BASE, ALONE), TRAINING, {"pairs": 6}),
    "suites": Part(suite_rows, _VGPU, {"names": ("streams",)}),
    "gpu": Part(gpu_rows, TRAINING),
}


if __name__ == "__main__":
    sys.exit(run("accelerators", __doc__, PARTS))
