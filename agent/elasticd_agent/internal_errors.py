"""Defects of elasticd that an agent outlives: an exception where none may come costs what was under way alone.

All workers of a node depend on its agent. An exception of a handler therefore costs the message, its client or
the part that was at work, and the agent goes on. The log has the traceback of each defect once, and a line now
and then for those that are like it.
"""

from __future__ import annotations

import logging
import threading
from traceback import walk_tb

from elasticd.codec.decoding import shown
from elasticd.system.logs import Seldom

#: Places of which a traceback is logged.
_MOST_PLACES = 64

_log = logging.getLogger(__name__)
_again = Seldom(_log)
_lock = threading.Lock()
_places: set[tuple[str, str, str, int]] = set()


def outlived(what: str, error: Exception) -> str:
    """Logs a defect. `what` says what failed, and is the same for all like it. Thread-safe.

    Returns:
        The error in one line, for whoever has to be told.
    """
    text = f"{type(error).__name__}: {shown(str(error))}"
    place = (what, type(error).__name__, *_raised_at(error))
    with _lock:
        new = place not in _places and len(_places) < _MOST_PLACES
        if new:
            _places.add(place)
    if new:
        _log.error("elasticd failed on %s, and goes on; please report it", what, exc_info=error)
    else:
        _again.warn(f"elasticd failed on {what} again ({text})")
    return text


def _raised_at(error: Exception) -> tuple[str, int]:
    """The file and line of the innermost call."""
    calls = [("", 0), *((frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))]
    return calls[-1]
