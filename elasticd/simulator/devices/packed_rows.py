"""Packed rows played by events, the exchange of keys counted.

A row begins when all lanes that share a sequence in it are there, and goes layer by layer with the slowest of
them. Keys and values that a lane lacks are fetched while it computes the attention of its cut pieces, and show
only beyond it. What comes from other nodes comes once for all lanes of a node, over a link of each. Times are
in units of one token's attention to one other on a normal lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from elasticd_planner.batching.packed_batch import CutOptions, packed_batch_plan
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.pass_order import timed_passes
from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.spec.batch import BatchLengths, BatchRow
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy


class Gang(NamedTuple):
    """The lanes of one pipeline."""

    slowdown: tuple[float, ...]  # by lane [64ths of a normal lane's time]
    capacity: int = 8192  # [tokens] of a row
    node: int = 8  # lanes of a node talk over the near link
    linear: int = 12 * 4096  # a token's matrix products
    fixed: int = 1000 * 12 * 4096  # of a row, whatever is in it
    #: A token's keys and values fetched (forward, again backward, gradient back), of its matrix products:
    #: grouped queries on links of 300 and 50 GB/s. Multi-head attention has four times as many.
    near: float = 0.012
    far: float = 0.09
    stages: int = 1
    nodes: tuple[int, ...] = ()  # of each lane; empty: so many lanes of a node follow each other

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.slowdown)

    @property
    def speed(self) -> Floats:
        """Of each lane, 1 of a normal one."""
        return 64 / np.array(self.slowdown)

    @property
    def node_of(self) -> Ints:
        """The node of each lane."""
        return np.array(self.nodes or [lane // self.node for lane in range(self.lanes)])

    def cost(self, tokens: Ints | Floats, length: Ints) -> Floats:
        """Of so many tokens of sequences of these lengths."""
        return np.asarray(tokens * (self.linear + length), dtype=np.float64)


def normal(lanes: int, **rest: int | float) -> Gang:
    """Lanes of which none is slow."""
    return Gang(slowdown=(64,) * lanes, **rest)  # type: ignore[arg-type]


def with_stragglers(draw: np.random.Generator, lanes: int, slow: int) -> Gang:
    """Lanes of which some are 1.5, 2 or 2.6 times slower."""
    slowdown = np.full(lanes, 64)
    slowdown[draw.choice(lanes, slow, replace=False)] = draw.choice((96, 128, 165), slow)
    return Gang(slowdown=tuple(slowdown.tolist()))


def bound(lengths: Ints, gang: Gang) -> float:
    """All work over all speed, and the fewest rows that memory lets be; no exchange."""
    rows = -(-int(lengths.sum()) // (gang.capacity * gang.lanes))
    return float(gang.cost(lengths, lengths).sum() / gang.speed.sum()) + rows * gang.fixed


def plan_of(gang: Gang) -> Plan:
    """A plan of one pipeline with these lanes, each of one device in each stage, a stage after the other."""
    stages = []
    for stage in range(gang.stages):
        numbers = range(stage * gang.lanes, (stage + 1) * gang.lanes)
        devices = tuple(f"n{number // gang.node}/{number % gang.node}" for number in numbers)
        ones = (1,) * gang.lanes
        stages.append(Stage(start=stage, stop=stage + 1, devices=devices, shares=ones, lanes=ones))
    pipeline = Pipeline(stages=tuple(stages), micro_batches=gang.lanes, rows=(1,) * gang.lanes)
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),))
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=gang.lanes)


def dealt(lengths: Ints, gang: Gang, plan: Plan | None = None) -> tuple[BatchRow, ...]:
    """The rows that a job would run."""
    batch_plan = packed_batch_plan(
        plan or plan_of(gang),
        1,
        range(len(lengths)),
        BatchLengths(tokens=tuple(lengths.tolist()), linear=gang.linear),
        gang.capacity,
        cut=CutOptions(fixed=gang.fixed),
        slowdown=tuple(map(round, gang.slowdown)),
    )
    return batch_plan.pipelines[0]


def seconds(rows: Sequence[BatchRow], gang: Gang) -> float:
    """When the last lane of a pipeline of one stage ends."""
    ready = np.zeros(gang.lanes)
    for row in rows:
        spent, group = row_times(row, gang)
        for first in set(group) - {-1}:
            own = group == first
            ready[own] = ready[own].max() + spent[own].max()
    return float(ready.max())


def staged_seconds(rows: Sequence[BatchRow], stages: Sequence[Gang], boundary: Sequence[float]) -> float:
    """When the last lane of a pipeline of several stages ends, each of which has the same lanes: each lane's
    own 1F1B schedule, in which it goes through a row with the slowest of the lanes that it meets there. A
    backward pass takes twice the forward one. `boundary`: of a row from a stage to the next one."""
    lanes: list[list[list[float]]] = [[] for _ in range(stages[0].lanes)]
    for row in rows:
        played = [row_times(row, gang) for gang in stages]
        group = played[0][1]
        for lane in np.flatnonzero(group >= 0).tolist():
            met = group == group[lane]
            lanes[lane].append([float(spent[met].max()) for spent, _ in played])
    return max((_schedule_seconds(times, boundary) for times in lanes if times), default=0.0)


def _schedule_seconds(times: Sequence[Sequence[float]], boundary: Sequence[float]) -> float:
    """When 1F1B ends rows of these times by stage, forward and backward together."""
    stages = list(zip(*times, strict=True))
    forward, backward = ([[part * each for each in stage] for stage in stages] for part in (1 / 3, 2 / 3))
    return max(stage[-1].stop for stage in timed_passes(passes, forward, backward, boundary))


def row_times(row: BatchRow, gang: Gang) -> tuple[Floats, Ints]:
    """The seconds of each lane for a row, and the least of the lanes that it meets in it (-1: it has no
    part)."""
    pieces = [(lane, *piece, piece.tokens) for lane, own in enumerate(row.lanes) for piece in own]
    lane, sample, length, start, _, tokens = np.array(pieces).T
    slowdown, node_of = np.array(gang.slowdown) / 64, gang.node_of
    beside = np.bincount(node_of)[node_of]  # lanes of its node
    spent = np.bincount(lane, gang.cost(tokens, length) * slowdown[lane], gang.lanes)
    group = np.where(np.isin(np.arange(gang.lanes), lane), np.arange(gang.lanes), -1)
    order = np.lexsort((start, sample))
    lane, sample, length, tokens = lane[order], sample[order], length[order], tokens[order]
    ends = np.flatnonzero(np.r_[True, sample[1:] != sample[:-1], True])
    for first, stop in pairwise(ends.tolist()):
        if stop - first < 2:
            continue
        own, part, whole = lane[first:stop], tokens[first:stop].astype(float), float(length[first])
        nodes = node_of[own]
        inside = np.bincount(nodes, part)[nodes]  # tokens that the lane's node has
        before = np.cumsum(part) - part
        fetched = (whole - before / 2 - part) * gang.near + (whole - inside) * gang.far / beside[own]
        hidden = part * whole * slowdown[own]
        np.add.at(spent, own, np.maximum(0, fetched * gang.linear - hidden))
        met = np.unique(group[own])
        group[np.isin(group, met)] = met[0]
    return np.where(group >= 0, spent + gang.fixed, 0), group


def cut_share(rows: Sequence[BatchRow], count: int) -> float:
    """The part of the sequences that is on several lanes."""
    pieces = sum(len(lane) for row in rows for lane in row.lanes)
    names = [piece.sample for row in rows for lane in row.lanes for piece in lane]
    assert len(set(names)) == count, "a sequence is lost"
    return float((np.bincount(names) > 1).mean()) if pieces else 0.0
