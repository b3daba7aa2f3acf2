"""SIGTERM that reaches torchrun twice: from whoever ends all processes of a node or a container, and from
`elasticd run`, which passes on its own.

At the first one torchrun tells its workers, and waits for them to leave in good order. A second one ends that
wait, and with it torchrun and its workers.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from elasticd.system.parent_death_signal import ECHO_SECONDS


def ignore_echoes() -> None:
    """Lets SIGTERM be heard once in `ECHO_SECONDS`. To be called while the workers run: torchrun sets its
    handler anew whenever it starts them."""
    heard_by = signal.getsignal(signal.SIGTERM)
    if isinstance(heard_by, _Once) or not callable(heard_by):
        return
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        signal.signal(signal.SIGTERM, _Once(heard_by))


class _Once:
    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler, self._heard = handler, -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._heard >= ECHO_SECONDS:
            self._heard = now
            self._handler(number, frame)
