"""What a recovery goes on from: copies that live, snapshots in memory, or a checkpoint."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.records import Proposal, Recovery


class Source(Value, frozen=True, kw_only=True):
    """As the proposal carries it: of snapshots and copies the `plan` that they are of, else the names of
    `checkpoints`. `words`, for people: where the state comes from, if not from copies that live."""

    plan: Plan | None
    recovery: Recovery
    checkpoints: tuple[str, ...] = ()
    words: str = ""


def called(proposal: Proposal) -> str:
    """What a proposal goes back to, by a name of its own; nothing where copies live."""
    recovery = proposal.recovery
    if recovery is None:
        return ""
    if recovery.snapshots and proposal.old is not None:
        return set_name(proposal.old.number, recovery.step)
    return CHECKPOINTS if proposal.old is None else ""


#: The name of all checkpoints: members read the first that all can.
CHECKPOINTS = "checkpoints"


def set_name(plan: int, step: int) -> str:
    """The name of a set of snapshots."""
    return f"the snapshots of plan {plan} at step {step}"
