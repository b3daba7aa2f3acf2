"""A device that is not the CPU: exactness, races and foreign memory, what a step costs beside a plain loop.

make bench NAME=accelerators                            # the suites take most of it
make bench NAME=accelerators ARGS='--only layouts step'  # parts; the results keep the others as they are

The device is vgpu (tests/accelerators): host memory that breaks where a GPU breaks. It says nothing of speed.
The last rows are of the CPU: a step now, over one of the commit before there were accelerators.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from _pairs import Ratio, ratio
from _parts import Parts
from _results import RESULTS, Row, row, table
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.accelerators import suites, test_training, vgpu  # noqa: E402
from tests.runtime import gang, test_parity  # noqa: E402

#: The last commit whose tensors were on the CPU whatever the machine has.
BASE = "aac28d2"
#: Goals: difference of a weight from one process, waits of the host, and ratios of launches and of CPU steps.
APART, WAITS, LAUNCHES, STEP = 1e-10, 2, 1.03, 1.03
#: Pairs of the CPU's step go on until half the interval is as narrow as this, or there are so many.
NARROW, MOST_PAIRS, STEPS_OF_A_PAIR = 0.01, 400, 10


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


def step_rows() -> Iterator[Row]:
    """The CPU's path: a step now over one of the base commit, in turns, in two processes that stay."""
    with base() as tree:
        found = paired(tree)
    name = f"a step on the CPU over that of {BASE}"
    yield row(name, found.value, "x", noise=found.noise)
    top = f"{name}: upper end of the 95 % interval ({found.pairs} pairs)"
    yield row(top, found.high, "x", goal=f"<= {STEP}", met=found.high <= STEP)


@contextmanager
def base() -> Iterator[Path]:
    """The tree of the base commit."""
    with tempfile.TemporaryDirectory(prefix="eb-base-") as folder:
        archive = subprocess.run(["git", "archive", BASE], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def paired(tree: Path) -> Ratio:
    """Until the interval is narrow."""
    ours, theirs = list[float](), list[float]()
    sides: list[tuple[subprocess.Popen[bytes], list[float]]] = []
    try:
        sides = [(_side(ROOT), ours), (_side(tree), theirs)]
        for process, _ in sides:
            _asked(process, 3 * STEPS_OF_A_PAIR)
        while len(ours) < MOST_PAIRS:
            for process, seconds in sides if len(ours) % 2 else sides[::-1]:
                seconds.append(_asked(process, STEPS_OF_A_PAIR))
            if len(ours) >= 30 and ratio(ours, theirs).noise <= NARROW:
                break
        return ratio(ours, theirs)
    finally:
        for process, _ in sides:
            process.kill()
            process.wait()


def _side(tree: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "benchmarks/_step_side.py"), str(tree)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tree)


def _asked(process: subprocess.Popen[bytes], steps: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n".encode())
    process.stdin.flush()
    line: Any = process.stdout.readline()
    return msgspec.json.decode(line, type=float)


#: By the name that `--only` takes.
PARTS = {"layouts": layout_rows, "cost": cost_rows, "step": step_rows, "suites": suite_rows}


def main() -> int:
    """Measures the parts that were asked for; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", default=list(PARTS))
    asked = parser.parse_args().only
    vgpu.library()
    parts = Parts(RESULTS / "accelerators.json", tuple(PARTS))
    missed: list[str] = []
    for name in asked:
        start = time.monotonic()
        rows = list(PARTS[name]())
        parts.put(name, rows, time.monotonic() - start)
        missed += [each.name for each in rows if each.met is False]
    Console().print(table("accelerators", parts.rows))
    if missed:
        print(f"goals missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
