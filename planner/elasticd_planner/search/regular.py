"""Regular layouts: pipelines of equal TP groups on the quickest nodes, for every setting at once.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from elasticd_planner.cost.model import pipeline_seconds
from elasticd_planner.cost.pipeline_time import Times, at_least
from elasticd_planner.grouping.node_partitions import GroupType
from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.balance.layer_split import split_layers
from elasticd_planner.search.balance.micro_batch_split import split_by_lines
from elasticd_planner.search.refine import Ordered, Refiner
from elasticd_planner.search.task import Chained, DeviceGroup, Task, alive, pipeline_signature
from elasticd_planner.spec.cluster import Device, Link, node_of, rate_of

#: Every number of nodes and of stages is tried up to so many; beyond it, those of the form 2^a or 3 x 2^a.
EVERY = 16

#: Layouts that slow boundaries keep from being the best are costed once more with the best order and layers:
#: so many, of so many stages at most.
POLISHED, POLISHED_STAGES = 16, 16

#: Layouts within this fraction of the best are kept, so many at most; so many candidates are costed.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """TP groups of one size on some nodes, in the order of nodes."""

    width: int
    groups: tuple[DeviceGroup, ...]
    speed: float  # [layers a second] of all groups together
    block: float  # seconds of a layer on the quickest group
    edges: float  # seconds of embed and head where they take least
    kinds: frozenset[GroupType]  # of groups that differ in cost or memory
    together: int  # the most groups of one node
    link: Link  # the slowest among all its devices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """So many pipelines of one pool's groups, under one setting."""

    setting: int
    pool: _Pool
    pipelines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownTimes:
    """Seconds that bounds of one task share."""

    hops: tuple[float, float]  # of the least boundary inside a node, and of the least between nodes
    after: dict[tuple[int, int, Link], float]  # after pipelines: by their number, devices of each, and the link

    @classmethod
    def of(cls, task: Task) -> _KnownTimes:
        """Those of a task, none of them `after` yet."""
        cluster = task.cluster
        links = cluster.between, *(level.link for level in cluster.levels)
        inside = min(map(task.cost.boundary, cluster.links))
        return cls(hops=(inside, min(map(task.cost.boundary, links))), after={})


def regular_layouts(tasks: Sequence[Task], ways: Sequence[object]) -> list[RegularLayout]:
    """The best regular layouts of some settings, the quickest first.

    Args:
        tasks: the task of each setting; all are of one cluster at the same rates.
        ways: a key for each setting, equal where TP groups take the same time.

    Returns:
        Layouts within `NEAR` of the best; empty where none fits.
    """
    return _Regular(tasks, ways).run()


class _Regular:
    """One enumeration of regular layouts."""

    def __init__(self, tasks: Sequence[Task], ways: Sequence[object]) -> None:
        self._tasks, self._ways = tasks, ways
        self._refiners: dict[int, Refiner] = {}
        self._best_seconds = math.inf
        self._held: dict[tuple[int, frozenset[GroupType], int], bool] = {}
        #: The quickest layout by setting, form and depth.
        self._layouts: dict[tuple[int, tuple[int, int], int], RegularLayout] = {}

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
            if self._holds(candidate):
                costed += 1
                for layout in _layouts(self._refiner(candidate.setting), candidate, limit):
                    self._keep(layout)
        for layout in self._slowed():
            if layout.free_seconds < self._best_seconds:
                self._keep(_polished(self._refiner(layout.setting), layout))
        limit = self._best_seconds * (1 + NEAR)
        near = [layout for layout in self._layouts.values() if layout.seconds <= limit]
        return sorted(near, key=lambda layout: (layout.seconds, layout.setting))[:KEPT]

    def _refiner(self, setting: int) -> Refiner:
        if setting not in self._refiners:
            self._refiners[setting] = Refiner(self._tasks[setting])
        return self._refiners[setting]

    def _holds(self, candidate: _Candidate) -> bool:
        """Returns whether pipelines of such groups may hold the layers."""
        task, kinds = self._tasks[candidate.setting], candidate.pool.kinds
        most = -(-len(candidate.pool.groups) // candidate.pipelines)
        key = candidate.setting, kinds, most
        if key not in self._held:
            refiner, depth = self._refiner(candidate.setting), min(most, task.layers)
            layers = [
                max(refiner.most_layers(kind, first=place == 0, in_flight=depth - place) for kind in kinds)
                for place in range(depth)
            ]
            self._held[key] = sum(layers) >= task.layers
        return self._held[key]

    def _keep(self, layout: RegularLayout) -> None:
        key = layout.setting, layout.form, layout.depth
        if key not in self._layouts or layout.seconds < self._layouts[key].seconds:
            self._layouts[key] = layout
        self._best_seconds = min(self._best_seconds, layout.seconds)

    def _candidates(self) -> Iterator[tuple[float, _Candidate]]:
        """Every candidate with its bound."""
        pools: dict[object, list[_Pool]] = {}
        for setting, (task, way) in enumerate(zip(self._tasks, self._ways, strict=True)):
            if way not in pools:
                pools[way] = list(_pools(task))
            known = _KnownTimes.of(task)
            for pool in pools[way]:
                for pipelines in _numbers(task, len(pool.groups)):
                    candidate = _Candidate(setting=setting, pool=pool, pipelines=pipelines)
                    yield _bound(task, candidate, known), candidate

    def _slowed(self) -> list[RegularLayout]:
        """Layouts that would be the best if boundaries took no time."""
        slowed = [
            layout
            for layout in self._layouts.values()
            if layout.free_seconds < self._best_seconds < layout.seconds and layout.depth <= POLISHED_STAGES
        ]
        return sorted(slowed, key=lambda layout: layout.seconds)[:POLISHED]


def _pools(task: Task) -> Iterator[_Pool]:
    """Groups of each size on the quickest nodes, of each number of nodes; and once without groups with a slow
    member, which hold up a regular pipeline."""
    devices: dict[str, list[Device]] = {}
    for device in alive(task):
        devices.setdefault(device.node, []).append(device)
    order = [node.name for node in task.cluster.joined if node.name in devices]
    speeds = {name: sum(1 / rate_of(task.rates, d.name) for d in devices[name]) for name in order}
    quickest = sorted(order, key=lambda name: (-round(speeds[name], 9), order.index(name)))
    refiner = Refiner(task)
    for width in task.cost.widths(max(map(len, devices.values()), default=0)):
        if task.fixed_tp not in (None, width):
            continue
        groups_of = {name: _cut(task, refiner, devices[name], width) for name in order}
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
        edges=min(cost.embed for cost in costs) + min(cost.head for cost in costs),
        kinds=frozenset(kinds),
        together=max(Counter(node_of(group.devices[0]) for group in groups).values()),
        link=refiner.task.cluster.reach(name for group in groups for name in group.devices),
    )


def _cut(task: Task, refiner: Refiner, devices: Sequence[Device], width: int) -> list[DeviceGroup]:
    """Groups of this size of one node's devices, alike ones together, with the shares that are quickest."""
    ranked = sorted(devices, key=lambda device: (rate_of(task.rates, device.name), -device.memory))
    groups = []
    for start in range(0, len(ranked) - width + 1, width):
        names = tuple(device.name for device in ranked[start : start + width])
        options = task.cost.shares([rate_of(task.rates, name) for name in names])
        ways = [DeviceGroup(devices=names, shares=shares) for shares in options]
        groups.append(min(ways, key=lambda group: refiner.type_of(group).block))
    return groups


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
    pool, pipelines = candidate.pool, candidate.pipelines
    even, rest = divmod(len(pool.groups), pipelines)
    depth = min(even, task.layers)
    deepest = min(even + bool(rest), task.layers)
    count = -(-task.micro_batches // pipelines)
    work = task.layers * pool.block + pool.edges
    slowest = task.layers * pipelines / pool.speed
    if len(pool.kinds) == 1:
        slowest = max(work / deepest, -(-task.layers // deepest) * pool.block)
    inside, between = known.hops
    crossed = -(-depth // pool.together) - 1
    way = work + crossed * between + (depth - 1 - crossed) * inside
    turns = count - 1 - task.cost.timing.hidden * min(count - 1, deepest - 1)
    key = pipelines, depth * pool.width, pool.link
    if key not in known.after:
        known.after[key] = task.cost.after(*key)
    seconds = count * slowest if task.steady else way + turns * slowest
    return seconds + known.after[key]


def _layouts(refiner: Refiner, candidate: _Candidate, limit: float) -> Iterator[RegularLayout]:
    """The candidate with a pipeline's stages next to each other; with each stage of all pipelines so; and with
    all groups, where these do not divide evenly. None that cannot end within the limit."""
    groups, pipelines, layers = candidate.pool.groups, candidate.pipelines, refiner.task.layers
    even, rest = divmod(len(groups), pipelines)
    depth = min(even, layers)
    ways = [[groups[i * depth : (i + 1) * depth] for i in range(pipelines)]]
    if depth > 1 and pipelines > 1:
        ways.append([groups[i : depth * pipelines : pipelines] for i in range(pipelines)])
    if rest and even < layers:
        ends = list(accumulate(even + (i < rest) for i in range(pipelines)))
        ways.append([groups[start:end] for start, end in pairwise([0, *ends])])
    for way in ways:
        layout = _costed(refiner, candidate, way, limit)
        if layout is not None:
            yield layout


def _costed(
    refiner: Refiner, candidate: _Candidate, pipelines: Sequence[Sequence[DeviceGroup]], limit: float
) -> RegularLayout | None:
    """The layout of these pipelines, with the order of stages that they have; None where it does not fit, or
    cannot end within the limit."""
    task = refiner.task
    ordered_of: dict[tuple[object, ...], Ordered] = {}
    ordered = []
    for groups in pipelines:
        hops = tuple(task.cluster.reach((a.devices[0], b.devices[0])) for a, b in pairwise(groups))
        key = tuple(map(refiner.type_of, groups)), hops
        if key not in ordered_of:
            chained = Chained(groups=tuple(groups), micro_batches=1)
            ordered_of[key] = refiner.lined(chained, tuple(range(len(groups))))
        ordered.append(ordered_of[key])
    if not all(len(one.line.caps) for one in ordered):
        return None
    counts = split_by_lines([one.line for one in ordered], task.micro_batches, steady=task.steady)
    if counts is None:
        return None
    different = {(id(one), count): (one, count) for one, count in zip(ordered, counts, strict=True)}
    after = _after(task, pipelines)
    seconds = []
    for one, count in different.values():
        times = _seconds(task, one, count, limit - after)
        if times is None:
            return None
        seconds.append(times)
    slowest, free = (max(times) for times in zip(*seconds, strict=True))
    chains = tuple(
        Chained(groups=tuple(groups), micro_batches=count)
        for groups, count in zip(pipelines, counts, strict=True)
    )
    return RegularLayout(
        setting=candidate.setting, seconds=slowest + after, free_seconds=free + after, chains=chains
    )


def _after(task: Task, pipelines: Sequence[Sequence[DeviceGroup]]) -> float:
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


def _seconds(task: Task, one: Ordered, micro_batches: int, limit: float) -> tuple[float, float] | None:
    """Seconds of a pipeline, and the same if boundaries took no time: of the schedule, with the better of the
    layers that the formula finds best with boundaries and without. None where neither is within the limit."""
    if task.steady or not task.cost.timing.hidden:
        seconds = one.line.seconds(micro_batches, steady=task.steady)
        return seconds, seconds
    free = tuple(replace(term, hop=0.0) for term in one.terms)
    count = max(micro_batches, len(free))
    layers = np.array([split_layers(terms, task.layers, count) for terms in (one.terms, free)])
    block, fixed, hop, forward = (
        np.array([getattr(term, name) for term in one.terms]) for name in ("block", "fixed", "hop", "forward")
    )
    work = np.stack([block * layers + fixed] * 2)  # [with boundaries or without, layers, stage]
    boundary = np.stack([hop[:-1] / 2, np.zeros(len(hop) - 1)])[:, None]
    times = Times(
        forward=work * forward,
        backward=work * (1 - forward),
        boundary=np.broadcast_to(boundary, (*work.shape[:-1], len(hop) - 1)),
    )
    if at_least(times, micro_batches).min() > limit:
        return None
    with_hops, without = task.cost.timing.seconds(times, micro_batches).min(axis=1)
    return float(with_hops), float(without)
