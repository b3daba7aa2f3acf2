"""A switch under way, and what the last ones cost."""

from __future__ import annotations

from elasticd_planner.policy.policy import Moved
from elasticd_planner.value import Value


class Switching(Value, frozen=True, kw_only=True):
    """The reason to abort the open proposal, and the costs of switches."""

    give_up: str = ""  # why the proposal is to be aborted (empty: it is not)
    #: a switch that set old copies aside in host memory was given up: the next one does without
    no_aside: bool = False
    moved: tuple[Moved, ...] = ()  # what the last switches cost; a new leader learns it anew
