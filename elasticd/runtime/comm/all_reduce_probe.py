"""Measures an all-reduce among the workers of this node, before they have work.

The members make a group like that of a stage, and all-reduce a few times. Before each all-reduce they compute a
small matrix product, as in a step, because threads that have just all-reduced do it again in half the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from elasticd.runtime import threads
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.groups import BootstrapKeyValue, Group, PlanGroups
from elasticd.runtime.telemetry.device_probe import SIZE
from elasticd.wire.worker import Rehearse, Rehearsed

#: All-reduces of each width that count, and those before them that do not.
REPEATS, WARM = 12, 2
#: Seconds that members wait for each other. The leader waits a little longer.
PROBE_TIMEOUT_SECONDS = 2.0

log = logging.getLogger(__name__)


def all_reduce_seconds(
    group: Group, size: int, paced: Callable[[float], None], accelerator: Accelerator = CPU
) -> float:
    """Seconds of one all-reduce. Every member of the group calls this, and gets the same.

    Args:
        group: the members.
        size: bytes of the tensor.
        paced: called after each matrix product with the time on `time.perf_counter` at which it began. On an
            emulated device it sleeps.
        accelerator: where the tensor lies, as a step's do.

    Returns:
        The median over the all-reduces of the shortest time that a member saw.

    Raises:
        PeerLost: a member is gone.
        Cancelled: the plan's groups were shut meanwhile.
    """
    accelerator.use()
    left, right = torch.ones(2, SIZE, SIZE, device=accelerator.device)
    out = torch.empty_like(left)
    mine = torch.zeros(REPEATS, dtype=torch.float64)
    for turn in range(WARM + REPEATS):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        accelerator.wait()
        paced(start)
        tensor = torch.zeros(max(1, size // 4), device=accelerator.device)
        accelerator.wait()
        start = time.perf_counter()
        group.all_reduce(tensor)
        if turn >= WARM:
            mine[turn - WARM] = time.perf_counter() - start
    # Of the members the one that waited least came last: its time is the collective's own.
    return float(group.all_gather(mine).amin(dim=0).median())


class AllReduceProbe:
    """Answers a leader's `Rehearse` in a thread, if the device has no work."""

    def __init__(
        self,
        device: str,
        make_groups: Callable[[str], PlanGroups],
        idle: Callable[[], bool],
        paced: Callable[[float], None],
        send: Callable[[Rehearsed], None],
        accelerator: Accelerator = CPU,
    ) -> None:
        self._device, self._make_groups, self._idle = device, make_groups, idle
        self._paced, self._send, self._accelerator = paced, send, accelerator
        self._running = threading.Lock()

    def ask(self, order: Rehearse) -> None:
        """Starts to measure what is asked for, unless the device has work or is measuring. Returns at once."""
        if self._idle() and self._device in order.members and self._running.acquire(blocking=False):
            threads.start(partial(self._rehearse, order), "elasticd-rehearsal")

    def _rehearse(self, order: Rehearse) -> None:
        try:
            plan_groups = self._make_groups(f"rehearsal/{order.members[0]}")
            try:
                found = self._measured(plan_groups, order)
            finally:
                plan_groups.park().join()
            if found and self._device == order.members[0]:
                self._send(Rehearsed(seconds=found))
        except (RuntimeError, OSError) as error:  # the plan is made without
            log.info("all-reduces were not rehearsed: %s", error)
        finally:
            self._running.release()

    def _measured(self, plan_groups: PlanGroups, order: Rehearse) -> dict[int, float]:
        found = {}
        for width in order.widths:
            members = order.members[:width]
            if self._device in members:
                group = plan_groups.group(members, "tensor")
                found[width] = all_reduce_seconds(group, order.size, self._paced, self._accelerator)
        return found


def plan_groups_of(device: str, address: str, store: BootstrapKeyValue) -> Callable[[str], PlanGroups]:
    """Makes process groups by their name, for a short while."""
    return lambda name: PlanGroups(
        name, device, address, store, seconds=PROBE_TIMEOUT_SECONDS, patience=PROBE_TIMEOUT_SECONDS
    )
