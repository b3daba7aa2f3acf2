"""Python's garbage collector, kept from stopping the event loop.

A full collection looks at every object, and an automatic one comes whenever enough new ones have survived. With
a plan of 8,000 devices and 1,000 connections it takes a quarter of a second, every few seconds: pings of
agents, votes and users wait for it. So the leader's process has no automatic full collections. It makes them
itself, and puts what they leave aside (`gc.freeze`), so that each looks only at what came since the last. With
8,000 devices that takes 65 ms after ten seconds and 10 ms after half a second. Once an hour it looks at all.
Objects without cycles are freed at once, as ever.
"""

from __future__ import annotations

import asyncio
import gc
import time

#: Seconds between collections of what is new, and of everything.
NEW_SECONDS, ALL_SECONDS = 0.5, 3600.0

#: A threshold that no count reaches.
_NEVER = 1 << 30


async def collecting(new_seconds: float = NEW_SECONDS, all_seconds: float = ALL_SECONDS) -> None:
    """Collects until it is cancelled; then the collector is as it was. For a process's own main loop: the
    collector is one for all of a process."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], _NEVER)
    looked = time.monotonic()
    try:
        while True:
            if time.monotonic() - looked >= all_seconds:
                gc.unfreeze()
                looked = time.monotonic()
            gc.collect()
            gc.freeze()
            await asyncio.sleep(new_seconds)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
