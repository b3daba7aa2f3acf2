"""What a step feels of a snapshot of 256 MiB a worker at every step, with the copy to the other node's agent.

etcd, a coordinator, two agents and two torchruns with a worker each are real processes on this machine; the
devices are emulated, so that a step takes about a second. Blocks of steps with and without snapshots take turns
in one job.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _results import Row, row

from elasticd.system.child_processes import ProcessError, Processes
from elasticd.testing.cluster import Cluster

HERE = Path(__file__).resolve().parent
#: Of which the first ten are not counted.
STEPS, WARM = 70, 10
NODES = ("n0", "n1")
NAME = "snapshot at every step of 1 s, peer copy included"


def configured(etcd: str, state: str) -> str:
    """One device has no memory for the whole state."""
    return "\n".join(
        [
            '[cluster]\nname = "bench"',
            f'[etcd]\nendpoints = ["{etcd}"]',
            f'[coordinator]\nport = 0\nstate = "{state}"',
            f'[agent]\ndevices = 1\nstate = "{state}"\nsnapshot_mib = 2048',
            "[emulate]\nenabled = true\nforward = 9e-4\nbackward = 1.8e-3\nmemory = 600_000_000",
            "[policy]\nminimum_saving = 0.9",
            "",
        ]
    )


def measured(steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What the workers wrote, and what the coordinator told of whole sets of snapshots."""
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as name, Processes(Path(name)) as processes:
        folder, script = Path(name), str(HERE / "_snapping.py")
        with Cluster(NODES, processes, folder, folder, configured) as cluster:
            torchruns = [cluster.start_torchrun(node, "bench", 1, script, name, str(steps)) for node in NODES]
            cluster.until(lambda: all(child.code is not None for child in torchruns), "the job's end", 600.0)
            if failed := [child for child in torchruns if child.code]:
                raise ProcessError(f"{failed[0].name} ended with {failed[0].code}:\n{failed[0].said(30)}")
            told = [event.text for event in cluster.api().events(0) if event.kind == "snapshot"]
            return [json.loads(path.read_text()) for path in sorted(folder.glob("n*.json"))], told


def snapshot_rows(steps: int = STEPS) -> Iterator[Row]:
    """What a snapshot costs a step, in a real job of two nodes."""
    found, told = measured(steps)
    counted = [
        (one, two)
        for one, two in zip(*(each["steps"] for each in found), strict=True)
        if one["step"] > WARM and (one["step"] - 1) % 5
    ]
    on = [max(one["seconds"], two["seconds"]) for one, two in counted if one["made"]]
    off = [max(one["seconds"], two["seconds"]) for one, two in counted if not one["on"]]
    wanted = sum(one["on"] for one, _ in counted)
    share = statistics.median(on) / statistics.median(off) - 1
    workers = list(zip(*counted, strict=True))
    ratios = [
        statistics.median(one["copy"] for one in steps if one["made"])
        / statistics.median(one["plain"] for one in steps if not one["on"])
        for steps in workers
    ]
    added = [
        statistics.median(one["processor"] for one in steps if one["made"])
        - statistics.median(one["processor"] for one in steps if not one["on"])
        for steps in workers
    ]
    noise = (max(off) - min(off)) / statistics.median(off)
    worst = max(ratios)
    size = statistics.mean(each["bytes"] for each in found) / (1 << 20)
    yield row(
        f"{NAME}: step time added",
        share,
        "",
        kind="emulated",
        goal="<= 0.05",
        met=len(on) == wanted and bool(told) and share <= 0.05,
        noise=noise,
    )
    yield row(
        f"{NAME}: what a step waits for over one memcpy beside it",
        worst,
        "",
        kind="emulated",
        goal="<= 1.2",
        met=worst <= 1.2,
    )
    yield row(
        f"{NAME}: processor time of the training thread added, of a step's seconds",
        max(added) / statistics.median(off),
        "",
        kind="emulated",
    )
    yield row(f"{NAME}: size of a worker's", size, "MiB", kind="emulated")
    yield row(f"{NAME}: a step without", statistics.median(off), "s", kind="emulated", noise=noise)
    yield row(f"{NAME}: steps that made one, of those that were to", f"{len(on)}/{wanted}", "", kind="emulated")
    yield row(f"{NAME}: whole sets that the leader told of", len(told), "", kind="emulated")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    for each in snapshot_rows():
        print(each.name, each.value, each.unit, each.met)
