"""The items of a step: which lane of a module of items takes which images (or clips) of which samples.

Made for each step, identically on every rank, as the batch plan is: a pure function of the plan, the batch of
the module with the loss, and the numbers of items. All of it is in whole numbers.

Micro-batches of all lanes of the module with the loss go in windows of `ahead` rows. In a window the items that
cost most are dealt first, each to the lane that would be done first with it: with all items that it has been
dealt in the step, divided by its weight (its micro-batches in the plan) and multiplied by its slowdown. So a
slow lane gets fewer items before any layout changes. A lane may serve some pipelines of the module with the
loss alone (`Pipeline.serves`). It takes an item in a pass, since items have shapes of their own, in the order
in which they are needed.

Of a packed batch a sample may be cut over lanes of a row. Its items are dealt once, and all of these lanes take
what is made of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import chain
from math import lcm
from typing import NamedTuple

from elasticd_planner.spec.batch import BatchPlan, BatchRow, ids_of
from elasticd_planner.spec.plan import ModulePlan, Place, Plan
from elasticd_planner.value import Value, refuse

#: The slowdown of a normal lane [64ths].
NORMAL = 64


class SampleItem(NamedTuple):
    """An item of a sample: an image, a clip."""

    sample: int  # its id
    number: int  # of the item in it; -1: all items of the sample, whose count is not known


class ItemGroup(NamedTuple):
    """Items that a lane of a module of items takes in one pass, all of one micro-batch."""

    items: tuple[SampleItem, ...]  # in the order of need
    pipeline: int  # of the module with the loss: the one that needs them
    lanes: tuple[int, ...]  # of that pipeline: those that have a part of their sample, in order
    micro_batch: int  # the row of that pipeline
    rows: int = 0  # [tokens] of all its items; 0: not known


class GroupId(NamedTuple):
    """Names a group of a step: the lane that takes it, and its number there."""

    module: str
    pipeline: int
    lane: int
    number: int


#: A micro-batch of the module with the loss: pipeline, lane, row.
Need = tuple[int, int, int]


class ItemBatch(Value, frozen=True, kw_only=True, dict=True):
    """The items of one module in one step under one plan."""

    step: int
    plan: int  # its number
    module: str
    pipelines: tuple[tuple[tuple[ItemGroup, ...], ...], ...]  # by pipeline and lane of the module of items

    def of(self, place: Place) -> tuple[ItemGroup, ...]:
        """The groups of the lane that a device is in."""
        return self.pipelines[place.pipeline][place.lane]

    def walk(self) -> Iterator[tuple[GroupId, ItemGroup]]:
        """All groups, by pipeline and lane."""
        for pipeline, lanes in enumerate(self.pipelines):
            for lane, groups in enumerate(lanes):
                for number, group in enumerate(groups):
                    yield GroupId(self.module, pipeline, lane, number), group

    @cached_property
    def needs(self) -> dict[Need, tuple[GroupId, ...]]:
        """By micro-batch of the module with the loss the groups that it needs, by pipeline and lane. One that
        needs no items is left out."""
        found: dict[Need, list[GroupId]] = defaultdict(list)
        for name, group in self.walk():
            for lane in group.lanes:
                found[group.pipeline, lane, group.micro_batch].append(name)
        return {need: tuple(names) for need, names in found.items()}

    @cached_property
    def digest(self) -> int:
        """A 64-bit hash of all groups and their places; never 0."""
        digest = hashlib.blake2b(struct.pack("<qq", self.step, self.plan), digest_size=8)
        digest.update(self.module.encode())
        for lanes in self.pipelines:
            for groups in lanes:
                for items, pipeline, taking, *need in groups:
                    listed = (len(items), *chain.from_iterable(items), pipeline, len(taking), *taking, *need)
                    digest.update(struct.pack(f"<{len(listed)}q", *listed))
                digest.update(b";")
            digest.update(b"/")
        return int.from_bytes(digest.digest(), "little") or 1


class _Item(NamedTuple):
    """An item that is dealt. Of two that cost alike the one that is needed first goes first."""

    cost: int  # negative, so that what costs most goes first
    micro_batch: int
    pipeline: int
    lanes: tuple[int, ...]
    place: int  # among the items of the micro-batch
    item: SampleItem


def item_batch(
    plan: Plan,
    module: str,
    batch: BatchPlan,
    counts: Mapping[int, int] | None,
    rows: Mapping[SampleItem, int] | None = None,
    slowdown: Sequence[int] = (),
    first: Sequence[int] = (),
) -> ItemBatch:
    """Deals the items of a step to the lanes of a module of items.

    Args:
        plan: of all modules.
        module: that takes the items.
        batch: of the module with the loss.
        counts: how many items each sample has, by its id. None: that is not known, and the items of a sample go
            together.
        rows: what each item costs [tokens]; None: all alike.
        slowdown: of each lane of the module, over all its pipelines [64ths of a normal lane's time]; empty: all
            are normal.
        first: lanes that take an item each before any other lane does, of those that cost least.

    Raises:
        Invalid: the module takes samples, a sample or an item is not in `counts` or `rows`, or there are not as
            many slowdowns as lanes.
    """
    taker = next((each for each in plan.modules if each.module == module), None)
    if taker is None or not taker.items:
        refuse(f"plan {plan.number}: it has no module {module!r} that takes items")
    lanes = _Lanes(taker, slowdown)
    windows: dict[int, list[_Item]] = defaultdict(list)
    for item in _items(batch, counts, rows):
        windows[item.micro_batch // taker.ahead].append(item)
    dealt: list[list[_Item]] = [[] for _ in taker.by_lane]
    for window in sorted(windows):
        listed = sorted(windows[window])
        if window == min(windows):
            for lane in first:
                least = next((item for item in reversed(listed) if lanes.may(lane, item.pipeline)), None)
                if least is not None:
                    listed.remove(least)
                    dealt[lane].append(least)
                    lanes.take(lane, -least.cost)
        for item in listed:
            dealt[lanes.first_done(-item.cost, item.pipeline)].append(item)
    known = rows is not None
    groups = iter([tuple(_group(item, known=known) for item in sorted(mine, key=_need)) for mine in dealt])
    pipelines = tuple(tuple(next(groups) for _ in each.micro_batches_by_lane) for each in taker.pipelines)
    return ItemBatch(step=batch.step, plan=batch.plan, module=module, pipelines=pipelines)


class _Lanes:
    """The items that each lane of a module has been dealt."""

    def __init__(self, module: ModulePlan, slowdown: Sequence[int]) -> None:
        listed = [
            (count, pipeline.serves)
            for pipeline in module.pipelines
            for count in pipeline.micro_batches_by_lane
        ]
        if slowdown and (len(slowdown) != len(listed) or min(slowdown) < 1):
            refuse(
                f"module {module.module}: {len(listed)} lanes need as many slowdowns of at least 1, not "
                f"{slowdown}"
            )
        whole, self._serves = lcm(*(weight for weight, _ in listed)), [serves for _, serves in listed]
        # By the time of a unit of cost and the pipelines that they serve, of which there are few: a heap of
        # (load, lane).
        self._alike: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
        for lane, ((weight, serves), slow) in enumerate(
            zip(listed, slowdown or [NORMAL] * len(listed), strict=True)
        ):
            self._alike[whole // weight * slow, serves].append((0, lane))
        self._serving: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}

    def may(self, lane: int, pipeline: int) -> bool:
        """Returns True if a lane serves a pipeline."""
        return not self._serves[lane] or pipeline in self._serves[lane]

    def take(self, lane: int, cost: int) -> None:
        """A lane is dealt an item, whoever would be done first."""
        for heap in self._alike.values():
            for place, (load, number) in enumerate(heap):
                if number == lane:
                    heap[place] = load + cost, lane
                    heapify(heap)
                    return

    def first_done(self, cost: int, pipeline: int) -> int:
        """The lane that would be done first with an item more of a pipeline, which it gets."""
        if pipeline not in self._serving:
            self._serving[pipeline] = [
                (factor, heap)
                for (factor, serves), heap in self._alike.items()
                if not serves or pipeline in serves
            ]
        _, lane, heap = min(
            ((factor * (heap[0][0] + cost), heap[0][1], heap) for factor, heap in self._serving[pipeline]),
            key=lambda each: each[:2],
        )
        heapreplace(heap, (heap[0][0] + cost, lane))
        return lane


def _items(
    batch: BatchPlan, counts: Mapping[int, int] | None, rows: Mapping[SampleItem, int] | None
) -> Iterator[_Item]:
    """The items of all micro-batches."""
    for pipeline, listed in enumerate(batch.pipelines):
        for index, row in enumerate(listed):
            place = 0
            for lanes, sample in _takers(row, batch):
                for item in _items_of(sample, counts):
                    yield _Item(-_cost(item, rows), index, pipeline, lanes, place, item)
                    place += 1


def _takers(row: BatchRow, batch: BatchPlan) -> Iterator[tuple[tuple[int, ...], int]]:
    """The samples of a row, each with the lanes that take its items. In a packed row a sample is there once,
    however many parts of it there are."""
    if not batch.packed:
        for lane, pieces in enumerate(row.lanes):
            yield from (((lane,), sample) for sample in ids_of(pieces))
        return
    lanes: dict[int, list[int]] = defaultdict(list)
    lacking: dict[int, int] = defaultdict(int)  # [pairs]
    for lane, pieces in enumerate(row.lanes):
        for sample, length, start, stop in pieces:
            if lane not in lanes[sample]:
                lanes[sample].append(lane)
            lacking[sample] += (0 if start else (length + 1) // 2) - (stop - start)
    for sample, taking in lanes.items():
        if lacking[sample]:
            refuse(f"step {batch.step}: sample {sample} is cut over rows, and its items are of one row")
        yield tuple(taking), sample


def _items_of(sample: int, counts: Mapping[int, int] | None) -> Sequence[SampleItem]:
    if counts is None:
        return (SampleItem(sample, -1),)
    if (count := counts.get(sample)) is None or count < 0:
        refuse(f"sample {sample}: its number of items must be known, and at least 0, not {count}")
    return [SampleItem(sample, number) for number in range(count)]


def _cost(item: SampleItem, rows: Mapping[SampleItem, int] | None) -> int:
    if rows is None:
        return 1
    if (cost := rows.get(item)) is None or cost < 1:
        refuse(f"item {item.number} of sample {item.sample}: its rows must be at least 1, not {cost}")
    return cost


def _need(each: _Item) -> tuple[int, int, tuple[int, ...], int]:
    return each.micro_batch, each.pipeline, each.lanes, each.place


def _group(each: _Item, *, known: bool) -> ItemGroup:
    return ItemGroup((each.item,), each.pipeline, each.lanes, each.micro_batch, -each.cost if known else 0)
