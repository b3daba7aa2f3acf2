"""Exceptions of the script's own code: reported to the leader, and caught where nobody else does.

An exception in a step, or in a callback, passes through the job's own generator. One that the body of the
script's loop raises does not: it is heard of when it is about to end the process (`sys.excepthook`). Before
that the interpreter closes the generator, as it does at a `break`, and nothing tells the one from the other.
So a worker whose loop was left takes its leave a moment later (`UserExceptionExit`): once no exception was on
its way for that long. On its way are those that the main thread handles now and did not handle as the loop was
left (in a `finally`, a `with`, an `except` that may raise it again), and one that the interpreter is showing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from elasticd.runtime.comm.groups import Cancelled, PeerLost, first_sentence
from elasticd.wire.worker import Raised

log = logging.getLogger(__name__)

#: Characters of an exception's text and of its traceback that are told; of the latter the end.
MOST_TEXT, MOST_TRACEBACK = 1000, 8000

#: Seconds for which no exception was on its way, until a script that left its loop takes its leave. The leader
#: waits longer for the others to take their leave too (`leave_seconds`).
_ON_ITS_WAY = 1.0
#: Seconds between looks for one.
_LOOK_SECONDS = 0.05

#: Exceptions that were raised while another one was handled, and that are looked through.
_DEEPEST = 16


def raised(
    error: Exception,
    *,
    plan: int,
    step: int,
    holds: bool,
    saves: bool,
    ends: bool = False,
    index: int | None = None,
) -> Raised:
    """An exception in the words for the leader; the arguments are its fields."""
    trace = ""
    with contextlib.suppress(Exception):
        trace = "".join(traceback.format_exception(error))
    return Raised(
        plan=plan,
        step=step,
        kind=kind_of(error),
        text=_text(error),
        traceback=_sound(trace)[-MOST_TRACEBACK:],
        holds=holds,
        saves=saves,
        ends=ends,
        index=index,
    )


def kind_of(error: BaseException) -> str:
    """The name of an exception's class, with its module where that is not the interpreter's own."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def lost_within(error: BaseException, *, interrupted: bool = False) -> PeerLost | Cancelled | None:
    """The loss of another rank that an exception comes of, if any.

    Args:
        error: the loss itself, or what the script's code raised instead when it caught the loss.
        interrupted: the plan's groups were shut meanwhile. An aborted collective leaves garbage, for which the
            script's code may raise, so that any exception counts: one of the script's own comes again.
    """
    cause: BaseException | None = error
    for _ in range(_DEEPEST):
        if isinstance(cause, PeerLost | Cancelled):
            return cause
        if cause is None:
            break
        cause = cause.__cause__ or cause.__context__
    if not interrupted:
        return None
    text = first_sentence(error) if isinstance(error, RuntimeError) else _text(error)
    return Cancelled(f"{kind_of(error)} once the plan's groups were shut: {text}")


def _text(error: BaseException) -> str:
    """Its text, of `MOST_TEXT` characters at most."""
    text = "(its text cannot be made)"
    with contextlib.suppress(Exception):  # `str` calls the user's code, too
        text = str(error)
    return _sound(text)[:MOST_TEXT]


def _sound(text: str) -> str:
    """Without what JSON cannot have."""
    return text.encode("utf-8", "replace").decode()


class Uncaught:
    """From `install` to `restore`: `told` is called with an exception that ends the main thread, after whatever
    shows it to the user."""

    def __init__(self, told: Callable[[Exception], None]) -> None:
        self._told: Callable[[Exception], None] | None = told
        self._before = sys.excepthook

    def install(self) -> None:
        """Nothing where this is not the main thread, whose exceptions alone are heard of here."""
        if threading.current_thread() is threading.main_thread():
            self._before, sys.excepthook = sys.excepthook, self._hook

    def restore(self) -> None:
        """Puts the earlier `sys.excepthook` back, unless another one took this one's place. Nobody is told any
        more: the other one may keep this one, and with it all that `told` refers to, as long as the process."""
        self._told = None
        if sys.excepthook == self._hook:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._before(kind, error, trace)
            sys.stderr.flush()
        finally:
            if isinstance(error, Exception) and self._told is not None:
                self._told(error)


class UserExceptionExit:
    """Calls `leave` once at most: at once (`now`); or, on another thread, when the main thread has ended
    (`at_end`), or no exception was on its way for a while (`later`); or not at all, if it was `withdrawn`
    before. alone: there are no other ranks, of which a line would speak."""

    def __init__(self, leave: Callable[[], None], alone: bool = False) -> None:
        self._leave, self._alone = leave, alone
        self._lock, self._taken = threading.Lock(), False

    def now(self) -> None:
        """Calls `leave` on this thread, unless it was called or withdrawn before."""
        if self.withdrawn():
            self._leave()

    def later(self, handled: BaseException | None = None) -> None:
        """By the main thread, in an `except GeneratorExit`. handled: what it handled before, in an `except` of
        the script around the loop."""
        if threading.main_thread().is_alive():
            given = (handled, _shown())
            threading.Thread(target=self._wait, args=given, name="elasticd-farewell").start()
        else:  # the interpreter ends, and starts no threads
            self.now()

    def at_end(self) -> None:
        """By the main thread, which goes on."""
        if threading.main_thread().is_alive():
            threading.Thread(target=self._wait_for_end, name="elasticd-farewell").start()
        else:  # the interpreter ends, and starts no threads
            self.now()

    def _wait_for_end(self) -> None:
        threading.main_thread().join()
        self.now()

    def withdrawn(self) -> bool:
        """Returns True if that was in time. From then on it is not taken any more."""
        with self._lock:
            before, self._taken = self._taken, True
        return not before

    def _wait(self, handled: BaseException | None, shown: BaseException | None) -> None:
        main, told = threading.main_thread(), False
        quiet = time.monotonic()
        while main.is_alive() and not self._taken and time.monotonic() - quiet < _ON_ITS_WAY:
            main.join(min(_LOOK_SECONDS, _ON_ITS_WAY))
            found = _on_its_way(main, handled, shown)
            if found is None:
                continue
            quiet = time.monotonic()
            if isinstance(found, Exception) and not told and not self._alone:
                told = True
                log.warning(
                    "the loop's body raised %s: the other ranks wait for what becomes of it", kind_of(found)
                )
        self.now()


def _on_its_way(
    thread: threading.Thread, handled: BaseException | None, shown: BaseException | None
) -> BaseException | None:
    """An exception of a thread that is neither of these two, and no wish to end: that one is taken for leaving.
    A `GeneratorExit` counts: the loop is still being left, and by what is not known before."""
    for found, known in ((_handled(thread), handled), (_shown(), shown)):
        ends = isinstance(found, SystemExit | KeyboardInterrupt)
        if found is not None and found is not known and not ends:
            return found
    return None


def _handled(thread: threading.Thread) -> BaseException | None:
    """The exception that a thread handles now: it is in an `except`, a `finally` or the end of a `with`."""
    found: Any = sys._current_exceptions().get(thread.ident or 0)
    return found[1] if isinstance(found, tuple) else found  # Python 3.11 has its class and traceback beside it


def _shown() -> BaseException | None:
    """The exception that the interpreter last showed, or is about to: `sys.excepthook` is called after that."""
    return getattr(sys, "last_value", None)
