"""Rows: lanes train as one process does, on the CPU among threads and on vgpu in processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elasticd_planner.spec.plan import Plan

from elasticd.runtime.comm.in_memory import run_threads
from tests.accelerators import test_training, vgpu
from tests.runtime import gang, test_engine_parity, test_lanes

#: The largest difference of a weight.
APART = 1e-10


def apart(results: Mapping[str, Mapping[str, Any]]) -> float:
    """The largest difference of a weight from that of one process."""
    _, _, weights = test_engine_parity.reference()
    held = [each for result in results.values() for each in result["weights"].items()]
    return max(test_engine_parity.apart(weights, each) for each in held)


def threads(plan: Plan) -> Mapping[str, Mapping[str, Any]]:
    """What the members of a plan have after training, on the CPU."""
    return run_threads(plan.members, lambda groups: test_engine_parity.trained(groups.me, plan, groups))


def lane_rows(most: int | None = None) -> Iterator[Row]:
    """Lanes x pipelines x stages x ZeRO 0 to 2, unequal rows, interleaved ones; or the first of them."""
    found = []
    for name, policy in islice(test_lanes.CASES, most):
        found.append(apart(threads(test_lanes.PLANS[name].replace(state=test_lanes.POLICIES[policy]))))
    title = f"largest difference of a weight: lanes, {len(found)} layouts on the CPU"
    yield row(title, max(found), "", goal=f"<= {APART:g}", met=max(found) <= APART)
    vgpu.library()
    found = []
    for plan in islice(test_training.LANES.values(), most):
        results = gang.run(str(Path(test_training.__file__)), "worker", plan.members, plan, seconds=600)
        assert not any(result["noted"] for result in results.values())
        found.append(apart(results))
    title = f"largest difference of a weight: lanes, {len(found)} layouts on vgpu"
    yield row(title, max(found), "", goal=f"<= {APART:g}", met=max(found) <= APART)
