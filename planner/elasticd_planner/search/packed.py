"""Packed plans: pipelines, lanes, TP sizes and stages chosen for the lengths of a step's sequences.

How many rows a step has, and of how many tokens, follows from the plan: from the memory of its lanes. So dense
plans are made for rows of several sizes (views): each view has as many micro-batches as the step has such rows,
and its plans hold them. Small rows let many narrow copies be, large ones ask for wide TP groups or more stages.

Of each view the regular layouts are tried, which are quickly listed. The dense search, which takes longer, is
asked where no layout for rows of these sizes holds the longest sequence, for rows of which k lanes hold it; and
of few devices in one node for rows of the best size, near the form of the best layout. Each plan is tried with
its pipelines of equal borders joined into 1, 2, 4 ... lanes (`lanes`). Plans that hold the longest sequence are
compared by the packed cost (`PackedCost`): by the seconds that these lengths take. A longer sequence that may
come is held, too, where some plan holds it; else half of it, and so on. Among equal plans the one that moves
the fewest bytes from the running plan is taken, and then the one with the fewest lanes.

Slow devices: borders of lanes must be equal, so that plans for normal devices, whose lanes get unequal shares
of tokens, stand beside those that move layers from a slow device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np

from elasticd_planner.cost.memory import fewest_devices
from elasticd_planner.cost.packed_cost import PackedCost
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Answer, Problem, Refusal, SearchSpace
from elasticd_planner.search import given_plan, lanes
from elasticd_planner.search.large import SMALL
from elasticd_planner.search.options import Form, form, task_of
from elasticd_planner.search.task import EXACT_DEVICES, alive, plan_of
from elasticd_planner.spec.model import apportion
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import PackedLane, Pipeline, Plan, Prediction
from elasticd_planner.spec.plan_summary import describe

#: The dense search, of a problem without packed sequences; near plans of a form alone, if one is given.
Search = Callable[[Problem, Form | None], Answer]
#: Plans of the best regular layouts for such a problem.
Regular = Callable[[Problem], Sequence[Plan]]

#: Rows of so many sizes are tried, each half of the one before; of many devices every second one.
_SIZES = 8
#: Tokens of the rows by which what each token takes is told from the state.
_FEW = 1024.0
#: How much more tokens a row has than the one before, of those by which it is told what lanes may hold.
_STEP = 1.1
#: Plans of regular layouts that a search of several modules looks at.
REGULAR = 8
#: Where all memory holds less than so many times the longest sequence, what may hold it is tried first.
_TIGHT = 2


def answer(problem: Problem, search: Search, regular: Regular, number: int, tolerance: float) -> Answer:
    """The best packed plan, or why there is none.

    Args:
        problem: with packed sequences.
        search: the dense search, for the problem's views.
        regular: the regular layouts of a view.
        number: of the plan.
        tolerance: plans within this fraction of the best count as equal to it if there is a running plan.
    """
    assert problem.packed is not None
    planning = _PackedSearch(
        problem=problem, packed=problem.packed, search=search, regular=regular, number=number
    )
    if problem.given is None:
        return planning.answer(tolerance)

    def searched(other: Problem) -> Answer:
        own = msgspec.structs.replace(other, current=problem.current)
        return answer(own, search, regular, number, tolerance)

    return given_plan.answer(problem, planning.as_given, searched)


def regular_plans(problem: Problem, search: Search, regular: Regular, number: int) -> list[Plan]:
    """Packed plans of regular layouts, the quickest first: the best of each TP size, and number of pipelines,
    lanes and stages.

    Args:
        problem: with packed sequences.
        search: the dense search, for the problem's views.
        regular: the regular layouts of a view.
        number: of the plans.
    """
    assert problem.packed is not None
    planning = _PackedSearch(
        problem=problem, packed=problem.packed, search=search, regular=regular, number=number
    )
    best: dict[tuple[object, ...], _Option] = {}
    for option in sorted(planning._layouts(tight=False).options, key=lambda each: each.seconds):
        pipelines = option.plan.pipelines
        kind = form(option.plan), len(pipelines), option.lanes, max(len(each.stages) for each in pipelines)
        best.setdefault(kind, option)
    return [option.plan for option in best.values()][:REGULAR]


@dataclass(frozen=True, kw_only=True)
class _Option:
    """A packed plan, and what it is compared by."""

    plan: Plan
    seconds: float
    moved: int
    lanes: int
    longest: int  # [tokens] of the sequence that a pipeline of it holds at most

    def preference(self, current: Plan | None) -> tuple[int, bool, int, float]:
        """Among plans of equal time."""
        changed = current is not None and shape(self.plan) != shape(current)
        return self.moved, changed, self.lanes, round(self.seconds, 12)


@dataclass(kw_only=True)
class _Layouts:
    """Packed plans of regular layouts. seconds, forms: of the best, by the tokens of rows."""

    options: list[_Option] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)

    def add(self, other: _Layouts) -> None:
        """Those of both."""
        self.options += other.options
        for size, seconds in other.seconds.items():
            if seconds < self.seconds.get(size, math.inf):
                self.forms[size] = other.forms[size]
            self.seconds[size] = min(seconds, self.seconds.get(size, math.inf))

    @property
    def ranked(self) -> list[int]:
        """Tokens of rows, the quickest first."""
        return sorted(self.seconds, key=lambda size: (self.seconds[size], size))

    @property
    def usual(self) -> bool:
        """Returns whether rows of some usual size hold the sequences."""
        return any(map(math.isfinite, self.seconds.values()))

    def around(self, sizes: list[int]) -> list[int]:
        """The best of these tokens of rows and those beside it; all, where no layout holds the sequences."""
        if not self.options:
            return sizes
        at = sizes.index(self.ranked[0])
        return sizes[max(0, at - 1) : at + 2]


@dataclass(frozen=True, kw_only=True)
class _PackedSearch:
    """One search for a packed plan."""

    problem: Problem
    packed: PackedSequences
    search: Search
    regular: Regular
    number: int
    _rooms: list[int] = field(default_factory=list)  # tokens that a pipeline of the plans tried holds

    @cached_property
    def cost(self) -> PackedCost:
        """The cost of its plans."""
        return cost_of(self.problem)

    def answer(self, tolerance: float) -> Answer:
        """The best plan of all views."""
        current, refusals, tried, options = self.problem.current, list[Refusal](), 0, list[_Option]()
        if current is not None and (kept := self._kept(current)) is not None:
            options.append(kept)
        now = self._now(current)
        if 1 < (room := self._room()) < self.packed.longest:
            self._rooms.append(room)
            return Answer.refused(self._too_long(), current_seconds=now, candidates=1)
        tight = room < _TIGHT * self.packed.longest  # few plans hold it, if any: these come first
        beyond = tight and not options and room > 1 and self._beyond_memory()
        for part in (1, 2, 4) if tight else ():  # of what holds a part it is known how much that is
            length = self.packed.longest // part
            options += self._all_widest_regular(length) if beyond else self._widest(length)
            if options or any(most > 1 for most in self._rooms):
                break
        if beyond or (tight and not options and any(most > 1 for most in self._rooms)):
            return Answer.refused(self._too_long(), current_seconds=now, candidates=1)
        layouts = self._layouts(tight=tight)
        options += layouts.options
        if not options and not tight and any(most > 1 for most in self._rooms) and self._beyond_memory():
            return Answer.refused(self._too_long(), current_seconds=now, candidates=1)
        pinned = self.problem.search_space.fixed_tp is not None
        if not tight and not (layouts.options if pinned else layouts.usual):
            options += self._widest_dense(self.packed.longest)
        for view, like in self._searched(layouts) if layouts.usual or not options else ():
            found = self.search(view, like)
            tried += found.candidates
            if found.plan is None:
                refusals.append(Refusal(found.refusal, found.cause))
            else:
                options += self._joined(found.plan.pipelines)
        if not options:
            return Answer.refused(self._refusal(refusals), current_seconds=now, candidates=tried)
        options = self._likely(options, room)
        slack = tolerance if current is not None else 0.0
        limit = min(option.seconds for option in options) * (1 + slack) * (1 + EQUAL)
        equal = [option for option in options if option.seconds <= limit]
        chosen = min(equal, key=lambda option: option.preference(current)).plan
        if current is not None and now is not None and shape(chosen) == shape(current):
            chosen = chosen.replace(strategies=current.strategies)  # its first shares are of no interest now
        return Answer(plan=self.told(chosen), current_seconds=now, candidates=tried + len(options))

    # -- what is searched

    def _sizes(self) -> Iterator[int]:
        """Tokens of rows: those of which some lanes hold the longest sequence, and halves of the most."""
        packed, devices = self.packed, len(alive(self.problem))
        limit = packed.most_tokens(self.problem.micro_batch)
        top = max(1, min(limit, max(packed.longest, math.ceil(packed.tokens))))
        few = devices <= EXACT_DEVICES
        found = {max(1, top >> step) for step in (range(_SIZES) if few else range(0, _SIZES, 2))}
        if packed.cut and few:
            found |= {min(limit, -(-packed.longest // count)) for count in range(1, devices + 1)}
        least = min(top, 4 * packed.least)  # a row that is shorter than two pieces is waste
        yield from sorted({size for size in found if size > least} | {least}, reverse=True)

    def _normal(self, size: int) -> Problem:
        """The problem with rows of this size as its micro-batches, and as if nothing were slow: lanes get
        unequal shares of tokens. Where sequences stay whole it is as it is."""
        if not self.packed.cut:
            return self._view(size)
        rates = {name: rate for name, rate in self.problem.rates.items() if not math.isfinite(rate)}
        return self._view(size, rates=rates)

    def _holding(self, size: int) -> Problem:
        """The same, with memory for no fewer tokens in a row."""
        return msgspec.structs.replace(self._normal(size), profile=self.problem.profile.sized(float(size)))

    def _layouts(self, *, tight: bool) -> _Layouts:
        """The regular layouts with TP groups of each size, of rows of which lanes hold the longest sequence
        where those of usual sizes do not. Free to choose a TP size, the search finds what it finds with any of
        them pinned. tight: layouts for the longest sequence were tried already."""
        layouts = _Layouts()
        for width in self._tp_sizes():
            of_width = self._layouts_of(width)
            layouts.add(of_width)
            if not of_width.options and not tight:
                layouts.options += self._widest_regular(self.packed.longest, width)
        return layouts

    def _tp_sizes(self) -> list[int]:
        """TP sizes that are tried: the pinned one, or all; of many devices those that divide a node."""
        pin = self.problem.search_space.fixed_tp
        counts = [len(node.devices) for node in self.problem.cluster.nodes]
        widths = self.cost.cost.widths(max(counts))
        if pin is not None:
            return [width for width in widths if width == pin]
        many = len(alive(self.problem)) > SMALL
        return [width for width in widths if not many or any(count % width == 0 for count in counts)]

    def _layouts_of(self, width: int) -> _Layouts:
        """The regular layouts with TP groups of this size, of rows of several sizes: of few devices of every
        second one, then of those beside the best; of these also layouts that move layers from slow devices."""
        layouts, sizes = _Layouts(), list(self._sizes())
        few = len(alive(self.problem)) <= EXACT_DEVICES
        for size in sizes[::2] if few else sizes:
            self._lay_out(layouts, size, width, self._normal(size))
        around = layouts.around(sizes)
        for size in around:
            if size not in layouts.seconds:
                self._lay_out(layouts, size, width, self._normal(size))
        if self.packed.cut and any(map(math.isfinite, self.problem.rates.values())):
            for size in around:
                self._lay_out(layouts, size, width, self._view(size))
        return layouts

    def _lay_out(self, layouts: _Layouts, size: int, width: int, view: Problem) -> None:
        """Adds the view's regular layouts with TP groups of this size."""
        layouts.seconds.setdefault(size, math.inf)
        space = msgspec.structs.replace(view.search_space, fixed_tp=width)
        for plan in self.regular(msgspec.structs.replace(view, search_space=space)):
            options = list(self._joined(plan.pipelines))
            layouts.options += options
            seconds = min((option.seconds for option in options), default=math.inf)
            if seconds < layouts.seconds[size]:
                layouts.seconds[size], layouts.forms[size] = seconds, form(plan)

    def _searched(self, layouts: _Layouts) -> Iterator[tuple[Problem, Form | None]]:
        """The questions to the dense search, and near which form: rows of all sizes where no plan holds the
        longest sequence yet; else, of few devices in one node, those of the best layout."""
        ranked, devices = layouts.ranked, alive(self.problem)
        if not layouts.usual:
            views = {view.global_batch: view for view in map(self._normal, sorted(ranked))}
            yield from ((view, None) for view in reversed(views.values()))
        elif len({device.node for device in devices}) == 1 and len(devices) <= EXACT_DEVICES:
            yield self._normal(ranked[0]), layouts.forms.get(ranked[0])

    def _view(self, size: int, **changes: object) -> Problem:
        count, devices = max(1, round(self.packed.tokens / size)), len(alive(self.problem))
        if count > devices:  # as many for each copy, whatever their number: rows are not so coarse
            count = -(-count // devices) * devices
            size = max(1, round(self.packed.tokens / count))
        space = msgspec.structs.replace(self.problem.search_space, micro_batches=(), interleave=1, lanes=1)
        view = msgspec.structs.replace(
            self.problem,
            profile=self.problem.profile.sized(float(size)),
            global_batch=count,
            micro_batch=1,
            packed=None,
            current=self._current_of(count),
            search_space=space,
        )
        return msgspec.structs.replace(view, **changes)

    def _current_of(self, count: int) -> Plan | None:
        """The running plan as one of so many micro-batches, lane by lane."""
        current = self.problem.current
        if current is None or len(current.by_lane) > count:
            return None
        weights = tuple(max(1, lane.micro_batches) for lane in current.by_lane)
        pipelines = (
            msgspec.structs.replace(lane, micro_batches=rows, packed=())
            for lane, rows in zip(current.by_lane, apportion(count, weights), strict=True)
        )
        return current.with_pipelines(pipelines, global_batch=count, micro_batch=1)

    def _likely(self, options: list[_Option], room: int) -> list[_Option]:
        """Those of the options that hold the sequence which may come, or others that do; where none does, half
        of it, and so on: the job stops at a sequence that its plan does not hold. room: as of `_room`."""
        wanted = self.packed.likely
        while wanted > self.packed.longest:
            if held := [option for option in options if option.longest >= wanted]:
                return held
            if wanted <= room and (held := self._widest(wanted)):
                return held
            wanted //= 2
        return options

    def _widest(self, longest: int) -> list[_Option]:
        """Plans of one pipeline of k lanes that holds a sequence of this length: regular layouts with TP groups
        of each size, of all k that do. Where there are none, what the dense search finds."""
        return self._all_widest_regular(longest) or self._widest_dense(longest)

    def _all_widest_regular(self, longest: int) -> list[_Option]:
        """Those that are regular layouts, with TP groups of each size."""
        return [option for width in self._tp_sizes() for option in self._widest_regular(longest, width)]

    def _widest_dense(self, longest: int) -> list[_Option]:
        """Those that the dense search finds; also with layers moved from slow devices."""
        slow = self.packed.cut and any(map(math.isfinite, self.problem.rates.values()))

        def plans(view: Problem) -> Iterator[Plan]:
            for rates in (view.rates, self.problem.rates) if slow else (view.rates,):
                plan = self.search(msgspec.structs.replace(view, rates=rates), None).plan
                if plan is None:
                    return
                yield plan

        return self._held(longest, self.problem.search_space.fixed_tp, plans)

    def _widest_regular(self, longest: int, width: int) -> list[_Option]:
        """Those that are regular layouts with TP groups of this size."""
        return self._held(longest, width, self.regular)

    def _held(
        self, longest: int, width: int | None, plans: Callable[[Problem], Iterable[Plan]]
    ) -> list[_Option]:
        """Plans that hold a sequence of this length, as long as more lanes hold it, too."""
        options = list[_Option]()
        for view in self._of_lanes(longest, width):
            joined = [option for plan in plans(view) for option in self._joined(plan.pipelines)]
            held = [option for option in joined if option.longest >= longest]
            if options and not held:
                break
            options += held
        return options

    def _of_lanes(self, longest: int, width: int | None) -> Iterator[Problem]:
        """The problem with rows of which k lanes hold a sequence of this length, for every k whose copies of
        the state leave memory for it; of many devices for the powers of two, for so many parts of all devices,
        and for as many lanes as memory holds. width: of TP groups; None: any."""
        devices = len(alive(self.problem))
        counts = set(range(1, devices + 1))
        if devices > EXACT_DEVICES:
            powers = {1 << k for k in range(devices.bit_length())}
            counts = powers | {devices // power for power in powers}
            counts |= {min(devices, max(1, self._copies - less)) for less in (0, 1)}
        for count in sorted(counts) if self.packed.cut else (1,):
            if self._room(count) < longest or count * (width or 1) > devices:
                continue
            view = self._holding(-(-longest // count))
            yield msgspec.structs.replace(
                view,
                search_space=msgspec.structs.replace(view.search_space, fixed_dp=count, fixed_tp=width),
                global_batch=max(count, view.global_batch),
                current=None,
            )

    # -- from what is found to packed plans

    def _joined(self, pipelines: Sequence[Pipeline]) -> Iterator[_Option]:
        """Pipelines with several numbers of lanes, as far as these hold the longest sequence."""
        most = min(self.problem.search_space.lanes, len(pipelines)) if self.packed.cut else 1
        seen: list[tuple[Pipeline, ...]] = []
        for count in sorted({*(1 << k for k in range(most.bit_length())), most}):
            joined = lanes.joined(pipelines, count)
            if joined in seen:
                continue
            seen.append(joined)
            made = self.packed_plan(joined)
            if made is not None:
                yield self._option(made)

    def _option(self, made: Plan) -> _Option:
        current = self.problem.current
        moved = bytes_to_move(self.problem.profile, current, made) if current is not None else 0
        most = max(len(pipeline.packed) for pipeline in made.pipelines)
        longest = max(self.cost.longest([lane.capacity for lane in each.packed]) for each in made.pipelines)
        seconds = self.cost.seconds(made)
        return _Option(plan=made, seconds=seconds, moved=moved, lanes=most, longest=longest)

    def packed_plan(self, pipelines: Sequence[Pipeline]) -> Plan | None:
        """The packed plan of these pipelines; None where they do not hold the longest sequence."""
        plan, room = with_rows(self.problem, self.cost, pipelines, self.number)
        self._rooms.append(room)
        return plan

    def told(self, made: Plan, prefix: str = "") -> Plan:
        """A plan with its number, prediction and reason."""
        seconds = self.cost.seconds(made)
        prediction = Prediction(
            step_seconds=seconds, bound_seconds=min(seconds, self.cost.bound()), memory=self.cost.memory(made)
        )
        reason = prefix + describe(made, self.problem.rates, self.problem.packed)
        return made.replace(number=self.number, prediction=prediction, reason=reason)

    # -- the running plan

    def _usable(self, plan: Plan) -> bool:
        there = {device.name for device in alive(self.problem)}
        return there.issuperset(plan.members) and plan.pipelines[0].layers == self.problem.profile.layers

    def _kept(self, current: Plan) -> _Option | None:
        """The running plan with rows for the sequences of now."""
        if not self._usable(current):
            return None
        made = self.packed_plan(current.pipelines)
        return None if made is None else self._option(made)

    def _now(self, current: Plan | None) -> float | None:
        """Seconds of the running plan as it is; None where it cannot run."""
        if current is None or not current.packed or not self._usable(current):
            return None
        seconds = self.cost.seconds(current)
        return seconds if math.isfinite(seconds) else None

    # -- why there is none

    @cached_property
    def _memory(self) -> int:
        """Bytes of all devices."""
        return sum(self.problem.cluster.memory[device.name] for device in alive(self.problem))

    @property
    def _copies(self) -> int:
        """Copies of the state that all memory holds at most."""
        return int(self._memory // max(1.0, self._least[0]))

    def _room(self, copies: int = 1) -> int:
        """Tokens of a sequence that all memory holds at most beside so many copies of the state, of which ZeRO
        shards all but one: each token is kept once."""
        limit = (self.packed.row_tokens or 1 << 40) * (len(alive(self.problem)) if self.packed.cut else 1)
        state, token = self._least
        whole = 1 if self.problem.search_space.states[0].zero else copies
        return int(min(limit, (self._memory - whole * state) / max(token, 1e-9) * (1 + EQUAL)))

    def _beyond_memory(self) -> bool:
        """Whether the lanes of no pipeline hold the longest sequence, even if every device had the largest
        memory, and TP groups could be anywhere."""
        longest = self.packed.longest
        count, layers = len(alive(self.problem)), self.problem.profile.layers
        memory = max(self.problem.cluster.memory[device.name] for device in alive(self.problem))
        widths = self.cost.cost.widths(max(len(node.devices) for node in self.problem.cluster.nodes))
        most = np.zeros(count + 1, dtype=np.int64)  # tokens of a lane's row, by its devices
        tokens = 1
        while tokens < longest:
            fewest = min(
                fewest_devices(cost.sized(tokens), layers, count, widths, memory, layers)
                for cost in self._leanest
            )
            if not math.isfinite(fewest):
                break
            tokens = min(longest, max(tokens + 1, int(tokens * _STEP)))
            most[int(fewest) :] = tokens
        together = np.zeros(count + 1, dtype=np.int64)  # of all lanes of a pipeline, by their devices
        for devices in range(1, count + 1):
            together[devices] = (together[:devices] + most[devices:0:-1]).max()
        return bool((together if self.packed.cut else most)[count] < longest)

    @cached_property
    def _leanest(self) -> list[ProfileCost]:
        """The costs of rows that may ask the least memory of a device."""
        space, cost, count = self.problem.search_space, self.cost.cost, len(alive(self.problem))
        if cost.state.zero:
            cost = replace(cost, pipelines=count, members=count)
        return [
            replace(cost, recompute=again, sequence_parallel=sliced)
            for again in {space.recompute == "always", bool(space.recompute)}
            for sliced in {space.sequence_parallel == "always", bool(space.sequence_parallel)}
        ]

    @cached_property
    def _least(self) -> tuple[float, float]:
        """The fewest bytes of a copy of the state, and of a token of a row, on all its devices together."""
        profile, devices = self.problem.profile, alive(self.problem)
        states, tokens = list[float](), list[float]()
        for cost in self._leanest:
            for width in cost.widths(len(devices)):
                few, more = (
                    sum(
                        cost.sized(size).memory(
                            profile.layers, (1,) * width, position, first=True, last=True, in_flight=1
                        )
                        for position in range(width)
                    )
                    for size in (_FEW, 2 * _FEW)
                )
                states.append(2 * few - more)
                tokens.append((more - few) / _FEW)
        return min(states, default=0.0), min(tokens, default=0.0)

    def as_given(self, given: Plan) -> Plan | str:
        """A plan from elsewhere with packed lanes; or why it does not hold the rows."""
        made = self.packed_plan(given.pipelines)
        return self._too_long().text if made is None else self.told(made, "given by the job: ")

    def _refusal(self, refusals: Iterable[Refusal]) -> Refusal:
        said = list(refusals)
        if not any(room > 1 for room in self._rooms) and said:
            return said[-1]
        return self._too_long()

    def _too_long(self) -> Refusal:
        packed, most = self.packed, max(self._rooms, default=0)
        held = "the lanes of no pipeline hold" if packed.cut else "no lane holds"
        remedies = ["add a node", "leave out or shorten such samples"]
        if packed.row_tokens and most >= packed.row_tokens:
            remedies.insert(0, "raise Packing(tokens=...)")
        if not packed.cut:
            remedies.insert(0, "let sequences be cut over devices, Packing(cut=True)")
        text = (
            f"does not fit: {packed.sample or 'a sequence'} has {packed.longest} tokens, and {held} more than "
            f"{most} in a row; "
            f"{', or '.join(remedies)}"
        )
        return Refusal(text, "memory")


def cost_of(problem: Problem) -> PackedCost:
    """The cost of packed plans of a problem, of its module with the loss, under its load of experts if it has
    one."""
    assert problem.packed is not None
    alone = SearchSpace(states=problem.search_space.states[:1])
    dense = task_of(msgspec.structs.replace(problem, search_space=alone, packed=None, modules=())).cost
    assert isinstance(dense, ProfileCost)
    return PackedCost(
        cost=replace(dense, load=problem.experts),
        cluster=problem.cluster,
        rates=problem.rates,
        packed=problem.packed,
        micro_batch=problem.micro_batch,
    )


def with_rows(
    problem: Problem, cost: PackedCost, pipelines: Sequence[Pipeline], number: int
) -> tuple[Plan | None, int]:
    """The packed plan of some pipelines; None where they do not hold the longest sequence.

    Args:
        problem: with packed sequences.
        cost: of its plans.
        pipelines: as they are, packed or not.
        number: of the plan.

    Returns:
        The plan, and the tokens of the longest sequence that one of the pipelines holds.
    """
    empty = packed_lanes(pipelines, [[1] * len(p.micro_batches_by_lane) for p in pipelines])
    draft = plan_of(problem, empty, number)
    capacity = cost.capacity(draft)
    room = max(map(cost.longest, capacity))
    if not cost.holds(capacity):
        return None, room
    rows, slowdown = cost.rows(draft, capacity), cost.slowdown(draft)
    return plan_of(problem, packed_lanes(pipelines, capacity, rows, slowdown), number), room


def packed_lanes(
    pipelines: Sequence[Pipeline],
    capacity: Sequence[Sequence[int]],
    rows: Sequence[int] | None = None,
    slowdown: Sequence[Sequence[int]] | None = None,
) -> tuple[Pipeline, ...]:
    """The same pipelines with packed lanes, and as many micro-batches as rows."""
    found = []
    for at, (pipeline, rooms) in enumerate(zip(pipelines, capacity, strict=True)):
        count, slow = (rows[at] if rows else 1), (slowdown[at] if slowdown else [64] * len(rooms))
        packed = tuple(
            PackedLane(capacity=max(1, room), slowdown=each) for room, each in zip(rooms, slow, strict=True)
        )
        each = (count,) * len(rooms) if len(rooms) > 1 else ()
        found.append(
            msgspec.structs.replace(pipeline, micro_batches=count * len(rooms), rows=each, packed=packed)
        )
    return tuple(found)


def shape(plan: Plan) -> tuple[object, ...]:
    """What of a plan holds state, and how lanes are joined."""
    return tuple(pipeline.stages for pipeline in plan.pipelines)
