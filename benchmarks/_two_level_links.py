"""Flat and two-level sums over gloo where nodes have a slow link: rows of `layouts`, and what each rank runs.

Two network namespaces are two nodes of four devices, joined by a link of a given rate. Each device is a
process. The same buckets are summed both ways in turns. What a ring puts on a node's link is 2 (k - 1) / k of a
bucket for k devices, and 2 (m - 1) / m in two levels on m nodes: 1.75 and 1.0 here, so bytes say 0.57. What the
kernel counted on the link is told beside the time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from elasticd_planner.layout.channels import Channel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _link import ADDRESSES, NotPermitted, link
from _movers import gang
from _pairs import ratio, ratio_rows
from _results import Row, row

from elasticd.runtime.comm.communicators import GlooCommunicators, Team
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.two_level_sums import TwoLevelTeam
from tests.file_key_value import FileKeyValue

#: Devices of each node, the rate of their link (Mbit/s), and of its bucket of tokens the bytes (tc-tbf).
NEAR, MEGABITS, BURST = 4, 200, "256kb"
MEMBERS = tuple(f"{node}/{index}" for node in "ab" for index in range(NEAR))
#: Bytes of a bucket, how many are under way at once, as in a backward pass, and pairs of all their sums.
SIZES = {
    "a bucket of 25 MiB": (25 << 20, 1, 10),
    "a bucket of 4 MiB": (4 << 20, 1, 24),
    "8 buckets of 4 MiB": (4 << 20, 8, 10),
}
#: What bytes on the link say.
PREDICTED = 1.0 / (2 * (len(MEMBERS) - 1) / len(MEMBERS))


def two_level_link_rows(pairs: int | None = None) -> Iterator[Row]:
    """Seconds in two levels over those of one ring, of each size; and bytes on the link. pairs: of the smallest
    size alone."""
    where = f"two-level over flat, measured over an emulated link of {MEGABITS} Mbit/s, 2 nodes x {NEAR}"
    try:
        with link(MEGABITS, BURST) as ends:
            within = [end for end in ends for _ in range(NEAR)]
            addresses = [address for address in ADDRESSES for _ in range(NEAR)]
            found = gang("_two_level_links.py", addresses, [str(pairs or 0)], within=within)[0]
    except NotPermitted as why:
        yield row(f"{where}: not run: {why}", None, "", kind="emulated")
        return
    for name, (flat, levels, on_link) in found.items():
        title = f"{where}: {name} (bytes say {PREDICTED:.2f})"
        yield from ratio_rows(title, ratio(levels, flat), 1.0, kind="emulated")
        yield row(f"{where}: bytes on the link, {name}", on_link, "x", kind="emulated")


def main(folder: str, rank: int, address: str, few: int) -> dict[str, tuple[list[float], list[float], float]]:
    """Sums buckets both ways, in turns; `few` pairs of one bucket (0: all sizes).

    Returns:
        By size the seconds in one ring and in two levels, pair by pair, and the ratio of the bytes on the link.
    """
    torch.set_num_threads(1)
    groups = PlanGroups("bench", MEMBERS[rank], address, FileKeyValue(Path(folder) / "store"))
    flat = groups.group(MEMBERS, "reduce")
    channel = Channel("reduce", MEMBERS)
    levels = GlooCommunicators(groups, (channel,), flat).team(channel)
    assert isinstance(levels, TwoLevelTeam)
    found = {}
    sizes = {"a bucket of 4 MiB": (4 << 20, 1, few)} if few else SIZES
    for name, (size, count, pairs) in sizes.items():
        tensors = [torch.empty(size // 4) for _ in range(count)]
        seconds: dict[Team, list[float]] = {flat: [], levels: []}
        sent = {flat: 0, levels: 0}
        for turn in range(pairs + 1):
            for team in (flat, levels) if turn % 2 else (levels, flat):
                for tensor in tensors:
                    tensor.fill_(1.0)
                flat.all_reduce(torch.ones(1))
                before, start = _sent(), time.perf_counter()
                for work in [team.begin_all_reduce(tensor) for tensor in tensors]:
                    team.finish(work)
                spent = torch.tensor([time.perf_counter() - start])
                assert all((tensor == len(MEMBERS)).all() for tensor in tensors)
                slowest = float(flat.all_gather(spent).max())
                if turn:  # the first time memory is touched
                    seconds[team].append(slowest)
                    sent[team] += _sent() - before
        found[name] = (seconds[flat], seconds[levels], sent[levels] / sent[flat])
    flat.all_gather(torch.ones(1))
    return found


def _sent() -> int:
    """Bytes that this namespace has put on its link."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(each[8]) for name, each in counts.items() if name != "lo")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))), flush=True)
    os._exit(0)
