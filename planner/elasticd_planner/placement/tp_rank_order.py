"""The order of a TP group's members, and which of those that are alike takes which share: so that least moves.

Members that are alike may change places and shares: the group takes as long and needs as much memory. But a
member's units begin where those before it end, so that one share that shrinks moves all that come after it; it
moves least if those on both sides take what it leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, prod

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import to_units
from elasticd_planner.grouping.tp_groups import by_name
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.state_movement import Held, Holders, holders, lacking
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import rate_of
from elasticd_planner.spec.plan import Pipeline, Stage

#: What a plan's seconds and memory depend on of a member: its rate and its memory.
Kind = tuple[float, int]

#: Members in order, with their shares.
Line = tuple[tuple[str, int], ...]

#: Members placed that held some of the layers, and others; what is left of each (kind, share).
State = tuple[int, int, tuple[int, ...]]

#: A group that may be lined up in more ways than have so many states only goes by the units that it had.
STATES = 4096


def reorder_tp_ranks(pipelines: Sequence[Pipeline], problem: Problem) -> tuple[Pipeline, ...]:
    """The same pipelines, the members of each group such that they lack the fewest bytes under the problem's
    current plan."""
    return _each(pipelines, problem, _Group.reorder_tp_ranks)


def relax_shares(pipelines: Sequence[Pipeline], problem: Problem) -> tuple[Pipeline, ...]:
    """The same members in the same order with other shares, such that no group's slowest member takes longer
    and the fewest bytes are lacking under the problem's current plan. A member may hold more: its memory must
    be asked."""
    return _each(pipelines, problem, _Group.relax_shares)


def _each(
    pipelines: Sequence[Pipeline], problem: Problem, change: Callable[[_Group], Stage]
) -> tuple[Pipeline, ...]:
    if problem.current is None:
        return tuple(pipelines)
    profile, rates = problem.profile, problem.rates
    before = holders(problem.current, profile.share_units)
    kinds = {device.name: (rate_of(rates, device.name), device.memory) for device in problem.cluster.devices}
    made = []
    for pipeline in pipelines:
        stages = (
            _Group(stage=stage, last=stage is pipeline.stages[-1], before=before, kinds=kinds, profile=profile)
            for stage in pipeline.stages
        )
        made.append(msgspec.structs.replace(pipeline, stages=tuple(map(change, stages))))
    return tuple(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A stage, what devices held `before`, and what they are."""

    stage: Stage
    last: bool
    before: Holders
    kinds: Mapping[str, Kind]
    profile: ModelProfile

    def reorder_tp_ranks(self) -> Stage:
        """As it is where nothing else lacks less."""
        given: Line = tuple(zip(self.stage.devices, self.stage.shares, strict=True))
        if not self._lacks(given):
            return self.stage
        old, new = self._old(), self._new()
        shares = dict(given)
        lines = [given, tuple((name, shares[name]) for name in (*old, *new))]
        slots = Counter((self.kinds[name], share) for name, share in given)
        choices = bool(old and new) or len(slots) > len({kind for kind, _ in slots})
        states = (len(old) + 1) * (len(new) + 1) * prod(count + 1 for count in slots.values())
        if choices and states <= STATES and self.profile.share_units % sum(self.stage.shares) == 0:
            lines.append(self._least(old, new, slots))
        best = min(lines, key=self._lacks)
        return msgspec.structs.replace(
            self.stage, devices=tuple(name for name, _ in best), shares=tuple(share for _, share in best)
        )

    def relax_shares(self) -> Stage:
        """As it is where no other shares lack less. Member by member, the least for each number of units that
        those so far have."""
        units = self.profile.share_units
        given = to_units(self.stage.shares, units)
        line: Line = tuple(zip(self.stage.devices, given, strict=True))
        if not self._lacks(line):
            return self.stage
        slowest = max(self.kinds[name][0] * share for name, share in line)
        states: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for index, name in enumerate(self.stage.devices):
            most = floor(slowest / self.kinds[name][0] * (1 + EQUAL))
            after = len(line) - index - 1
            grown: dict[int, tuple[float, tuple[int, ...]]] = {}
            for low, (lacks, shares) in states.items():
                least = 1 if after else units - low
                for size in range(least, min(most, units - low - after) + 1):
                    option = lacks + self._bytes(name, low, low + size), (*shares, size)
                    grown[low + size] = min(option, grown.get(low + size, option))
            states = grown
        lacks, shares = states[units]
        return msgspec.structs.replace(self.stage, shares=shares) if lacks < self._lacks(line) else self.stage

    def _old(self) -> list[str]:
        """Members that have units of some of these layers, in the order of those units."""
        return sorted(
            (name for name in self.stage.devices if self._had(name) is not None),
            key=lambda name: (self._had(name), by_name(name)),
        )

    def _new(self) -> list[str]:
        return sorted((name for name in self.stage.devices if self._had(name) is None), key=by_name)

    def _had(self, name: str) -> int | None:
        held = self.before.get(name)
        stage = self.stage
        return held.low if held is not None and held.common(stage.start, stage.stop, stage.later) else None

    def _least(self, old: Sequence[str], new: Sequence[str], slots: Mapping[tuple[Kind, int], int]) -> Line:
        """The line that lacks least of all that keep the order of the old members, and that of the new ones:
        member by member, the least for each (old placed, new placed, slots left)."""
        states: dict[State, tuple[float, Line]] = {(0, 0, tuple(slots.values())): (0.0, ())}
        for _ in self.stage.devices:
            grown: dict[State, tuple[float, Line]] = {}
            for (i, j, left), (lacks, line) in states.items():
                low = sum(share for _, share in line)
                following = [(name, i + 1, j) for name in old[i : i + 1]]
                following += [(name, i, j + 1) for name in new[j : j + 1]]
                for name, at, fresh in following:
                    for slot, (kind, share) in enumerate(slots):
                        if left[slot] and kind == self.kinds[name]:
                            rest = (*left[:slot], left[slot] - 1, *left[slot + 1 :])
                            option = lacks + self._lack(name, low, share), (*line, (name, share))
                            grown[at, fresh, rest] = min(option, grown.get((at, fresh, rest), option))
            states = grown
        return min(states.values())[1]

    def _lack(self, name: str, low: int, share: int) -> float:
        """Bytes that a member lacks which has so much from there, in parts of the group's shares."""
        unit = self.profile.share_units // sum(self.stage.shares)
        return self._bytes(name, low * unit, (low + share) * unit)

    def _lacks(self, line: Line) -> float:
        total, low = 0.0, 0
        units = to_units([share for _, share in line], self.profile.share_units)
        for (name, _), size in zip(line, units, strict=True):
            total += self._bytes(name, low, low + size)
            low += size
        return total

    def _bytes(self, name: str, low: int, high: int) -> float:
        start, stop, later = self.stage.start, self.stage.stop, self.stage.later
        wanted = Held(start=start, stop=stop, later=later, low=low, high=high, embed=start == 0, head=self.last)
        return lacking(self.profile, self.before.get(name), wanted)
