"""One linear order of the passes and messages of all modules: each rank carries out its part of it.

A list schedule in whole microseconds. A pass occupies the devices of its TP group, so that modules may share
all their devices, some, or none, and TP groups of unlike widths may overlap.

*The module with the loss* keeps the order of its schedule on each stage. *Modules of items* fill in: a pass of
theirs begins where its devices wait for at least three quarters of it (a backward pass: half of it), or when it
is due, `lead` micro-batches before the first stage of the module with the loss needs it, or when memory is
full. No forward pass begins more than `ahead` micro-batches early, so that a lane keeps the outputs of so many,
and of those in the pipeline. With `ahead` of all micro-batches the forward passes of items may all come first
and their backward passes last (the three phases of Megatron-LM's MIMO); with 1 they nest in the pipeline.

*Messages.* A message is sent and received at one place in the order. It is where the devices of both ends are
between two passes, so that none of them waits for the other, and at most `EARLY` passes of its receiver before
the one that needs it. The first such place is taken: messages travel while their receivers run other passes.
Where there is none, it is the place where both wait least.

*Why no rank waits for ever.* Each act stands behind those that it needs, and a message has one place at both
ends. So the first act of the order that is not over can always go on, also on a device that carries out its
launches in one queue. Sums of gradients have a place in the order, too (`sums_after`). Where each rank launched
a sum when its own passes of the module are over, a rank would wait in a sum for another one, and that one for
passes of the first rank in another module.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from elasticd_planner.layout.gradient_buckets import Bucket
from elasticd_planner.layout.pass_order import Act, Schedule
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.item_batch import GroupId, ItemBatch, ItemGroup
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import NO_TIMES, ModulePlan, Pipeline, Plan, Stage
from elasticd_planner.value import refuse

#: Rows that `Stage.microseconds` of a module of items is of; an item of unknown size counts as so many.
ROWS = 1024
#: A pass of a block whose times are not known [us].
_FORWARD, _BACKWARD = 1000, 2000
#: A message is received this many passes at most, of any module on its devices, before the one that needs it.
EARLY = 4
#: When a pass may begin whose input nobody makes yet.
_FAR = 1 << 60


class ModuleAct(NamedTuple):
    """An act of the members of one TP group: a pass, or their end of a message."""

    module: str
    pipeline: int
    lane: int
    stage: int
    act: Act  #: of a module of items `micro_batch` is the index of the group in its lane
    group: GroupId | None = None  #: of a message between modules: what it brings, or brings the gradient of


class ModulePassTime(NamedTuple):
    """When a pass runs, from the begin of the step [us]."""

    act: ModuleAct
    start: int
    stop: int


def module_order(
    plan: Plan, batches: Mapping[str, BatchPlan | ItemBatch], schedule: Schedule, *, backward: bool = True
) -> tuple[ModuleAct, ...]:
    """All acts of a step, in one order that is the same on all ranks.

    A message between modules goes from the last stage of the module of items to the first stage of the module
    with the loss, and its gradient back. It is listed where both are on the same devices, too.

    Args:
        plan: of all modules.
        batches: of the step, by module: the batch plan of the module with the loss, and items of the others.
        schedule: the order of the passes of each stage of the module with the loss.
        backward: False: forward passes alone, as in an evaluation.

    Raises:
        Invalid: a module has no batch, or one of the other kind.
        ValueError: the passes of this schedule wait for each other.
    """
    run = _ModuleRun(_Graph(plan, batches, schedule, backward=backward))
    return tuple(_acts(run.order))


def module_pass_times(
    plan: Plan,
    batches: Mapping[str, BatchPlan | ItemBatch],
    schedule: Schedule,
    *,
    backward: bool = True,
    one_queue: bool = False,
) -> tuple[ModulePassTime, ...]:
    """When the passes of that order run, in the order; messages take no time.

    Args:
        plan: as for `module_order`; and all below.
        batches: of the step, by module.
        schedule: of the module with the loss.
        backward: whether there are backward passes.
        one_queue: each device carries out its acts one after the other, so that the ends of a message wait for
            each other. Else messages go beside the passes.
    """
    order = _ModuleRun(_Graph(plan, batches, schedule, backward=backward)).order
    if one_queue:
        _in_one_queue(order)
    return tuple(ModulePassTime(_act(one, "pass"), one.begin, one.end) for one in order)


def _in_one_queue(order: Sequence[_Pass]) -> None:
    """Sets the times of passes to those in one queue."""
    messages = _messages(order)
    free: dict[int, int] = defaultdict(int)
    at = 0
    for place, one in enumerate(order):
        while at < len(messages) and messages[at].place == place:
            sender, receiver = messages[at].sender, messages[at].receiver
            if sender.group.devices != receiver.group.devices:
                ends = (*sender.group.devices, *receiver.group.devices)
                free.update(dict.fromkeys(ends, max(free[device] for device in ends)))
            at += 1
        one.begin = max(free[device] for device in one.group.devices)
        one.end = one.begin + one.time
        free.update(dict.fromkeys(one.group.devices, one.end))


def _act(one: _Pass, what: str, name: GroupId | None = None) -> ModuleAct:
    new = tuple.__new__  # in few instructions: an order is made each step
    return new(ModuleAct, (*one.group.key, new(Act, (what, one.kind, one.index, one.chunk)), name))


class _Message(NamedTuple):
    place: int  #: before which pass of the order
    time: int
    number: int  #: of all, so that no two are equal
    sender: _Pass
    receiver: _Pass
    name: GroupId | None


def _messages(order: Sequence[_Pass]) -> list[_Message]:
    """All messages, in their order."""
    place_of, number = _Timeline(order).place, count()
    return sorted(
        _Message(*place_of(sender, one), next(number), sender, one, name)
        for one in order
        for sender, name in one.receives
    )


def _acts(order: Sequence[_Pass]) -> Iterator[ModuleAct]:
    """The passes in this order, and all messages."""
    messages, at = _messages(order), 0
    for place, one in enumerate(order):
        while at < len(messages) and messages[at].place == place:
            message = messages[at]
            yield _act(message.sender, "send", message.name)
            yield _act(message.receiver, "receive", message.name)
            at += 1
        yield _act(one, "pass")


def sections_done(order: Sequence[ModuleAct], view: Plan, spec: ModelSpec) -> dict[str, int]:
    """The place in the order after which no backward pass goes through a section any more, on any device.

    Args:
        order: of all modules.
        view: the plan of the module alone.
        spec: of the module.

    Returns:
        By section the index in `order` of its last backward pass; of a module that has none the last index.
    """
    name = view.module.module
    last: dict[tuple[int, int, int, int], int] = {}
    for index, (module, pipeline, lane, stage, act, _) in enumerate(order):
        if module == name and act.what == "pass" and act.kind == "backward":
            last[pipeline, lane, stage, act.chunk] = index
    lanes = [pipeline.by_lane for pipeline in view.pipelines]
    found = dict.fromkeys(spec.sections(0, len(spec.layers)), -1)
    for (pipeline, lane, stage, chunk), index in last.items():
        for section in spec.sections(*lanes[pipeline][lane].stages[stage].chunks[chunk]):
            found[section] = max(found[section], index)
    return {section: len(order) - 1 if index < 0 else index for section, index in found.items()}


def sums_after(done: Mapping[str, int], buckets: Sequence[Bucket], spec: ModelSpec) -> tuple[int, ...]:
    """After which act of the order all members launch the sum of each bucket. Several sums at one place go in
    the order of modules in the plan, then of buckets.

    Args:
        done: what `sections_done` gives for the module.
        buckets: all buckets of the module, in their order.
        spec: of the module.

    Returns:
        For each bucket an index in the order, never less than that of the bucket before.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for alias, owner in spec.ties:
        users[owner].append(alias)
    by_name: dict[str, int] = {}
    found, least = [], -1
    for bucket in buckets:
        for piece in bucket.pieces:
            if piece.name not in by_name:
                names = (piece.name, *users[piece.name])
                by_name[piece.name] = max(done[section] for name in names for section in _sections(done, name))
            least = max(least, by_name[piece.name])
        found.append(least)
    return tuple(found)


def _sections(done: Mapping[str, int], name: str) -> Iterator[str]:
    """The section that a parameter is named in."""
    return (section for section in done if name.startswith(f"{section}."))


class _Pass:
    """A pass of a TP group, and what is known of its time."""

    __slots__ = (
        *("group", "kind", "index", "chunk", "time", "rank", "due", "taker", "missing", "came", "begin", "end"),
        *("place", "numbers", "users", "receives"),
    )
    place: int  #: in the order
    numbers: list[int]  #: by device of its TP group how many passes begin there before it

    def __init__(
        self,
        group: _TpGroup,
        kind: str,
        index: int,
        chunk: int,
        time: int,
        rank: int = 0,
        due: int = 0,
        taker: _TpGroup | None = None,
    ) -> None:
        """
        Args:
            group: its devices.
            kind: "forward" or "backward".
            index: of its micro-batch, or of its group of items, in the lane.
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
        self.users: list[_Pass] = []  # passes that need it
        self.receives: list[tuple[_Pass, GroupId | None]] = []  # from other TP groups


@dataclass(eq=False, slots=True)
class _TpGroup:
    """A TP group: the devices of a stage of a lane of a module."""

    key: tuple[str, int, int, int]  #: module, pipeline, lane, stage
    devices: tuple[int, ...]
    passes: list[_Pass] = field(default_factory=list)  #: of the module with the loss all; else those begun
    begun: int = 0  #: how many of them
    started: int = 0  #: of the module with the loss: micro-batches that have begun at the first stage
    waiting: list[_TpGroup] = field(default_factory=list)  #: groups that may go on when one more has
    # Of a module of items:
    ahead: int = 0
    lead: int = 0
    beside: list[_TpGroup] = field(default_factory=list)  #: of the module with the loss, that share devices
    queue: deque[_Pass] = field(default_factory=deque)  #: forward passes of the first chunk, by rank
    forwards: list[tuple[int, _Pass]] = field(default_factory=list)  #: others whose input is there: a heap
    backwards: list[tuple[int, _Pass]] = field(default_factory=list)  #: likewise
    kept: int = 0  #: groups of items between their forward and backward passes
    waits: bool = False  #: it is in `waiting` of a taker


class _Timeline:
    """The passes of each device, and the places of messages between them."""

    def __init__(self, order: Sequence[_Pass]) -> None:
        self._passes: dict[int, list[_Pass]] = defaultdict(list)
        self._begins: dict[int, list[int]] = defaultdict(list)
        self._all_begins = [one.begin for one in order]
        for place, one in enumerate(order):
            one.place, one.numbers = place, [len(self._passes[device]) for device in one.group.devices]
            for device in one.group.devices:
                self._passes[device].append(one)
                self._begins[device].append(one.begin)

    def place(self, sender: _Pass, receiver: _Pass) -> tuple[int, int]:
        """Before which pass of the order a message is, and when. Where devices must wait, those of the receiver
        count twice."""
        if sender.group.devices == receiver.group.devices:  # nothing is sent
            return receiver.place, receiver.begin
        time = sender.end
        if self._waits(receiver, time):  # and the sender is between two passes
            return bisect_left(self._all_begins, time), time
        earliest = sender.place + 1
        for device, number in zip(receiver.group.devices, receiver.numbers, strict=True):
            if number > EARLY:
                earliest = max(earliest, self._passes[device][number - EARLY].place)
        spots: list[_Spot] = []
        for device, number in zip(receiver.group.devices, receiver.numbers, strict=True):
            passes, at = self._passes[device], max(0, number - EARLY)
            while at < number and (passes[at].begin < time or passes[at].place < earliest):
                at += 1
            if at and passes[at - 1].end > time:
                time = passes[at - 1].end
            spots.append(_Spot(passes, at, 2))
        for device, number in zip(sender.group.devices, sender.numbers, strict=True):
            if device not in receiver.group.devices:
                passes, at = self._passes[device], max(number + 1, bisect_left(self._begins[device], time) - 1)
                while at < len(passes) and passes[at].place < earliest:
                    at += 1
                spots.append(_Spot(passes, at, 1))
        for spot in spots:
            if (end := spot.passes[spot.number - 1].end) > time and spot.number:
                time = end
        least, best = _FAR, receiver.place
        while True:
            wait, first, late, begin = 0, receiver.place, None, time
            for spot in spots:
                if spot.number < len(spot.passes):
                    one = spot.passes[spot.number]
                    if one.place < first:
                        first = one.place
                    if one.begin < time:
                        wait += spot.weight * (time - one.begin)
                        if one.begin < begin or late is None:
                            late, begin = spot, one.begin
            if late is None:
                return first, time
            if wait <= least:
                least, best = wait, first
            one = late.passes[late.number]
            if one is receiver:
                return best, receiver.begin
            late.number += 1
            if one.end > time:
                time = one.end

    def _waits(self, receiver: _Pass, time: int) -> bool:
        """Whether the devices of a pass are between two passes, of the last ones before it."""
        for device, number in zip(receiver.group.devices, receiver.numbers, strict=True):
            at = bisect_left(self._begins[device], time)
            if at < number - EARLY or (at and self._passes[device][at - 1].end > time):
                return False
        return True


@dataclass(slots=True)
class _Spot:
    """Before one of the passes of a device."""

    passes: list[_Pass]
    number: int
    weight: int  #: of the time that this pass is late


class _Graph:
    """All passes of a step, and which needs which."""

    def __init__(
        self,
        plan: Plan,
        batches: Mapping[str, BatchPlan | ItemBatch],
        schedule: Schedule,
        *,
        backward: bool,
    ) -> None:
        self.devices = {device: number for number, device in enumerate(plan.members)}
        self.own: list[list[_TpGroup]] = [[] for _ in self.devices]  # of the module with the loss, by device
        self.fillers: list[list[_TpGroup]] = [[] for _ in self.devices]  # of modules of items
        self.count = 0  # passes
        self._backward, self._schedule = backward, schedule
        loss = plan.loss_module
        batch = batches.get(loss.module)
        if not isinstance(batch, BatchPlan):
            refuse(f"step: module {loss.module} takes samples, and needs a batch plan")
        # By pipeline and lane the passes at the first stage, by kind and micro-batch.
        self._first: dict[tuple[int, int], dict[tuple[str, int], _Pass]] = {}
        self._period: dict[tuple[int, int], int] = {}  # [us] of a micro-batch at the slowest stage
        for p, (pipeline, rows) in enumerate(zip(loss.pipelines, batch.pipelines, strict=True)):
            for j, lane in enumerate(pipeline.by_lane):
                self._add_lane(loss.module, p, j, lane, sum(bool(row.lanes[j]) for row in rows))
        for module in plan.modules:
            if not module.items:
                continue
            items = batches.get(module.module)
            if not isinstance(items, ItemBatch):
                refuse(f"step: module {module.module} takes {module.items}, and needs a batch of them")
            self._add_items(module, items)

    def _groups(self, module: str, p: int, j: int, lane: Pipeline) -> list[_TpGroup]:
        return [
            _TpGroup((module, p, j, s), tuple(self.devices[device] for device in stage.devices))
            for s, stage in enumerate(lane.stages)
        ]

    def _add_lane(self, module: str, p: int, j: int, lane: Pipeline, count: int) -> None:
        """The passes of a lane of the module with the loss."""
        groups, stages = self._groups(module, p, j, lane), len(lane.stages)
        found: dict[tuple[str, int, int], _Pass] = {}  # by kind, place, micro-batch
        for s, (group, stage) in enumerate(zip(groups, lane.stages, strict=True)):
            times = _times(stage)
            for device in group.devices:
                self.own[device].append(group)
            for kind, index, chunk in self._schedule(stages, s, count, lane.chunks) if count else ():
                if self._backward or kind == "forward":
                    one = _Pass(group, kind, index, chunk, times[kind][chunk])
                    found[kind, chunk * stages + s, index] = one
                    group.passes.append(one)
        self.count += len(found)
        last = stages * lane.chunks - 1
        for (kind, place, index), one in found.items():
            if kind == "forward":
                if place:
                    _needs(one, found["forward", place - 1, index])
            elif place < last:
                _needs(one, found["backward", place + 1, index])
        self._first[p, j] = {(kind, index): one for (kind, place, index), one in found.items() if not place}
        self._period[p, j] = max(sum(sum(part) for part in _times(stage).values()) for stage in lane.stages)

    def _add_items(self, module: ModulePlan, batch: ItemBatch) -> None:
        """The passes of a module of items. Those that are needed first have the lowest ranks."""

        def when(each: tuple[GroupId, ItemGroup]) -> tuple[int, int, GroupId]:
            row = each[1].micro_batch
            return row * self._period[each[1].pipeline, each[1].lane], row, each[0]

        lanes: dict[tuple[int, int], list[_TpGroup]] = {}
        for p, pipeline in enumerate(module.pipelines):
            for j, lane in enumerate(pipeline.by_lane):
                lanes[p, j] = groups = self._groups(module.module, p, j, lane)
                for group in groups:
                    group.ahead, group.lead = module.ahead, module.lead
                    beside = {id(own): own for device in group.devices for own in self.own[device]}
                    group.beside = list(beside.values())
                    for device in group.devices:
                        self.fillers[device].append(group)
        times = {
            (p, j): [_times(stage) for stage in lane.stages]
            for p, pipeline in enumerate(module.pipelines)
            for j, lane in enumerate(pipeline.by_lane)
        }
        backward = self._backward and module.trainable
        for rank, (name, items) in enumerate(sorted(batch.walk(), key=when)):
            at = name.pipeline, name.lane
            self._add_group(lanes[at], times[at], name, items, rank, backward=backward)

    def _add_group(
        self,
        groups: Sequence[_TpGroup],
        times: Sequence[_Times],
        name: GroupId,
        items: ItemGroup,
        rank: int,
        *,
        backward: bool,
    ) -> None:
        """The chain of passes of one group of items."""
        first = self._first[items.pipeline, items.lane]
        taking, giving = first["forward", items.micro_batch], first.get(("backward", items.micro_batch))
        rows = items.rows or ROWS * len(items.items)
        chunks = len(times[0]["forward"])
        places = [(group, chunk) for chunk in range(chunks) for group in groups]
        before: _Pass | None = None
        for kind in ("forward", "backward") if backward else ("forward",):
            for group, chunk in places if kind == "forward" else reversed(places):
                time = max(1, times[group.key[3]][kind][chunk] * rows // ROWS)
                order = rank * chunks + (chunks - 1 - chunk if kind == "forward" else chunk)
                one = _Pass(group, kind, name.number, chunk, time, order, items.micro_batch, taking.group)
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


def _needs(user: _Pass, one: _Pass, name: GroupId | None = None) -> None:
    user.missing += 1
    one.users.append(user)
    if name is not None or one.group is not user.group:
        user.receives.append((one, name))


#: By kind the times of the passes of a stage, by chunk [us].
_Times = dict[str, list[int]]


def _times(stage: Stage) -> _Times:
    """Chunks take their parts of the stage's times by their layers."""
    layers = stage.layers
    times = stage.microseconds
    if times == NO_TIMES:
        times = _FORWARD * layers, _BACKWARD * layers
    return {
        kind: [max(1, whole * (stop - start) // layers) for start, stop in stage.chunks]
        for kind, whole in zip(("forward", "backward"), times, strict=True)
    }


class _ModuleRun:
    """Runs all passes: whenever a device is free, or an input has come, what can begin there does."""

    order: list[_Pass]  #: as they begin

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self.order = []
        self._free = [0] * len(graph.devices)  # when each device has done what has begun
        # (time, number, device, a pass of items whose inputs are all there)
        self._events: list[tuple[int, int, int, _Pass | None]] = []
        self._number = 0
        for device in range(len(graph.devices)):
            self._push(0, device)
        while self._events:
            now, _, device, ready = heappop(self._events)
            if ready is not None:
                listed = ready.group.forwards if ready.kind == "forward" else ready.group.backwards
                heappush(listed, (ready.rank, ready))
            if self._free[device] <= now:
                self._look(device, now)
        if len(self.order) != graph.count:
            raise ValueError("the passes of this schedule wait for each other")

    def _push(self, time: int, device: int, ready: _Pass | None = None) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, device, ready))

    def _look(self, device: int, now: int) -> None:
        """Begins what is to begin on a device that is free."""
        graph = self._graph
        next_begin = _FAR
        for group in graph.own[device]:
            next_begin = self._next_begin(group)
        for group in graph.fillers[device]:
            free = all(self._free[each] <= now for each in group.devices)
            if free and (one := self._filler(group, now)) is not None:
                self._begin(one, now)
                return
        if next_begin <= now:
            (group,) = graph.own[device]
            self._begin(group.passes[group.begun], now)
        elif next_begin < _FAR:
            self._push(next_begin, device)

    def _next_begin(self, group: _TpGroup) -> int:
        """When the next pass of a stage of the module with the loss can begin, as far as that is known."""
        if group.begun == len(group.passes):
            return _FAR
        one = group.passes[group.begun]
        if one.missing:
            return _FAR
        begin = one.came
        for device in group.devices:
            if self._free[device] > begin:
                begin = self._free[device]
        return begin

    def _filler(self, group: _TpGroup, now: int) -> _Pass | None:
        """The pass of items that is to begin now on the devices of a TP group, all of them free."""
        back = group.backwards[0][1] if group.backwards else None
        if back is not None and group.kept >= group.ahead:
            return back
        ahead = group.forwards[0][1] if group.forwards else None
        if group.queue and (ahead is None or group.queue[0].rank < ahead.rank):
            head = group.queue[0]
            assert head.taker is not None
            if head.due < head.taker.started + group.ahead:
                ahead = head
            if not group.waits:
                group.waits = True
                head.taker.waiting.append(group)
        if ahead is not None and ahead.taker is not None and ahead.due < ahead.taker.started + group.lead:
            return ahead
        until = min(map(self._next_begin, group.beside), default=_FAR)
        if ahead is not None and 4 * (until - now) >= 3 * ahead.time:
            return ahead
        if back is not None and 2 * (until - now) >= back.time:
            return back
        return None

    def _begin(self, one: _Pass, now: int) -> None:
        group = one.group
        one.begin, one.end = now, now + one.time
        self.order.append(one)
        group.begun += 1
        if group.ahead:
            self._leave(group, one)
        elif one.kind == "forward" and not group.key[3] and not one.chunk:
            group.started += 1
            for waiting in group.waiting:
                waiting.waits = False
                self._push(now, waiting.devices[0])
            group.waiting.clear()
        for device in group.devices:
            self._free[device] = one.end
            self._push(one.end, device)
        for user in one.users:
            user.missing -= 1
            if one.end > user.came:
                user.came = one.end
            if not user.missing:
                self._push(user.came, user.group.devices[0], user if user.group.ahead else None)

    def _leave(self, group: _TpGroup, one: _Pass) -> None:
        """A pass of items waits no more."""
        group.passes.append(one)
        if one.kind == "backward":
            heappop(group.backwards)
            group.kept -= 1
        else:
            if group.queue and one is group.queue[0]:
                group.queue.popleft()
                group.waits = False  # its next one may be of another taker
            else:
                heappop(group.forwards)
            group.kept += 1
