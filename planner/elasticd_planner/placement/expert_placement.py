"""Experts on the devices of a TP group, by measured load and slowdown: as even as can be, and moving few.

With rows w of each expert and slowdowns x of the devices no placement has a busiest device below
T = sum(w) / sum(1 / x). A placement that fills device after device meets T with at most D - 1 replicas
(McNaughton, 1959): an expert that lies on a border is on both devices, each of which takes a part of its rows.

A load drifts. Replicas make up for most of that at no cost: with the same holders other parts of the rows are
even again, for which nothing moves (a maximum flow finds them). Where that is not enough, single experts move
from the devices that have too much, one after the other, or change places with lighter ones. Only if that fails
a placement is made anew.

The next rows are not those of the load that a placement is made for. A device with a large part of one
expert's rows changes with that expert; one with small parts of many hardly changes. So a placement has as many
replicas as there may be, of those experts whose part for a device is largest, as in EPLB (deepseek-ai/EPLB):
where another expert's part has become much larger than that of an expert with replicas would be without one,
the replica is given to the former. Parts of an expert's rows are as equal as the bound allows. A placement that
fills device after device splits the fewest; it is taken where no other one meets the bound.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from elasticd_planner.numeric import EQUAL
from elasticd_planner.spec.expert_load import Parts, rows_by_device
from elasticd_planner.spec.plan import HeldExperts, SplitExperts
from elasticd_planner.value import refuse

#: Parts of an expert's rows are whole numbers that sum to this.
WHOLE = 1 << 16
#: A placement that fills device after device splits some of the so many heaviest experts for each device; more,
#: if the others do not fit.
HEAVY = 2
#: A placement within this of the bound stays as it is. Parts are whole numbers, which may add a little.
TOLERANCE = 0.0009
#: Where moves of single experts come within this of the bound, or of a new placement, none is made anew.
NEAR = 0.02
#: A replica with less than this of a device's rows may go, so that another expert gets one.
FEW = 0.2
#: An expert gets a replica of another one if its part for a device is more than so many times the other's part
#: without that replica.
MUCH = 1.6
#: An expert whose part is less than this of the slowest device's rows gets no replica.
LITTLE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlacement:
    """The experts of a block on devices, and rows of the busiest one.

    held: by device. splits: of each expert on several devices its number, and the part of its rows that each of
    these takes, in the order of the devices. busiest: rows times slowdown of the busiest device, for the
    load that it was made from.
    """

    held: HeldExperts
    splits: SplitExperts
    busiest: float

    @property
    def replicas(self) -> int:
        """Experts on devices beyond the first one of each."""
        return sum(len(split) - 2 for split in self.splits)


def least_busiest(load: Sequence[float], slowdown: Sequence[float]) -> float:
    """Rows times slowdown of the busiest device, which no placement beats."""
    return math.fsum(load) / math.fsum(1 / each for each in slowdown)


def placed(
    load: Sequence[float],
    slowdown: Sequence[float],
    held: HeldExperts = (),
    *,
    slots: Sequence[int] = (),
    replicas: int | None = None,
    tolerance: float = TOLERANCE,
) -> BlockPlacement:
    """A placement of a block's experts.

    Args:
        load: rows of each expert.
        slowdown: of each device.
        held: the experts that each device has now; (): none. Where they are more than there are slots, or
            some expert is on no device, the placement is made anew.
        slots: the most experts that each device has memory for; (): any number.
        replicas: none are added where there are so many; None: one less than devices.
        tolerance: a placement of these holders, or near to it, stays where it is within this of the bound.

    Returns:
        The placement that moves fewest experts of those found. Its busiest device is within the tolerance of
        `least_busiest`, if slots and replicas allow.

    Raises:
        Invalid: the slots are fewer than the experts, or slots or held are of another number of devices.
    """
    for name, each in (("slots", slots), ("held", held)):
        if each and len(each) != len(slowdown):
            refuse(f"expert placement: {name} is of {len(each)} devices, and there are {len(slowdown)}")
    if slots and sum(slots) < len(load):
        refuse(f"expert placement: {len(load)} experts, and memory for {sum(slots)} on all devices together")
    spare = len(slowdown) - 1 if replicas is None else replicas
    room = list(slots) or [len(load)] * len(slowdown)
    total = math.fsum(load)
    weights = [each / total if total else 1 / len(load) for each in load]
    search = _Search(weights, list(slowdown), room, spare)
    limit = search.bound * (1 + tolerance)
    best: _Spread | None = None
    holders = [{d for d, own in enumerate(held) if expert in own} for expert in range(len(load))]
    if all(holders) and all(len(own) <= most for own, most in zip(held, room, strict=False)):
        best = search.near(holders, limit)
    if best is None or best.busiest > max(limit, search.bound * (1 + NEAR)):
        new = search.new(limit)
        if best is None or new.busiest * (1 + NEAR) < best.busiest:
            best = new
    return search.placement(best, total)


def busiest(load: Sequence[float], slowdown: Sequence[float], held: HeldExperts, splits: Parts = ()) -> float:
    """Rows times slowdown of the busiest device of a placement under a load."""
    return max(x * rows for x, rows in zip(slowdown, rows_by_device(load, held, splits), strict=True))


def arrivals(before: HeldExperts, after: HeldExperts) -> int:
    """Experts that devices have in a placement and lacked in the one before: what moves."""
    return sum(len({*new} - {*old}) for old, new in zip(before, after, strict=True))


@dataclass(frozen=True, slots=True)
class _Spread:
    """Rows of experts on their holders. tight: the devices that cannot do with less."""

    holders: list[set[int]]
    rows: list[dict[int, float]]  # by expert, by device
    busiest: float
    tight: frozenset[int]


class _Search:
    """One block's placement. Weights of experts sum to 1."""

    def __init__(self, weights: list[float], slowdown: list[float], slots: list[int], spare: int) -> None:
        self._weights, self._slowdown, self._slots, self._spare = weights, slowdown, slots, spare
        self._speed = [1 / each for each in slowdown]
        self.bound = 1 / math.fsum(self._speed)

    def placement(self, spread: _Spread, total: float) -> BlockPlacement:
        held = tuple(
            tuple(expert for expert, on in enumerate(spread.holders) if device in on)
            for device in range(len(self._slowdown))
        )
        splits = tuple(
            (expert, *_parts([spread.rows[expert].get(device, 0.0) for device in sorted(on)]))
            for expert, on in enumerate(spread.holders)
            if len(on) > 1
        )
        return BlockPlacement(held=held, splits=splits, busiest=spread.busiest * total)

    def near(self, holders: list[set[int]], limit: float) -> _Spread:
        """These holders with replicas for the heaviest experts, and with as few experts moved as bring the
        busiest device to the limit, or as near as moves of single experts do."""
        best = spread = self._spread(self._replicated(self._spread(holders)))
        for _ in range(4 * len(self._slowdown)):
            if spread.busiest <= limit:
                break
            for drops in (True, False):
                moved = self._moved(spread, drops=drops)
                if moved is None:
                    return best
                after = self._spread(moved)
                if after.busiest < spread.busiest:
                    break
            spread = after
            if spread.busiest < best.busiest:
                best = spread
        return best

    def _replicated(self, spread: _Spread) -> list[set[int]]:
        """Holders with a replica for the expert whose parts are largest, on the device with least to do, one
        after the other: a new one, or that of an expert whose parts stay much smaller without it."""
        experts, devices = range(len(self._weights)), range(len(self._slowdown))
        rows = [
            {device: parts.get(device, 0.0) for device in sorted(on)}
            for on, parts in zip(spread.holders, spread.rows, strict=True)
        ]
        for _ in range(2 * self._spare):
            few = [e for e in experts if len(rows[e]) < len(devices)]
            if not few:
                break
            heavy = max(few, key=lambda e: (self._weights[e] / len(rows[e]), -e))
            part = self._weights[heavy] / len(rows[heavy])
            if part < LITTLE * self.bound * min(self._speed):
                break
            left = light = -1
            if sum(map(len, rows)) - len(rows) >= self._spare:
                split = [e for e in experts if len(rows[e]) > 1]
                light = min(split, key=lambda e: (self._weights[e] / (len(rows[e]) - 1), e), default=heavy)
                if part <= MUCH * self._weights[light] / max(1, len(rows[light]) - 1):
                    break
                left = min(rows[light], key=lambda d: (rows[light][d], d))
            counts = self._counts(rows)
            targets = [d for d in devices if d not in rows[heavy] and (counts[d] < self._slots[d] or d == left)]
            if not targets:
                break
            if light >= 0:
                del rows[light][left]
            seconds = self._seconds(rows)
            rows[heavy][min(targets, key=lambda d: (seconds[d], d))] = 0.0
            rows[heavy] = dict.fromkeys(rows[heavy], self._weights[heavy] / len(rows[heavy]))
        return [{*own} for own in rows]

    def _seconds(self, rows: Sequence[Mapping[int, float]]) -> list[float]:
        """Rows times slowdown of each device."""
        seconds = [0.0] * len(self._slowdown)
        for parts in rows:
            for device, part in parts.items():
                seconds[device] += part * self._slowdown[device]
        return seconds

    def _moved(self, spread: _Spread, *, drops: bool) -> list[set[int]] | None:
        """One expert more on the device with most room, from a device that has too much; and where there are
        as many replicas as may be, the replica with the fewest rows gone (`drops`), or the expert gone where it
        was, or a lighter one in its place. None: no such move is left."""
        holders = [{*on} for on in spread.holders]
        on_device = [0.0] * len(self._slowdown)
        counts = self._counts(holders)
        for expert, on in enumerate(holders):
            for device in on:
                on_device[device] += spread.rows[expert].get(device, 0.0)
        room = [self.bound * v - rows for v, rows in zip(self._speed, on_device, strict=True)]
        roomy = [d for d in range(len(room)) if d not in spread.tight and room[d] > 0]
        targets = [d for d in roomy if counts[d] < self._slots[d]]
        if not roomy:
            return None
        target = max(targets or roomy, key=lambda d: (room[d], -d))
        excess = min(-sum(room[d] for d in spread.tight), room[target])
        here = [e for e, on in enumerate(holders) if len(on) == 1 and on <= spread.tight and self._weights[e]]
        if not here:
            return None
        if targets and (
            sum(len(on) - 1 for on in holders) < self._spare or (drops and self._drop_least(spread, holders))
        ):
            enough = [e for e in here if self._weights[e] >= excess]
            expert = min(enough, key=lambda e: self._weights[e]) if enough else max(here, key=self._heavy)
            holders[expert].add(target)
            return holders
        others = [e for e, on in enumerate(holders) if on == {target}]
        # (how far off, the expert that goes there, the one that comes from there)
        moves = [(abs(self._weights[e] - excess), e, -1) for e in here] if targets else []
        for heavy in here:
            for light in others:
                more = self._weights[heavy] - self._weights[light]
                if 0 < more < room[target] + (spread.busiest - self.bound) * self._speed[target]:
                    moves.append((abs(more - excess), heavy, light))
        if not moves:
            return None
        _, heavy, light = min(moves)
        if light >= 0:
            holders[light] = holders[heavy]
        holders[heavy] = {target}
        return holders

    def _counts(self, holders: Sequence[Container[int]]) -> list[int]:
        """The number of experts on each device."""
        return [sum(device in on for on in holders) for device in range(len(self._slowdown))]

    def _heavy(self, expert: int) -> float:
        return self._weights[expert]

    def _drop_least(self, spread: _Spread, holders: list[set[int]]) -> bool:
        """Takes the replica with the fewest rows away, if these are few. Returns True if it did."""
        split = [
            (spread.rows[e].get(d, 0.0), e, d)
            for e, on in enumerate(holders)
            if len(on) > 1
            for d in sorted(on)
        ]
        if not split:
            return False
        rows, expert, device = min(split)
        if rows > self.bound * min(self._speed) * FEW:
            return False
        holders[expert].discard(device)
        return True

    def new(self, limit: float) -> _Spread:
        """A placement of nothing but the loads: with replicas of the heaviest experts, if that meets the limit,
        else the best that is found."""
        experts, devices = len(self._weights), len(self._slowdown)
        order = sorted(range(experts), key=lambda e: (-self._weights[e], e))
        found = self.near(self._packed(), limit)
        if found.busiest <= limit:
            return found
        heavy = min(experts, HEAVY * devices)
        while True:
            holders = self._poured(order[:heavy], order[heavy:])
            if holders is not None:
                spread = self._spread(holders)
                if spread.busiest < found.busiest:
                    found = spread
                if spread.busiest <= self.bound * (1 + EQUAL):
                    break
            if heavy == experts:
                break
            heavy = min(experts, 2 * heavy)
        return found

    def _poured(self, heavy: Sequence[int], light: Sequence[int]) -> list[set[int]] | None:
        """Light experts whole, the longest first, where most room is; then heavy ones into the rooms that are
        left, device after device. None: there are not the slots or replicas."""
        devices = len(self._slowdown)
        full = [self.bound * v for v in self._speed]
        left, free = [*full], [*self._slots]
        holders: list[set[int]] = [set() for _ in self._weights]
        for expert in light:
            open_devices = [d for d in range(devices) if free[d]]
            if not open_devices:
                return None
            device = max(open_devices, key=lambda d: (left[d] / full[d], -d))
            holders[expert].add(device)
            left[device] -= self._weights[expert]
            free[device] -= 1
        rooms = [max(0.0, each) for each in left]
        need, room = math.fsum(self._weights[e] for e in heavy), math.fsum(rooms)
        if room <= 0 or need <= 0:
            return None
        rooms = [each * need / room for each in rooms]
        device, splits = 0, 0
        for expert in heavy:
            rest = self._weights[expert]
            while device < devices - 1 and (rooms[device] <= EQUAL * self.bound or not free[device]):
                device += 1
            while True:
                if not free[device]:
                    return None
                holders[expert].add(device)
                free[device] -= 1
                taken = min(rest, rooms[device])
                rest, rooms[device] = rest - taken, rooms[device] - taken
                if rest <= EQUAL * self.bound or device == devices - 1:
                    break
                device += 1
                splits += 1
        return holders if splits <= self._spare else None

    def _packed(self) -> list[set[int]]:
        """Replicas for the experts whose parts are largest, and then equal parts, the largest first where it is
        done soonest."""
        experts, devices = len(self._weights), range(len(self._slowdown))
        copies = [1] * experts
        for _ in range(min(self._spare, sum(self._slots) - experts)):
            few = [e for e in range(experts) if copies[e] < len(devices)]
            if not few:
                break
            copies[max(few, key=lambda e: (self._weights[e] / copies[e], -e))] += 1
        parts = [(self._weights[e] / copies[e], e) for e in range(experts) for _ in range(copies[e])]
        holders: list[set[int]] = [set() for _ in range(experts)]
        rows, free = [0.0 for _ in devices], [*self._slots]
        for part, expert in sorted(parts, key=lambda each: (-each[0], each[1])):
            open_devices = [d for d in devices if free[d] and d not in holders[expert]]
            if open_devices:
                device = min(open_devices, key=lambda d: ((rows[d] + part) * self._slowdown[d], d))
                holders[expert].add(device)
                rows[device] += part
                free[device] -= 1
        return holders

    def _spread(self, holders: list[set[int]]) -> _Spread:
        """Rows of experts on several devices in parts that make the busiest device least (exactly: a maximum
        flow for a time; if it is not all rows, the time that the devices behind the least cut need)."""
        alone = [0.0] * len(self._slowdown)
        rows: list[dict[int, float]] = [{} for _ in holders]
        split = []
        for expert, on in enumerate(holders):
            if len(on) == 1:
                (device,) = on
                alone[device] += self._weights[expert]
                rows[expert][device] = self._weights[expert]
            else:
                split.append(expert)
        worst = max(range(len(alone)), key=lambda d: alone[d] * self._slowdown[d])
        time, tight = alone[worst] * self._slowdown[worst], frozenset({worst})
        if time < self.bound:
            time, tight = self.bound, frozenset(range(len(alone)))
        for _ in range(len(alone) + 1):
            flow, behind = self._flow(
                holders, split, [time * v - a for v, a in zip(self._speed, alone, strict=True)]
            )
            if behind is None:
                break
            inside = math.fsum(self._weights[e] for e in split if holders[e] <= behind)
            inside += math.fsum(alone[d] for d in behind)
            needed = inside / math.fsum(self._speed[d] for d in behind)
            if needed <= time * (1 + EQUAL):
                break
            time, tight = needed, frozenset(behind)
        for expert in split:
            rows[expert] = flow[expert]
        return _Spread(holders, rows, time, tight)

    def _flow(
        self, holders: list[set[int]], split: Sequence[int], room: list[float]
    ) -> tuple[dict[int, dict[int, float]], set[int] | None]:
        """The most rows of split experts that fit into rooms of devices, by augmenting paths, which begin with
        equal parts of each; and the devices behind the least cut, where not all fit."""
        none = EQUAL * self.bound * min(self._speed)
        flow: dict[int, dict[int, float]] = {
            expert: dict.fromkeys(sorted(holders[expert]), 0.0) for expert in split
        }
        behind: set[int] = set()
        for expert in split:
            rest = self._weights[expert]
            part = rest / len(flow[expert])
            for device, most in [*((d, part) for d in flow[expert]), *((d, rest) for d in flow[expert])]:
                given = min(rest, most, max(0.0, room[device]))
                flow[expert][device] += given
                room[device] -= given
                rest -= given
            while rest > none:
                path, reached = self._path(flow, expert, room, none)
                if path is None:
                    behind |= reached
                    # They go somewhere: in proportion to speed.
                    speed = math.fsum(self._speed[d] for d in flow[expert])
                    for device in flow[expert]:
                        flow[expert][device] += rest * self._speed[device] / speed
                    break
                pushed = min(rest, room[path[-1][1]], *(flow[e][before] for e, _, before in path[1:]), math.inf)
                for e, device, before in path:
                    flow[e][device] += pushed
                    if before >= 0:
                        flow[e][before] -= pushed
                room[path[-1][1]] -= pushed
                rest -= pushed
        return flow, behind or None

    def _path(
        self, flow: dict[int, dict[int, float]], expert: int, room: Sequence[float], none: float
    ) -> tuple[list[tuple[int, int, int]] | None, set[int]]:
        """The shortest way from an expert to a device with room, over experts that can give way: steps of
        (expert, device to, device from; -1 of the first)."""
        came: dict[int, tuple[int, int]] = {}  # device: (expert that goes there, the device that it leaves)
        queue = []
        for device in flow[expert]:
            came[device] = expert, -1
            queue.append(device)
        for device in queue:
            if room[device] > none:
                path = []
                while device >= 0:
                    mover, before = came[device]
                    path.append((mover, device, before))
                    device = before
                return path[::-1], set()
            for other, parts in flow.items():
                if other == expert or parts.get(device, 0.0) <= none:
                    continue
                for following in parts:
                    if following not in came:
                        came[following] = other, device
                        queue.append(following)
        return None, set(came)


def _parts(rows: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to rows, which sum to `WHOLE`."""
    total = math.fsum(rows)
    if not total:
        rows, total = [1.0] * len(rows), float(len(rows))
    exact = [WHOLE * each / total for each in rows]
    parts = [*map(math.floor, exact)]
    for at in sorted(range(len(rows)), key=lambda i: parts[i] - exact[i])[: WHOLE - sum(parts)]:
        parts[at] += 1
    return tuple(parts)
