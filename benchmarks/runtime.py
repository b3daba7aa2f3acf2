"""The figures of the runtime: a step beside plain torch's, beside its own simulation, and what telling costs.

make bench NAME=runtime

Our step and torch's run in one process by turns, on the same ranks, model, samples and first values, and their
losses must agree. A step of ours has its vote in it, and so the global loss and gradient norm; torch's has not.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from _frame import TRAINING, Part, run  # noqa: E402
from _instructions import rows as counted_rows  # noqa: E402
from _movers import gang  # noqa: E402
from _pairs import ratio, ratio_rows  # noqa: E402
from _results import Row, row  # noqa: E402
from _runtime_emulated import PLANS, simulated  # noqa: E402
from _runtime_lengths import PLAN as TWO_PIPELINES  # noqa: E402
from _runtime_lengths import Windows, files  # noqa: E402
from _runtime_pairs import rows as processor_rows  # noqa: E402
from _runtime_sides import CLOSE  # noqa: E402

PAIRS = 40
PROCESSOR_PAIRS = 80
VOTES, COST_STEPS = 400, 60
LAYERS, MICRO_BATCHES = 12, 4  # of the small model whose host's work is counted
EMULATED_STEPS = 10
LENGTH_STEPS = 3
STEP = 0.05  # seconds, of which telling may take a part
MOST_TOLD = 0.01
MOST_OVERRUNS = 0.01

PEERS = {
    "DDP": ("two ranks, data parallel: step over torch DDP's", 1.05),
    "DDP, small layers": (
        "two ranks, data parallel, 12 blocks of width 64, 4 micro-batches: main thread's processor time of a "
        "step over torch DDP's",
        1.08,
    ),
    "TP": ("TP 2: step over torch's parallelize_module", 1.10),
    "1F1B": ("PP 2, 8 micro-batches: step over torch's Schedule1F1B", 1.10),
    "GPipe": ("PP 2, 8 micro-batches: 1F1B step over torch's ScheduleGPipe", 1.10),
}

#: Scenes whose layers are so small that the host's work is most of a step: its processor time is compared.
OF_THE_HOST = ("DDP, small layers",)


def slowest(found: list[dict[str, Any]], key: str) -> list[float]:
    """Seconds of each turn, of the rank that took longest."""
    return [max(each) for each in zip(*(rank[key] for rank in found), strict=True)]


def peer_rows(scene: str, pairs: int = PAIRS) -> Iterator[Row]:
    """A scene trained by elasticd and by plain torch in turns, and the ratio of their step times."""
    name, most = PEERS[scene]
    found = gang("_runtime_sides.py", ["127.0.0.1"] * 2, [scene, str(pairs)], seconds=900)
    apart = agreement(found)
    if apart > CLOSE:
        raise RuntimeError(f"{scene}: losses differ by {apart}: the two sides do not train the same")
    column = 2 if scene in OF_THE_HOST else 0
    seconds = {
        side: slowest([{side: [step[column] for step in rank[side]]} for rank in found], side)
        for side in ("ours", "theirs")
    }
    yield from ratio_rows(name, ratio(seconds["ours"], seconds["theirs"]), most)
    yield row(f"{name.partition(':')[0]}: our step", statistics.median(seconds["ours"]) * 1e3, "ms")


def agreement(found: list[dict[str, Any]]) -> float:
    """How far the two sides' losses are apart, at most."""
    apart = 0.0
    for step, (_, ours, _) in enumerate(found[0]["ours"]):
        theirs = [rank["theirs"][step][1] for rank in found]
        there = [loss for loss in theirs if loss is not None]
        apart = max(apart, abs(ours - statistics.mean(there)))
    return apart


def emulated_rows(scene: str, steps: int = EMULATED_STEPS) -> Iterator[Row]:
    """Of one of the emulated plans."""
    ranks = len(PLANS[scene].members)
    found = gang("_runtime_emulated.py", ["127.0.0.1"] * ranks, [str(steps), scene], seconds=900)
    seconds = slowest(found, "seconds")
    middle, expected = statistics.median(seconds), simulated(PLANS[scene])
    off = abs(middle / expected - 1)
    spread = (max(seconds) - min(seconds)) / middle
    name = f"{ranks} emulated devices, {scene} plan"
    yield row(
        f"{name}: step's distance from the event-driven simulation",
        off,
        "",
        kind="emulated",
        goal="<= 0.05",
        met=off <= 0.05,
        noise=spread,
    )
    yield row(f"{name}: measured step", middle, "s", kind="emulated", noise=spread)
    yield row(f"{name}: simulated step", expected, "s", kind="simulated")
    late = sum(rank["overruns"] for rank in found) / sum(rank["paced"] for rank in found)
    yield row(
        f"{name}: overruns of the emulation",
        late,
        "",
        kind="emulated",
        goal="<= 0.01",
        met=late <= MOST_OVERRUNS,
    )


def length_rows(steps: int = LENGTH_STEPS) -> Iterator[Row]:
    """Files as they are beside the same tokens in equal windows, which the emulation alone paces."""
    rate, noise, late = {}, 0.0, 0.0
    for side in ("files", "windows"):
        found = gang(
            "_runtime_lengths.py",
            ["127.0.0.1"] * len(TWO_PIPELINES.members),
            [side, str(steps)],
            seconds=900,
        )
        seconds, tokens = slowest(found, "seconds"), found[0]["tokens"]
        rate[side] = sum(tokens) / sum(seconds)
        each = [count / second for count, second in zip(tokens, seconds, strict=True)]
        noise = max(noise, statistics.stdev(each) / rate[side])
        late = max(late, sum(rank["overruns"] for rank in found) / sum(rank["paced"] for rank in found))
    ratio_ = rate["files"] / rate["windows"]
    lengths = sorted(map(len, files()))
    yield row(
        f"{len(lengths)} files of {lengths[0]} to {lengths[-1]} bytes as they are: tokens/s over those of the "
        f"same tokens in windows of {len(Windows()[0]['inputs'])}, two pipelines of two stages",
        ratio_,
        "",
        kind="emulated",
        goal=">= 0.9",
        met=ratio_ >= 0.9,
        noise=noise,
    )
    for side, value in rate.items():
        yield row(f"the standard library's {side}: throughput", value, "tokens/s", kind="emulated", noise=noise)
    yield row(
        "the standard library: overruns of the emulation",
        late,
        "",
        kind="emulated",
        goal="<= 0.01",
        met=late <= MOST_OVERRUNS,
    )


def cost_rows(votes: int = VOTES, steps: int = COST_STEPS) -> Iterator[Row]:
    """What a vote and the telemetry of a step cost."""
    found = gang("_runtime_cost.py", ["127.0.0.1"] * 4, [str(votes), str(steps)], seconds=900)
    seconds, bare = slowest(found, "vote"), slowest(found, "bare")
    yield from ratio_rows("four ranks: the vote over a bare all-gather of its size", ratio(seconds, bare), 1.3)
    yield row("four ranks: the vote", statistics.median(seconds) * 1e3, "ms")
    yield row("four ranks: a bare all-gather of its size", statistics.median(bare) * 1e3, "ms")
    cpu = max(rank["cpu"] for rank in found)
    part = cpu / STEP
    yield row(
        "vote, telemetry and control: CPU time outside the collective, of a step of 50 ms",
        part,
        "",
        goal=f"<= {MOST_TOLD}",
        met=part <= MOST_TOLD,
    )
    yield row("vote, telemetry and control: CPU time outside the collective", cpu * 1e6, "us")


def count_rows(layers: int = LAYERS, micro_batches: int = MICRO_BATCHES) -> Iterator[Row]:
    """Counts of the host's work for a step."""
    yield from counted_rows(layers, micro_batches)


def processor_pair_rows(
    layers: int = LAYERS, micro_batches: int = MICRO_BATCHES, pairs: int = PROCESSOR_PAIRS
) -> Iterator[Row]:
    """Processor time of a step over plain torch's."""
    yield from processor_rows(layers, micro_batches, pairs)


PARTS = {
    **{scene: Part(partial(peer_rows, scene), TRAINING, {"pairs": 6}) for scene in PEERS},
    **{scene: Part(partial(emulated_rows, scene), TRAINING, {"steps": 2}) for scene in PLANS},
    "counts": Part(count_rows, TRAINING, {"layers": 2, "micro_batches": 2}),
    "pairs": Part(processor_pair_rows, TRAINING, {"layers": 2, "micro_batches": 2, "pairs": 6}),
    "lengths": Part(length_rows, TRAINING, {"steps": 2}),
    "cost": Part(cost_rows, (*TRAINING, "elasticd/wire"), {"votes": 10, "steps": 4}),
}

if __name__ == "__main__":
    sys.exit(run("runtime", __doc__, PARTS))
