"""`BatchesAhead`: the batch plans of a plan's steps, each made a step ahead, beside the update before it.

Every rank makes them by itself, the same to the bit. So a batch plan passes through no message, and a fault
leaves none to agree on. The vote of a step has a digest of the next one: a rank that deals otherwise is named
before any rank trains on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import accumulate

from elasticd_planner.batching.batch_summary import lane_work, summary_of
from elasticd_planner.batching.lane_slowdown import SlowdownChange, SlowdownState
from elasticd_planner.batching.lane_slowdown import step as slowdowns_after
from elasticd_planner.batching.lane_tree import NORMAL
from elasticd_planner.batching.packed_batch import planned_slowdown
from elasticd_planner.spec.batch import BatchPlan, BatchSummary
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.step_samples import Feed
from elasticd.runtime.threads import DaemonThreads

log = logging.getLogger(__name__)


class BatchesAhead:
    """The batch plans of one plan, by step."""

    def __init__(
        self, feed: Feed, plan: Plan, linear: int, thread: DaemonThreads, members: Sequence[str]
    ) -> None:
        """
        Args:
            feed: gives the samples of each step.
            plan: the plan in force, of the module with the loss.
            linear: see `elasticd_planner.spec.sample_packing.linear_of`.
            thread: in which batches are planned beside training.
            members: of the plan of all modules, in rank order.
        """
        self._feed, self._plan, self._linear = feed, plan, linear
        self._speeds = SlowdownState.begin(planned_slowdown(plan.pipelines))
        self.agreed: tuple[int, ...] | None = None  #: slowdowns of lanes by votes; None: as the plan has them
        ends = [0, *accumulate(len(pipeline.micro_batches_by_lane) for pipeline in plan.pipelines)]
        #: Of each device that computes the place of its lane among those of all pipelines.
        self._lanes = {device: ends[place.pipeline] + place.lane for device, place in plan.places.items()}
        self._members = members
        self._made: dict[int, Future[BatchPlan]] = {}
        self._thread = thread
        self._compared = -1  # the step whose batch plan the last vote has compared

    def of(self, step: int) -> BatchPlan:
        """The batch plan of a step that has begun.

        Raises:
            SampleError: a sample of it goes into no row; on every rank.
        """
        self._made = {at: made for at, made in self._made.items() if at >= step}
        if step not in self._made or not self._feed.ahead:
            self._make(step, beside=False)
        return self._made[step].result()

    def compared(self, step: int) -> bool:
        """Returns True if all ranks are known to have the same batch plan of a step."""
        return self._compared == step and self._feed.ahead

    def next(self, step: int) -> BatchPlan | None:
        """The batch of the step after this one. None: its samples are not known yet, or one goes into no row,
        which the next step says."""
        if not self._feed.ahead:
            return None
        if step + 1 not in self._made:
            self._make(step + 1, beside=False)
        with suppress(SampleError):
            return self._made[step + 1].result()
        return None

    def voted(self, batch: BatchPlan, seconds: Sequence[float]) -> None:
        """A step ends: the one after the next can be dealt.

        Args:
            batch: of the step.
            seconds: that blocks computed on each rank, the same on all of them.
        """
        if not self._feed.packed:
            self._compared = batch.step + 1
            return
        spent = [0.0] * len(self._speeds.lanes)
        for device, each in zip(self._members, seconds, strict=True):
            if (lane := self._lanes.get(device)) is not None:  # else it computes nothing here
                spent[lane] = max(spent[lane], each)
        work = lane_work(self._plan, batch, self._linear)
        self._speeds, changes = slowdowns_after(self._speeds, spent, work)
        if changes:
            self.agreed = self._speeds.slowdown
            for change in changes:
                log.info("step %d: %s", batch.step, self._said(change))
        if self._feed.ahead:
            self._compared = batch.step + 1
            self._make(batch.step + 2, beside=True)

    def summary(self, batch: BatchPlan) -> BatchSummary | None:
        """A packed batch in numbers; None: it is padded."""
        return summary_of(self._plan, batch, self._linear, self._speeds.slowdown) if batch.packed else None

    def slowdown_of(self, device: str) -> int:
        """By which the lane of a device gets its share of tokens [64ths]; 0: shares do not follow."""
        if not self._feed.packed or device not in self._lanes:
            return 0
        return self._speeds.slowdown[self._lanes[device]]

    def _said(self, change: SlowdownChange) -> str:
        device = next(name for name, lane in self._lanes.items() if lane == change.lane)
        return (
            f"the lane of {device} takes {change.after / NORMAL:.2f} times as long as a normal one "
            f"(before: {change.before / NORMAL:.2f}); its share of tokens follows"
        )

    def _make(self, step: int, *, beside: bool) -> None:
        # It asks the user's dataset, on the training thread.
        dealing = self._feed.dealing(self._plan, step, self.agreed)
        if beside:
            self._made[step] = self._thread(dealing)
            return
        made: Future[BatchPlan] = Future()
        self._made[step] = made
        try:
            made.set_result(dealing())
        except Exception as error:
            made.set_exception(error)
