"""The launches of all ranks: whether they always run, or some wait for each other for ever.

Theory of operation. A communicator runs a rank's launches one after the other, on a stream of its own: a launch
begins when the one before it there is over, and when all is over that the rank's compute stream had joined
before. An operation (a collective, or a message) runs when all its members have begun the launches that it is a
part of. A launch is over when its operations are; it has several where a batch of messages goes on side by
side. "Begins", "runs" and "is over" are the nodes of a graph, and everything runs if and only if that graph has
no cycle and each operation is launched by all its members. Timing plays no part in it, so one set of logs
proves all runs that launch the same.

All this is true of a device that runs its streams side by side. It need not: kernels of several communicators
compete for it, streams may share a queue of the hardware, and a driver may wait until the device has nothing
under way, as when it loads a kernel. So an operation may have to wait for all that its rank launched before it,
and NCCL asks for one order of launches over all communicators of a device. `in_one_queue` makes logs to check
that with: what runs in one queue also runs where less waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective or a message."""

    name: str  #: the same at all members, and of no other operation
    members: tuple[str, ...]  #: ranks, by any names


@dataclass(frozen=True, slots=True)
class Launch:
    """A rank's host puts operations behind what its compute stream has joined so far, and goes on."""

    communicator: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """A rank's compute stream waits from here on for the launch that an operation is a part of."""

    operation: str


#: What one rank's host did, in its order.
Log: TypeAlias = Sequence[Launch | Join]


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Operations that never run, and why."""

    operations: tuple[str, ...]
    reason: str


class _Node(NamedTuple):
    """An event of the graph. `rank` is empty for what all members of an operation have in common."""

    what: str
    rank: str
    name: str | int


def deadlock(logs: Mapping[str, Log]) -> Deadlock | None:
    """Why some of these launches never run; None if all do, whatever the timing.

    Args:
        logs: of each rank.

    Raises:
        ValueError: a rank launches an operation twice, or joins one that it has not launched.
    """
    if missing := _unmatched(logs):
        operation, ranks = missing
        return Deadlock((operation,), f"{operation} is never launched by {', '.join(ranks)}")
    before: dict[_Node, set[_Node]] = defaultdict(set)
    for rank, log in logs.items():
        _add_rank(before, rank, log)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle: list[_Node] = error.args[1]
        names = tuple(str(node.name) for node in reversed(cycle[1:]) if node.what == "runs")
        return Deadlock(names, f"each waits for the next, the last for the first: {', '.join(names)}")
    return None


def in_one_queue(logs: Mapping[str, Log]) -> dict[str, list[Launch | Join]]:
    """The same launches as if each rank had one communicator: what holds for these holds on a device that
    carries out one launch at a time, in the order of its host. What it computes between two launches may wait
    for the first one and hold up the second one, which come in this order anyway."""
    return {
        rank: [replace(entry, communicator="") if isinstance(entry, Launch) else entry for entry in log]
        for rank, log in logs.items()
    }


def _add_rank(before: dict[_Node, set[_Node]], rank: str, log: Log) -> None:
    joined = _Node("joined", rank, 0)  # how far the compute stream has come
    last: dict[str, _Node] = {}  # the end of each communicator's last launch
    ends: dict[str, _Node] = {}  # of the launch of each operation
    for number, entry in enumerate(log, 1):
        if isinstance(entry, Join):
            if entry.operation not in ends:
                raise ValueError(f"{rank} joins {entry.operation}, which it has not launched")
            now = _Node("joined", rank, number)
            before[now] |= {joined, ends[entry.operation]}
            joined = now
            continue
        begins, ends_here = _Node("begins", rank, number), _Node("is over", rank, number)
        before[begins].add(joined)
        if entry.communicator in last:
            before[begins].add(last[entry.communicator])
        last[entry.communicator] = ends_here
        for operation in entry.operations:
            if operation.name in ends:
                raise ValueError(f"{rank} launches {operation.name} twice")
            ends[operation.name] = ends_here
            runs = _Node("runs", "", operation.name)
            before[runs].add(begins)
            before[ends_here].add(runs)


def _unmatched(logs: Mapping[str, Log]) -> tuple[str, list[str]] | None:
    """The first operation that some of its members do not launch, and these members."""
    launched = {
        (operation.name, rank)
        for rank, log in logs.items()
        for entry in log
        if isinstance(entry, Launch)
        for operation in entry.operations
    }
    for log in logs.values():
        for entry in log:
            for operation in entry.operations if isinstance(entry, Launch) else ():
                absent = [member for member in operation.members if (operation.name, member) not in launched]
                if absent:
                    return operation.name, absent
    return None
