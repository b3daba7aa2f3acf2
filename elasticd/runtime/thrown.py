"""What the script's own code raised, as the leader is told of it, and as it is caught where nobody else does.

An exception in a step, or in a callback, passes through the job's own generator. One that the body of the
script's loop raises does not: it is heard of when it is about to end the process (`sys.excepthook`). Before
that the interpreter drops what the loop runs over, and so closes the generator, just as `break` does. The two
are told apart by the traceback that an exception has made of the frame it passes through (`unwinding`).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from elasticd.messages import Raised
from elasticd.runtime.groups import Cancelled, PeerLost

#: Characters of an exception's text and of its traceback that are told; of the latter the end.
MOST_TEXT, MOST_TRACEBACK = 1000, 8000

#: Seconds from an exception in the body of the script's loop to the end of the process, if nobody catches it.
CAUGHT_SECONDS = 3.0

#: Exceptions that were raised while another one was handled, and that are looked through.
_DEEPEST = 16


def raised(error: Exception, *, plan: int, step: int, holds: bool, saves: bool, ends: bool = False) -> Raised:
    """An exception in the words for the leader; the arguments are its fields."""
    text = "(its text cannot be made)"
    with contextlib.suppress(Exception):  # `str` calls the user's code, too
        text = str(error)
    trace = ""
    with contextlib.suppress(Exception):
        trace = "".join(traceback.format_exception(error))
    return Raised(
        plan=plan,
        step=step,
        kind=kind_of(error),
        text=_sound(text)[:MOST_TEXT],
        traceback=_sound(trace)[-MOST_TRACEBACK:],
        holds=holds,
        saves=saves,
        ends=ends,
    )


def kind_of(error: BaseException) -> str:
    """The name of an exception's class, with its module where that is not the interpreter's own."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def lost_within(error: BaseException) -> PeerLost | Cancelled | None:
    """The loss of another rank that the script's code caught, and raised something of its own instead."""
    found: BaseException | None = error
    for _ in range(_DEEPEST):
        if found is None or isinstance(found, PeerLost | Cancelled):
            return found
        found = found.__cause__ or found.__context__
    return None


def unwinding() -> bool:
    """Asked by a generator that is closed: whether an exception is passing through the function that runs over
    it. One that handles an exception, or did, stands at another instruction than its traceback has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    if frame is None:
        return False
    found = gc.get_referrers(frame)
    return any(isinstance(each, TracebackType) and each.tb_lasti == frame.f_lasti for each in found)


class Farewell:
    """Said a while after the body of the script's loop raised: if that ended the process, it was withdrawn
    before; so the script has caught it."""

    def __init__(self, said: Callable[[], None]) -> None:
        self._said = said
        self._lock = threading.Lock()
        self._withdrawn = self._over = False

    def soon(self, seconds: float = CAUGHT_SECONDS) -> None:
        """It is said then."""
        timer = threading.Timer(seconds, self._say)
        timer.daemon = True
        timer.start()

    def withdraw(self) -> bool:
        """Whether it was not said, and will not be."""
        with self._lock:
            self._withdrawn = True
            return not self._over

    def _say(self) -> None:
        with self._lock:
            if not self._withdrawn:
                self._over = True
                self._said()


def _sound(text: str) -> str:
    """Without what JSON cannot have."""
    return text.encode("utf-8", "replace").decode()


class Uncaught:
    """From `install` to `restore`: `told` is called with an exception that ends the main thread, after whatever
    shows it to the user."""

    def __init__(self, told: Callable[[Exception], None]) -> None:
        self._told = told
        self._before = sys.excepthook

    def install(self) -> None:
        """Nothing where this is not the main thread, whose exceptions alone are heard of here."""
        if threading.current_thread() is threading.main_thread():
            self._before, sys.excepthook = sys.excepthook, self._hook

    def restore(self) -> None:
        if sys.excepthook == self._hook:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if isinstance(error, Exception):
            sys.stderr.flush()
            self._told(error)
