"""How long an all-reduce takes among the workers of this node, before they have work.

The members make a group as a stage's is made, and reduce a few times. Before each time they do a small piece of
computation, as in a step: threads that have just reduced reduce again in half the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from elasticd.runtime.comm.groups import BootstrapKeyValue, Fabric, Group
from elasticd.runtime.telemetry.device_probe import SIZE
from elasticd.wire.worker import Rehearse, Rehearsed

#: All-reduces of each width, and those that come first and do not count.
REPEATS, WARM = 12, 2
#: Seconds that members wait for each other. The leader waits a little longer.
PATIENCE = 2.0

log = logging.getLogger(__name__)


def all_reduce_seconds(group: Group, size: int, paced: Callable[[float], None]) -> float:
    """Seconds of one all-reduce of `size` bytes. Every member of the group calls this, and gets the same.
    `paced` is called after each piece of computation with the time at which it began: it sleeps on emulated
    devices."""
    left, right = torch.ones(2, SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    mine = torch.zeros(REPEATS, dtype=torch.float64)
    for turn in range(WARM + REPEATS):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        paced(start)
        tensor = torch.zeros(max(1, size // 4))
        start = time.perf_counter()
        group.all_reduce(tensor)
        if turn >= WARM:
            mine[turn - WARM] = time.perf_counter() - start
    # Of the members the one that waited least came last: its time is the collective's own.
    return float(group.all_gather(mine).amin(dim=0).median())


class Rehearser:
    """Answers a leader's `Rehearse`, on a thread of its own, while the device is `idle`."""

    def __init__(
        self,
        device: str,
        fabric: Callable[[str], Fabric],
        idle: Callable[[], bool],
        paced: Callable[[float], None],
        send: Callable[[Rehearsed], None],
    ) -> None:
        self._device, self._fabric, self._idle = device, fabric, idle
        self._paced, self._send = paced, send
        self._running = threading.Lock()

    def ask(self, order: Rehearse) -> None:
        """Returns at once."""
        if self._idle() and self._device in order.members and self._running.acquire(blocking=False):
            name = "elasticd-rehearsal"
            threading.Thread(target=self._rehearse, args=(order,), name=name, daemon=True).start()

    def _rehearse(self, order: Rehearse) -> None:
        try:
            fabric = self._fabric(f"rehearsal/{order.members[0]}")
            try:
                found = self._measured(fabric, order)
            finally:
                fabric.park().join()
            if found and self._device == order.members[0]:
                self._send(Rehearsed(seconds=found))
        except (RuntimeError, OSError) as error:  # the plan is made without
            log.info("all-reduces were not rehearsed: %s", error)
        finally:
            self._running.release()

    def _measured(self, fabric: Fabric, order: Rehearse) -> dict[int, float]:
        found = {}
        for width in order.widths:
            members = order.members[:width]
            if self._device in members:
                group = fabric.group(members, "tensor")
                found[width] = all_reduce_seconds(group, order.size, self._paced)
        return found


def fabric_of(device: str, address: str, store: BootstrapKeyValue) -> Callable[[str], Fabric]:
    """Makes a fabric by its name, for a short while."""
    return lambda name: Fabric(name, device, address, store, seconds=PATIENCE, patience=PATIENCE)
