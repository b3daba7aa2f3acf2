"""The cost of a packed plan: the rows that its lanes hold, and the step's seconds for unlike sequences.

A token of mean work takes a stage as long as the profile says; a sequence of L tokens counts as

    w(L) = L (linear + L) / (linear + effective)

of them, so that all sequences of a step together count as their tokens. A lane is as fast as its slowest stage.

  pipelines  The costliest sequence first, each to the pipeline that ends first with it, of those that hold it.
  lanes      Where sequences may be cut, all lanes of a pipeline end together: work over the sum of their
             speeds. A piece has a least size, and the keys that it lacks are fetched beside its attention: what
             attention does not hide is added. Where all stay whole, lanes are dealt them as pipelines are.
  rows       As few as memory allows; of several stages as many as take the least time, with a row's fixed time
             against the fill, and none of less work than the longest sequence:

                 rows x (work / rows / speed + fixed) + fill of the longest row

A step ends with the slowest pipeline, and what follows it (`ProfileCost.after`). The dealing that jobs run
(`elasticd_planner.batching`) comes within a few percent of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace

import numpy as np

from elasticd_planner.cost.memory import memory_by_device, most_tokens, pipeline_memory
from elasticd_planner.cost.model import after_seconds, stage_times
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.spec.cluster import Cluster, Rates, node_of, rate_of
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Pipeline, Plan, Stage

#: A normal lane's time for a unit of work, and the bounds of what lanes take.
NORMAL, LEAST, MOST = 64, 16, 1024
#: Sequences that take less than this part of the step's time are not dealt one by one. Of plans of ten drawn
#: jobs on up to eight devices the seconds of nine are within 0.07 % of those where each is, of one within 2 %.
_SMALL = 0.01
#: The part of a sequence's keys that a lane needs in the mean: of the two pieces that it has, one from the
#: front and the other as far from the end, the later one needs those before it.
_NEEDED = 0.75
#: Tokens of the rows by which a lane's fixed time and its time by tokens are told apart.
_FEW = 1024.0
#: Keys and values pass three times: forward, again backward, and their gradients back.
_PASSES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lane:
    """Seconds of a lane, forward and backward: of a row whatever is in it, and of a token of mean work."""

    fixed: float  # on its slowest stage
    token: float
    fill_fixed: float  # on its other stages, and between them
    fill_token: float
    stages: int
    keys: float  # bytes of a token's keys and values that a member of its fullest stage fetches in a step
    calls: int  # fetches of a sequence's keys from one other lane in a step
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dealt:
    """The part of a step that a pipeline, or a lane, has."""

    work: float  # in tokens of mean work
    tokens: float
    costly: Ints  # lengths of the sequences that were dealt one by one


@dataclass(frozen=True, kw_only=True)
class PackedCost:
    """The cost of packed plans of one problem."""

    cost: ProfileCost  # of micro-batches of any size
    cluster: Cluster
    rates: Rates
    packed: PackedSequences
    micro_batch: int  # samples of a padded micro-batch, which a row has no more tokens than, if nothing says so
    _lanes: dict[tuple[Stage, ...], _Lane] = field(default_factory=dict)
    _rooms: dict[tuple[tuple[Stage, ...], int, int, bool, tuple[int, ...]], int] = field(default_factory=dict)

    # -- memory

    def capacity(self, plan: Plan, memory: Mapping[str, int] | None = None) -> tuple[tuple[int, ...], ...]:
        """The most tokens of a row that each lane of each pipeline may have; 0: not even its state fits.
        memory: of each device [bytes]; None: all that it has."""
        cost, limit = self.cost.under(plan), self.packed.row_tokens or math.inf
        memory = self.cluster.memory if memory is None else memory
        found = []
        for pipeline in plan.pipelines:
            own, sized = [], self._of_lanes(pipeline, cost)
            for lane in pipeline.by_lane:
                sizes = tuple(memory[device] for stage in lane.stages for device in stage.devices)
                key = lane.stages, cost.pipelines, cost.members, sized.cut, sizes
                if key not in self._rooms:
                    self._rooms[key] = most_tokens(lane, sized.sized, memory)
                own.append(int(min(limit, self._rooms[key])))
            found.append(tuple(own))
        return tuple(found)

    def longest(self, capacity: Sequence[int]) -> int:
        """Tokens of the longest sequence that lanes of these capacities hold in one row, in whole pairs."""
        together = 2 * sum(each // 2 for each in capacity) if self.packed.cut else 0
        return max(together, *capacity)

    def holds(self, capacity: Sequence[Sequence[int]]) -> bool:
        """Returns True if every lane holds a row at all, and some pipeline the longest sequence."""
        least = min(each for own in capacity for each in own)
        return least > 1 and max(map(self.longest, capacity)) >= self.packed.longest

    def memory(self, plan: Plan) -> dict[str, int]:
        """Bytes that each member needs under a plan of packed lanes, all of them with full rows."""
        needed, cost = memory_by_device(plan, self.cost), self.cost.under(plan)
        limit = self.packed.most_tokens(self.micro_batch)
        for pipeline in plan.pipelines:
            sized = self._of_lanes(pipeline, cost)
            for lane in pipeline.by_lane:
                needed |= pipeline_memory(lane, sized.sized(min(limit, lane.packed[0].capacity)))
        return needed

    def _of_lanes(self, pipeline: Pipeline, cost: ProfileCost) -> ProfileCost:
        """The cost of a pipeline's lanes, over which sequences are cut where there are several."""
        return replace(cost, cut=self.packed.cut and len(pipeline.micro_batches_by_lane) > 1)

    # -- time

    def slowdown(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """The slowdown of each lane of each pipeline, in 64ths of the median lane's time for the same work."""
        tokens = [[self._lane(lane).token for lane in pipeline.by_lane] for pipeline in plan.pipelines]
        ordered = sorted(token for own in tokens for token in own)
        middle = ordered[(len(ordered) - 1) // 2]
        return tuple(
            tuple(min(MOST, max(LEAST, round(NORMAL * token / middle))) for token in own) for own in tokens
        )

    def seconds(self, plan: Plan) -> float:
        """Of a step under a plan of packed lanes; inf where no pipeline holds the longest sequence."""
        capacity = [[lane.capacity for lane in pipeline.packed] for pipeline in plan.pipelines]
        if not self.holds(capacity):
            return math.inf
        slowest = max(seconds for seconds, _ in self._played(plan, capacity))
        return slowest + after_seconds(plan, self.cluster, self.cost)

    def rows(self, plan: Plan, capacity: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The rows that each pipeline is expected to have."""
        return tuple(rows for _, rows in self._played(plan, capacity))

    def bound(self) -> float:
        """Seconds that no plan beats: all work over all speed."""
        usable = [rate_of(self.rates, device.name) for device in self.cluster.devices]
        alive = [rate for rate in usable if math.isfinite(rate)]
        return self.cost.sized(max(1.0, self.packed.tokens)).bound(alive, 1)

    def _played(self, plan: Plan, capacity: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
        """Seconds and rows of each pipeline."""
        limit = self.packed.most_tokens(self.micro_batch)
        capacity = [[min(limit, room) for room in own] for own in capacity]
        pipelines = [[self._lane(lane) for lane in pipeline.by_lane] for pipeline in plan.pipelines]
        dealt = self._by_pipeline(pipelines, capacity)
        return [self._shared(*each) for each in zip(pipelines, capacity, dealt, strict=True)]

    def _lane(self, lane: Pipeline) -> _Lane:
        found = self._lanes.get(lane.stages)
        if found is None:
            found = self._lanes[lane.stages] = self._timed(lane)
        return found

    def _timed(self, lane: Pipeline) -> _Lane:
        """By rows of two sizes."""
        one, two = (
            stage_times(lane, self.cluster, self.rates, self.cost.sized(tokens)) for tokens in (_FEW, 2 * _FEW)
        )
        depth, work, more = len(lane.stages), one.work, two.work
        token = ((more - work) / _FEW).reshape(-1, depth).sum(0)
        fixed = (2 * work - more).reshape(-1, depth).sum(0)
        hop_token = 2 * float((two.boundary - one.boundary).sum()) / _FEW
        hop_fixed = 2 * float((2 * one.boundary - two.boundary).sum())
        slowest, profile = int(np.argmax(token)), self.cost.profile
        # A row takes some time whatever is in it. Where none was measured, about that of the least piece that
        # is worth a kernel, which is what the dealing of rows takes it for, too.
        part = self.packed.linear / (self.packed.linear + self.packed.lengths.effective)
        if not profile.block.fixed_seconds:
            fixed = np.maximum(fixed, self.packed.least * part * token)
        groups = profile.groups / profile.share_units if profile.groups else 1.0
        keys = [
            _PASSES * 2 * profile.boundary_bytes * groups * stage.layers / len(stage.devices)
            for stage in lane.stages
        ]
        return _Lane(
            fixed=float(fixed[slowest]),
            token=float(token[slowest]),
            fill_fixed=float(fixed.sum() - fixed[slowest]) + hop_fixed,
            fill_token=float(token.sum() - token[slowest]) + hop_token,
            stages=depth,
            keys=max(keys),
            calls=_PASSES * max(stage.layers for stage in lane.stages),
            node=node_of(lane.stages[0].devices[0]),
        )

    # -- dealing

    def _by_pipeline(
        self, pipelines: Sequence[Sequence[_Lane]], capacity: Sequence[Sequence[int]]
    ) -> list[_Dealt]:
        """The part of a step's sequences that each pipeline gets."""
        speeds = [sum(1 / lane.token for lane in own) for own in pipelines]
        tokens = self.packed.tokens
        whole = _Dealt(work=tokens, tokens=tokens, costly=self.packed.typical)
        return self._dealt(whole, speeds, [self.longest(own) for own in capacity])

    def _dealt(self, given: _Dealt, speeds: Sequence[float], longest: Sequence[int]) -> list[_Dealt]:
        """Costly sequences one by one, each to whom it ends first with, of those that hold it; then all others
        so that all end together."""
        if len(speeds) == 1:
            return [given]
        works = self._work(given.costly)
        small = _SMALL * given.work / sum(speeds) * min(speeds)
        each = int(np.searchsorted(-works, -small))
        each = max(each, int(np.searchsorted(-given.costly, -min(longest))))
        loads, taken = [0.0] * len(speeds), [list[int]() for _ in speeds]
        heap = [(0.0, at) for at in range(len(speeds))]
        heapify(heap)
        for length, work in zip(given.costly[:each].tolist(), works[:each].tolist(), strict=True):
            if length <= longest[heap[0][1]]:
                at = heap[0][1]
                loads[at] += work / speeds[at]
                heapreplace(heap, (loads[at], at))
            else:
                held = [at for at, most in enumerate(longest) if most >= length] or [int(np.argmax(longest))]
                at = min(held, key=lambda at: loads[at] + work / speeds[at])
                loads[at] += work / speeds[at]
                heap = [(load, at) for at, load in enumerate(loads)]
                heapify(heap)
            taken[at].append(length)
        left_work = max(0.0, given.work - float(works[:each].sum()))
        left_tokens = max(0.0, given.tokens - float(given.costly[:each].sum()))
        end = _level(loads, speeds, left_work)
        found = []
        for load, speed, own in zip(loads, speeds, taken, strict=True):
            poured = max(0.0, end - load) * speed
            part = poured / left_work if left_work else 0.0
            found.append(
                _Dealt(
                    work=load * speed + poured,
                    tokens=sum(own) + part * left_tokens,
                    costly=np.array(own or [1], dtype=np.int64),
                )
            )
        return found

    def _work(self, lengths: Ints) -> Floats:
        """Tokens of mean work that sequences count as."""
        linear, effective = self.packed.linear, self.packed.lengths.effective
        found: Floats = lengths * (linear + lengths) / (linear + effective)
        return found

    # -- one pipeline

    def _shared(self, lanes: Sequence[_Lane], capacity: Sequence[int], dealt: _Dealt) -> tuple[float, int]:
        """Seconds of a pipeline, and its rows."""
        if len(lanes) == 1:
            return self._rows(lanes, capacity, dealt)
        if self.packed.cut:
            seconds, rows = self._rows(lanes, capacity, dealt)
            exposed = self._exposed(lanes, capacity, dealt, seconds, rows)
            if exposed is not None:
                return seconds + exposed, rows
        parts = self._dealt(dealt, [1 / lane.token for lane in lanes], capacity)
        found = [
            self._rows([lane], [room], part) for lane, room, part in zip(lanes, capacity, parts, strict=True)
        ]
        return max(seconds for seconds, _ in found), max(rows for _, rows in found)

    def _rows(self, lanes: Sequence[_Lane], capacity: Sequence[int], dealt: _Dealt) -> tuple[float, int]:
        speed = sum(1 / lane.token for lane in lanes)
        fixed, stages = max(lane.fixed for lane in lanes), lanes[0].stages
        even = dealt.work / speed
        least = max(1, math.ceil(dealt.tokens / sum(capacity)))
        longest = int(dealt.costly[0])
        alone = float(self._work(dealt.costly[:1])[0]) / self._speed_of(lanes, speed, longest)
        if stages == 1:
            return max(even, alone) + least * fixed, least
        likely = math.sqrt((stages - 1) * even / fixed) if fixed else math.inf
        # A row is of one sequence at least, and rows are even where none has less work than the longest.
        most = max(least, min(self.packed.sequences, even / alone if alone else math.inf))
        counts = {max(1, int(min(max(each, least), most))) for each in (likely, likely + 1)}
        return min((self._filled(lanes, even, count, fixed, alone), count) for count in counts)

    def _filled(self, lanes: Sequence[_Lane], even: float, rows: int, fixed: float, alone: float) -> float:
        longest = max(even / rows, alone)
        fill = max(lane.fill_fixed + lane.fill_token * longest / lane.token for lane in lanes)
        return max(even, alone) + rows * fixed + fill

    def _speed_of(self, lanes: Sequence[_Lane], speed: float, length: int) -> float:
        """Of all lanes that a sequence may be cut over."""
        if len(lanes) == 1:
            return speed
        widest = max(1, length // (2 * self.packed.least))
        if widest >= len(lanes):
            return speed
        return sum(sorted((1 / lane.token for lane in lanes), reverse=True)[:widest])

    def _exposed(
        self, lanes: Sequence[_Lane], capacity: Sequence[int], dealt: _Dealt, seconds: float, rows: int
    ) -> float | None:
        """Seconds in which lanes wait for keys, in the mean over lanes; None where no sequence is cut."""
        count, token = len(lanes), sum(lane.token for lane in lanes) / len(lanes)
        together = seconds if lanes[0].stages == 1 else seconds / rows
        works = self._work(dealt.costly)
        cut = (dealt.costly > max(capacity)) | (works * token > together)
        if not cut.any():
            return None
        lengths, works = dealt.costly[cut].astype(np.float64), works[cut]
        mean = sum(capacity) / count
        degree = np.ceil(np.maximum(lengths / mean, works * token / together))
        degree = np.clip(degree, 2, count)
        nodes = [lane.node for lane in lanes]
        inside = max(nodes.count(node) for node in set(nodes))
        near, far = self.cluster.inside, self.cluster.between
        apart = degree > inside
        each = np.where(apart, 1 / far.bandwidth, 1 / near.bandwidth)
        wait = np.where(apart, far.latency, near.latency)
        fetched = _NEEDED * (1 - 1 / degree) * lengths * max(lane.keys for lane in lanes) * each
        fetched += (degree - 1) * lanes[0].calls * wait
        attention = lengths / degree * lengths * token / (self.packed.linear + self.packed.lengths.effective)
        return float((degree * np.maximum(0.0, fetched - attention)).sum()) / count


def _level(loads: Sequence[float], speeds: Sequence[float], work: float) -> float:
    """When all end that share this work, each after its load."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    speed = done = 0.0
    for place, at in enumerate(order):
        speed += speeds[at]
        done += loads[at] * speeds[at]
        end = (work + done) / speed
        if place + 1 == len(order) or end <= loads[order[place + 1]]:
            return end
    return 0.0
