"""Waiting for a condition of other processes or threads, where nothing tells that it came about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

#: Seconds that a condition has: a busy machine takes half a minute to start a worker.
CONDITION_TIMEOUT_SECONDS = 400.0
#: Seconds between two looks at most.
_LONGEST_PAUSE_SECONDS = 0.5
#: Seconds between two looks at least, for each that a look takes.
_RARELY = 15

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    what: Callable[[], object] = str,
    *,
    seconds: float = CONDITION_TIMEOUT_SECONDS,
    pause: float = 0.03,
) -> T:
    """Looks at a condition until it is true.

    Args:
        condition: what is looked at.
        what: what is said where it never became true.
        seconds: how long it has.
        pause: seconds between two looks; looks that themselves take long are made less often.

    Returns:
        The condition's first true value.

    Raises:
        AssertionError: it was not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < deadline, f"this never became true: {what()}"
        time.sleep(max(pause, min(_RARELY * (now - began), _LONGEST_PAUSE_SECONDS)))
