"""What a switch moves and how long that takes on the modelled links."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elasticd_planner.cluster import Cluster
from elasticd_planner.placement import Held, holders
from elasticd_planner.plan import Plan
from elasticd_planner.profiles import ModelProfile, SectionProfile


@dataclass(frozen=True, kw_only=True)
class Move:
    """Bytes that each member of the new plan lacks, and the seconds until all have them."""

    lacking: dict[str, int]
    seconds: float

    @property
    def total(self) -> int:
        return sum(self.lacking.values())


def move(
    profile: ModelProfile, cluster: Cluster, old: Plan | None, new: Plan, sources: Collection[str] | None = None
) -> Move:
    """A job's first plan is filled from the seed and moves nothing. After a fault only `sources` hold what they
    held under the old plan.

    Every device takes what it lacks over its node's link to others, which its node's devices share, and no
    faster than over the link inside: as if none of it were on its own node, which is the worst case.
    """
    if old is None:
        return Move(lacking=dict.fromkeys(new.members, 0), seconds=0.0)
    before = holders(old, profile.share_units)
    if sources is not None:
        before = {name: held for name, held in before.items() if name in sources}
    after = holders(new, profile.share_units)
    lacking = {name: round(_lacking(profile, before.get(name), held)) for name, held in after.items()}
    by_node: dict[str, int] = {}
    for name, size in lacking.items():
        node = name.rpartition("/")[0]
        by_node[node] = by_node.get(node, 0) + size
    inside = max(lacking.values(), default=0) / cluster.inside.bandwidth
    between = max(by_node.values(), default=0) / cluster.between.bandwidth
    return Move(lacking=lacking, seconds=max(inside, between if len(cluster.nodes) > 1 else 0.0))


def _lacking(profile: ModelProfile, old: Held | None, new: Held) -> float:
    """Bytes of parameters and optimizer state; gradients are made anew."""
    common = _overlap((old.start, old.stop), (new.start, new.stop)) if old is not None else 0
    kept = _overlap((old.low, old.high), (new.low, new.high)) if old is not None else 0
    wanted = new.high - new.low

    def lack(section: SectionProfile, had: bool) -> float:
        per_unit = (section.cut_bytes + section.grouped_bytes) / profile.share_units
        return per_unit * (wanted - kept) if had else per_unit * wanted + section.whole_bytes

    total = common * lack(profile.block, True) + (new.stop - new.start - common) * lack(profile.block, False)
    if new.embed:
        total += lack(profile.embed, old is not None and old.embed)
    if new.head:
        total += lack(profile.head, old is not None and old.head)
    return total * (1 + profile.optimizer_factor)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
