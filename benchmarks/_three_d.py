"""Rows: 2 x 2 x 2 with ZeRO trains as one process does; TP groups keep to nodes on drawn clusters."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from _lanes_parity import APART, apart
from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.accelerators import test_training, vgpu
from tests.planner.drawn_topologies import Placed, placed
from tests.runtime import gang, test_three_d

#: How many clusters that have a plan.
CLUSTERS = 1_000


def parity_rows(most: int | None = None) -> Iterator[Row]:
    """Eight processes on two emulated nodes, on the CPU over gloo and on vgpu."""
    plans = dict(islice(test_three_d.PLANS.items(), most))
    for name, plan in plans.items():
        results = gang.run(str(Path(test_three_d.__file__)), "worker", plan.members, plan, seconds=600)
        yield _near(f"{name}: largest difference of a weight, 8 gloo processes on 2 nodes", apart(results))
    vgpu.library()
    noted = 0
    for name, plan in plans.items():
        results = gang.run(str(Path(test_training.__file__)), "worker", plan.members, plan, seconds=600)
        noted += sum(len(result["noted"]) for result in results.values())
        yield _near(f"{name}: largest difference of a weight, 8 vgpus", apart(results))
    title = "2 x 2 x 2 on vgpu: races, foreign devices, memory freed too soon"
    yield row(title, noted, "", goal="0", met=noted == 0)


def _near(title: str, found: float) -> Row:
    return row(title, found, "", goal=f"<= {APART:g}", met=found <= APART)


def topology_rows(clusters: int = CLUSTERS) -> Iterator[Row]:
    """Clusters of unlike nodes of one to eight devices, with islands, racks, stragglers and scarce memory."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        drawn: list[Placed] = []
        for seed, each in enumerate(pool.imap(placed, range(clusters), chunksize=1)):
            drawn.append(each)
            if each.groups is not None and each.beaten > 1 + 1e-9:
                print(f"seed {seed}: the plan takes {each.beaten:.6f} times what an order of devices takes")
    found = [each for each in drawn if each.groups is not None]
    title = f"{clusters:,} drawn clusters"
    yield row(f"{title}: those whose problem has a plan", len(found), "", kind="simulated")
    yield row(f"{title}: TP groups", sum(each.groups or 0 for each in found), "", kind="simulated")
    must = sum(each.across for each in found if each.must)
    yield row(
        f"{title}: TP groups that cross nodes, where a group is more than a node", must, "", kind="simulated"
    )
    crossing = sum(each.across for each in found if not each.must)
    yield row(
        f"{title}: TP groups that cross nodes where one fits",
        crossing,
        "",
        kind="simulated",
        goal="0",
        met=crossing == 0,
    )
    for name, others in (
        ("in the order of their names", [each.naive for each in found]),
        ("in the best of five random orders", [each.drawn for each in found]),
        ("in the best of five random orders of groups inside nodes", [each.kept for each in found]),
    ):
        slower = sum(each.seconds > other * (1 + 1e-9) for each, other in zip(found, others, strict=True))
        yield row(
            f"{title}: the plan's shape is faster on devices {name}",
            slower,
            "",
            kind="simulated",
            goal="0",
            met=slower == 0,
        )
        ratios = [
            other / each.seconds for each, other in zip(found, others, strict=True) if other < float("inf")
        ]
        title_ratio = f"{title}: predicted step of the plan's shape on devices {name} over the plan's, median"
        yield row(title_ratio, statistics.median(ratios), "x", kind="simulated")
    beaten = max(each.beaten for each in found)
    yield row(
        f"{title}: predicted step of the plan over that of the best order, largest",
        beaten,
        "x",
        kind="simulated",
        goal="<= 1",
        met=beaten <= 1 + 1e-9,
    )
    # Where a node's own links are not the quickest, it costs something that TP groups keep to nodes.
    paid = [each.seconds / each.other for each in found if each.seconds > each.other * (1 + 1e-9)]
    title = f"{title}: the quickest links are not inside nodes, and groups across nodes are faster"
    yield row(title, len(paid), "", kind="simulated")
    yield row(f"{title}, largest ratio", max(paid, default=1.0), "x", kind="simulated")
