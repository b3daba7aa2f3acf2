"""The end of a job: the request or the exception that brings it about."""

from __future__ import annotations

from elasticd_planner.value import Value

from elasticd.records import Thrown


class JobEnding(Value, frozen=True, kw_only=True):
    """Requests and exceptions that end the job, and its end in the store."""

    done_epoch: int = 0  # epoch of the job's end in the store
    orderly: bool = False  # it ended since its workers were told to go, by a user who stopped it or by signals
    requested: bool = False  # somebody asked for its end, whether its workers left in order or not
    stopping: str = ""  # who stops the job (empty: nobody)
    stop_at: float = 0.0  # when it ends then, at the latest
    stop_asked_at: float = 0.0  # when somebody asked for that
    thrown: tuple[Thrown, ...] = ()  # exceptions of the script's own code, newest last
    failing: str = ""  # which of them ends the job, once its state is saved (empty: none)
