"""Rows: the order of a pipeline of many passes, and orders of drawn plans beside those of before."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from _results import Row, row
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.pass_order import stage_order

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner.drawn_orders import BLOCK, RECORDED, digest

#: (stages, micro-batches, chunks) of 2,048 passes, and the most milliseconds that their order may take.
PIPELINES, MOST_MILLISECONDS = ((8, 128, 1), (4, 64, 4), (8, 32, 4), (16, 16, 4)), 20.0


def order_rows(blocks: int = len(RECORDED["acts"]), times: int = 15) -> Iterator[Row]:
    """Plain and interleaved: seconds of the processor, the least of some tries."""
    slowest = max(_milliseconds(*pipeline, times) for pipeline in PIPELINES)
    title = "order of 2,048 passes and their messages, slowest of 4 pipelines"
    met = slowest <= MOST_MILLISECONDS
    yield row(title, slowest, "ms", goal=f"<= {MOST_MILLISECONDS:g}", met=met)
    with multiprocessing.get_context("spawn").Pool() as pool:
        alike = sum(pool.imap_unordered(_alike, range(blocks)))
    plans = blocks * BLOCK["acts"]
    title = "drawn plans of one module: acts are those of commit 40ff4026"
    yield row(title, alike, "", goal=f"{plans:,}", met=alike == plans)


def _milliseconds(stages: int, micro_batches: int, chunks: int, times: int) -> float:
    least = float("inf")
    for _ in range(times):
        anew = partial(passes)  # a schedule whose orders are not kept
        start = time.process_time()
        stage_order(anew, stages, 0, micro_batches, chunks)
        least = min(least, time.process_time() - start)
    return least * 1e3


def _alike(block: int) -> int:
    """How many plans of a block have the acts of before: all, or none that is known."""
    return BLOCK["acts"] * (digest("acts", block) == RECORDED["acts"][block])
