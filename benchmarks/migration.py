"""The figures of migration: speed over loopback and a slow link, against the way by disk, schedules, bytes,
and what snapshots cost.

make bench NAME=migration

Ratios are of exchanges that take turns in one run; noise is the spread of those ratios. The row over a slow
link needs root, for network namespaces; without, it says why there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from _frame import PLANNER, PRODUCT, Part, run  # noqa: E402
from _link import ADDRESSES, NotPermitted, link  # noqa: E402
from _movers import environment, gang  # noqa: E402
from _planned import schedule_rows, straggler_rows  # noqa: E402
from _results import Row, row  # noqa: E402
from _scenes import LAYERS_VARIABLE  # noqa: E402
from _snapshots import snapshot_rows  # noqa: E402

REPEATS = 7
MEGABITS = 1000
GIB = 1 << 30
WORDS = {
    "join": "1 GiB in 2,000 tensors to a rank that joins",
    "recut": "four ranks, every box cut anew (TP 2 x 2 stages to TP 4)",
}


def ratio_row(name: str, ratios: Sequence[float], goal: float | None) -> Row:
    """The median of ratios with the spread between them, and the least that it should be."""
    middle = statistics.median(ratios)
    spread = (max(ratios) - min(ratios)) / middle
    if goal is None:
        return row(name, middle, "", noise=spread)
    return row(name, middle, "", goal=f">= {goal:g}", met=middle >= goal, noise=spread)


def loopback_rows(scene: str, ranks: int, repeats: int = REPEATS, layers: int | None = None) -> Iterator[Row]:
    """A scene between processes of this machine: speed, preparation, bytes. layers: of a smaller state."""
    if layers is not None:
        os.environ[LAYERS_VARIABLE] = str(layers)
    found = gang("_mover.py", ["127.0.0.1"] * ranks, [scene, str(repeats)])
    seconds = found[0]["seconds"]
    ratios = [plain / move for plain, move in seconds]
    # The goal is for a state as it lies; cutting anew also copies what stays here, and slices columns.
    goal = 0.7 if scene == "join" else None
    yield ratio_row(f"loopback, {WORDS[scene]}: speed over plain gloo", ratios, goal)
    yield speed_row(f"loopback, {WORDS[scene]}: speed", found)
    ahead = statistics.median(found[0]["ahead"])
    yield row(f"loopback, {WORDS[scene]}: rounds made ahead, while training goes on", ahead, "s")
    yield from byte_rows(f"loopback, {WORDS[scene]}", found)
    if scene == "join":
        yield from disk_rows([move for _, move in seconds])


def speed_row(name: str, found: Sequence[dict[str, Any]]) -> Row:
    """Bytes that were lacking over the median second of the move."""
    taken = [move for _, move in found[0]["seconds"]]
    middle = statistics.median(taken)
    return row(name, found[0]["lacking"] / middle / 1e9, "GB/s", noise=(max(taken) - min(taken)) / middle)


def byte_rows(name: str, found: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """What was given to the transport, and what the kernel says that TCP carried, over what was lacking."""
    lacking = found[0]["lacking"]
    for what, size in (
        ("bytes sent", sum(each["sent"] + each["beside"] for each in found)),
        ("bytes that TCP carried", sum(each["wire"] for each in found)),
    ):
        yield row(
            f"{name}: {what} over those lacking",
            size / lacking,
            "",
            goal="<= 1.02",
            met=size <= 1.02 * lacking,
        )


def link_rows(repeats: int = 3, layers: int | None = None) -> Iterator[Row]:
    """The share of a link's bits that are state."""
    if layers is not None:
        os.environ[LAYERS_VARIABLE] = str(layers)
    name = f"{MEGABITS} Mbit/s link, {WORDS['join']}: speed over the link's"
    try:
        with link(MEGABITS) as ends:
            found = gang("_mover.py", ADDRESSES, ["join", str(repeats)], within=ends)
    except NotPermitted as why:
        yield row(name, f"not run: {why}", "")
        return
    full = MEGABITS * 1e6 / 8
    yield ratio_row(name, [found[0]["lacking"] / move / full for _, move in found[0]["seconds"]], 0.9)
    plain = statistics.median([found[0]["lacking"] / sent / full for sent, _ in found[0]["seconds"]])
    yield row(f"{MEGABITS} Mbit/s link: plain gloo over the link's speed", plain, "")


def disk_rows(moves: Sequence[float]) -> Iterator[Row]:
    """The same state saved once and loaded by both ranks at the same time, by torch's own checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix="elasticd-bench-", dir=HERE))  # the disk that the project is on
    try:
        saves, loads = [], []
        for turn in range(3):
            where = folder / str(turn)
            saves.append(by_disk("save", where, 1))
            loads.append(by_disk("load", where, 2))
            if turn < 2:
                shutil.rmtree(where)
        middle = statistics.median(moves)
        ratios = [(save + load) / middle for save, load in zip(saves, loads, strict=True)]
        yield ratio_row("1 GiB: save and load through DCP over the move", ratios, 5.0)
        seconds = restart(folder / "2")
        yield row("1 GiB: torchrun started from that checkpoint until it is loaded", seconds, "s")
        yield row("1 GiB: the move itself", middle, "s", noise=(max(moves) - min(moves)) / middle)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def by_disk(what: str, folder: Path, count: int) -> float:
    """The longest that any of `count` processes at once took to save or load."""
    command = [sys.executable, str(HERE / "_disk.py"), what, str(folder)]
    started = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return max(float(json.loads(text)["seconds"]) for text in said)


def restart(folder: Path) -> float:
    """Seconds from the start of torchrun with two workers until both have loaded the checkpoint."""
    start = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(HERE / "_disk.py"), "worker", str(folder)),
        ],
        env=environment(),
        capture_output=True,
        check=True,
    )
    ended = [(folder.parent / f"loaded-{rank}").stat().st_mtime for rank in range(2)]
    return max(ended) - (time.time() - (time.perf_counter() - start))


_MOVES = ("migration", "planner/elasticd_planner/layout")
PARTS = {
    "join": Part(partial(loopback_rows, "join", 2), _MOVES, {"repeats": 2, "layers": 2}),
    "recut": Part(partial(loopback_rows, "recut", 4), _MOVES, {"repeats": 2, "layers": 2}),
    "link": Part(link_rows, _MOVES, {"repeats": 2, "layers": 2}),
    "schedule": Part(schedule_rows, _MOVES),
    "straggler": Part(straggler_rows, PLANNER),
    "snapshots": Part(snapshot_rows, PRODUCT, {"steps": 20}),
}

if __name__ == "__main__":
    sys.exit(run("migration", __doc__, PARTS))
