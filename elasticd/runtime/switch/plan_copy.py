"""The training state under one plan on one rank, as switches see it, and what makes and fills one.

`Engine` is such a copy of a job whose model elasticd cuts; a job of the user's own loop has others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import PreparedMove
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box

from elasticd.records import Proposal, Vote
from elasticd.runtime.comm.communicators import Communicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.engine.state_health import StateHealth


class PlanCopy(Protocol):
    """The training state under one plan on one rank."""

    health: StateHealth  #: of the state here

    @property
    def plan(self) -> Any:
        """The plan."""

    @property
    def plan_groups(self) -> PlanGroups:
        """The process groups of the plan."""

    @property
    def rank(self) -> int:
        """The rank of this device under the plan."""

    @property
    def reduced(self) -> int | None:
        """Index of the step whose gradients are reduced here and wait for their update."""

    @property
    def last(self) -> Vote | None:
        """The vote of the last update."""

    @property
    def lent(self) -> object | None:
        """Its state while a part of that lies in host memory; None: nothing does."""

    def rest(self) -> None:
        """Returns when the device has come to rest, after another member was lost. Raises DeviceLost."""

    def back(self) -> None:
        """Takes back what was set aside. Raises RuntimeError."""

    def set_aside(self, kept: Mapping[Item, Sequence[Box]]) -> object:
        """Lends this device's memory to another plan. Raises NoHostMemory."""

    def delivered(self) -> None:
        """Returns when this device has the values that were sent to it."""

    def apply(self, vote: Vote) -> None:
        """Makes the update of a step whose reduced gradients are here."""


Held = TypeVar("Held", bound=PlanCopy)


@dataclass(frozen=True, kw_only=True)
class PreparedPlan(Generic[Held]):
    """All that a rank needs before it switches to a proposed plan."""

    old: Holdings | None  # of the state that moves; None: it is read from a checkpoint, or made
    new: Holdings  # of the proposed plan
    engine: Held | None  # without state; None on a rank that is no member of the plan
    transition: PlanGroups  # the groups made for this switch
    group: Group  # the transition group
    communicators: Communicators | None  # of devices, for what moves from one to another; None: it is alone
    proposal: Proposal  # of the plan
    snapshot: LocalState | None = None  # read here for lost ranks, whose state snapshots alone have
    prepared_move: PreparedMove | None = (
        None  # the transfers, computed ahead where training goes on until the switch
    )

    @property
    def all_read(self) -> bool:
        """True if all state is read from snapshots, so that no copy on a device is of use."""
        recovery, old = self.proposal.recovery, self.proposal.old
        return recovery is not None and old is not None and recovery.all_read(old)


@dataclass(frozen=True, kw_only=True)
class MoveResult:
    """The step that a move leads to, and its cost."""

    step: int  # updates that the new state has seen
    bytes_sent: int = 0  # by this rank, checksums included
    bytes_lacking: int = 0  # of the new state that this rank did not hold before
    bytes_state: int = 0  # the job's whole state, each element once
    checkpoint: str = ""  # name of the one that the state was read from ("": none)
    began: float = 0.0  # seconds on `time.perf_counter`, when all ranks had come
    #: By device that sent to this rank: bytes, and seconds until they were here.
    flows: Mapping[str, tuple[int, float]] = field(default_factory=dict)


class PlanMoves(Protocol[Held]):
    """Makes copies of new plans, and moves the state into them."""

    @property
    def folder(self) -> Path | None:
        """The folder of the job's checkpoints; None: it keeps none."""

    def prepare(
        self,
        proposal: Proposal,
        device: str,
        plan_groups_of: Callable[[str], PlanGroups],
        training: Held | None,
    ) -> PreparedPlan[Held]:
        """Makes what a proposed plan needs, beside training, and joins the transition group last.

        Args:
            proposal: the proposed plan, and the one before it.
            device: this rank's device.
            plan_groups_of: makes the groups of one part of the plan ("groups" or "transition").
            training: the copy in force here, which trains on meanwhile.
        """

    def move(self, prepared: PreparedPlan[Held], held: Held | None, step: int) -> MoveResult:
        """Fills the new copy from what all ranks hold; `held` stays as it is.

        Args:
            prepared: what `prepare` made.
            held: the copy here whose state the job goes on from; None: this rank only joins.
            step: updates applied to it.

        Raises:
            SOUND, PeerLost, Cancelled: The move failed. After one of `SOUND` the transition group is usable.
        """
