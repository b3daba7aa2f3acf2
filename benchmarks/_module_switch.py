"""Rows: the encoder's layout changes in a running job of two modules and back, again and again: what moves, and
how long ranks stand still."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.reshard import reshard
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from tests.integration import train_modules
from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_modules_live import plans_of, said
from tests.migration.ranks import together
from tests.runtime.image_model import TEXT
from tests.runtime.test_modules import make_recipe, trained

#: Runs, switches of each, and steps between two of them. A device that changes its speed more often in a run is
#: left alone for longer and longer.
RUNS, SWITCHES, STEPS = 5, 4, 12
#: Seconds that a rank may stand still (p95).
MOST_SECONDS = 0.35


class _Line(msgspec.Struct):
    step: int
    plan: int
    time: float


def switch_rows(runs: int = RUNS, switches: int = SWITCHES) -> Iterator[Row]:
    """Three processes over gloo; the encoder has two lanes of a device each, or one of two and one of one.
    The module with the loss stays as it is. Blocks take half a millisecond."""
    plans = plans_of(TEXT.layers)
    played = [_run(plans, switches) for _ in range(runs)]
    moved = [data for swaps, _ in played for data in swaps if data["number"] > 1]
    sent, least = (sum(data[name] for data in moved) for name in ("bytes_sent", "bytes_lacking"))
    ways = [(plans[""], plans["a/0"]), (plans["a/0"], plans[""])]
    vision = runs * sum(_vision_lacks(*ways[number % 2]) for number in range(switches))
    here = f"{runs * switches} switches of the encoder alone in {runs} runs, 3 ranks"
    language = least - vision
    yield row(f"{here}: bytes of the language model", language, "bytes", goal="0", met=not language)
    state = _state_sent(*ways[0])
    ratio = state / _vision_lacks(*ways[0])
    yield row(
        "one of them among threads: bytes of state sent over the least", ratio, "", goal="1.00", met=ratio == 1
    )
    yield row(f"{here}: bytes sent over the least, with checksums and receipts", sent / least, "")
    stalls = sorted(stall for _, ledgers in played for stall in _stalls(ledgers, switches + 1))
    middle, late = statistics.median(stalls), stalls[int(0.95 * len(stalls))]
    yield row(f"{here}: seconds that a rank stands still, median", middle, "s")
    met = late <= MOST_SECONDS
    yield row(f"{here}: seconds that a rank stands still, p95", late, "s", goal=f"<= {MOST_SECONDS:g}", met=met)


def _run(plans: Mapping[str, Plan], switches: int) -> tuple[list[dict[str, Any]], dict[str, list[_Line]]]:
    """A job that switches so often: the data of the switches' events, and the steps of each rank."""
    with Cluster({"a": 2, "b": 1}, plans=dict(plans), settings=JobSettings(retry_seconds=0.5)) as cluster:
        cluster.run(Path(train_modules.__file__), model="by hand")
        cluster.runs(1, steps=STEPS)
        for number in range(2, switches + 2):
            cluster.pace("a/0", 1.0 if number % 2 else SLOW)
            cluster.runs(number, steps=STEPS)
        swaps = [event["data"] for event in cluster.events("swapped")]
        text = said(cluster)
        cluster.finish()
        cluster.wait(120)
        ledgers = {
            path.name: [msgspec.json.decode(line, type=_Line) for line in path.read_text().splitlines()]
            for path in cluster.folder.glob("ledger-*")
        }
    assert len(ledgers) == 3, text
    return swaps, ledgers


def _state_sent(old: Plan, new: Plan) -> int:
    """The bytes of state that all members send, after some steps."""
    train = partial(_trained, old)
    states = {device: result["state"] for device, result in run_threads(old.members, train).items()}
    specs = make_recipe().model.specs
    before, after = Layouts(specs, old), Layouts(specs, new)
    names = tuple(dict.fromkeys((*old.members, *new.members)))

    sent: list[int] = []

    def move(end: MemoryTransport) -> bool:
        sent.append(migrate(before, after, states.get(names[end.rank], LocalState()), end).bytes_sent)
        return True

    together(MemoryTransport.connect(names), move)
    return sum(sent)


def _trained(plan: Plan, memory: object) -> dict[str, Any]:
    groups = cast(PlanGroups, memory)
    return trained(groups.me, plan, groups)


def _vision_lacks(old: Plan, new: Plan) -> int:
    """The bytes of the encoder that devices of the new plan lack: values, and two moments."""
    specs = make_recipe().model.specs
    before, after = Layouts(specs, old), Layouts(specs, new)
    sizes = {item: 16 if item.role == "state" else 8 for item in after.items}  # in double precision
    return sum(
        each.box.size * sum(sizes[item] for item in each.items)
        for each in reshard(before, after, sizes)
        if each.name.startswith("vision.")
    )


def _stalls(ledgers: Mapping[str, list[_Line]], last: int) -> Iterator[float]:
    """Of each rank and switch the seconds between its last step before and its first after, less a step of the
    newer plan."""
    for lines in ledgers.values():
        for number in range(2, last + 1):
            old = [line.time for line in lines if line.plan == number - 1]
            new = [line.time for line in lines if line.plan == number]
            if old and len(new) > 2:
                normal = statistics.median(b - a for a, b in itertools.pairwise(new))
                yield max(0.0, new[0] - old[-1] - normal)
