"""The leader's knowledge of a job's data network: who reached whom of late, and which nodes are left out."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from elasticd_planner.value import Value

from elasticd.machines.job.state.reachable_nodes import Pair, pair

#: Rounds in a row in which a pair must fail before it counts: one may be lost to a busy machine.
ROUNDS = 2


def nodes_name(nodes: Iterable[str]) -> str:
    """A set of nodes, for people."""
    return ", ".join(sorted(nodes))


class Out(Value, frozen=True, kw_only=True):
    """A node that the job went on without, since others did not reach it."""

    times: int  # how often
    until: float  # when a plan may use it again, once it reaches them


class Network(Value, frozen=True, kw_only=True):
    """The results of the agents' tests of which nodes reach each other. They test it in rounds."""

    round: int = 0  # number of the present or last round
    asked: tuple[str, ...] = ()  # nodes that have not answered in it yet
    asked_at: float = 0.0  # when it began
    #: by node that answered: the nodes that it did not reach
    heard: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    next_at: float = 0.0  # when the next round begins
    quiet: int = 0  # rounds in a row in which all reached all
    #: rounds in a row in which a pair failed, by both of its nodes
    failed: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    out: dict[str, Out] = msgspec.field(default_factory=dict)  # nodes that the job went on without
    regroups: int = 0  # how often in a row the members stood still with nobody lost, and made no step after it
    chosen: tuple[str, ...] = ()  # nodes that are to go on once there is a plan for them
    #: sets of nodes for which there is no plan, with the reason
    unplanned: dict[str, str] = msgspec.field(default_factory=dict)
    hopeless_since: float | None = None  # since when no set of nodes can go on

    def apart(self, nodes: Iterable[str] | None = None) -> frozenset[Pair]:
        """The pairs (of these nodes) that failed to reach each other in enough rounds."""
        if not self.failed:
            return frozenset()
        among = None if nodes is None else {*nodes}
        return frozenset(
            (one, other)
            for one, others in self.failed.items()
            for other, rounds in others.items()
            if rounds >= ROUNDS and (among is None or (one in among and other in among))
        )

    def untried(self, nodes: Iterable[str]) -> bool:
        """Returns True if there may be a plan for these nodes."""
        return nodes_name(nodes) not in self.unplanned

    def answered(self, node: str, unreached: Iterable[str]) -> Network:
        """With what this node said in the present round."""
        asked = tuple(other for other in self.asked if other != node)
        return msgspec.structs.replace(self, asked=asked, heard={**self.heard, node: tuple(unreached)})

    def closed(self) -> Network:
        """After the present round. Of a pair of which nobody said anything, what was known stays known."""
        now = {pair(node, other) for node, others in self.heard.items() for other in others}
        before = {(one, other): n for one, others in self.failed.items() for other, n in others.items()}
        counts = {both: before.get(both, 0) + 1 for both in now}
        counts |= {
            both: rounds for both, rounds in before.items() if both not in now and not {*both} & {*self.heard}
        }
        failed: dict[str, dict[str, int]] = {}
        for (one, other), rounds in sorted(counts.items()):
            failed.setdefault(one, {})[other] = rounds
        quiet = 0 if now or not self.heard else self.quiet + 1
        return msgspec.structs.replace(self, asked=(), heard={}, failed=failed, quiet=quiet)
