"""What a recovery goes on from: copies that live, snapshots in memory, or a checkpoint."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.records import Proposal, Recovery


class Source(Value, frozen=True, kw_only=True):
    """What a recovery reads its state from, as the proposal carries it."""

    plan: Plan | None  # that copies or snapshots are of; None: checkpoints
    recovery: Recovery  # who has what
    checkpoints: tuple[str, ...] = ()  # names, newest first
    words: str = ""  # where the state comes from, if not from copies that live


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
