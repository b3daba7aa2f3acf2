"""The exchange of keys of a short sequence of six lanes over gloo: rounds together over rounds one by one."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.parallel import context_parallel
from tests.runtime.test_context_parallel import Case, at_work

LANES = 6
CASE = Case(((1,),) * LANES, ((20 * LANES, dict.fromkeys(range(LANES), 1)),), kv="multi-query")
PAIRS = 60


def timed(device: str, store: Any) -> list[float]:
    """One of the processes: seconds of a step with rounds together over those of one without, for each pair."""
    groups, together = PlanGroups("plan/1", device, "127.0.0.1", store), context_parallel.TOGETHER
    mine, everyone = at_work(CASE, device, groups), groups.group(CASE.stage.devices, "vote")

    def seconds(limit: int) -> float:
        context_parallel.TOGETHER = limit
        everyone.all_gather(torch.zeros(1))
        start = time.perf_counter()
        mine.step()
        everyone.all_gather(torch.zeros(1))
        return time.perf_counter() - start

    found = []
    for at in range(PAIRS + 5):
        spent = {limit: seconds(limit) for limit in ((0, together) if at % 2 else (together, 0))}
        found.append(spent[together] / spent[0])
    return found[5:]


def middle(found: dict[str, list[float]]) -> tuple[float, float]:
    """The median of all pairs, of all devices, and half the width of the middle half."""
    every = [each for own in found.values() for each in own]
    low, mid, high = statistics.quantiles(every, n=4)
    return mid, (high - low) / 2
