"""Rows: no drawn plan deadlocks, and some of them are trained by processes under the rules of NCCL."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.accelerators import test_training, vgpu
from tests.planner.drawn_plans import drawn_plan
from tests.planner.launch_order import deadlock, in_one_queue
from tests.planner.test_launches import logs_of
from tests.runtime import test_engine_parity

#: Plans whose launches are checked, and plans that are trained.
PLANS, TRAINED = 10_000, 50
#: Devices that a trained plan may use.
DEVICES = tuple(f"n{node}/{local}" for node in range(2) for local in range(3))


def free(seed: int) -> bool:
    """Whether the launches of a drawn plan can be carried out whatever the timing, also in one queue."""
    logs = logs_of(seed)
    found = deadlock(logs) or deadlock(in_one_queue(logs))
    if found is not None:
        print(f"plan {seed}: {found}", file=sys.stderr)
    return found is None


def trains(seed: int) -> bool:
    """Whether a drawn plan trains as one process does, and launches what the plan says."""
    plan = drawn_plan(
        seed,
        layers=test_engine_parity.CONFIG.layers,
        devices=DEVICES,
        micro_batches=test_engine_parity.BATCH,
        carriers=False,
    )
    try:
        test_training.check(plan)
    except AssertionError as error:
        print(f"plan {seed} in processes: {error}", file=sys.stderr)
        return False
    return True


def deadlock_rows(plans: int = PLANS) -> Iterator[Row]:
    """Uneven TP, unlike pipelines, interleaved ones, ZeRO 0 to 2 with carriers, buckets of any size; on
    streams that run side by side, and in one queue."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        count = sum(pool.imap_unordered(free, range(plans), chunksize=50))
    yield row("drawn plans without deadlock", count, "", goal=f"{plans:,}", met=count == plans)


def strict_rows(plans: int = TRAINED) -> Iterator[Row]:
    """On vgpu, each rank a process; weights within 1e-10 of one process."""
    vgpu.library()
    count = sum(map(trains, range(plans)))
    title = "of them trained in processes under strict communicators, exactly and as predicted"
    yield row(title, count, "", goal=str(plans), met=count == plans)
