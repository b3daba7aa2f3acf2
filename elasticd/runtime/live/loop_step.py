"""`LoopStep`: one try of one step, as the script's loop gets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from inspect import signature
from types import TracebackType
from typing import Any, Self

import torch
from elasticd_planner.spec.mesh import MeshPlan
from torch.nn.parallel import DistributedDataParallel

from elasticd.runtime.data.sample_ledger import hash_samples
from elasticd.runtime.engine.vote import StepOutcome
from elasticd.runtime.live.live_copy import LiveCopy
from elasticd.runtime.live.live_state import SmallState, State


class LoopStep:
    """One try of one step. Its body goes into `with step:`.

    A peer that is lost within the body ends it, and the step comes again, unless the vote had decided it. The
    vote comes in the first `optimizer.step()` of the body, or at its end. An exception of the script's own
    comes out as it is.

    Attributes:
        index: number of the step, from 0.
        indices: of this rank's samples.
        scale: what a mean over this rank's samples is to be multiplied with before `backward`, since DDP and
            FSDP take the mean over ranks: lanes x own samples / samples of the step.
        loss: the mean over this rank's samples (or tokens, after `scale_of`), for `total`; the script sets it
            before its optimizer steps. None: it is not known.
        total: the mean over all samples of the step, from the vote on; NaN: a rank's loss was not known, or
            this rank did not hear the vote of the job's last step.
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
        self.copy, self.index = copy, index
        self._state: State | None = copy.user
        self.indices = dealt(copy.plan, samples)[copy.plan.lane_of[copy.device]]
        self.everything = samples
        self._scale = len(copy.plan.lanes) * len(self.indices) / len(samples)
        self._scaled = False  # the script asked for it
        self.loss: torch.Tensor | float | None = None
        self.total = math.nan
        self.loss_known = False  # in its vote
        self.outcome: StepOutcome | None = None  # of its vote
        self.decided = False  # the update is to be made: a vote was heard here, or by another rank
        self.made = self.closed = False  # closed: the body is over
        self.lost: Exception | None = None  # the fault that ended it
        self.told = False  # the leader was told of that
        self.stepped: set[int] = set()  # optimizers, by id, that stepped in it
        self.updates = 0  # that optimizers made in it
        self.small: SmallState | None = None  # before the body
        self.broken: Exception | None = None  # of a collective after its updates, which gave NaN
        self.counts = counts_of(self.state)  # before the body
        self._read, self._enter, self._leave = read, enter, leave
        self._weight: float | None = None

    @property
    def state(self) -> State:
        """The state that `build` returned for the mesh in force.

        Raises:
            RuntimeError: the loop went on to the next step.
        """
        if self._state is None:
            raise RuntimeError(f"step {self.index} is over: use the state of the step that the loop gave last")
        return self._state

    @property
    def scale(self) -> float:
        """See the class."""
        self._scaled = True
        return self._scale

    @property
    def unscaled(self) -> bool:
        """True if the script did not ask for a scale that is not 1."""
        return not self._scaled and self._scale != 1.0

    def let_go(self) -> None:
        """The loop goes on: a step that the script still has keeps no state alive."""
        del self.copy
        self._state = self.small = self._read = None  # type: ignore[assignment]
        self.__dict__.pop("data", None)

    @cached_property
    def data(self) -> Any:
        """This rank's samples, collated."""
        return self._read(self.indices)

    def scale_of(self, tokens: float) -> float:
        """The scale of a mean over this rank's tokens, where samples have unlike numbers of them: ranks x own
        tokens / tokens of the step, ranks of one TP group counted once. Call it on every rank, before the first
        `optimizer.step()` of the body."""
        self._weight, plan, self._scaled = float(tokens), self.copy.plan, True
        everyone = self.copy.everyone.all_gather(torch.tensor([self.terms[1]], dtype=torch.float64))
        ranks = sum(_first_of_tp(plan, member) for member in plan.members)
        return ranks * float(tokens) / float(everyone.sum())

    @property
    def terms(self) -> tuple[float, float]:
        """The sum of this rank's losses and their count; of a TP group, which computes the same, the first has
        them. Ranks of context and sequence parallelism have the losses of unlike tokens."""
        if not _first_of_tp(self.copy.plan, self.copy.device):
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
        """True once each optimizer has made its update."""
        return self.decided and self.stepped >= {id(each) for each in self.state.optimizers}

    @property
    def moved(self) -> list[bool]:
        """Of each scheduler, and of the average, whether it moved in the body."""
        return [now != before for now, before in zip(counts_of(self.state), self.counts, strict=True)]

    def __enter__(self) -> Self:
        self._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._leave(self, error)


class UsualMoves:
    """The moves of schedulers and of the average in the bodies so far.

    Once the vote decided a step all ranks make its update. A body that breaks off after its last update, as at
    a forward pass through DDP of an evaluation, may leave out what follows: a rank whose body came to its end
    has it. So what moved in every body before is moved for it.
    """

    def __init__(self) -> None:
        self._updates = 0  # of the last body
        self._last: list[bool] | None = None  # they moved in the last body
        self._always: list[bool] = []  # they moved in each body

    def note(self, step: LoopStep) -> None:
        """A body with an update came to its end."""
        moved = self._last = step.moved
        before = self._always or [True] * len(moved)
        self._always, self._updates = [*map(all, zip(before, moved, strict=True))], step.updates

    def complete(self, step: LoopStep) -> bool:
        """Makes the moves that a body which broke off did not come to.

        Returns:
            True if the step counts; False where an update is missing, or it is not known what else is.
        """
        if self._last is None or not step.updated or step.updates < self._updates:
            return False
        state, owed = step.state, list[Callable[[], object]]()
        movers = [*state.schedulers, state.ema]
        for each, now, last, always in zip(movers, step.moved, self._last, self._always, strict=True):
            if now or not last:
                continue
            move = _move_of(each, step) if always else None
            if move is None:
                return False
            owed.append(move)
        for move in owed:
            move()
        if state.scaler is not None and step.small is not None and step.small.is_as_before(state.scaler):
            with suppress(AssertionError):  # no optimizer stepped through it
                state.scaler.update()
        return True


def _move_of(mover: Any, step: LoopStep) -> Callable[[], object] | None:
    """The call that moves a scheduler, or the average, once; None where it takes more than is known here."""
    average: Any = step.state.ema
    if mover is not average:
        needs = [each for each in signature(mover.step).parameters.values() if each.default is each.empty]
        return None if needs else mover.step
    model = step.state.model
    model = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = step.copy.tensors
    there = {id(parameter) for parameter in model.parameters()}
    if tensors is None or any(id(tensor) not in there for tensor in tensors.trained.values()):
        return None  # a forward pass that broke off left parameters that are not sharded
    return partial(average.update_parameters, model) if hasattr(average, "update_parameters") else None


def _first_of_tp(plan: MeshPlan, device: str) -> bool:
    at = zip(plan.names, plan.coordinates[device], strict=True)
    return not any(place for name, place in at if name == "tp")


def counts_of(state: State) -> list[object]:
    """The counts of schedulers, and of the average, which tell whether they moved."""
    averaged = getattr(state.ema, "n_averaged", None)
    return [
        *map(_count_of, state.schedulers),
        int(averaged) if isinstance(averaged, torch.Tensor) else averaged,
    ]


def _count_of(scheduler: Any) -> object:
    """The moves of a scheduler; those of a ChainedScheduler are its parts'."""
    parts = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", None), *map(_count_of, parts)


def dealt(plan: MeshPlan, samples: Sequence[int]) -> list[tuple[int, ...]]:
    """The samples of each lane: the first lane's come first."""
    parts, at = [], 0
    for count in plan.samples:
        parts.append(tuple(samples[at : at + count]))
        at += count
    return parts
