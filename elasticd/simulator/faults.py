"""What happens to a cluster: faults by step or by time, written down or drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from elasticd_planner.value import Value, refuse

DAY = 86_400.0

#: What each kind needs, beside when: "place" (a device or a node), "node", or nothing; and a key of its own.
KINDS: dict[str, tuple[str, str]] = {
    "slow": ("place", "factor"),
    "recover": ("place", ""),
    "kill": ("place", ""),
    "join": ("place", ""),
    "partition": ("node", "lasts"),
    "shift": ("", "tokens"),
    "takeover": ("", ""),
    "unlink": ("node", ""),
    "relink": ("node", ""),
}


class Fault(Value, frozen=True, kw_only=True):
    """What happens at a step (once so many are done) or at a time in seconds.

    slow: the device (or every one of the node) runs `factor` times slower than normal; recover: at normal
    speed again. kill: the device's process dies and the device with it, or the whole machine; join: it is
    there again, at normal speed (one that was killed at step 0 is new). partition: for `lasts` seconds nobody
    reaches the node. shift: a sample has `tokens` from now on, in the mean. takeover: the leader is gone,
    another takes over once its lease has run out. unlink, relink: a node's agent loses the leader and finds
    it again, while its workers train on.
    """

    kind: str
    device: str = ""
    node: str = ""
    factor: float = 1.0
    lasts: float = 0.0
    tokens: int = 0
    step: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            refuse(f"kind = {self.kind!r} must be one of {', '.join(KINDS)}")
        if (self.step is None) == (self.seconds is None):
            refuse("give either step or seconds: when does it happen?")
        if (self.step or 0) < 0 or (self.seconds or 0.0) < 0:
            refuse("step and seconds must not be negative")
        place, own = KINDS[self.kind]
        if place == "node" and (self.device or not self.node):
            refuse(f"kind = {self.kind!r} is about a node (as 'n0'), not about device = {self.device!r}")
        if place == "place" and bool(self.device) == bool(self.node):
            refuse(f"kind = {self.kind!r} needs either device (as 'n0/3') or node (as 'n0')")
        if not place and (self.device or self.node):
            refuse(f"kind = {self.kind!r} is about no place: leave out {self.device or self.node!r}")
        self._check_own(own)

    def _check_own(self, own: str) -> None:
        for name, default in (("factor", 1.0), ("lasts", 0.0), ("tokens", 0)):
            if name != own and getattr(self, name) != default:
                refuse(f"kind = {self.kind!r} has no {name} (= {getattr(self, name)}): leave it out")
        if own == "factor" and not 1 < self.factor < 1000:
            refuse(f"factor = {self.factor} must be above 1 (how many times slower than normal) and finite")
        if own == "lasts" and not 0 < self.lasts < math.inf:
            refuse(f"lasts = {self.lasts} must be the seconds until the node can be reached again, as 30.0")
        if own == "tokens" and self.tokens < 1:
            refuse(f"tokens = {self.tokens} must be how many a sample has from then on, as 8192")

    @property
    def speed(self) -> bool:
        """Whether it is about how fast devices run."""
        return self.kind in ("slow", "recover")

    @property
    def where(self) -> str:
        return self.device or (f"node {self.node}" if self.node else "")

    @property
    def text(self) -> str:
        where = self.where
        return {
            "slow": f"{where} runs {self.factor:g}x slower",
            "recover": f"{where} recovers",
            "kill": f"{where} dies",
            "join": f"{where} is there again",
            "partition": f"{where} is cut off for {self.lasts:g} s",
            "shift": f"samples of {self.tokens} tokens",
            "takeover": "the leader dies",
            "unlink": f"{where} loses the leader; its workers train on",
            "relink": f"{where} finds the leader again",
        }[self.kind]

    def devices(self, names: Sequence[str]) -> list[str]:
        """Those of the cluster's devices that it is about."""
        return [name for name in names if name == self.device or name.rpartition("/")[0] == self.node]


class RandomFaults(Value, frozen=True, kw_only=True):
    """Drawn from the seed. Fail-slow: how often a device becomes slow, for how long in the mean (exponential),
    by which factors (evenly on a logarithmic scale). Fail-stop: how often one dies, and how many hours it
    takes in the mean until it is there again."""

    slow_per_device_day: float = 0.0
    hours: float = 1.0
    least: float = 1.3
    most: float = 5.0
    stop_per_device_day: float = 0.0
    repair_hours: float = 4.0

    def __post_init__(self) -> None:
        if min(self.slow_per_device_day, self.stop_per_device_day) < 0:
            refuse("slow_per_device_day and stop_per_device_day must not be negative")
        if not self.hours > 0 or not self.repair_hours > 0 or not 1 < self.least <= self.most:
            refuse("hours and repair_hours must be positive, and 1 < least <= most")

    @property
    def any(self) -> bool:
        return self.slow_per_device_day > 0 or self.stop_per_device_day > 0


def draw(settings: RandomFaults, devices: Sequence[str], until: float, seed: int) -> tuple[Fault, ...]:
    """Each device becomes slow, and dies, by Poisson processes of its own; it recovers before it may be slow
    again, and is repaired before it may die again. One that comes back is as fast as any."""
    rng = np.random.default_rng([seed, 1])
    scales = (math.log(settings.least), math.log(settings.most))
    faults: list[Fault] = []
    if settings.slow_per_device_day:
        for device in devices:
            at = float(rng.exponential(DAY / settings.slow_per_device_day))
            while at < until:
                factor = round(math.exp(float(rng.uniform(*scales))), 2)
                faults.append(Fault(kind="slow", device=device, factor=factor, seconds=round(at, 3)))
                at += float(rng.exponential(settings.hours * 3600))
                if at < until:
                    faults.append(Fault(kind="recover", device=device, seconds=round(at, 3)))
                at += float(rng.exponential(DAY / settings.slow_per_device_day))
    if settings.stop_per_device_day:
        rng = np.random.default_rng([seed, 2])  # what is slow does not depend on what dies
        for device in devices:
            at = float(rng.exponential(DAY / settings.stop_per_device_day))
            while at < until:
                faults.append(Fault(kind="kill", device=device, seconds=round(at, 3)))
                at += float(rng.exponential(settings.repair_hours * 3600))
                if at < until:
                    faults.append(Fault(kind="join", device=device, seconds=round(at, 3)))
                at += float(rng.exponential(DAY / settings.stop_per_device_day))
    return tuple(sorted(faults, key=lambda fault: (fault.seconds or 0.0, fault.device)))
