"""`BatchesAhead`: the batch plans of a plan's steps, each made a step ahead, beside the update before it.

Every rank makes them by itself, the same to the bit. So a batch plan passes through no message, and a fault
leaves none to agree on. The vote of a step has a digest of the next one: a rank that deals otherwise is named
before any rank trains on it.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.step_samples import Feed
from elasticd.runtime.threads import DaemonThreads


class BatchesAhead:
    """The batch plans of one plan, by step."""

    def __init__(self, feed: Feed, plan: Plan) -> None:
        self._feed, self._plan = feed, plan
        self._made: dict[int, Future[BatchPlan]] = {}
        self._thread = DaemonThreads("batches")

    def of(self, step: int) -> BatchPlan:
        """The batch plan of a step that has begun.

        Raises:
            SampleError: a sample of it goes into no row; on every rank.
        """
        self._made = {at: made for at, made in self._made.items() if at >= step}
        if step not in self._made or not self._feed.ahead:
            self._make(step, beside=False)
        return self._made[step].result()

    def next(self, step: int) -> BatchPlan | None:
        """That of the step after this one. None: its samples are not known yet, or one goes into no row, which
        the next step says."""
        if not self._feed.ahead:
            return None
        if step + 1 not in self._made:
            self._make(step + 1, beside=False)
        with suppress(SampleError):
            return self._made[step + 1].result()
        return None

    def voted(self, step: int) -> None:
        """A step ends: the one after the next can be dealt."""
        if self._feed.ahead and self._feed.packed:
            self._make(step + 2, beside=True)

    def _make(self, step: int, *, beside: bool) -> None:
        dealing = self._feed.dealing(self._plan, step)  # asks the user's dataset, on the training thread
        if beside:
            self._made[step] = self._thread(dealing)
            return
        made: Future[BatchPlan] = Future()
        self._made[step] = made
        try:
            made.set_result(dealing())
        except Exception as error:
            made.set_exception(error)
