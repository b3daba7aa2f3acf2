"""`elasticd.live`: stalls, shares of a slow device, exactness, and what a step costs beside plain torch's.

make bench NAME=live
make bench NAME=live ARGS='--only straggler exact'

All is real: processes, gloo, kills by SIGKILL. The stalls of all meshes, beside those of torchrun and torchft,
are in `make bench NAME=faults`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _live_cost  # noqa: E402
import _live_faults  # noqa: E402
from _frame import TRAINING, Part, run  # noqa: E402
from _instructions import counted_rows  # noqa: E402
from _live_faults import TITLES  # noqa: E402
from _pairs import ratio, ratio_rows  # noqa: E402
from _results import Row, row  # noqa: E402

from elasticd.machines.job.state.job_state import JobSettings  # noqa: E402
from elasticd.testing.waiting import until  # noqa: E402
from tests.integration import test_live, train_live  # noqa: E402
from tests.integration.cluster import Cluster  # noqa: E402
from tests.live_pages.test_live_pages import MOST, changed  # noqa: E402

MEASURED = (*TRAINING, "elasticd/machines", "agent")
SETTINGS = JobSettings(retry_seconds=0.5)
FOUR = {"a": 1, "b": 1, "c": 1, "d": 1}
#: The most that a step may take over one of plain torch.
MOST_OVER = 1.02
#: How many times slower a device is made, and the seconds of a sample of a normal one.
SLOW, SAMPLE = 3.0, 2.4e-2
#: Goals: seconds until shares change; a step over its bound.
MOST_WAIT, MOST_BOUND = 10.0, 1.15
#: Goals: how far losses, and weights and moments, may be from those of one process, in float64.
LOSS_APART, APART = 1e-13, 1e-11


def lines_rows() -> Iterator[Row]:
    """Lines that a loop changes."""
    titles = {"nanogpt": "nanoGPT's DDP loop", "titan": "a torchtitan-like trainer"}
    for name, most in MOST.items():
        count = len(changed(name))
        yield row(f"{titles[name]}: changed lines", count, "lines", goal=f"<= {most}", met=count <= most)


def cost_rows(kind: str, pairs: int) -> Iterator[Row]:
    """Wall seconds of a step, in turns with one of plain torch."""
    for every, words in ((None, ""), *(((1 << 30, ", without snapshots"),) if kind == "fsdp" else ())):
        with Cluster(FOUR, settings=SETTINGS, emulated=False) as cluster:
            options = {"kind": kind, "pairs": pairs, "snapshot_every": every}
            cluster.run(Path(_live_cost.__file__), **options)
            codes = cluster.wait(600)
            assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
            seconds = json.loads((cluster.folder / "seconds.json").read_text())
        snapshots = ", a snapshot of each step" if kind == "fsdp" and every is None else words
        name = f"{TITLES[kind]}, 4 ranks{snapshots}: a step over plain torch's"
        yield from ratio_rows(name, ratio(seconds["ours"], seconds["plain"]), MOST_OVER)


def count_rows(buffers: int = 8) -> Iterator[Row]:
    """Counts of the host's work for a step, in one process."""
    for kind, size in (("ddp", 0), ("ddp", buffers), ("fsdp", 0)):
        what = f", {size} MiB of buffers" if size else ""
        name = f"one process, {TITLES[kind]}{what}"
        yield from counted_rows(name, "_live_instructions.py", (kind, str(size)), None, MOST_OVER)


@contextmanager
def slowed(steps: int, sample: float = SAMPLE, **options: Any) -> Iterator[Cluster]:
    """A job on four devices whose samples take `sample` seconds."""
    with Cluster(FOUR, settings=SETTINGS, forward=sample / 3) as cluster:
        cluster.run(Path(train_live.__file__), steps=steps, **options)
        cluster.runs(1, 8)
        yield cluster


def straggler_rows(batch: int = 96, steps: int = 400) -> Iterator[Row]:
    """One of four is made three times slower, and gets well again."""
    name = "one rank of 4 at a third of its speed"
    with slowed(steps, kind="fsdp", batch=batch) as cluster:
        before = time.time()
        cluster.pace("a/0", SLOW)
        until(lambda: _share(cluster) < batch // 4 - 2, cluster.events)
        until(lambda: _settled(cluster), cluster.events)
        well = time.time()
        cluster.pace("a/0", 1.0)
        until(lambda: _share(cluster) == batch // 4, cluster.events)
        cluster.runs(1, 10)
        made = _ledger(cluster, "a")
        changed_at = next(t for _, share, t in made if t > before and share < batch // 4 - 2)
        back_at = next(t for _, share, t in made if t > well and share == batch // 4)
        uneven = [t for _, share, t in made if share < batch // 4 - 2 and t < well]
        cluster.close()
    waited = changed_at - before
    yield row(
        f"{name}: seconds until shares change", waited, "s", goal=f"<= {MOST_WAIT:g} s", met=waited <= MOST_WAIT
    )
    bound = batch * SAMPLE / (3 + 1 / SLOW)
    took = statistics.median(b - a for a, b in itertools.pairwise(uneven))
    over = took / bound
    yield row(f"{name}: a step over its bound", over, "x", goal=f"<= {MOST_BOUND}", met=over <= MOST_BOUND)
    yield row(f"{name}: throughput over the bound", 1 / over, "x", goal=">= 0.85", met=1 / over >= 0.85)
    yield row(f"{name}: seconds until it has its share back", back_at - well, "s")


def _ledger(cluster: Cluster, node: str) -> list[tuple[int, int, float]]:
    """The steps of a device: number, samples, and unix time."""
    rows = next(rows for name, rows in test_live.entries(cluster).items() if name.startswith(f"ledger-{node}-"))
    return [(step, len(samples), when) for step, _, samples, _, when in rows]


def _share(cluster: Cluster) -> int:
    return _ledger(cluster, "a")[-1][1]


def _settled(cluster: Cluster) -> bool:
    """Twenty steps were made since shares changed last."""
    made = _ledger(cluster, "a")
    return len(made) > 20 and len({share for _, share, _ in made[-20:]}) == 1


def exact_rows(steps: int = 100) -> Iterator[Row]:
    """A death, a join and a slow device: the largest difference from one process of plain torch, in float64."""
    for kind in ("ddp", "hsdp", "fsdp"):
        with slowed(steps, kind=kind) as cluster:
            dead = cluster.workers.pop("d/0")
            dead.kill()
            dead.wait()
            until(lambda: len(cluster.events("recorded")) >= 2, cluster.events)
            cluster.rejoin("d")
            cluster.start_worker("d/0", Path(train_live.__file__), {"kind": kind, "steps": steps})
            until(lambda: len(cluster.events("recorded")) >= 3, cluster.events)
            cluster.pace("a/0", SLOW)
            codes = cluster.wait(300)
            assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
            loss, weights = test_live.differences(cluster, kind, steps)
        name = f"{TITLES[kind]}, 4 ranks, death, join, slow device, float64"
        yield row(f"{name}: losses apart", loss, "", goal=f"<= {LOSS_APART:g}", met=loss <= LOSS_APART)
        text = f"{name}: weights and second moments apart"
        yield row(text, weights, "", goal=f"<= {APART:g}", met=weights <= APART)


PARTS = {
    "pages": Part(lines_rows, ("tests/live_pages",)),
    "counts": Part(count_rows, MEASURED, {"buffers": 1}),
    **{
        f"cost-{kind}": Part(partial(cost_rows, kind, pairs=200), MEASURED, {"pairs": 8})
        for kind in ("ddp", "fsdp")
    },
    "straggler": Part(straggler_rows, MEASURED, {"batch": 48}),
    "exact": Part(exact_rows, MEASURED, {"steps": 70}),
    "deaths": Part(partial(_live_faults.all_rows, "fsdp", count=200), MEASURED, {"count": 2}),
}

if __name__ == "__main__":
    sys.exit(run("live", __doc__, PARTS))
