"""Regular layouts: pipelines of equal TP groups on the quickest nodes, for every setting at once.

Where a head takes as long as many layers, a pipeline of narrow groups waits for its last stage: such pipelines
are listed with a wider last group, too.

On a healthy cluster the best plan is regular or near to it. A regular layout has few numbers: a setting, the
number of nodes, the size of groups, the number of pipelines, and where a pipeline's stages are: next to each
other, or each next to the same stage of the other pipelines. All layouts are listed with a bound, and costed
from the least bound on, with the links that they cross, until no bound is below the best.

The search of a setting starts from them. So more freedom (settings, devices) does not end in a worse plan than
the regular one that it allows.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from elasticd_planner.cost.model import pipeline_seconds
from elasticd_planner.cost.pipeline_time import Times, at_least
from elasticd_planner.grouping.node_partitions import GroupType
from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.balance.layer_split import Terms, split_layers
from elasticd_planner.search.balance.micro_batch_split import split_by_lines
from elasticd_planner.search.refine import Ordered, Refiner
from elasticd_planner.search.task import (
    Chained,
    DeviceGroup,
    Signature,
    Task,
    alive,
    pipeline_signature,
)
from elasticd_planner.spec.cluster import Device, Link, node_of, rate_of

#: Every number of nodes and of stages is tried up to so many; beyond it, those of the form 2^a or 3 x 2^a.
EVERY = 16

#: Layouts that slow boundaries keep from being the best are costed once more with the best order and layers:
#: so many with groups of one size and so many others, of so many stages at most.
POLISHED, POLISHED_STAGES = 16, 16

#: Pipelines as groups in the order of their stages.
Pipelines = Sequence[Sequence[DeviceGroup]]

#: Layouts within this fraction of the best are kept, so many at most; so many candidates are costed. Those with
#: a wider last group are costed where they may be the best.
NEAR, KEPT, COSTED = 0.05, 24, 400


@dataclass(frozen=True, kw_only=True, slots=True)
class RegularLayout:
    """One regular layout under one setting."""

    setting: int  # the place of the setting's task in the list of tasks
    seconds: float  # of a step, with layers and micro-batches by the formula
    free_seconds: float  # the same if boundaries between stages took no time
    chains: tuple[Chained, ...]

    @property
    def form(self) -> tuple[int, int]:
        """The number of pipelines, and the size of groups."""
        return len(self.chains), len(self.chains[0].groups[0].devices)

    @property
    def depth(self) -> int:
        """The stages of a pipeline."""
        return len(self.chains[0].groups)

    @property
    def end(self) -> int:
        """The size of a pipeline's last group."""
        return len(self.chains[0].groups[-1].devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """TP groups of one size on some nodes, in the order of nodes."""

    width: int
    groups: tuple[DeviceGroup, ...]
    speed: float  # [layers a second] of all groups together
    block: float  # seconds of a layer on the quickest group
    embed: float  # seconds where it takes least
    head: float  # the same of the head
    kinds: frozenset[GroupType]  # of groups that differ in cost or memory
    together: int  # the most groups of one node
    link: Link  # the slowest among all its devices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """So many pipelines of one pool's groups, under one setting. end: the quickest groups of another size, if
    each pipeline's last group has that size."""

    setting: int
    pool: _Pool
    pipelines: int
    end: _Pool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrangement:
    """A candidate's groups as pipelines. alike: by pipeline, the first that looks the same."""

    pipelines: tuple[tuple[DeviceGroup, ...], ...]
    alike: tuple[int, ...]

    @classmethod
    def of(cls, task: Task, pipelines: Pipelines) -> _Arrangement:
        """The arrangement of these pipelines."""
        first: dict[Signature, int] = {}
        alike = tuple(
            first.setdefault(pipeline_signature(task, groups), at) for at, groups in enumerate(pipelines)
        )
        return cls(pipelines=tuple(map(tuple, pipelines)), alike=alike)


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownTimes:
    """Seconds that bounds of one task share."""

    hops: tuple[float, float]  # of the least boundary inside a node, and of the least between nodes
    after: dict[tuple[int, int, Link], float]  # after pipelines: by their number, devices of each, and the link
    slowest: dict[tuple[int, int, int], float]  # of stages: by their number, and the pools' identities

    @classmethod
    def of(cls, task: Task, slowest: dict[tuple[int, int, int], float]) -> _KnownTimes:
        """Those of a task, none of them `after` yet. slowest: those of all tasks with these pools."""
        cluster = task.cluster
        links = cluster.between, *(level.link for level in cluster.levels)
        inside = min(map(task.cost.boundary, cluster.links))
        return cls(hops=(inside, min(map(task.cost.boundary, links))), after={}, slowest=slowest)


def regular_layouts(refiners: Sequence[Refiner], ways: Sequence[object]) -> list[RegularLayout]:
    """The best regular layouts of some settings, the quickest first.

    Args:
        refiners: of the task of each setting; all are of one cluster at the same rates.
        ways: a key for each setting, equal where TP groups take the same time.

    Returns:
        Layouts within `NEAR` of the best; empty where none fits.
    """
    return _Regular(refiners, ways).run()


def regular_seconds(refiners: Sequence[Refiner], ways: Sequence[object], limit: float) -> list[float]:
    """Seconds of the quickest regular layout of each setting; the limit where none takes less. Other arguments
    as there."""
    return _Regular(refiners, ways).by_setting(limit)


class _Regular:
    """One enumeration of regular layouts."""

    def __init__(self, refiners: Sequence[Refiner], ways: Sequence[object]) -> None:
        self._refiners, self._ways = refiners, ways
        self._costs = _Costs()
        self._best_seconds = math.inf
        self._held: dict[tuple[int, frozenset[GroupType], int], bool] = {}
        #: The quickest layout by setting, form, depth and size of the last group.
        self._layouts: dict[tuple[int, tuple[int, int], int, int], RegularLayout] = {}

    def run(self) -> list[RegularLayout]:
        """Costs candidates from the least bound on; then those whose boundaries alone are slow, once more."""
        heap = [(bound, at, candidate) for at, (bound, candidate) in enumerate(self._candidates())]
        heapq.heapify(heap)
        costed = 0
        while heap and costed < COSTED:
            bound, _, candidate = heapq.heappop(heap)
            limit = self._best_seconds * (1 + NEAR)
            if bound > limit:
                break
            if candidate.end is not None:
                limit = self._best_seconds
            if bound <= limit and self._holds(candidate):
                costed += 1
                refiner = self._refiners[candidate.setting]
                for pipelines in self._costs.arranged(refiner, candidate):
                    layout = self._costs.layout(refiner, candidate.setting, pipelines, limit)
                    if layout is not None:
                        self._keep(layout)
        for layout in self._slowed():
            if layout.free_seconds < self._best_seconds:
                self._keep(_polished(self._refiners[layout.setting], layout))
        limit = self._best_seconds * (1 + NEAR)
        near = [layout for layout in self._layouts.values() if layout.seconds <= limit]
        return sorted(near, key=lambda layout: (layout.seconds, layout.setting))[:KEPT]

    def by_setting(self, limit: float) -> list[float]:
        """The least seconds of each setting, or the limit."""
        least = [limit] * len(self._refiners)
        for bound, candidate in sorted(self._candidates(), key=lambda entry: entry[0]):
            at = candidate.setting
            if bound < least[at] and self._holds(candidate):
                for pipelines in self._costs.arranged(self._refiners[at], candidate):
                    layout = self._costs.layout(self._refiners[at], at, pipelines, least[at])
                    least[at] = min(least[at], layout.seconds if layout is not None else math.inf)
        return least

    def _holds(self, candidate: _Candidate) -> bool:
        """Returns whether pipelines of such groups may hold the layers."""
        refiner, kinds = self._refiners[candidate.setting], candidate.pool.kinds
        most = -(-len(candidate.pool.groups) // candidate.pipelines)
        key = candidate.setting, kinds, most
        if key not in self._held:
            depth = min(most, refiner.task.layers)
            layers = [
                max(refiner.most_layers(kind, first=place == 0, in_flight=depth - place) for kind in kinds)
                for place in range(depth)
            ]
            self._held[key] = sum(layers) >= refiner.task.layers
        return self._held[key]

    def _keep(self, layout: RegularLayout) -> None:
        key = layout.setting, layout.form, layout.depth, layout.end
        if key not in self._layouts or layout.seconds < self._layouts[key].seconds:
            self._layouts[key] = layout
        self._best_seconds = min(self._best_seconds, layout.seconds)

    def _candidates(self) -> Iterator[tuple[float, _Candidate]]:
        """Every candidate with its bound."""
        pools: dict[object, list[_Pool]] = {}
        slowest: dict[tuple[int, int, int], float] = {}
        for setting, (refiner, way) in enumerate(zip(self._refiners, self._ways, strict=True)):
            task = refiner.task
            if way not in pools:
                pools[way] = list(_pools(refiner))
            known = _KnownTimes.of(task, slowest)
            for pool in pools[way]:
                for pipelines in _numbers(task, len(pool.groups)):
                    for end in (None, *_ends(task, pool, pipelines, pools[way])):
                        candidate = _Candidate(setting=setting, pool=pool, pipelines=pipelines, end=end)
                        yield _bound(task, candidate, known), candidate

    def _slowed(self) -> list[RegularLayout]:
        """Layouts that would be the best if boundaries took no time."""
        slowed = [
            layout
            for layout in self._layouts.values()
            if layout.free_seconds < self._best_seconds < layout.seconds and layout.depth <= POLISHED_STAGES
        ]
        slowed.sort(key=lambda layout: layout.seconds)
        alike = [layout for layout in slowed if layout.end == layout.form[1]]
        return alike[:POLISHED] + [layout for layout in slowed if layout not in alike][:POLISHED]


def _pools(refiner: Refiner) -> Iterator[_Pool]:
    """Groups of each size on the quickest nodes, of each number of nodes; and once without groups with a slow
    member, which hold up a regular pipeline."""
    task, devices = refiner.task, dict[str, list[Device]]()
    for device in alive(task):
        devices.setdefault(device.node, []).append(device)
    order = [node.name for node in task.cluster.joined if node.name in devices]
    speeds = {name: sum(1 / rate_of(task.rates, d.name) for d in devices[name]) for name in order}
    quickest = sorted(order, key=lambda name: (-round(speeds[name], 9), order.index(name)))
    for width in task.cost.widths(max(map(len, devices.values()), default=0)):
        if task.fixed_tp not in (None, width):
            continue
        groups_of = {name: _cut(refiner, (d.name for d in devices[name]), width) for name in order}
        lists = []
        for count in few(len(quickest)):
            chosen = {*quickest[:count]}
            lists.append([group for name in order if name in chosen for group in groups_of[name]])
        blocks = {group: refiner.type_of(group).block for group in lists[-1]} if lists else {}
        limit = min(blocks.values(), default=0.0) * (1 + EQUAL)
        lists.append([group for group, block in blocks.items() if block <= limit])
        for groups in dict.fromkeys(map(tuple, lists)):
            if groups:
                yield _pool(refiner, width, groups)


def _pool(refiner: Refiner, width: int, groups: tuple[DeviceGroup, ...]) -> _Pool:
    kinds = [refiner.type_of(group) for group in groups]
    costs = [kind.cost for kind in kinds]
    return _Pool(
        width=width,
        groups=groups,
        speed=sum(1 / cost.block for cost in costs),
        block=min(cost.block for cost in costs),
        embed=min(cost.embed for cost in costs),
        head=min(cost.head for cost in costs),
        kinds=frozenset({id(kind): kind for kind in kinds}.values()),  # few differ, and a hash takes long
        together=max(Counter(node_of(group.devices[0]) for group in groups).values()),
        link=refiner.task.cluster.reach(name for group in groups for name in group.devices),
    )


def _cut(refiner: Refiner, names: Iterable[str], width: int) -> list[DeviceGroup]:
    """Groups of this size of one node's devices, alike ones together, with the shares that are quickest."""
    ranked = refiner.task.ranked(names)
    starts = range(0, len(ranked) - width + 1, width)
    return [refiner.quickest(ranked[start : start + width]) for start in starts]


def _ends(task: Task, pool: _Pool, pipelines: int, pools: Sequence[_Pool]) -> Iterator[_Pool]:
    """Of each larger size the quickest groups, where so many pipelines of the pool's groups would wait for the
    head: their last stages with one layer, and the head, take longer than all stages do on average."""
    depth = len(pool.groups) // pipelines
    if pool.block + pool.head <= (task.layers * pool.block + pool.embed + pool.head) / depth:
        return
    quickest: dict[int, _Pool] = {}
    for other in pools:
        best = quickest.get(other.width, pool)
        if other.width > pool.width and other.block + other.head < best.block + best.head:
            quickest[other.width] = other
    narrow = len(pool.groups) * pool.width
    yield from (end for end in quickest.values() if narrow - pipelines * end.width >= pipelines * pool.width)


def few(most: int) -> list[int]:
    """Every number up to `EVERY`; of more those of the form 2^a or 3 x 2^a, and the most itself."""
    parts = {base << power for base in (1, 3) for power in range(most.bit_length())}
    return sorted({*range(1, min(most, EVERY) + 1), *(part for part in parts if part <= most), most})


def _numbers(task: Task, groups: int) -> list[int]:
    """Numbers of pipelines of so many groups."""
    most = min(groups, task.micro_batches)
    if task.fixed_dp is not None:
        return [task.fixed_dp] if task.fixed_dp <= most else []
    return sorted({min(groups // depth, most) for depth in few(min(groups, task.layers))})


def _bound(task: Task, candidate: _Candidate, known: _KnownTimes) -> float:
    """Seconds that the candidate cannot beat, by the first inequality of `pipeline_time`: a micro-batch's way
    through the quickest groups and over the boundaries, and the others' work on the slowest stage, less the
    forward passes that the schedule hides."""
    pool, pipelines, last = candidate.pool, candidate.pipelines, candidate.end or candidate.pool
    groups, speed, own = len(pool.groups), pool.speed, 0
    if candidate.end is not None:
        groups, own = groups - -(-pipelines * last.width // pool.width), 1
        speed = groups / pool.block + pipelines / last.block
    even, rest = divmod(groups, pipelines)
    depth = min(even + own, task.layers)
    deepest = min(even + bool(rest) + own, task.layers)
    count = -(-task.micro_batches // pipelines)
    block = min(pool.block, last.block)
    work = task.layers * block + pool.embed + last.head
    slowest = task.layers * pipelines / speed
    if len(pool.kinds) == 1:
        alike = deepest, id(pool), id(last)
        if alike not in known.slowest:
            known.slowest[alike] = _slowest(task.layers, deepest, pool, last)
        slowest = known.slowest[alike]
    inside, between = known.hops
    crossed = -(-depth // pool.together) - 1
    way = work + crossed * between + (depth - 1 - crossed) * inside
    timing = task.cost.timing
    turns = count - 1 - timing.hidden * min(count - 1, deepest - 1)
    key = pipelines, depth * pool.width, pool.link
    if key not in known.after:
        known.after[key] = task.cost.after(*key)
    return timing.first(slowest, way) + turns * slowest + known.after[key]


def _slowest(layers: int, depth: int, pool: _Pool, last: _Pool) -> float:
    """The least seconds of one micro-batch on the slowest of so many stages with whole layers, on equal groups
    of the pool; the last on one of `last`."""
    if depth == 1:
        return layers * last.block + pool.embed + last.head
    first, between, end = (pool.block, pool.embed), (pool.block, 0.0), (last.block, last.head)
    stages = [(1, *first), (depth - 2, *between), (1, *end)]
    limit = max(block + edge for count, block, edge in stages if count)
    speed = sum(count / block for count, block, _ in stages)
    limit = max(limit, (layers + sum(count * edge / block for count, block, edge in stages)) / speed)
    while True:
        held = [math.floor((limit - edge) / block * (1 + EQUAL)) for _, block, edge in stages]
        if sum(count * n for (count, _, _), n in zip(stages, held, strict=True)) >= layers:
            return limit
        limit = min(
            (n + 1) * block + edge for (count, block, edge), n in zip(stages, held, strict=True) if count
        )


def _shared(groups: Sequence[DeviceGroup], pipelines: int) -> list[Sequence[DeviceGroup]]:
    """All these groups, next to each other, over so many pipelines."""
    even, rest = divmod(len(groups), pipelines)
    ends = accumulate(even + (i < rest) for i in range(pipelines))
    return [groups[start:end] for start, end in pairwise([0, *ends])]


def _with_ends(refiner: Refiner, candidate: _Candidate, size: int) -> list[Pipelines]:
    """The candidate's devices as pipelines whose last group has this size; none where a node has too few."""
    pool, pipelines = candidate.pool, candidate.pipelines
    names = [name for group in pool.groups for name in group.devices]
    nodes: dict[str, list[str]] = {}
    for name in names:
        nodes.setdefault(node_of(name), []).append(name)
    ends = Counter(node_of(names[len(names) * (i + 1) // pipelines - 1]) for i in range(pipelines))
    groups, last = list[DeviceGroup](), list[DeviceGroup]()
    for node, own in nodes.items():
        rest = len(own) - ends[node] * size
        if rest < 0:
            return []
        groups += _cut(refiner, own[:rest], pool.width)
        last += _cut(refiner, own[rest:], size)
    if len(groups) < pipelines:
        return []
    most = refiner.task.layers - 1
    return [[(*own[:most], end) for own, end in zip(_shared(groups, pipelines), last, strict=True)]]


class _Costs:
    """What settings share whose TP groups take the same time: arrangements of groups, and the seconds of
    pipelines that look alike."""

    def __init__(self) -> None:
        self._arranged: dict[tuple[tuple[DeviceGroup, ...], int, int], list[_Arrangement]] = {}
        self._ordered: dict[tuple[Terms, ...], Ordered] = {}
        #: By a pipeline's terms and micro-batches: seconds of its stages, the least that it may take, and what
        #: it takes.
        self._played: dict[tuple[tuple[Terms, ...], int], tuple[Times, float, tuple[float, float] | None]] = {}

    def arranged(self, refiner: Refiner, candidate: _Candidate) -> list[_Arrangement]:
        """The candidate with a pipeline's stages next to each other; with each stage of all pipelines so; and
        with all groups, where these do not divide evenly."""
        task, end = refiner.task, candidate.end.width if candidate.end is not None else 0
        key = candidate.pool.groups, candidate.pipelines, end
        if key not in self._arranged:
            ways = _with_ends(refiner, candidate, end) if end else _even(candidate, task.layers)
            self._arranged[key] = [_Arrangement.of(task, pipelines) for pipelines in ways]
        return self._arranged[key]

    def layout(self, refiner: Refiner, setting: int, way: _Arrangement, limit: float) -> RegularLayout | None:
        """The layout of these pipelines, with the order of stages that they have; None where it does not fit,
        or cannot end within the limit."""
        task = refiner.task
        ordered = {first: self._lined(refiner, way.pipelines[first]) for first in dict.fromkeys(way.alike)}
        if not all(len(one.line.caps) for one in ordered.values()):
            return None
        lines = [ordered[first].line for first in way.alike]
        counts = split_by_lines(lines, task.micro_batches)
        if counts is None:
            return None
        after = _after(task, way.pipelines)
        slowest = free = 0.0
        for first, count in dict.fromkeys(zip(way.alike, counts, strict=True)):
            seconds = self._seconds(task, ordered[first], count, limit - after)
            if seconds is None:
                return None
            slowest, free = max(slowest, seconds[0]), max(free, seconds[1])
        chains = tuple(
            Chained(groups=groups, micro_batches=count)
            for groups, count in zip(way.pipelines, counts, strict=True)
        )
        return RegularLayout(setting=setting, seconds=slowest + after, free_seconds=free + after, chains=chains)

    def _lined(self, refiner: Refiner, groups: Sequence[DeviceGroup]) -> Ordered:
        """These groups as the stages of a pipeline."""
        order = tuple(range(len(groups)))
        terms = refiner.terms(Chained(groups=tuple(groups), micro_batches=1), order)
        if terms not in self._ordered:
            self._ordered[terms] = refiner.ordered(order, terms)
        return self._ordered[terms]

    def _seconds(
        self, task: Task, one: Ordered, micro_batches: int, limit: float
    ) -> tuple[float, float] | None:
        """Seconds of a pipeline, and the same if boundaries took no time: of the schedule, with the better of
        the layers that the formula finds best with boundaries and without. None where neither is within the
        limit."""
        if not task.cost.timing.hidden:
            seconds = one.line.seconds(micro_batches)
            return seconds, seconds
        key = one.terms, micro_batches
        if key not in self._played:
            times = _times(one, task.layers, micro_batches)
            self._played[key] = times, float(at_least(times, micro_batches).min()), None
        times, least, played = self._played[key]
        if least > limit:
            return None
        if played is None:
            with_hops, without = task.cost.timing.seconds(times, micro_batches).min(axis=1)
            played = float(with_hops), float(without)
            self._played[key] = times, least, played
        return played


def _even(candidate: _Candidate, layers: int) -> list[Pipelines]:
    """The arrangements of pipelines whose groups all have one size."""
    groups, pipelines = candidate.pool.groups, candidate.pipelines
    even, rest = divmod(len(groups), pipelines)
    depth = min(even, layers)
    ways: list[Pipelines] = [[groups[i * depth : (i + 1) * depth] for i in range(pipelines)]]
    if depth > 1 and pipelines > 1:
        ways.append([groups[i : depth * pipelines : pipelines] for i in range(pipelines)])
    if rest and even < layers:
        ways.append(_shared(groups, pipelines))
    return ways


def _times(one: Ordered, layers: int, micro_batches: int) -> Times:
    """Seconds of a pipeline's stages: [with boundaries or without, layers that are the formula's best with
    boundaries or without, stage]."""
    terms, count = one.terms, max(micro_batches, len(one.terms))
    free = tuple(replace(term, hop=0.0) for term in terms)
    given = np.array([one.layers(count), split_layers(free, layers, count)])
    block, fixed, hop, forward = (
        np.array([getattr(term, name) for term in terms]) for name in ("block", "fixed", "hop", "forward")
    )
    work = np.stack([block * given + fixed] * 2)
    boundary = np.stack([hop[:-1] / 2, np.zeros(len(hop) - 1)])[:, None]
    return Times(
        forward=work * forward,
        backward=work * (1 - forward),
        boundary=np.broadcast_to(boundary, (*work.shape[:-1], len(hop) - 1)),
    )


def _after(task: Task, pipelines: Pipelines) -> float:
    """Seconds of a step after the slowest of these pipelines."""
    members = [name for groups in pipelines for group in groups for name in group.devices]
    fewest, depth = min((sum(len(group.devices) for group in groups), len(groups)) for groups in pipelines)
    return task.cost.after(len(pipelines), fewest, task.cluster.reach(members), depth)


def _polished(refiner: Refiner, layout: RegularLayout) -> RegularLayout:
    """The layout with the best order of stages and layers, where that is quicker."""
    task, pipelines = refiner.task, refiner.pipelines(layout.chains)
    if pipelines is None:
        return layout
    different = {
        (pipeline_signature(task, pipeline.stages), pipeline.micro_batches): pipeline for pipeline in pipelines
    }
    slowest = max(pipeline_seconds(one, task.cluster, task.rates, task.cost) for one in different.values())
    groups = [
        [group for group in chained.groups if isinstance(group, DeviceGroup)] for chained in layout.chains
    ]
    return replace(layout, seconds=min(layout.seconds, slowest + _after(task, groups)))
