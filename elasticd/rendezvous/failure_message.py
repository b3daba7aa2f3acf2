"""One line in place of torchrun's traceback: a worker failed, which has said why itself, or a signal came.

The handler lives in torchrun's process. What ends that process uncaught goes through `sys.excepthook`; ours
speaks for failed workers alone and leaves everything else to the one before it.
"""

from __future__ import annotations

import signal
import sys
from types import TracebackType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def said(error: ChildFailedError) -> str:
    """The line: how the first worker that failed ended."""
    _, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        how = f"ended with exit code {failure.exitcode}"
    else:
        how = f"was ended by signal {-failure.exitcode} ({_name(-failure.exitcode)})"
    return f"elasticd: a worker of this node {how}: its own last line above says why"


def install() -> None:
    """Puts the hook in its place; once, however often it is called. Python ends with code 1 after it."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ChildFailedError):
            print(said(error), file=sys.stderr, flush=True)
        elif isinstance(error, SignalException):
            text = f"elasticd: torchrun has ended its workers, as {_name(error.sigval)} told it to"
            print(text, file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown here"
