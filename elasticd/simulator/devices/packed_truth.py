"""The modelled devices' real times with packed sequences: each step's rows as workers deal them, played.

A step has sequences of its own, a function of (seed, step). They are dealt by the same code as in workers, by
slowdowns that lanes agree on after each step and use from the step after next on, as workers do. The rows are
played by events at the devices' true speeds, the exchange of keys counted (`packed_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from elasticd_planner.batching.batch_summary import lane_work, summary_of
from elasticd_planner.batching.lane_slowdown import SlowdownState
from elasticd_planner.batching.lane_slowdown import step as slowdowns_after
from elasticd_planner.batching.packed_batch import CutOptions, nodes_of, packed_batch_plan, planned_slowdown
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, BatchRow
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.expert_load import ExpertLoad, fractions_in
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.spec.sequence_lengths import bucket

from elasticd.simulator.devices.device_model import MOST_KEPT, TYPICAL, DeviceModel, StepTimes
from elasticd.simulator.devices.expert_loads import ExpertLoads
from elasticd.simulator.devices.packed_rows import Gang, seconds, staged_seconds
from elasticd.simulator.devices.plan_arrays import Compiled

#: Keys and values pass three times: forward, again backward, and their gradients back.
_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class PackedWork:
    """The sequences that a job packs."""

    drawn: Callable[[int, float], Ints]  # lengths of the sequences of a step, times a factor
    mean: float  # tokens of a sequence
    linear: int  # what a token's matrix products cost, in units of its attention to one other
    effective: Callable[[float], float]  # the length that a token's sequence has in the mean, times a factor
    row_tokens: int | None  # the most tokens of a row
    cut: CutOptions | None  # None: sequences stay whole
    # What a row takes whatever is in it, in units of one token's attention to one other on a normal device:
    # that of the least piece, as workers assume it when they deal.
    fixed: int
    follow: bool  # whether the shares of lanes follow their speeds


class PackedTruth(DeviceModel):
    """The cluster as it is, of a job that packs its sequences. A shift to so many tokens makes all sequences
    longer, in proportion."""

    def __init__(
        self,
        cluster: Cluster,
        of: Callable[[int], ModelProfile],
        tokens: int,
        work: PackedWork,
        loads: ExpertLoads | None = None,
        *,
        seed: int,
        noise: float,
        overhead: float,
    ):
        """
        Args:
            cluster: as for `DeviceModel`, like `of`, `tokens`, `seed`, `noise`, `overhead`.
            work: the sequences.
            loads: of the model's experts, if it has some.
        """
        self.work, self.loads, self._at = work, loads, 0
        self._agreed: dict[str, tuple[SlowdownState, tuple[tuple[int, ...] | None, ...]]] = {}
        self._batch: BatchPlan | None = None  # of the last step
        super().__init__(cluster, of, tokens, seed=seed, noise=noise, overhead=overhead)

    @property
    def scale(self) -> float:
        """The length of sequences as a multiple of that at first."""
        return self.tokens / self.work.mean

    def overfull(self, plan: Plan) -> str:
        """The empty string: a plan's lanes hold the longest sequence that there is."""
        return ""

    def dealt(self, plan: Plan, step: int, slowdown: Sequence[int] | None) -> tuple[BatchPlan, Ints]:
        """The rows of a step, and the lengths of its sequences."""
        lengths = self.work.drawn(step, self.scale)
        made = packed_batch_plan(
            plan,
            step,
            range(len(lengths)),
            BatchLengths(tokens=tuple(lengths.tolist()), linear=self.work.linear),
            self.work.row_tokens,
            cut=self.work.cut,
            slowdown=slowdown,
        )
        return made, lengths

    def step(self, plan: Plan, step: int) -> StepTimes:
        """The seconds of step number `step`, after which lanes agree on slowdowns."""
        self._at = step
        state, ahead = self._agreed.get(plan.digest) or self._begun(plan)
        batch, _ = self.dealt(plan, step, ahead[0])
        times = self._played(plan, batch, self.factors * self.noise(step))
        if self.work.follow:
            shape, block = self._shape(plan), times.block
            spent = np.maximum.reduceat(block, np.flatnonzero(np.diff(shape.pipeline, prepend=-1)))
            state, _ = slowdowns_after(state, spent.tolist(), lane_work(plan, batch, self.work.linear))
            ahead = (*ahead[1:], state.slowdown)
        self._agreed = {plan.digest: (state, ahead)}  # another plan begins anew
        self._batch = batch
        return times

    def typical(self, plan: Plan) -> float:
        """Seconds of a step in the mean over noise and batches, with shares that have followed the speeds."""
        key = (plan.digest, self.tokens, self.factors.tobytes(), self._at if self.loads is not None else 0)
        if key not in self._means:
            if len(self._means) > MOST_KEPT:
                self._means.clear()
            slowdown = self._true_slowdown(plan) if self.work.follow else None
            found = []
            for step in range(TYPICAL):
                batch, _ = self.dealt(plan, step, slowdown)
                found.append(float(self._played(plan, batch, self.factors * self.noise(step)).seconds))
            self._means[key] = float(np.mean(found))
        return self._means[key]

    def gang(self, plan: Plan) -> Gang:
        """All lanes of a plan of single stages as other planners have them, at the true speeds; times are in
        units of `unit`."""
        lanes = [lane for pipeline in plan.pipelines for lane in self._gangs(plan, pipeline, self.factors)[:1]]
        first = lanes[0]
        slowdown = tuple(each for gang in lanes for each in gang.slowdown)
        capacity = min(lane.capacity for pipeline in plan.pipelines for lane in pipeline.packed)
        nodes = tuple(int(lane.stages[0].devices[0].partition("/")[0][1:]) for lane in plan.by_lane)
        width = max(1, len(nodes) // len(set(nodes)))
        row = min(capacity, self.work.row_tokens or capacity)
        return first._replace(slowdown=slowdown, nodes=nodes, node=width, capacity=row)

    @property
    def unit(self) -> float:
        """Seconds of one token's attention to one other on a normal device that has all layers."""
        seconds = self.profile.block.seconds * self.profile.layers
        return seconds / (self.work.linear + self.work.effective(self.scale))

    def beside(self, plan: Plan) -> float:
        """Seconds of a step after its pipelines."""
        return self._shape(plan).reduction + self._overhead

    # -- one step

    def _begun(self, plan: Plan) -> tuple[SlowdownState, tuple[tuple[int, ...] | None, ...]]:
        return SlowdownState.begin(planned_slowdown(plan.pipelines)), (None, None)

    def _true_slowdown(self, plan: Plan) -> tuple[int, ...]:
        """Of each lane, which is as slow as its slowest stage."""
        each = [self._gangs(plan, pipeline, self.factors) for pipeline in plan.pipelines]
        slowdown = np.concatenate([np.max([gang.slowdown for gang in gangs], axis=0) for gangs in each])
        return tuple(np.clip(np.rint(64 * slowdown / np.median(slowdown)), 16, 1024).astype(int).tolist())

    def _gangs(self, plan: Plan, pipeline: Pipeline, unit: Floats) -> list[Gang]:
        """The lanes of a pipeline in each of its stages, in units of `self.unit`. Embed and head count as so
        many more matrix products."""
        profile, base = self.profile, self.unit
        near, far = self.cluster.inside, self.cluster.between
        width = 2 * _PASSES * profile.boundary_bytes
        width *= profile.groups / profile.share_units if profile.groups else 1.0
        load = None if self.loads is None else self.loads.load(self._at)
        found = []
        for place, stage in enumerate(pipeline.stages):
            edge = (profile.embed.seconds if place == 0 else 0.0) + (
                profile.head.seconds if place == len(pipeline.stages) - 1 else 0.0
            )
            block = profile.block.seconds * stage.layers
            slow = [self._slowest(lane, unit, load) for lane in stage.by_lane]
            linear = self.work.linear + round(edge / block * self._products)
            keys = width * stage.layers / max(len(lane.devices) for lane in stage.by_lane)
            found.append(
                Gang(
                    slowdown=tuple(64 * each * stage.layers / profile.layers for each in slow),
                    capacity=1,
                    linear=linear,
                    fixed=round(self.work.fixed * min(slow) * stage.layers / profile.layers),
                    near=keys / near.bandwidth / base / linear,
                    far=keys / far.bandwidth / base / linear,
                    nodes=nodes_of(pipeline),
                )
            )
        return found

    def _slowest(self, lane: Stage, unit: Floats, load: ExpertLoad | None) -> float:
        """The part of a block's work on one normal device that a lane's devices take; of its experts as long as
        the busiest one of each block."""
        slow = unit[[self._index[name] for name in lane.devices]]
        dense = max(lane.fraction(at) * slow[at] for at in range(len(lane.devices)))
        if load is None:
            return float(dense)
        experts = (np.array(fractions_in(lane, load)) * slow).max(1).mean()
        return float(dense * (1 - load.part) + experts * load.part)

    @property
    def _products(self) -> float:
        """A token of mean work in units of one token's attention to one other."""
        return self.work.linear + self.work.effective(self.scale)

    def _played(self, plan: Plan, batch: BatchPlan, unit: Floats) -> StepTimes:
        shape, base = self._shape(plan), self.unit
        ends, first = np.zeros(shape.count), 0
        for pipeline, rows in zip(plan.pipelines, batch.pipelines, strict=True):
            gangs, lanes = self._gangs(plan, pipeline, unit), len(pipeline.micro_batches_by_lane)
            if rows:
                ends[first : first + lanes] = self._pipeline(shape, pipeline, rows, gangs, base)
            first += lanes
        work = np.array(lane_work(plan, batch, self.work.linear), dtype=np.float64)[shape.pipeline]
        tokens = np.array(_tokens(plan, batch), dtype=np.float64)[shape.pipeline]
        own = shape.fraction * unit[shape.devices]
        profile = self.profile
        scale = work * base * shape.layers / profile.layers
        block, experts, waited = own * scale, np.zeros(len(own)), np.zeros(len(shape.stage_start))
        if self.loads is not None:
            load = self.loads.load(self._at)
            ratios, busiest = self.loads.work(plan, shape, unit, load)
            experts, block = block * load.part * ratios, block * (1 - load.part)
            first_of = shape.stage_start
            waited = scale[first_of] * load.part * busiest / shape.layers[first_of]
        embed = np.where(shape.first, own * tokens * profile.embed.seconds, 0.0)
        head = np.where(shape.last, own * tokens * profile.head.seconds, 0.0)
        slowest = (np.maximum.reduceat(block + embed + head, shape.stage_start) + waited)[shape.stage_of]
        block = block + experts
        total = float(ends.max()) + shape.reduction
        return StepTimes(
            seconds=np.array(total + self._overhead),
            block=block,
            embed=embed,
            head=head,
            tensor=slowest - block - embed - head,
            reduce=total - ends[shape.pipeline],
        )

    def _pipeline(
        self,
        shape: Compiled,
        pipeline: Pipeline,
        rows: tuple[BatchRow, ...],
        gangs: list[Gang],
        base: float,
    ) -> float:
        """When a pipeline ends; all-reduces and boundaries take a row as long as one of its mean tokens."""
        at = next(
            int(shape.stage_of[place])
            for place, device in enumerate(shape.devices)
            if self.names[device] == pipeline.by_lane[0].stages[0].devices[0]
        )
        tokens = sum(piece.tokens for row in rows for lane in row.lanes for piece in lane)
        mean = tokens / len(rows) / len(rows[0].lanes) / self.profile.tokens  # of a row, in micro-batches
        waits = [float(shape.waits[at + place]) * mean for place in range(len(gangs))]
        gangs = [
            gang._replace(fixed=gang.fixed + round(wait / base))
            for gang, wait in zip(gangs, waits, strict=True)
        ]
        if len(gangs) == 1:
            return seconds(rows, gangs[0]) * base
        hops = [float(shape.boundary[at + place]) * mean / base for place in range(len(gangs) - 1)]
        return staged_seconds(rows, gangs, hops) * base

    def measurements(self, plan: Plan, step: int, times: StepTimes) -> list[Measurement]:
        """The reports of the members about it, in rank order."""
        batch = self._batch
        assert batch is not None
        assert batch.step == step
        shape, spent = self._shape(plan), float(times.seconds)
        told = [_length_sums(batch, plan, device) for device in plan.members]
        slow = self._agreed[plan.digest][0].slowdown if self.work.follow else ()
        found = []
        for rank, (device, (tokens, squares, longest, lengths, rows)) in enumerate(
            zip(plan.members, told, strict=True)
        ):
            block, embed, head = (float(part[rank]) for part in (times.block, times.embed, times.head))
            tensor, reduce = float(times.tensor[rank]), float(times.reduce[rank])
            layers = float(shape.layers[rank] * shape.fraction[rank])
            found.append(
                Measurement(
                    device=device,
                    plan=plan.number,
                    step=step,
                    tokens=tokens,
                    block_seconds=block,
                    block_work=tokens * layers,
                    embed_seconds=embed,
                    head_seconds=head,
                    tensor_seconds=tensor if tensor > 1e-12 else 0.0,
                    boundary_seconds=max(0.0, spent - block - embed - head - tensor - reduce),
                    reduce_seconds=reduce,
                    step_seconds=spent,
                    micro_batches=rows,
                    squares=squares,
                    longest=longest,
                    lengths=lengths,
                    slowdown=slow[int(shape.pipeline[rank])] if slow else 0,
                    batch=summary_of(plan, batch, self.work.linear, slow or None) if rank == 0 else None,
                )
            )
        return found if self.loads is None else self.loads.reported(plan, step, found)


def _tokens(plan: Plan, batch: BatchPlan) -> list[int]:
    """Of each lane of all pipelines."""
    return [
        sum(piece.tokens for row in rows for piece in row.lanes[lane])
        for pipeline, rows in zip(plan.pipelines, batch.pipelines, strict=True)
        for lane in range(len(pipeline.micro_batches_by_lane))
    ]


def _length_sums(batch: BatchPlan, plan: Plan, device: str) -> tuple[int, float, int, dict[int, int], int]:
    """Tokens, squares, the longest, a histogram and rows of what a device has."""
    place = plan.places.get(device)
    if place is None:
        return 0, 0.0, 0, {}, 0
    mine = batch.of(place)
    pieces = [piece for row in mine for piece in row]
    lengths: dict[int, int] = {}
    for piece in pieces:
        if not piece.start:
            at = bucket(piece.length)
            lengths[at] = lengths.get(at, 0) + 1
    return (
        sum(piece.tokens for piece in pieces),
        float(sum(piece.tokens * piece.length for piece in pieces)),
        max((piece.length for piece in pieces), default=0),
        lengths,
        len(mine),
    )
