"""Steps as rank 0 reports them, and as their readers have them."""

from __future__ import annotations

from elasticd_planner.value import Value


class StepRecord(Value, frozen=True, kw_only=True):
    """A step as rank 0 reported it."""

    step: int  # index
    plan: int  # number of its plan
    loss: float | None  # mean per token
    tokens: int | None  # of all ranks
    #: of the step itself, from its begin to its end; the script's own code between two steps is not in it
    #: (0: not measured)
    seconds: float
    time: float  # unix seconds at which it ended, by the leader's clock
    #: the same in seconds of rank 0's monotonic clock (0: it did not tell, and `time` is the report's arrival)
    ended_at: float = 0.0
    #: name of that clock, which begins with each start of the worker's process: `time` and `ended_at` measure
    #: durations between steps of one clock alone
    clock: str = ""
