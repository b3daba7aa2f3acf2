"""One linear order of the passes and messages of all modules: each rank carries out its part of it.

A list schedule in whole microseconds. A pass occupies the devices of its TP group, so that modules may share
all their devices, some, or none, and TP groups of unlike widths may overlap.

*The module with the loss* keeps the order of its schedule on each stage. *Modules of items* fill in: a pass of
theirs begins where its devices wait for at least three quarters of it (a backward pass: half of it), or when it
is due, `lead` micro-batches before the first stage of the module with the loss needs it, or when memory is
full. No forward pass begins more than `ahead` micro-batches early, so that a lane keeps the outputs of so many,
and of those in the pipeline. With `ahead` of all micro-batches the forward passes of items may all come first
and their backward passes last (the three phases of Megatron-LM's MIMO); with 1 they nest in the pipeline.

*Lanes* whose passes wait for each other have them at one place in the order, a row at a time (`module_passes`).

*Messages.* A message is sent and received at one place in the order (`message_places`): where both ends are
between two passes, up to four passes of its receiver before the one that needs it.

*Why no rank waits for ever.* Each act stands behind those that it needs, and a message has one place at both
ends. So the first act of the order that is not over can always go on, also on a device that carries out its
launches in one queue. Sums of gradients have a place in the order, too (`sum_places`). Where each rank launched
a sum when its own passes of the module are over, a rank would wait in a sum for another one, and that one for
passes of the first rank in another module.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from elasticd_planner.layout.message_places import MessagePlaces
from elasticd_planner.layout.module_passes import (
    ModulePass,
    ModulePasses,
    PassGroup,
    item_time,
    row_sizes,
    row_time,
    stage_microseconds,
)
from elasticd_planner.layout.pass_order import Act, Schedule
from elasticd_planner.spec.batch import BatchPlan, SequencePiece
from elasticd_planner.spec.item_batch import GroupId, ItemBatch
from elasticd_planner.spec.model import ModelSpec, section_of
from elasticd_planner.spec.plan import Plan

#: The time of a message from a pass to another one [us], and what goes over a border of modules.
Delay = Callable[[ModulePass, ModulePass, GroupId | None], int]

#: The tokens of mean work that a piece of a packed sequence counts as.
Work = Callable[[SequencePiece], float]

#: When a pass may begin whose input nobody makes yet.
_FAR = 1 << 60


class ModuleAct(NamedTuple):
    """An act of the members of one TP group: a pass, or their end of a message. Of lanes that pass a row
    together each has an act of its own."""

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
    plan: Plan,
    batches: Mapping[str, BatchPlan | ItemBatch],
    schedule: Schedule,
    *,
    backward: bool = True,
    device: str | None = None,
) -> tuple[ModuleAct, ...]:
    """All acts of a step, or of the component of a device, in one order that is the same on all ranks.

    A component has the pipelines that exchange items in the step, or share a device. No act of one needs an act
    of another one, so that a rank need not know the order of the others.

    A message between modules goes from the last stage of the module of items to the first stage of the module
    with the loss, and its gradient back. It is listed where both are on the same devices, too.

    Args:
        plan: of all modules.
        batches: of the step, by module: the batch plan of the module with the loss, and items of the others.
        schedule: the order of the passes of each stage of the module with the loss.
        backward: False: forward passes alone, as in an evaluation.
        device: whose component; None: all acts.

    Raises:
        Invalid: a module has no batch, or one of the other kind.
        ValueError: the passes of this schedule wait for each other.
    """
    run = _ModuleRun(ModulePasses(plan, batches, schedule, backward=backward, device=device))
    return tuple(_acts(run.order))


def module_pass_times(
    plan: Plan,
    batches: Mapping[str, BatchPlan | ItemBatch],
    schedule: Schedule,
    *,
    backward: bool = True,
    one_queue: bool = False,
    delay: Delay | None = None,
    actual: Plan | None = None,
    work: Work | None = None,
) -> tuple[ModulePassTime, ...]:
    """When the passes of that order run, in the order.

    Args:
        plan: as for `module_order`; and all below.
        batches: of the step, by module.
        schedule: of the module with the loss.
        backward: whether there are backward passes.
        one_queue: each device carries out its acts one after the other, so that the ends of a message wait for
            each other. Else messages go beside the passes.
        delay: the time of a message from a pass to another one, of stages or of modules [us]; None: they take
            none, as in the run that gives the order. Not with `one_queue`.
        actual: the same plan with the times that passes do take; None: those of the plan, which give the order.
        work: the tokens that pieces of packed sequences do count as; None: as many as they have, by which the
            order is made.
    """
    order = _ModuleRun(ModulePasses(plan, batches, schedule, backward=backward)).order
    if actual is not None or work is not None:
        _set_times(order, actual or plan, batches, work)
    if one_queue:
        _in_one_queue(order)
    elif delay is not None or actual is not None or work is not None:
        _delayed(order, len(plan.members), delay or _no_time)
    return tuple(
        ModulePassTime(act, one.begin, one.end)
        for one in order
        for act in _acts_of(one, "pass")
        if act.act.what == "pass"
    )


def step_microseconds(
    plan: Plan,
    batches: Mapping[str, BatchPlan | ItemBatch],
    schedule: Schedule,
    delay: Delay,
    actual: Plan | None = None,
    work: Work | None = None,
    limit: float = math.inf,
) -> float:
    """The end of the last pass of that order [us]. Arguments as for `module_pass_times`, besides:

    Args:
        limit: where the end is later, it may be inf; not with `actual` times, nor with `work`.
    """
    graph = ModulePasses(plan, batches, schedule, backward=True)
    try:
        if actual is None and work is None:
            return _DelayedRun(graph, delay, limit).end
        order = _ModuleRun(graph).order
        _set_times(order, actual or plan, batches, work)
        _delayed(order, len(plan.members), delay)
        return max(one.end for one in order)
    finally:
        graph.clear()


def _no_time(sender: ModulePass, receiver: ModulePass, name: GroupId | None) -> int:
    return 0


def _set_times(
    order: Sequence[ModulePass],
    plan: Plan,
    batches: Mapping[str, BatchPlan | ItemBatch],
    work: Work | None,
) -> None:
    """Sets what passes take to the times of a plan, and to the work of packed rows."""
    loss = plan.loss_module
    if work is not None and isinstance(rows := batches[loss.module], BatchPlan):
        sizes = [row_sizes(*pair, work) for pair in zip(loss.pipelines, rows.pipelines, strict=True)]
        for one in order:
            if one.group.sizes:
                one.group.sizes = sizes[one.group.key[1]]
    times = {
        (module.module, p, j, s): stage_microseconds(stage)
        for module in plan.modules
        for p, pipeline in enumerate(module.pipelines)
        for j, lane in enumerate(pipeline.by_lane)
        for s, stage in enumerate(lane.stages)
    }
    means = {module.module: module.item_rows for module in plan.modules}
    for one in order:
        one.time = row_time(times[one.group.key][one.kind][one.chunk], one.group, one.index)
        module, p, j, _ = one.group.key
        if isinstance(items := batches[module], ItemBatch):
            one.time = item_time(one.time, items.pipelines[p][j][one.index], means[module])


def _delayed(order: Sequence[ModulePass], devices: int, delay: Delay) -> None:
    """Sets the times of passes to those with messages that take time, beside the passes."""
    free = [0] * devices
    for one in order:
        begin = 0
        for device in one.group.devices:
            if free[device] > begin:
                begin = free[device]
        for sender, name in one.receives:
            came = sender.end + delay(sender, one, name)
            if came > begin:
                begin = came
        one.begin = begin
        one.end = begin + one.time
        for device in one.group.devices:
            free[device] = one.end


def _in_one_queue(order: Sequence[ModulePass]) -> None:
    """Sets the times of passes to those in one queue."""
    messages = _messages(order)
    free: dict[int, int] = defaultdict(int)
    at = 0
    for place, one in enumerate(order):
        while at < len(messages) and messages[at][0] == place:
            _, _, _, sender, receiver, _ = messages[at]
            if sender.group.devices != receiver.group.devices:
                ends = (*sender.group.devices, *receiver.group.devices)
                free.update(dict.fromkeys(ends, max(free[device] for device in ends)))
            at += 1
        one.begin = max(free[device] for device in one.group.devices)
        one.end = one.begin + one.time
        free.update(dict.fromkeys(one.group.devices, one.end))


def _acts_of(
    one: ModulePass, what: str, name: GroupId | None = None, lanes: Sequence[int] = ()
) -> Iterable[ModuleAct]:
    """The acts of a pass, or of an end of a message.

    Args:
        one: the pass.
        what: its part in it.
        name: of the group of items that the message is of.
        lanes: of those that pass a row together: that have a part in the message; empty: all.
    """
    new = tuple.__new__  # in few instructions: an order is made each step
    module, pipeline, lane, stage = one.group.key
    if not one.group.rows:
        act = new(Act, (what, one.kind, one.index, one.chunk))
        return (new(ModuleAct, (module, pipeline, lane, stage, act, name)),)
    acts = []
    for number, places in enumerate(one.group.rows):
        if (index := places.get(one.index)) is not None:
            if lanes and number not in lanes:
                continue
            act = Act(what, one.kind, index, one.chunk)  # type: ignore[arg-type]
        elif what == "pass" and one.group.serves:
            act = Act("serve", one.kind, one.index, one.chunk)
        else:
            continue
        acts.append(ModuleAct(module, pipeline, number, stage, act, name))
    return acts


#: The pass of the order that comes next, the time, a number (so that no two are equal), sender, receiver, and
#: what goes over a border of modules.
_Message = tuple[int, int, int, ModulePass, ModulePass, GroupId | None]


def _messages(order: Sequence[ModulePass]) -> list[_Message]:
    """All messages, in their order."""
    place_of, found = MessagePlaces(order).of, list[_Message]()
    for one in order:
        for sender, name in one.receives:
            found.append((*place_of(sender, one), len(found), sender, one, name))
    found.sort()
    return found


def _acts(order: Sequence[ModulePass]) -> Iterator[ModuleAct]:
    """The passes in this order, and all messages."""
    messages = _messages(order)
    at, last = 0, len(messages)
    for place, one in enumerate(order):
        while at < last and messages[at][0] == place:
            _, _, _, sender, receiver, name = messages[at]
            lanes = () if name is None else sender.takers or receiver.takers
            # A lane's term of a gradient is received before another lane sends its own: members of both may
            # receive the term of the other.
            for part in [(lane,) for lane in lanes] if sender.group.rows and lanes else [lanes]:
                yield from _acts_of(sender, "send", name, part)
                yield from _acts_of(receiver, "receive", name, part)
            at += 1
        yield from _acts_of(one, "pass")


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
        if module == name and act.what in ("pass", "serve") and act.kind == "backward":
            last[pipeline, lane, stage, act.chunk] = index
    lanes = [pipeline.by_lane for pipeline in view.pipelines]
    found = dict.fromkeys(spec.sections(0, len(spec.layers)), -1)
    for (pipeline, lane, stage, chunk), index in last.items():
        for section in spec.sections(*lanes[pipeline][lane].stages[stage].chunks[chunk]):
            found[section] = max(found[section], index)
    return {section: len(order) - 1 if index < 0 else index for section, index in found.items()}


def sum_places(
    order: Sequence[ModuleAct], modules: Sequence[tuple[Plan, ModelSpec]], *, chained: bool
) -> dict[str, dict[str, int]]:
    """After which act of the order all members launch a sum of gradients: a member does before the first of its
    own acts that comes later.

    Sums of a module have one sequence, the last parameters first, and those at one place that of the modules.
    None stands before one that precedes it, whether or not a member takes part in that one: of parameters that
    are tied, some members have sums, and others have not. Ranks of different components (`module_order`) have
    orders of their own. So that they launch the sums that they share in one sequence, too, all sums of a module
    then precede those of the next one.

    Args:
        order: of all modules, or of a component.
        modules: those that are trained, by view and model, in the sequence of their sums.
        chained: the order is of a component.

    Returns:
        By module and parameter the index in `order`; a bucket stands where the last of its pieces does.
    """
    found: dict[str, dict[str, int]] = {}
    least = -1
    for view, spec in modules:
        done = sections_done(order, view, spec)
        least = least if chained else -1
        users: dict[str, list[str]] = defaultdict(list)
        for alias, owner in spec.ties:
            users[owner].append(alias)
        places = found[view.module.module] = {}
        for name in reversed([*spec.parameters]):
            least = max(least, *(done[section_of(user)] for user in (name, *users.get(name, ()))))
            places[name] = least
    return found


class _ModuleRun:
    """Runs all passes: whenever a device is free, or an input has come, what can begin there does."""

    order: list[ModulePass]  #: as they begin
    _ended = False  # before all passes have begun

    def __init__(self, graph: ModulePasses) -> None:
        self._graph = graph
        self.order = []
        self._free = [0] * len(graph.devices)  # when each device has done what has begun
        # (time, number, devices, a pass of items whose inputs are all there)
        self._events: list[tuple[int, int, tuple[int, ...], ModulePass | None]] = []
        self._number = 0
        self._push(0, tuple(range(len(graph.devices))))
        while self._events and not self._ended:
            now, _, devices, ready = heappop(self._events)
            if ready is not None:
                listed = ready.group.forwards if ready.kind == "forward" else ready.group.backwards
                heappush(listed, (ready.rank, ready))
            for device in devices:
                if self._free[device] <= now:
                    self._look(device, now)
        if len(self.order) != graph.count and not self._ended:
            raise ValueError("the passes of this schedule wait for each other")

    def _push(self, time: int, devices: tuple[int, ...], ready: ModulePass | None = None) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, devices, ready))

    def _look(self, device: int, now: int) -> None:
        """Begins what is to begin on a device that is free."""
        for group in self._graph.fillers[device]:
            if not (group.backwards or group.forwards or group.queue):
                continue
            for each in group.devices:
                if self._free[each] > now:
                    break
            else:
                if (one := self._filler(group, now)) is not None:
                    self._begin(one, now)
                    return
        for group in self._graph.own[device]:
            next_begin = self._next_begin(group)
            if next_begin <= now:
                self._begin(group.passes[group.begun], now)
            elif (
                next_begin < _FAR and len(group.devices) > 1
            ):  # one device alone is looked at as its input comes
                self._push(next_begin, (device,))

    def _next_begin(self, group: PassGroup) -> int:
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

    def _filler(self, group: PassGroup, now: int) -> ModulePass | None:
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
        if ahead is None and back is None:
            return None
        until = min(map(self._next_begin, group.beside), default=_FAR)
        if ahead is not None and 4 * (until - now) >= 3 * ahead.time:
            return ahead
        if back is not None and 2 * (until - now) >= back.time:
            return back
        return None

    def _begin(self, one: ModulePass, now: int) -> None:
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
                self._push(now, waiting.devices[:1])
            group.waiting.clear()
        for device in group.devices:
            self._free[device] = one.end
        self._push(one.end, group.devices)
        for user in one.users:
            user.missing -= 1
            if one.end > user.came:
                user.came = one.end
            if not user.missing:
                self._push(user.came, user.group.devices[:1], user if user.group.ahead else None)

    def _leave(self, group: PassGroup, one: ModulePass) -> None:
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


class _DelayedRun(_ModuleRun):
    """The run, and beside it when passes end if messages take time. It is over once that must be later than a
    limit: by the work that is left on a device, or on a stage and the way of the last gradient from there."""

    end: float  #: of the last pass [us]; inf: later than the limit

    def __init__(self, graph: ModulePasses, delay: Delay, limit: float) -> None:
        self._delay, self._limit, self.end = delay, limit, 0
        self._late = [0] * len(graph.devices)  # when each device has done, with messages
        self._left = [0] * len(graph.devices)  # what passes take there that have not begun
        for device, groups in enumerate(graph.groups):
            self._left[device] = sum(group.left for group in groups)
        super().__init__(graph)

    def _begin(self, one: ModulePass, now: int) -> None:
        super()._begin(one, now)
        group, late, left = one.group, self._late, self._left
        begin = 0
        for device in group.devices:
            if late[device] > begin:
                begin = late[device]
        for sender, name in one.receives:
            arrival = sender.late + self._delay(sender, one, name)
            if arrival > begin:
                begin = arrival
        one.late = end = begin + one.time
        group.left -= one.time
        least = end + group.left + group.tail
        for device in group.devices:
            late[device] = end
            left[device] -= one.time
            if end + left[device] > least:
                least = end + left[device]
        if end > self.end:
            self.end = end
        if least > self._limit:
            self.end, self._ended = math.inf, True
