"""The snapshots of a job that agents keep, as its leader knows it: which sets are whole, which can be read.

A set has one snapshot of each member of a plan, all of one step. Its moment is the plan's number, then the
step: later plans may go on from earlier steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value

from elasticd.wire.snapshots import Held

#: Plans whose beginnings are remembered; older ones have no snapshot left.
MOST_BEGUN = 64


class Moment(NamedTuple):
    """A point in a job's history."""

    plan: int  # number of the plan of the last update
    step: int  # updates so far


class SnapshotSets(Value, frozen=True, kw_only=True):
    """The snapshots of a job that agents hold."""

    kept: dict[str, dict[Moment, tuple[Held, ...]]] = msgspec.field(default_factory=dict)  # by node and moment
    #: by number, as first ranks gave them with their snapshots
    plans: dict[int, JobPlan] = msgspec.field(default_factory=dict)
    #: updates at which each plan was recorded, by its number
    begun: dict[int, int] = msgspec.field(default_factory=dict)
    whole: Moment | None = None  # newest complete set that no single node's end can take away
    told_at: float | None = None  # when people last heard of one
    #: recoveries that failed, by the name of what they read
    failed: dict[str, int] = msgspec.field(default_factory=dict)

    def replaced(self, node: str, held: Iterable[Held], plans: Iterable[JobPlan]) -> SnapshotSets:
        """With all that this node's agent says that it holds, in place of what it said before. History that a
        later plan did not go on from is left out."""
        sets: dict[Moment, tuple[Held, ...]] = {}
        for one in held:
            moment = Moment(one.plan, one.step)
            if not self.dead(moment):
                sets[moment] = (*sets.get(moment, ()), one)
        kept = {**self.kept, node: sets}
        known = self.plans
        new = {plan.number: plan for plan in plans if plan.number not in known}
        if new:
            needed = {moment.plan for plan_moments in kept.values() for moment in plan_moments}
            known = {number: plan for number, plan in {**known, **new}.items() if number in needed}
        return msgspec.structs.replace(self, kept=kept, plans=known)

    def forgotten(self, node: str) -> SnapshotSets:
        """Another agent took the place of that one, and what it held is gone with it."""
        if node not in self.kept:
            return self
        kept = {name: sets for name, sets in self.kept.items() if name != node}
        return msgspec.structs.replace(self, kept=kept)

    def recorded(self, plan: int, step: int) -> SnapshotSets:
        """A plan was recorded: what plans before it made beyond this step is no part of history."""
        begun = {**self.begun, plan: step}
        newest = sorted(begun)[-MOST_BEGUN:]
        after = msgspec.structs.replace(self, begun={number: begun[number] for number in newest}, failed={})
        kept = {
            node: {moment: held for moment, held in sets.items() if not after.dead(moment)}
            for node, sets in self.kept.items()
        }
        whole = None if self.whole is None or after.dead(self.whole) else self.whole
        return msgspec.structs.replace(after, kept=kept, whole=whole)

    def dead(self, moment: Moment) -> bool:
        """Returns True if a later plan went on from a step before it."""
        return any(number > moment.plan and step < moment.step for number, step in self.begun.items())

    def moments(self) -> list[Moment]:
        """All of which anybody holds anything, the newest first."""
        return sorted({moment for sets in self.kept.values() for moment in sets}, reverse=True)

    def holding(self, moment: Moment) -> list[str]:
        """The nodes that hold a snapshot of this moment."""
        return sorted(node for node, sets in self.kept.items() if moment in sets)

    def copies(
        self, moment: Moment, plan: JobPlan, nodes: Collection[str] | None = None
    ) -> dict[str, list[str]]:
        """The holders of each member's share, among these nodes (None: among all). A member whose share nobody
        holds is not in it; one of another incarnation is no member."""
        holders: dict[str, list[str]] = {}
        for node, sets in self.kept.items():
            if nodes is None or node in nodes:
                for held in sets.get(moment, ()):
                    if plan.binding.get(held.device) == held.incarnation:
                        holders.setdefault(held.device, []).append(node)
        return holders

    def is_whole(self, moment: Moment, plan: JobPlan, peers: Collection[str]) -> bool:
        """Returns True if the share of each member is held on two nodes; on one where the plan has no other
        node that takes snapshots. peers: the nodes that do."""
        homes = {device: node_of(device) for device in plan.members}
        takers = set(homes.values()) & set(peers)
        needed = {device: 2 if takers - {home} else 1 for device, home in homes.items()}
        if sum(len(sets.get(moment, ())) for sets in self.kept.values()) < sum(needed.values()):
            return False  # told in a moment, which a thousand agents' words ask for
        copies = self.copies(moment, plan)
        return all(len(set(copies.get(device, ()))) >= count for device, count in needed.items())

    def failing(self, what: str) -> SnapshotSets:
        """A recovery from what this names was given up."""
        return msgspec.structs.replace(self, failed={**self.failed, what: self.failed.get(what, 0) + 1})


def stand_ins(
    shares: Sequence[str], copies: dict[str, list[str]], readers: Iterable[str]
) -> dict[str, str] | None:
    """The device that reads each share, from its own node's agent: evenly, and each its own where it can.

    Args:
        shares: the members that they are of.
        copies: the nodes that hold each.
        readers: the devices that may read.

    Returns:
        None where some share is on no node that has a reader.
    """
    by_node: dict[str, list[str]] = {}
    for device in readers:
        by_node.setdefault(node_of(device), []).append(device)
    options = {
        device: [reader for node in sorted(set(copies.get(device, ()))) for reader in by_node.get(node, ())]
        for device in shares
    }
    load: dict[str, int] = {}
    substitutes: dict[str, str] = {}
    # Whoever can read its own share has it; then those that fewest can read.
    for device in sorted(options, key=lambda name: (name not in options[name], len(options[name]))):
        if not options[device]:
            return None
        own = device in options[device] and not load.get(device)
        best = device if own else min(options[device], key=lambda name: load.get(name, 0))
        load[best] = load.get(best, 0) + 1
        substitutes[device] = best
    return {device: substitutes[device] for device in shares}
