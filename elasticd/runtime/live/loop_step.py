"""`LoopStep`: one try of one step, as the script's loop gets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from elasticd_planner.spec.mesh import MeshPlan

from elasticd.runtime.data.sample_ledger import hash_samples
from elasticd.runtime.engine.vote import StepOutcome
from elasticd.runtime.live.live_copy import LiveCopy
from elasticd.runtime.live.live_state import State


class LoopStep:
    """One try of one step. Its body goes into `with step:`.

    A peer that is lost within the body ends it, and the step comes again, unless the vote had decided it. The
    vote comes in the first `optimizer.step()` of the body, or at its end. An exception of the script's own
    comes out as it is.

    Attributes:
        index: number of the step, from 0.
        indices: of this rank's samples.
        state: what `build` returned for the mesh in force.
        scale: what a mean over this rank's samples is to be multiplied with before `backward`, since DDP and
            FSDP take the mean over ranks: lanes x own samples / samples of the step.
        loss: the mean over this rank's samples (or tokens, after `scale_of`), for `total`; the script sets it
            before its optimizer steps. None: it is not known.
        total: the mean over all samples of the step, from the vote on; NaN: a rank's loss was not known, or
            another rank's vote decided the step.
        made: the body is over, and the step counts. Code after the `with` runs for a try that was lost, too.
    """

    def __init__(
        self,
        copy: LiveCopy,
        index: int,
        samples: Sequence[int],
        read: Callable[[Sequence[int]], Any],
        enter: Callable[[LoopStep], None],
        leave: Callable[[LoopStep, BaseException | None], bool],
    ) -> None:
        self.copy, self.index, self.state = copy, index, copy.user
        self.indices = dealt(copy.plan, samples)[copy.plan.lane_of[copy.device]]
        self.everything = samples
        self._lanes = len(copy.plan.lanes)
        self.scale = self._lanes * len(self.indices) / len(samples)
        self.loss: torch.Tensor | float | None = None
        self.total = math.nan
        self.outcome: StepOutcome | None = None  # of its vote
        self.decided = False  # the update is to be made: a vote was heard here, or by another rank
        self.made = self.closed = False  # closed: the body is over
        self.lost: Exception | None = None  # the fault that ended it
        self.told = False  # the leader was told of that
        self.stepped: set[int] = set()  # optimizers, by id, that stepped in it
        self._read, self._enter, self._leave = read, enter, leave
        self._weight: float | None = None

    @property
    def user(self) -> State:
        """What the script trains."""
        return self.copy.user

    @cached_property
    def data(self) -> Any:
        """This rank's samples, collated."""
        return self._read(self.indices)

    def scale_of(self, tokens: float) -> float:
        """The scale of a mean over this rank's tokens, where samples have unlike numbers of them: lanes x own
        tokens / tokens of the step. Call it on every rank, before the first `optimizer.step()` of the body."""
        self._weight = float(tokens)
        everyone = self.copy.everyone.all_gather(torch.tensor([self.terms[1]], dtype=torch.float64))
        return self._lanes * float(tokens) / float(everyone.sum())

    @property
    def terms(self) -> tuple[float, float]:
        """The sum of this rank's losses and their count; of a lane of several ranks the first one has them."""
        plan = self.copy.plan
        if plan.lanes[plan.lane_of[self.copy.device]][0] != self.copy.device:
            return 0.0, 0.0
        count = self._weight if self._weight is not None else float(len(self.indices))
        loss = self.loss
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        loss = math.nan if loss is None else float(loss)
        return loss * count, count

    @property
    def hash(self) -> int:
        """Of the samples that this rank gave to the script."""
        return hash_samples(self.indices)

    @property
    def hashes(self) -> list[int]:
        """Of the samples that each rank is to see, in rank order."""
        plan = self.copy.plan
        by_lane = [hash_samples(own) for own in dealt(plan, self.everything)]
        return [by_lane[plan.lane_of[member]] for member in plan.members]

    @property
    def updated(self) -> bool:
        """Whether each optimizer has made its update."""
        return self.decided and self.stepped >= {id(each) for each in self.state.optimizers}

    def __enter__(self) -> Self:
        self._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._leave(self, error)


def dealt(plan: MeshPlan, samples: Sequence[int]) -> list[tuple[int, ...]]:
    """The samples of each lane: the first lane's come first."""
    parts, at = [], 0
    for count in plan.samples:
        parts.append(tuple(samples[at : at + count]))
        at += count
    return parts
