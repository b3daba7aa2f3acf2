"""The layer split: how many layers each stage of a pipeline has, by formula and by the exact schedule time.

By the formula it is a min-max problem with one budget. A pipeline takes sum_j s_j + (m - 1) max_j s_j with
s_j = block_j x n_j + fixed_j + hop_j: for a given cap on max_j s_j, stage j may have as many layers as stay
below it, and the least sum fills the cheapest stages first. The caps worth trying are the values that an s_j
can take, so trying all of them (at once, in arrays) is exact for every m.

The schedule takes no more than that, and no less than the same with the work t_j = block_j x n_j + fixed_j
under the cap and m - 1 - hidden x min(m - 1, p - 1) in place of m - 1 (`pipeline_time`): a bound from the same
arrays.

By the schedule's exact time (`best_layers`) only the splits that can end within a limit are listed: with S the
least time that one micro-batch needs on its way there and back, stage j must not work longer than
(limit - S) / (m - 1 - h_j forward_j) on a micro-batch, nor than (limit - what precedes it) / m. With a tight
limit few splits remain; they are costed at once in arrays. Where there are many, a local search moves one layer
at a time from stage to stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.cost.model import GroupCost
from elasticd_planner.cost.pipeline_time import FORMULA, FORWARD, Times, Timing
from elasticd_planner.numeric import EQUAL, Floats, Ints

#: The most layer splits that are listed: of one pipeline, and of all pipelines in one array.
LISTED, AT_ONCE = 4096, 65536

#: The most single-layer moves of the local search.
MOVES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a stage contributes: seconds of one block, seconds besides blocks, and the most layers that its
    memory holds with 1, 2, ... `depth` micro-batches going through the pipeline (`depth`: its stages). `hop`:
    seconds of the boundary after it, there and back; `forward`: the part of its work that is forward."""

    block: float
    fixed: float
    most: tuple[int, ...]
    hop: float = 0.0
    forward: float = FORWARD

    @classmethod
    def of(cls, cost: GroupCost, most: tuple[int, ...], *, first: bool, last: bool, hop: float = 0.0) -> Terms:
        """The terms of a stage on a TP group of this cost."""
        fixed = (cost.embed if first else 0.0) + (cost.head if last else 0.0)
        return cls(block=cost.block, fixed=fixed, most=most, hop=hop, forward=cost.forward)

    @property
    def charged(self) -> float:
        """Seconds besides blocks, the boundary's included."""
        return self.fixed + self.hop


def fill(
    terms: Sequence[Terms], layers: int, micro_batches: int, *, charged: bool = True
) -> tuple[Floats, Ints]:
    """Caps on the slowest stage (`charged`: with the boundary after it), ascending, and for each the layers by
    stage of the least sum of seconds."""
    return _Caps(terms, layers, charged=charged).filled(min(micro_batches, len(terms)))


class _Caps:
    """Caps on the slowest stage of one pipeline, and the layers that each stage may have under them."""

    def __init__(self, terms: Sequence[Terms], layers: int, *, charged: bool) -> None:
        self.block = np.array([t.block for t in terms])
        fixed = np.array([t.charged if charged else t.fixed for t in terms])
        self._most = np.array([t.most for t in terms])  # [stage, micro-batches under way]
        self._order = np.argsort(self.block, kind="stable").tolist()
        self._layers, room = layers, layers - len(terms) + 1  # every stage has a layer
        each = np.array([*{*zip(self.block.tolist(), fixed.tolist(), strict=True)}])  # of stages that differ
        self._caps = np.unique(each[:, :1] * np.arange(1, room + 1) + each[:, 1:])
        limit = np.floor((self._caps[:, None] * (1 + EQUAL) - fixed) / self.block).astype(np.int64)
        self._limit = np.minimum(limit, room)

    def filled(self, in_flight: int) -> tuple[Floats, Ints]:
        """As `fill` says, with so many micro-batches under way."""
        layers, limit = self._layers, np.minimum(self._limit, self._most[:, in_flight - 1])
        possible = (limit >= 1).all(axis=1) & (limit.sum(axis=1) >= layers)
        caps, limit = self._caps[possible], limit[possible]
        given = np.ones_like(limit)
        left = np.full(len(caps), layers - limit.shape[1])
        for stage in self._order:
            more = np.minimum(limit[:, stage] - 1, left)
            given[:, stage] += more
            left = left - more
        return caps, given

    def alike(self, in_flight: int) -> bool:
        """Returns whether memory holds as much with one more micro-batch under way."""
        most = self._most
        return in_flight < most.shape[1] and bool((most[:, in_flight] == most[:, in_flight - 1]).all())


def curve(terms: Sequence[Terms], layers: int, micro_batches: int, timing: Timing = FORMULA) -> Floats:
    """Seconds of the best layers for 1 ... `micro_batches` micro-batches; inf where the memory forbids it. Of
    the schedule some that no layers beat, in any order of the stages."""
    seconds = np.full(micro_batches, np.inf)
    depth = len(terms)
    if depth > layers:
        return seconds
    fixed, hidden = sum(t.charged for t in terms), timing.hidden
    under, start = _Caps(terms, layers, charged=not hidden), 1
    for stop in range(1, depth + 1):
        if under.alike(stop):
            continue
        last = micro_batches if stop == depth else min(stop, micro_batches)
        if start > last:
            break
        caps, given = under.filled(stop)
        if len(caps):
            sums = timing.fill * (given @ under.block + fixed)
            count = np.arange(start, last + 1)
            again = (count - timing.fill) - hidden * np.minimum(count - 1, depth - 1)
            seconds[start - 1 : last] = (sums[:, None] + caps[:, None] * again).min(axis=0)
        start = last + 1
    return seconds


def split_layers(terms: Sequence[Terms], layers: int, micro_batches: int) -> tuple[int, ...]:
    """Layers by stage with the least pipeline time; raises ValueError where the memory forbids all."""
    caps, given = fill(terms, layers, micro_batches)
    if not len(caps):
        raise ValueError(f"{layers} layers do not fit into the memory of {len(terms)} stages")
    sums = given @ np.array([t.block for t in terms])
    best = int(np.argmin(sums + caps * (micro_batches - 1)))
    return tuple(int(n) for n in given[best])


@dataclass(frozen=True, kw_only=True, slots=True)
class Layered:
    """Layers by stage, and the seconds of the pipeline with them."""

    seconds: float
    layers: tuple[int, ...]
    proved: bool = True  # no other layers are quicker: all were listed


def best_layers(
    pipelines: Sequence[Sequence[Terms]], layers: int, micro_batches: int, limit: float, timing: Timing
) -> list[Layered | None]:
    """Of each of some pipelines with as many stages the layers with the least seconds, None where these are
    above the `limit`. Where too many are possible, the best that single moves lead to, above the limit, too."""
    found: list[Layered | None] = [None] * len(pipelines)
    stages = _Stages(pipelines, micro_batches)
    caps = stages.caps(layers, limit)
    waiting: list[tuple[int, Ints]] = []
    size = 0
    for index in np.flatnonzero(caps.sum(axis=1) >= layers).tolist():
        if _count(caps[index], layers) > LISTED:
            found[index] = _climbed(stages, index, pipelines[index], layers, timing)
            continue
        waiting.append((index, bounded(caps[index], layers)))
        size += len(waiting[-1][1])
        if size > AT_ONCE:
            _cost(stages, waiting, limit, timing, found)
            waiting, size = [], 0
    if waiting:
        _cost(stages, waiting, limit, timing, found)
    return found


def reached(terms: Sequence[Terms], layers: int, most: int, timing: Timing) -> Floats:
    """Seconds for 1 ... `most` micro-batches with the layers that the formula finds best for some of them; inf
    where none fit with as many micro-batches under way as there may be."""
    caps, given = fill(terms, layers, len(terms)) if layers >= len(terms) else (np.zeros(0), np.zeros((0, 1)))
    if not len(caps):
        return np.full(most, np.inf)
    stages = _Stages([terms], len(terms))
    sums = given @ stages.block[0]
    best = np.argmin(np.arange(most)[:, None] * caps + sums, axis=1)
    rows = given[np.unique(best)]
    found: Floats = timing.curve(stages.times(0, rows), most).min(axis=1)
    return found


class _Stages:
    """Terms as arrays, [pipeline, stage]."""

    def __init__(self, pipelines: Sequence[Sequence[Terms]], micro_batches: int) -> None:
        self.micro_batches, self.depth = micro_batches, len(pipelines[0])
        in_flight = min(micro_batches, self.depth) - 1
        each = [[(t.block, t.fixed, t.hop, t.forward, t.most[in_flight]) for t in terms] for terms in pipelines]
        self.block, self.fixed, self.hop, self.forward, self.most = np.moveaxis(np.array(each), -1, 0)

    def caps(self, layers: int, limit: float) -> Ints:
        """The most layers that a stage may have for the pipeline to end within the limit."""
        count, depth = self.micro_batches, self.depth
        limit *= 1 + EQUAL
        one = self.block + self.fixed + self.hop  # a layer on each stage, the others where they are cheapest
        least = one.sum(axis=1) + (layers - depth) * self.block.min(axis=1)
        turns = np.minimum(count - 1, np.arange(depth - 1, -1, -1)) * self.forward
        with np.errstate(divide="ignore"):
            work = (limit - least)[:, None] / (count - 1 - turns)
        work = np.where(count > 1, work, np.inf)
        work = np.minimum(work, (limit - (np.cumsum(one, axis=1) - one)) / count)
        most = np.floor(np.clip((work - self.fixed) / self.block, 0, layers - depth + 1) * (1 + EQUAL))
        caps: Ints = np.minimum(most, self.most).astype(np.int64)
        caps[(least > limit) | (caps < 1).any(axis=1)] = 0
        return caps

    def times(self, index: int | Ints, layers: Ints) -> Times:
        """Of pipelines with these layers, [..., stage]."""
        work = self.block[index] * layers + self.fixed[index]
        forward = work * self.forward[index]
        hop = np.broadcast_to(self.hop[index], work.shape)
        return Times(forward=forward, backward=work - forward, boundary=hop[..., :-1] / 2)


def _cost(
    stages: _Stages,
    waiting: Sequence[tuple[int, Ints]],
    limit: float,
    timing: Timing,
    found: list[Layered | None],
) -> None:
    """Costs what was listed, all at once, but for what the limit excludes."""
    which = np.concatenate([np.full(len(rows), index) for index, rows in waiting])
    rows = np.concatenate([rows for _, rows in waiting])
    limit *= 1 + EQUAL
    seconds = timing.seconds(stages.times(which, rows), stages.micro_batches, limit)
    order = np.lexsort((seconds, which))
    first = order[np.flatnonzero(np.diff(which[order], prepend=-1))]
    for best in first:
        if seconds[best] <= limit:
            found[which[best]] = Layered(seconds=float(seconds[best]), layers=tuple(map(int, rows[best])))


def _climbed(
    stages: _Stages, index: int, terms: Sequence[Terms], layers: int, timing: Timing
) -> Layered | None:
    """From the formula's best layers, moving one layer at a time while that helps."""
    caps, given = fill(terms, layers, stages.micro_batches)
    if not len(caps):
        return None
    options = np.unique(given, axis=0)
    costs = timing.seconds(stages.times(index, options), stages.micro_batches)
    now, seconds = options[int(np.argmin(costs))], float(costs.min())
    moves = np.eye(stages.depth, dtype=np.int64)
    steps = (moves[:, None] - moves[None, :]).reshape(-1, stages.depth)
    for _ in range(MOVES):
        options = now + steps
        options = options[((options >= 1) & (options <= stages.most[index])).all(axis=1)]
        if not len(options):
            break
        costs = timing.seconds(stages.times(index, options), stages.micro_batches, seconds)
        least = int(np.argmin(costs))
        if costs[least] >= seconds * (1 - EQUAL):
            break
        now, seconds = options[least], float(costs[least])
    return Layered(seconds=seconds, layers=tuple(map(int, now)), proved=False)


def _count(caps: Ints, total: int) -> float:
    """How many ways there are to divide `total` with at least one and at most `caps` for each."""
    ways = np.ones(1)
    for cap in caps:
        ways = np.convolve(ways, np.ones(cap))[: total + 1]
    rest = total - len(caps)
    return float(ways[rest]) if 0 <= rest < len(ways) else 0.0


def bounded(caps: Ints, total: int) -> Ints:
    """All ways to divide `total` with at least one and at most `caps` for each: [way, stage]."""
    rows = np.zeros((1, 0), dtype=np.int64)
    left = np.array([total])
    for stage, cap in enumerate(caps):
        after = len(caps) - stage - 1
        low = np.maximum(1, left - int(caps[stage + 1 :].sum()))
        high = np.minimum(cap, left - after)
        many = np.maximum(0, high - low + 1)
        begin = np.repeat(np.cumsum(many) - many, many)
        given = np.repeat(low, many) + np.arange(int(many.sum())) - begin
        rows = np.concatenate((np.repeat(rows, many, axis=0), given[:, None]), axis=1)
        left = np.repeat(left, many) - given
    return rows
