"""Ends of a rank's part in a job, other than by its last step."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from elasticd.system.logs import say
from elasticd.system.torchrun_outcome import OUTCOME_VARIABLE, REFUSAL, STOP
from elasticd.system.user_line import raised_by_user, user_line

#: Where torch's agent looks for why a worker failed.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
T = TypeVar("T")


class ScriptRefusal(ValueError):
    """The base of errors by which elasticd refuses what a script describes: the text says what would be right.

    One that nobody catches ends the script with its text and the script's line, in place of a traceback.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        refuse_in_one_line()


#: The begin of torch's message where `init_process_group` lacks the variables that a launcher sets.
_NO_LAUNCHER = "Error initializing torch.distributed using env:// rendezvous: environment variable "


def without_launcher(error: BaseException) -> str:
    """The remedy where `init_process_group` was called in a process that no launcher started; "" for any other
    error."""
    if not (isinstance(error, ValueError) and str(error).startswith(_NO_LAUNCHER)):
        return ""
    return (
        "torch.distributed.init_process_group was called in a process that no launcher started: a script with "
        "an elasticd.Job or an elasticd.live leaves that call out, since these make all process groups "
        "themselves; any other is started with 'elasticd run SCRIPT' or torchrun"
    )


def refuse_in_one_line() -> None:
    """Has this process end by one line, without a traceback, where nobody catches a `ScriptRefusal`, or an
    `init_process_group` without a launcher. It puts a hook before `sys.excepthook`; once, unless another one
    took its place."""
    before = sys.excepthook
    if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
        return
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = str(error) if isinstance(error, ScriptRefusal) else without_launcher(error)
        if not text:
            before(kind, error, trace)
            return
        reason = f"{text} ({user_line(error)})"
        if not is_told(refused(reason)):
            say(reason)

    sys.excepthook = hook


class OptionRefusal(ScriptRefusal, TypeError):
    """A group of options has no such field, or the field takes no such value."""


def script_options(group: type[T]) -> type[T]:
    """Decorates a dataclass of options: one that is not taken ends the script with one line.

    A misspelled field is named with the one that it is close to. Errors that the user's own code raises stay.
    """
    construct, names = group.__init__, tuple(inspect.signature(group).parameters)

    @wraps(construct)
    def construct_or_refuse(self: Any, *values: Any, **keywords: Any) -> None:
        try:
            for keyword in keywords:
                if keyword not in names:
                    raise OptionRefusal(unexpected(group.__name__, keyword, names))
            construct(self, *values, **keywords)
        except (ValueError, TypeError) as error:
            if isinstance(error, ScriptRefusal) or raised_by_user(error):
                raise
            text = str(error).replace(f"{group.__name__}.__init__()", f"{group.__name__}()")
            raise OptionRefusal(text) from error

    group.__init__ = construct_or_refuse  # type: ignore[method-assign]
    return group


def unexpected(owner: str, keyword: str, names: Iterable[str]) -> str:
    """Returns the sentence about a keyword that `owner` does not have, with the name that it is close to."""
    near = get_close_matches(keyword, names, n=1)
    meant = f": did you mean {near[0]}=...?" if near else f"; it takes {', '.join(names)}"
    return f"{owner}() got an unexpected keyword argument {keyword!r}{meant}"


class JobStopped(SystemExit):
    """The job cannot go on; the message says why. As a SystemExit it ends a script with that one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"elasticd: {reason}")
        self.reason = reason

    def __str__(self) -> str:
        return f"elasticd: {self.reason}"


def stopped(reason: str) -> JobStopped:
    """The error for a job that cannot go on. `elasticd run` prints the reason once, in place of the workers."""
    return _stop_error(reason, STOP)


def refused(reason: str) -> JobStopped:
    """The error for a script or worker that would be refused again: its torchrun does not start it anew.

    `elasticd run` prints the reason once, in place of the workers.
    """
    return _stop_error(reason, REFUSAL)


def _stop_error(reason: str, key: str) -> JobStopped:
    """The error, whose reason torch's error file has under this key."""
    error = JobStopped(reason)
    if path := os.environ.get(_ERROR_FILE):
        outcome = {"message": str(error), "timestamp": int(time.time()), key: reason}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(outcome))
            if os.environ.get(OUTCOME_VARIABLE):
                error.code = 1
    return error


def is_told(error: JobStopped) -> bool:
    """Returns whether `elasticd run` prints the reason, in place of this process."""
    return error.code == 1


class JobOver(Exception):
    """The job ended while this rank stood by, or had lost the others."""


class Drained(SystemExit):
    """This process has drained: the job goes on without it, or was stopped. As a SystemExit with code 0 it ends
    a script in good order, before what follows the last step; and its torchrun starts no other in its place.

    Attributes:
        reason: For the leader and people.
    """

    def __init__(self, reason: str = "it has drained, and the job goes on without it") -> None:
        super().__init__(0)
        self.reason = reason
