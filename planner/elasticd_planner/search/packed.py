"""Packed plans: pipelines, lanes, TP sizes and stages chosen for the lengths of a step's sequences.

How many rows a step has, and of how many tokens, follows from the plan: from the memory of its lanes. So the
dense search is asked for plans of rows of several sizes (views): each has as many micro-batches as the step has
such rows, and its plans hold them. Small rows let many narrow copies be, large ones ask for wide TP groups or
more stages. Each plan found is then tried with its pipelines of equal borders joined into 1, 2, 4 ... lanes
(`lanes`). What remains is compared by the packed cost (`PackedCost`): what holds the longest sequence, and
takes the least time for these lengths. A longer sequence that may come is held, too, where some plan holds it;
else half of it, and so on. Among equal plans the one that moves the fewest bytes from the running
plan is taken, and then the one with the fewest lanes.

Slow devices: borders of lanes must be equal, so that a plan for normal devices, whose lanes get unequal shares
of tokens, stands beside the one that moves layers from a slow device. The latter is searched for rows of the
best size alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from elasticd_planner.cost.packed_cost import PackedCost
from elasticd_planner.layout.optimizer_sharding import with_carriers
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.state_movement import bytes_to_move, strategy
from elasticd_planner.problem import Answer, Problem, SearchSpace
from elasticd_planner.search import given_plan, lanes
from elasticd_planner.search.options import task_of
from elasticd_planner.search.task import EXACT_DEVICES, alive
from elasticd_planner.spec.model import apportion
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import PackedLane, Pipeline, Plan, Prediction
from elasticd_planner.spec.plan_summary import describe

#: The dense search, of a problem without packed sequences.
Search = Callable[[Problem], Answer]

#: Rows of so many sizes are tried, each half of the one before; of many devices every second one.
_SIZES = 8
#: Tokens of the rows by which what each token takes is told from the state.
_FEW = 1024.0
#: Where all memory holds less than so many times the longest sequence, what may hold it is tried first.
_TIGHT = 2
#: Of many devices so many TP sizes are tried with further sizes of rows.
_LIKELY = 2


def answer(problem: Problem, search: Search, number: int, tolerance: float) -> Answer:
    """The best packed plan, or why there is none.

    Args:
        problem: with packed sequences.
        search: the dense search, for the problem's views.
        number: of the plan.
        tolerance: plans within this fraction of the best count as equal to it.
    """
    assert problem.packed is not None
    planning = _PackedSearch(problem=problem, packed=problem.packed, search=search, number=number)
    if problem.given is None:
        return planning.answer(tolerance)
    given = given_plan.under(problem.given, problem.search_space)
    wrong = given_plan.missing(given, problem) or planning.lacking(given)
    if not wrong:
        made = planning.packed_plan(given.pipelines)
        assert made is not None
        return Answer(plan=planning.told(made, "given by the job: "), candidates=1)
    if problem.only_given:
        return Answer(plan=None, refusal=f"the plan that the job gives cannot be: {wrong}", candidates=1)
    searched = msgspec.structs.replace(problem, given=None, current=problem.current)
    found = answer(searched, search, number, tolerance)
    if found.plan is None:
        return found
    reason = f"{found.plan.reason}; the plan that the job gives cannot be: {wrong}"
    return msgspec.structs.replace(found, plan=found.plan.replace(reason=reason))


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
        changed = current is not None and _shape(self.plan) != _shape(current)
        return self.moved, changed, self.lanes, round(self.seconds, 12)


@dataclass(frozen=True, kw_only=True)
class _PackedSearch:
    """One search for a packed plan."""

    problem: Problem
    packed: PackedSequences
    search: Search
    number: int
    _rooms: list[int] = field(default_factory=list)  # tokens that a pipeline of the plans tried holds

    @cached_property
    def cost(self) -> PackedCost:
        """The cost of its plans."""
        space = self.problem.search_space
        alone = SearchSpace(states=space.states[:1])
        dense = task_of(msgspec.structs.replace(self.problem, search_space=alone, packed=None)).cost
        return PackedCost(
            cost=dense,  # type: ignore[arg-type]  # a problem in seconds has a profile's cost
            cluster=self.problem.cluster,
            rates=self.problem.rates,
            packed=self.packed,
            micro_batch=self.problem.micro_batch,
        )

    def answer(self, tolerance: float) -> Answer:
        """The best plan of all views."""
        current, refusals, tried, options = self.problem.current, [], 0, list[_Option]()
        if current is not None and (kept := self._kept(current)) is not None:
            options.append(kept)
        now = self._now(current)
        if 1 < (room := self._room()) < self.packed.longest:
            self._rooms.append(room)
            return Answer(plan=None, refusal=self._too_long(), current_seconds=now, candidates=1)
        if tight := room < _TIGHT * self.packed.longest:  # few plans hold it, if any: these come first
            for part in (1, 2, 4):  # of what holds a part it is known how much that is
                options += self._widest(self.packed.longest // part)
                if options or any(most > 1 for most in self._rooms):
                    break
            if not options and any(most > 1 for most in self._rooms):
                return Answer(plan=None, refusal=self._too_long(), current_seconds=now, candidates=1)
        best, by_width = dict[int, float](), dict[int, float]()
        few = len(alive(self.problem)) <= EXACT_DEVICES
        for size in self._sizes() if few else sorted(self._sizes()):
            for view in (self._normal(size),) if few else list(self._of_widths(size, by_width)):
                found = self.search(view)
                tried += found.candidates
                if found.plan is None:
                    refusals.append(found.refusal)
                    continue
                made = list(self._joined(found.plan.pipelines))
                best[size] = min([best.get(size, math.inf), *(option.seconds for option in made)])
                if made and (width := view.search_space.fixed_tp) is not None:
                    by_width[width] = min([by_width.get(width, math.inf), *(each.seconds for each in made)])
                options += made
        if options:
            size = min(best, key=lambda size: (best[size], size), default=0)
            views = self._of_widths(size, {}) if few else iter((self._normal(size),))
            for view in (*views, *self._slow(size)) if size else ():
                found = self.search(view)
                options += self._joined(found.plan.pipelines) if found.plan is not None else ()
        elif not tight:
            options += self._widest(self.packed.longest)
        if options and max(option.longest for option in options) < self.packed.likely <= room:
            options += self._widest(self.packed.likely)
        if not options:
            return Answer(plan=None, refusal=self._refusal(refusals), current_seconds=now, candidates=tried)
        options = self._likely(options)
        limit = min(option.seconds for option in options) * (1 + tolerance) * (1 + EQUAL)
        near = [option for option in options if option.seconds <= limit]
        chosen = min(near, key=lambda option: option.preference(current)).plan
        if current is not None and now is not None and _shape(chosen) == _shape(current):
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

    def _slow(self, size: int) -> tuple[Problem, ...]:
        """The problem with its slow devices, where `_normal` is without: a search with these takes several
        times as long, so that it is made for rows of the best size alone."""
        slow = self.packed.cut and any(map(math.isfinite, self.problem.rates.values()))
        return (self._view(size),) if slow else ()

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
        pipelines = tuple(
            msgspec.structs.replace(lane, micro_batches=rows, packed=())
            for lane, rows in zip(current.by_lane, apportion(count, weights), strict=True)
        )
        made = strategy(pipelines, current.module.module)
        return current.replace(strategies=(made,), global_batch=count, micro_batch=1)

    def _of_widths(self, size: int, known: dict[int, float]) -> Iterator[Problem]:
        """The problem with rows of this size, with each TP size that divides the devices of a node; where the
        seconds of several TP sizes are known, with the best two of these."""
        view = self._normal(size)
        likely = sorted(known, key=lambda width: (known[width], width))[:_LIKELY] if len(known) > 1 else None
        counts = [len(node.devices) for node in self.problem.cluster.nodes]
        for width in self.cost.cost.widths(max(counts)):
            if likely is not None and width not in likely:
                continue
            if view.search_space.fixed_tp in (None, width) and any(count % width == 0 for count in counts):
                space = msgspec.structs.replace(view.search_space, fixed_tp=width)
                yield msgspec.structs.replace(view, search_space=space)

    def _likely(self, options: list[_Option]) -> list[_Option]:
        """Those of the options that hold the sequence which may come; where none does, half of it, and so on:
        the job stops at a sequence that its plan does not hold."""
        wanted = self.packed.likely
        while wanted > self.packed.longest:
            if held := [option for option in options if option.longest >= wanted]:
                return held
            wanted //= 2
        return options

    def _widest(self, longest: int) -> Iterator[_Option]:
        """Plans of one pipeline of k lanes that holds a sequence of this length, for every k; of many devices
        for the powers of two, for so many parts of all devices, and for as many lanes as memory holds."""
        devices = len(alive(self.problem))
        counts = set(range(1, devices + 1))
        if devices > EXACT_DEVICES:
            powers = {1 << k for k in range(devices.bit_length())}
            counts = powers | {devices // power for power in powers}
            counts |= {min(devices, max(1, self._copies - less)) for less in (0, 1)}
        for count in sorted(counts) if self.packed.cut else (1,):
            size = -(-longest // count)
            view = self._normal(size)
            space = msgspec.structs.replace(view.search_space, fixed_dp=count)
            micro_batches = max(count, view.global_batch)
            found = self.search(
                msgspec.structs.replace(view, search_space=space, global_batch=micro_batches, current=None)
            )
            made = list(self._joined(found.plan.pipelines)) if found.plan is not None else []
            if made and max(option.longest for option in made) >= longest:
                yield from made
                return

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
        draft = self._plan(packed_lanes(pipelines, [[1] * len(p.micro_batches_by_lane) for p in pipelines]))
        capacity = self.cost.capacity(draft)
        self._rooms.append(max(map(self.cost.longest, capacity)))
        if not self.cost.holds(capacity):
            return None
        rows, slowdown = self.cost.rows(draft, capacity), self.cost.slowdown(draft)
        return self._plan(packed_lanes(pipelines, capacity, rows, slowdown))

    def _plan(self, pipelines: Sequence[Pipeline]) -> Plan:
        used = {name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices}
        plan = Plan(
            number=self.number,
            strategies=(strategy(pipelines),),
            state=self.problem.search_space.states[0],
            micro_batch=self.problem.micro_batch,
            global_batch=self.problem.global_batch,
            idle=tuple(device.name for device in self.problem.cluster.devices if device.name not in used),
        )
        return with_carriers(plan) if plan.state.replicas else plan

    def told(self, made: Plan, prefix: str = "") -> Plan:
        """A plan with its number, prediction and reason."""
        seconds = self.cost.seconds(made)
        prediction = Prediction(
            step_seconds=seconds, bound_seconds=min(seconds, self.cost.bound()), memory=self.cost.memory(made)
        )
        reason = prefix + describe(made, self.problem.rates)
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

    def _room(self) -> int:
        """Tokens of a sequence that all memory holds at most: one copy of the state is in it, and each token is
        kept once."""
        limit = (self.packed.row_tokens or 1 << 40) * (len(alive(self.problem)) if self.packed.cut else 1)
        state, token = self._least
        return int(min(limit, (self._memory - state) / max(token, 1e-9) * (1 + EQUAL)))

    @cached_property
    def _least(self) -> tuple[float, float]:
        """The fewest bytes of a copy of the state, and of a token of a row, on all its devices together."""
        space, profile, devices = self.problem.search_space, self.problem.profile, alive(self.problem)
        states, tokens = list[float](), list[float]()
        for again in {space.recompute == "always", bool(space.recompute)}:
            for sliced in {space.sequence_parallel == "always", bool(space.sequence_parallel)}:
                cost = replace(self.cost.cost, recompute=again, sequence_parallel=sliced)
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

    def lacking(self, plan: Plan) -> str:
        """Why a plan does not hold the rows, in words; an empty string if it does."""
        return "" if self.packed_plan(plan.pipelines) is not None else self._too_long()

    def _refusal(self, refusals: Iterable[str]) -> str:
        said = list(refusals)
        if not any(room > 1 for room in self._rooms) and said:
            return said[-1]
        return self._too_long()

    def _too_long(self) -> str:
        packed, most = self.packed, max(self._rooms, default=0)
        held = "the lanes of no pipeline hold" if packed.cut else "no lane holds"
        remedies = ["add a node", "leave out or shorten such samples"]
        if packed.row_tokens and most >= packed.row_tokens:
            remedies.insert(0, "raise Packing(tokens=...)")
        if not packed.cut:
            remedies.insert(0, "let sequences be cut over devices, Packing(cut=True)")
        return (
            f"does not fit: {packed.sample or 'a sequence'} has {packed.longest} tokens, and {held} more than "
            f"{most} in a row; "
            f"{', or '.join(remedies)}"
        )


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


def _shape(plan: Plan) -> tuple[object, ...]:
    """What of a plan holds state, and how lanes are joined."""
    return tuple(pipeline.stages for pipeline in plan.pipelines)
