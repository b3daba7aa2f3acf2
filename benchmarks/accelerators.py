"""A device that is not the CPU: exactness, races and foreign memory, what a step costs beside a plain loop.

make bench NAME=accelerators                            # the suites take most of it
make bench NAME=accelerators ARGS='--only layouts step'  # parts; the results keep the others as they are

The device is vgpu (tests/accelerators): host memory that breaks where a GPU breaks. It says nothing of speed.
The last rows are of the CPU: a step now, over one of the commit before there were accelerators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from _parts import measured
from _results import Row, row
from _step_before import ALONE, step_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.accelerators import suites, test_training, vgpu  # noqa: E402
from tests.runtime import gang, test_parity  # noqa: E402

#: The last commit whose tensors were on the CPU whatever the machine has.
BASE = "aac28d2"
#: Goals: difference of a weight from one process, waits of the host, and the ratio of launches.
APART, WAITS, LAUNCHES = 1e-10, 2, 1.03


def layout_rows() -> Iterator[Row]:
    """Each layout of the suite in processes of its own, over gloo."""
    _, _, weights = test_parity.reference()
    noted = 0
    for name, plan in test_training.PLANS.items():
        results = gang.run(str(Path(test_training.__file__)), "worker", plan.members, plan, seconds=600)
        noted += sum(len(result["noted"]) for result in results.values())
        held = [each for result in results.values() for each in result["weights"].items()]
        apart = max(test_parity.apart(weights, each) for each in held)
        title = f"largest difference of a weight: {name}"
        yield row(title, apart, "", goal=f"<= {APART:g}", met=apart <= APART)
    title = "layouts: races, foreign devices, memory freed too soon"
    yield row(title, noted, "", goal="0", met=noted == 0)


def suite_rows() -> Iterator[Row]:
    """The suites, all sizes and seeds: their tests compare with one process to 1e-10, and note every fault of
    order and memory."""
    for name in suites.SUITES:
        ran = suites.run(name)
        if ran.failed:
            print(ran.said, file=sys.stderr)
        yield row(f"tests on the device that pass: {name}", ran.passed, "")
        yield row(f"tests on the device that fail: {name}", ran.failed, "", goal="0", met=ran.failed == 0)


def cost_rows() -> Iterator[Row]:
    """A step of one device, beside a plain loop of the same micro-batches."""
    (found,) = gang.run(str(ROOT / "tests/accelerators/test_budget.py"), "counted", ["alone"]).values()
    (plain_waits, plain), (waits, launches) = found
    yield row("waits of the host in a step: plain loop", plain_waits, "")
    met = waits <= plain_waits + WAITS
    yield row("waits of the host in a step", waits, "", goal=f"<= plain loop + {WAITS}", met=met)
    yield row("launches in a step: plain loop", plain, "")
    yield row("launches in a step", launches, "")
    over = launches / plain
    yield row("launches over the plain loop's", over, "x", goal=f"<= {LAUNCHES}", met=over <= LAUNCHES)


#: By the name that `--only` takes.
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "layouts": layout_rows,
    "cost": cost_rows,
    "step": partial(step_rows, BASE, ALONE),
    "suites": suite_rows,
}


if __name__ == "__main__":
    vgpu.library()
    sys.exit(measured("accelerators", __doc__, PARTS))
