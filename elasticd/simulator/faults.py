"""What happens to a cluster: faults by step or by time, written down or drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from elasticd_planner.value import Value, refuse

#: What a scenario may not ask for yet, and why.
UNSUPPORTED = {
    "kill": "a lost worker stops the job until the issue about faults (recovery from a loss) is done",
    "join": "joining a running job comes with the issue about faults, which is not done",
    "partition": "a node that is cut off counts as lost only with the issue about faults, which is not done",
    "shift": "detection does not tell a shift of the data from slowness until the issue about shifts is done",
}
KINDS = ("slow", "recover", "takeover", "unlink", "relink")
DAY = 86_400.0


class Fault(Value, frozen=True, kw_only=True):
    """What happens at a step (once so many are done) or at a time in seconds. slow: the device (or every one
    of the node) runs `factor` times slower than normal; recover: at normal speed again; takeover: the leader
    is gone, another takes over once its lease has run out; unlink, relink: a node's agent loses the leader
    and finds it again, while its workers train on."""

    kind: str
    device: str = ""
    node: str = ""
    factor: float = 1.0
    step: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind in UNSUPPORTED:
            refuse(f"kind = {self.kind!r} cannot be simulated yet: {UNSUPPORTED[self.kind]}")
        if self.kind not in KINDS:
            refuse(f"kind = {self.kind!r} must be one of {', '.join(KINDS)}")
        if (self.step is None) == (self.seconds is None):
            refuse("give either step or seconds: when does it happen?")
        if (self.step or 0) < 0 or (self.seconds or 0.0) < 0:
            refuse("step and seconds must not be negative")
        if self.kind == "takeover":
            return
        if bool(self.device) == bool(self.node):
            refuse(f"kind = {self.kind!r} needs either device (as 'n0/3') or node (as 'n0')")
        if self.kind in ("unlink", "relink") and not self.node:
            refuse(f"kind = {self.kind!r} is about a node, not about device = {self.device!r}")
        if self.kind == "slow" and not 1 < self.factor < 1000:
            refuse(f"factor = {self.factor} must be above 1 (how many times slower than normal) and finite")

    @property
    def speed(self) -> bool:
        """Whether it is about how fast devices run."""
        return self.kind in ("slow", "recover")

    @property
    def text(self) -> str:
        where = self.device or f"node {self.node}"
        return {
            "slow": f"{where} runs {self.factor:g}x slower",
            "recover": f"{where} recovers",
            "takeover": "the leader dies",
            "unlink": f"{where} loses the leader; its workers train on",
            "relink": f"{where} finds the leader again",
        }[self.kind]


class RandomFaults(Value, frozen=True, kw_only=True):
    """Fail-slow drawn from the seed: how often a device becomes slow, for how long in the mean (exponential),
    by which factors (evenly on a logarithmic scale)."""

    slow_per_device_day: float = 0.0
    hours: float = 1.0
    least: float = 1.3
    most: float = 5.0

    def __post_init__(self) -> None:
        if self.slow_per_device_day < 0 or not self.hours > 0 or not 1 < self.least <= self.most:
            refuse("slow_per_device_day must not be negative, hours positive, and 1 < least <= most")


def draw(settings: RandomFaults, devices: Sequence[str], until: float, seed: int) -> tuple[Fault, ...]:
    """Each device becomes slow by a Poisson process of its own, and recovers before it may again."""
    rng = np.random.default_rng([seed, 1])
    scales = (math.log(settings.least), math.log(settings.most))
    faults: list[Fault] = []
    for device in devices:
        at = float(rng.exponential(DAY / settings.slow_per_device_day))
        while at < until:
            factor = round(math.exp(float(rng.uniform(*scales))), 2)
            faults.append(Fault(kind="slow", device=device, factor=factor, seconds=round(at, 3)))
            at += float(rng.exponential(settings.hours * 3600))
            if at < until:
                faults.append(Fault(kind="recover", device=device, seconds=round(at, 3)))
            at += float(rng.exponential(DAY / settings.slow_per_device_day))
    return tuple(sorted(faults, key=lambda fault: (fault.seconds or 0.0, fault.device)))
