"""The rest of a device after a fault: all that its plan's communicators launched has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elasticd.runtime.accelerator import Accelerator, DeviceLost
from elasticd.runtime.comm.groups import PlanGroups

log = logging.getLogger(__name__)

#: Seconds that a device has to come to rest.
DRAIN_SECONDS = 10.0


def come_to_rest(
    device: str, groups: PlanGroups, ended: Callable[[float], bool], accelerator: Accelerator
) -> None:
    """Returns when an accelerator has come to rest, after another member was lost. It waits for nobody then.

    Args:
        device: this one.
        groups: of the plan; they are shut, which frees the accelerator.
        ended: returns whether the plan's communicators have ended within so many seconds.
        accelerator: of this device.

    Raises:
        DeviceLost: it did not, and what it has is lost with it.
    """
    began = time.monotonic()
    groups.shut()
    if not (ended(DRAIN_SECONDS) and accelerator.drained(DRAIN_SECONDS)):
        raise DeviceLost(
            f"{device}: {accelerator.text} did not come to rest within {DRAIN_SECONDS:.0f} s of a fault"
        )
    log.warning("%s came to rest in %.3f s", accelerator.text, time.monotonic() - began)
