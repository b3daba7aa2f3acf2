"""Packed rows of the module with the loss beside modules of items: what of a mean step each lane has, and the
rows that memory leaves.

The sequences of a mean step (`PackedSequences.typical`) are dealt as a job deals them. So a row has its items,
a sequence that is cut over lanes has the rows of its items on each of these, and a long row takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd_planner.batching.packed_batch import CutOptions, packed_batch_plan
from elasticd_planner.cost.packed_cost import PackedCost
from elasticd_planner.problem import Problem
from elasticd_planner.search.packed import cost_of, packed_lanes
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, SequencePiece
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Pipeline, Plan

#: Tokens of a row that a lane has at least.
_LEAST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtRows:
    """The sequences of a mean step under a plan."""

    batch: BatchPlan
    work: tuple[float, ...]  # by lane over all pipelines: tokens of mean work
    pieces: tuple[int, ...]  # likewise: samples of which it has a part
    samples: tuple[tuple[int, ...], ...]  # by pipeline: those of which each row has a part

    def alive(self, pipeline: int, rows: int) -> int:
        """The most samples of so many adjacent rows of a pipeline."""
        counts = self.samples[pipeline]
        return max((sum(counts[at : at + rows]) for at in range(max(1, len(counts) - rows + 1))), default=0)


class PackedRows:
    """The packed rows of the module with the loss, of one problem."""

    cost: PackedCost

    def __init__(self, problem: Problem) -> None:
        assert problem.packed is not None
        self.packed: PackedSequences = problem.packed
        self.cost = cost_of(problem)
        self._micro_batch = problem.micro_batch
        self._dealt: dict[tuple[tuple[Pipeline, ...], float], DealtRows] = {}

    @property
    def each(self) -> float:
        """The samples of a step that one of the typical ones stands for."""
        return self.packed.sequences / len(self.packed.typical)

    def samples(self, part: float) -> int:
        """The number of the typical ones that are dealt. part: of them all."""
        return max(1, round(part * len(self.packed.typical)))

    def row_tokens(self, view: Plan) -> float:
        """Tokens of a row of a lane, in the mean."""
        return self.packed.tokens / sum(lane.micro_batches for lane in view.by_lane)

    def work(self, piece: SequencePiece) -> float:
        """Tokens of mean work that a piece of a sequence counts as."""
        linear, effective = self.packed.linear, self.packed.lengths.effective
        return piece.tokens * (linear + piece.length) / (linear + effective)

    def holds(self, view: Plan) -> bool:
        """Returns True if the lanes of some pipeline hold the longest sequence."""
        return self.cost.holds([[lane.capacity for lane in pipeline.packed] for pipeline in view.pipelines])

    def dealt(self, view: Plan, part: float = 1.0) -> DealtRows:
        """The sequences of a mean step. part: of them, evenly, as far as the lanes hold them."""
        key = view.pipelines, part
        if key not in self._dealt:
            self._dealt[key] = self._deal(view, part)
        return self._dealt[key]

    def _deal(self, view: Plan, part: float) -> DealtRows:
        packed = self.packed
        most = max(
            self.cost.longest([lane.capacity for lane in pipeline.packed]) for pipeline in view.pipelines
        )
        typical = packed.typical.tolist()
        count = self.samples(part)
        tokens = tuple(min(most, typical[at * len(typical) // count]) for at in range(count))
        cut = CutOptions(least=packed.least, fixed=packed.least * packed.linear) if packed.cut else None
        batch = packed_batch_plan(
            view,
            0,
            range(count),
            BatchLengths(tokens=tokens, linear=packed.linear),
            packed.row_tokens or None,
            cut=cut,
        )
        work, pieces, samples = list[float](), list[int](), list[tuple[int, ...]]()
        for pipeline, rows in zip(view.pipelines, batch.pipelines, strict=True):
            for lane in range(len(pipeline.micro_batches_by_lane)):
                own = [piece for row in rows for piece in row.lanes[lane]]
                work.append(sum(map(self.work, own)))
                pieces.append(len(own))
            samples.append(tuple(len({piece.sample for lane in row.lanes for piece in lane}) for row in rows))
        return DealtRows(batch=batch, work=tuple(work), pieces=tuple(pieces), samples=tuple(samples))

    # Rows that memory leaves.

    def with_memory(self, plan: Plan, memory: Mapping[str, int]) -> Plan | None:
        """The plan with as many tokens in a row of each lane of the module with the loss as that much memory of
        each device holds; None where that is not the longest sequence."""
        view = plan.loss_view
        rooms = self.cost.capacity(view, memory)
        return self._with(plan, rooms) if self.cost.holds(rooms) else None

    def packed_plan(self, plan: Plan) -> Plan:
        """The plan with packed lanes, as small as can be where it has none."""
        if plan.packed:
            return plan
        lanes = [[_LEAST] * len(each.micro_batches_by_lane) for each in plan.loss_module.pipelines]
        return self._with(plan, lanes)

    def too_long(self, view: Plan) -> str:
        """Why a plan does not hold the longest sequence."""
        rooms = [[lane.capacity for lane in pipeline.packed] for pipeline in view.pipelines]
        return (
            f"does not fit: {self.packed.sample or 'a sequence'} has {self.packed.longest} tokens, and "
            f"its lanes hold no more than {max(map(self.cost.longest, rooms))} in a row beside modules of items"
        )

    def lean(self, plan: Plan) -> Plan:
        """The plan with the fewest tokens in a row that hold the longest sequence, in proportion."""
        rooms = [[lane.capacity for lane in pipeline.packed] for pipeline in plan.loss_module.pipelines]
        part = self.packed.longest / max(map(self.cost.longest, rooms))
        return self._with(
            plan, [[min(room, max(_LEAST, 2 * math.ceil(room * part / 2))) for room in own] for own in rooms]
        )

    def _with(self, plan: Plan, rooms: Sequence[Sequence[int]]) -> Plan:
        view = plan.loss_view
        pipelines = packed_lanes(view.pipelines, rooms, self.cost.rows(view, rooms), self.cost.slowdown(view))
        return plan.with_pipelines(pipelines)
