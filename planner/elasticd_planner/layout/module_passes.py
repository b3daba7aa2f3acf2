"""The passes of all modules of a step: how long they take, and which of them needs which.

Those of a module of items are ranked by need: when the first stage of the module with the loss would take their
micro-batch if each micro-batch of that lane took as long as at its slowest stage.

Lanes of the module with the loss may wait for each other inside of a pass: those of a packed row, of which some
may share a sequence, and those that share experts. Then a pass is of a row, on the devices of all lanes, and
has one place in the order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from elasticd_planner.layout.pass_order import Schedule
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece
from elasticd_planner.spec.item_batch import NORMAL, GroupId, ItemBatch, ItemGroup
from elasticd_planner.spec.plan import NO_TIMES, ModulePlan, Pipeline, Plan, Stage
from elasticd_planner.value import refuse

#: Pipelines, by module and number.
Component = set[tuple[str, int]]

#: Rows that `Stage.microseconds` of a module of items is of; an item of unknown size counts as so many.
ROWS = 1024
#: Tokens of a packed row that it is of, by the slowdown of a normal lane.
UNIT = 1024 * NORMAL
#: A pass of a block whose times are not known [us].
_FORWARD, _BACKWARD = 1000, 2000


class ModulePass:
    """A pass of a TP group, and what is known of its time."""

    __slots__ = (
        *("group", "kind", "index", "chunk", "time", "rank", "due", "taker", "missing", "came", "begin", "end"),
        *("place", "numbers", "users", "receives", "takers", "late"),
    )
    place: int  #: in the order
    late: int  #: its end where messages take time
    numbers: list[int]  #: by device of its group how many passes begin there before it

    def __init__(
        self,
        group: PassGroup,
        kind: str,
        index: int,
        chunk: int,
        time: int,
        rank: int = 0,
        due: int = 0,
        taker: PassGroup | None = None,
    ) -> None:
        """
        Args:
            group: its devices.
            kind: "forward" or "backward".
            index: of its micro-batch, or of its group of items, in the lane; of lanes together, the row.
            chunk: of the stage.
            time: that it takes [us].
            rank: of a module of items: those of lower rank are needed first.
            due: of a module of items: the micro-batch that needs it.
            taker: of a module of items: the first stage that needs it.
        """
        self.group, self.kind, self.index, self.chunk, self.time = group, kind, index, chunk, time
        self.rank, self.due, self.taker = rank, due, taker
        self.missing = 0  # passes that it needs, and that have not begun
        self.came = 0  # when the last of its inputs is there, as far as they have begun
        self.begin = self.end = 0
        self.users: list[ModulePass] = []  # passes that need it
        self.receives: list[tuple[ModulePass, GroupId | None]] = []  # from other groups
        self.takers: tuple[int, ...] = ()  # of a module of items: the lanes that take what it makes


@dataclass(eq=False, slots=True)
class PassGroup:
    """The devices that are in a pass: a TP group, or those of all lanes of a stage."""

    key: tuple[str, int, int, int]  #: module, pipeline, lane, stage; of all lanes, the first lane
    devices: tuple[int, ...]
    #: Of all lanes: by lane, and by the rows of which it has a part, the index of its micro-batch.
    rows: tuple[Mapping[int, int], ...] = ()
    serves: bool = False  #: of all lanes: one without a part of a row serves in its passes
    #: Of rows of a packed plan: by row so many times as long as a pass takes by the plan [1 / `UNIT`].
    sizes: tuple[int, ...] = ()
    passes: list[ModulePass] = field(default_factory=list)  #: of the module with the loss all; else those begun
    begun: int = 0  #: how many of them
    left: int = 0  #: what those take that have not begun [us]
    tail: int = 0  #: what a micro-batch takes at least from its last pass here on [us]
    started: int = 0  #: of the module with the loss: micro-batches that have begun at the first stage
    waiting: list[PassGroup] = field(default_factory=list)  #: groups that may go on when one more has
    # Of a module of items:
    ahead: int = 0
    lead: int = 0
    beside: list[PassGroup] = field(default_factory=list)  #: of the module with the loss, that share devices
    queue: deque[ModulePass] = field(default_factory=deque)  #: forward passes of the first chunk, by rank
    forwards: list[tuple[int, ModulePass]] = field(default_factory=list)  #: others whose input is there: a heap
    backwards: list[tuple[int, ModulePass]] = field(default_factory=list)  #: likewise
    kept: int = 0  #: groups of items between their forward and backward passes
    waits: bool = False  #: it is in `waiting` of a taker


class ModulePasses:
    """All passes of a step, and which needs which."""

    def __init__(
        self,
        plan: Plan,
        batches: Mapping[str, BatchPlan | ItemBatch],
        schedule: Schedule,
        *,
        backward: bool,
        device: str | None = None,
    ) -> None:
        component = None if device is None else _component(plan, batches, device)
        self.devices = {device: number for number, device in enumerate(plan.members)}
        self.own: list[list[PassGroup]] = [[] for _ in self.devices]  # of the module with the loss, by device
        self.fillers: list[list[PassGroup]] = [[] for _ in self.devices]  # of modules of items
        self.count = 0  # passes
        self._backward, self._schedule = backward, schedule
        loss = plan.loss_module
        batch = batches.get(loss.module)
        if not isinstance(batch, BatchPlan):
            refuse(f"step: module {loss.module} takes samples, and needs a batch plan")
        # By pipeline and lane the passes at the first stage, by kind and micro-batch.
        self._first: dict[tuple[int, int], dict[tuple[str, int], ModulePass]] = {}
        self._period: dict[tuple[int, int], int] = {}  # [us] of a micro-batch at the slowest stage
        self._lanes: list[Sequence[PassGroup]] = []  # of the module with the loss, of one chunk: their stages
        for p, (pipeline, rows) in enumerate(zip(loss.pipelines, batch.pipelines, strict=True)):
            if component is not None and (loss.module, p) not in component:
                continue
            if batch.packed or pipeline.shares_experts:
                self._add_rows(loss.module, p, pipeline, rows)
                continue
            for j, lane in enumerate(pipeline.by_lane):
                groups = self._groups(loss.module, p, j, lane)
                count = sum(bool(row.lanes[j]) for row in rows)
                self._first[p, j] = self._add_stages(groups, lane, count)
                self._period[p, j] = _period(lane)
        for module in plan.modules:
            if not module.items:
                continue
            items = batches.get(module.module)
            if not isinstance(items, ItemBatch):
                refuse(f"step: module {module.module} takes {module.items}, and needs a batch of them")
            self._add_items(module, items, component)
        if backward:
            for stages in self._lanes:
                _set_tails(stages)

    @property
    def groups(self) -> Iterator[list[PassGroup]]:
        """By device its TP groups."""
        return ([*own, *fillers] for own, fillers in zip(self.own, self.fillers, strict=True))

    def clear(self) -> None:
        """Lets go of what passes and groups know of each other, so that none of them waits for a collection."""
        for first in self._first.values():
            first.clear()
        for group in {id(group): group for listed in (*self.own, *self.fillers) for group in listed}.values():
            for one in group.passes:
                one.users.clear()
                one.receives.clear()
            for held in (group.passes, group.waiting, group.beside, group.queue):
                held.clear()

    def _groups(self, module: str, p: int, j: int, lane: Pipeline) -> list[PassGroup]:
        return [
            PassGroup((module, p, j, s), tuple(self.devices[device] for device in stage.devices))
            for s, stage in enumerate(lane.stages)
        ]

    def _add_rows(self, module: str, p: int, pipeline: Pipeline, rows: Sequence[BatchRow]) -> None:
        """The passes of a pipeline of the module with the loss whose lanes pass each row together."""
        lanes = pipeline.by_lane
        places = tuple(
            {row: place for place, row in enumerate(row for row, each in enumerate(rows) if each.lanes[lane])}
            for lane in range(len(lanes))
        )
        sizes = row_sizes(pipeline, rows, attrgetter("tokens"))
        groups = [
            PassGroup(
                (module, p, 0, s),
                tuple(self.devices[device] for device in stage.devices),
                places,
                bool(stage.shared_blocks),
                sizes,
            )
            for s, stage in enumerate(pipeline.stages)
        ]
        first, period = self._add_stages(groups, lanes[0], len(rows)), _period(lanes[0])
        if sizes:
            period = period * sum(sizes) // len(sizes) // UNIT
        for lane in range(len(lanes)):
            self._first[p, lane], self._period[p, lane] = first, period

    def _add_stages(
        self, groups: Sequence[PassGroup], lane: Pipeline, count: int
    ) -> dict[tuple[str, int], ModulePass]:
        """The passes of a lane of the module with the loss, or of all lanes together.

        Args:
            groups: by stage.
            lane: its stages.
            count: of micro-batches, or of rows.

        Returns:
            Those at the first stage, by kind and index.
        """
        stages = len(lane.stages)
        found: dict[tuple[str, int, int], ModulePass] = {}  # by kind, place, micro-batch
        for s, (group, stage) in enumerate(zip(groups, lane.stages, strict=True)):
            times = stage_microseconds(stage)
            for device in group.devices:
                self.own[device].append(group)
            for kind, index, chunk in self._schedule(stages, s, count, lane.chunks) if count else ():
                if self._backward or kind == "forward":
                    one = ModulePass(group, kind, index, chunk, row_time(times[kind][chunk], group, index))
                    found[kind, chunk * stages + s, index] = one
                    group.passes.append(one)
            group.left = sum(one.time for one in group.passes)
        if count and lane.chunks == 1:
            self._lanes.append(groups)
        self.count += len(found)
        last = stages * lane.chunks - 1
        for (kind, place, index), one in found.items():
            if kind == "forward":
                if place:
                    _needs(one, found["forward", place - 1, index])
            elif place < last:
                _needs(one, found["backward", place + 1, index])
        return {(kind, index): one for (kind, place, index), one in found.items() if not place}

    def _add_items(self, module: ModulePlan, batch: ItemBatch, component: Component | None) -> None:
        """The passes of a module of items. Those that are needed first have the lowest ranks."""

        def when(each: tuple[GroupId, ItemGroup]) -> tuple[int, int, GroupId]:
            row = each[1].micro_batch
            return row * self._period[each[1].pipeline, each[1].lanes[0]], row, each[0]

        # By pipeline and lane, and by kind: TP group, chunk and time of 1,024 rows, in the order of passes.
        lanes: dict[tuple[int, int], dict[str, list[tuple[PassGroup, int, int]]]] = {}
        for p, pipeline in enumerate(module.pipelines):
            if component is not None and (module.module, p) not in component:
                continue
            for j, lane in enumerate(pipeline.by_lane):
                groups, times = self._groups(module.module, p, j, lane), [*map(stage_microseconds, lane.stages)]
                lanes[p, j] = {
                    kind: [
                        (group, chunk, stage[kind][chunk])
                        for chunk in range(lane.chunks)
                        for group, stage in zip(groups, times, strict=True)
                    ][::step]
                    for kind, step in (("forward", 1), ("backward", -1))
                }
                for group in groups:
                    group.ahead, group.lead = module.ahead, module.lead
                    beside = {id(own): own for device in group.devices for own in self.own[device]}
                    group.beside = list(beside.values())
                    for device in group.devices:
                        self.fillers[device].append(group)
        backward = self._backward and module.trainable
        inside = (each for each in batch.walk() if (each[0].pipeline, each[0].lane) in lanes)
        for rank, (name, items) in enumerate(sorted(inside, key=when)):
            places = lanes[name.pipeline, name.lane]
            self._add_group(places, name, items, module.item_rows, rank, backward=backward)

    def _add_group(
        self,
        places: Mapping[str, Sequence[tuple[PassGroup, int, int]]],
        name: GroupId,
        items: ItemGroup,
        mean: int,
        rank: int,
        *,
        backward: bool,
    ) -> None:
        """The chain of passes of one group of items. mean: rows of an item."""
        first = self._first[items.pipeline, items.lanes[0]]
        taking, giving = first["forward", items.micro_batch], first.get(("backward", items.micro_batch))
        chunks = places["forward"][-1][1] + 1
        before: ModulePass | None = None
        for kind in ("forward", "backward") if backward else ("forward",):
            for group, chunk, whole in places[kind]:
                time = item_time(whole, items, mean)
                order = rank * chunks + (chunks - 1 - chunk if kind == "forward" else chunk)
                one = ModulePass(group, kind, name.number, chunk, time, order, items.micro_batch, taking.group)
                one.takers = items.lanes
                group.left += time
                self.count += 1
                if before is None:
                    group.queue.append(one)
                elif before.kind == kind:
                    _needs(one, before)
                else:
                    assert giving is not None
                    _needs(taking, before, name)
                    _needs(one, giving, name)
                before = one
        if not backward:
            assert before is not None
            _needs(taking, before, name)


def _component(plan: Plan, batches: Mapping[str, BatchPlan | ItemBatch], device: str) -> Component:
    """The pipelines that a device's pipelines are connected with: by items of the step, or by devices."""
    beside: dict[object, list[object]] = defaultdict(list)
    for module in plan.modules:
        for p, pipeline in enumerate(module.pipelines):
            own = module.module, p
            for stage in pipeline.stages:
                for each in stage.devices:
                    beside[own].append(each)
                    beside[each].append(own)
        items = batches.get(module.module)
        if isinstance(items, ItemBatch):
            loss = plan.loss_module.module
            pairs = {(name.pipeline, group.pipeline) for name, group in items.walk()}
            for source, target in pairs:
                beside[module.module, source].append((loss, target))
                beside[loss, target].append((module.module, source))
    found, around = set[object]([device]), list[object]([device])
    while around:
        new = {*beside[around.pop()]} - found
        found |= new
        around += new
    return {(module.module, p) for module in plan.modules for p in range(len(module.pipelines))} & found


def item_time(whole: int, items: ItemGroup, mean: int) -> int:
    """The time of a pass of a group of items [us].

    Args:
        whole: the time of 1,024 rows.
        items: of the group; where it has no rows, each has `mean`.
        mean: rows of an item; 0: not known.
    """
    return max(1, whole * (items.rows or (mean or ROWS) * len(items.items)) // ROWS)


def row_sizes(
    pipeline: Pipeline, rows: Sequence[BatchRow], tokens: Callable[[SequencePiece], float]
) -> tuple[int, ...]:
    """By row of a packed pipeline so many times as long as a pass takes by the plan [1 / `UNIT`]: that of its
    slowest lane. tokens: those that a piece counts as."""
    return tuple(
        max(
            round(sum(map(tokens, pieces)) * lane.slowdown)
            for pieces, lane in zip(row.lanes, pipeline.packed, strict=True)
        )
        for row in (rows if pipeline.packed else ())
    )


def row_time(whole: int, group: PassGroup, index: int) -> int:
    """The time of a pass of a micro-batch, or of a row, of the module with the loss [us].

    Args:
        whole: the time by the plan: of a micro-batch, or in a packed plan of 1,024 tokens on a normal lane.
        group: its devices.
        index: of the micro-batch or row.
    """
    return max(1, whole * group.sizes[index] // UNIT) if group.sizes else whole


def _period(lane: Pipeline) -> int:
    """The time of a micro-batch at the slowest stage [us]."""
    return max(sum(sum(part) for part in stage_microseconds(stage).values()) for stage in lane.stages)


def _needs(user: ModulePass, one: ModulePass, name: GroupId | None = None) -> None:
    user.missing += 1
    one.users.append(user)
    if name is not None or one.group is not user.group:
        user.receives.append((one, name))


def _set_tails(groups: Sequence[PassGroup]) -> None:
    """Sets what a micro-batch takes from its last pass on each stage of a lane on: backward passes on those
    before it, and of its items."""
    one, tail = groups[0].passes[-1], 0
    while one.users:
        one = max(one.users, key=lambda user: user.time)
        tail += one.time
    for group in groups:
        group.tail = tail
        tail += group.passes[-1].time


#: By kind the times of the passes of a stage, by chunk [us].
PassTimes = dict[str, list[int]]


def stage_microseconds(stage: Stage) -> PassTimes:
    """Chunks take their parts of the stage's times by their layers."""
    layers = stage.layers
    times = stage.microseconds
    if times == NO_TIMES:
        times = _FORWARD * layers, _BACKWARD * layers
    return {
        kind: [max(1, whole * (stop - start) // layers) for start, stop in stage.chunks]
        for kind, whole in zip(("forward", "backward"), times, strict=True)
    }
