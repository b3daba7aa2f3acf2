"""One fault: what happens to what, and when; the same value for a real cluster and a simulated one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elasticd_planner.value import Value, refuse

#: What each kind needs, beside when: "place" (a device or a node), "device", "node", or nothing; and a key of
#: its own.
KINDS: dict[str, tuple[str, str]] = {
    "slow": ("place", "factor"),
    "recover": ("place", ""),
    "kill": ("place", "lasts"),
    "join": ("place", ""),
    "freeze": ("device", "lasts"),
    "thaw": ("device", ""),
    "cut": ("node", "lasts"),
    "heal": ("node", ""),
    "restart": ("node", ""),
    "partition": ("node", "lasts"),
    "shift": ("", "tokens"),
    "takeover": ("", ""),
}

#: What ends a fault that lasts for some seconds.
ENDINGS = {"kill": "join", "freeze": "thaw", "cut": "heal"}


class Fault(Value, frozen=True, kw_only=True):
    """What happens at a step (once so many are done) or at a time in seconds.

    slow: the device (or every one of the node) runs `factor` times slower than normal; recover: at normal
    speed again. kill: a device's process dies, or the whole machine; join: it is there again, at normal speed
    (simulated, one that was killed at step 0 is new; a real torchrun brings a worker back by itself). freeze:
    the device's process stands still (SIGSTOP); thaw: it goes on. cut: a node's agent reaches neither the
    leader nor the store, while its workers train on; heal: it reaches them again. restart: a node's agent dies
    and another is started. partition: for `lasts` seconds nobody reaches the node. shift: a sample has
    `tokens` from now on, in the mean. takeover: the leader is gone, another takes over.

    kill, freeze and cut may have `lasts`: after so many seconds join, thaw or heal follows by itself. What
    would come at a step may never come where training stands until it does.
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
        if place == "device" and (self.node or not self.device):
            refuse(f"kind = {self.kind!r} is about a device (as 'n0/3'), not about node = {self.node!r}")
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
        if own == "lasts" and not 0 <= self.lasts < math.inf:
            refuse(f"lasts = {self.lasts} must be the seconds until it is over, as 30.0")
        if self.kind == "partition" and not self.lasts:
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
        said = {
            "slow": f"{where} runs {self.factor:g}x slower",
            "recover": f"{where} recovers",
            "kill": f"{where} dies",
            "join": f"{where} is there again",
            "freeze": f"{where} stands still",
            "thaw": f"{where} goes on",
            "cut": f"{where}'s agent loses leader and store; its workers train on",
            "heal": f"{where}'s agent finds leader and store again",
            "restart": f"{where}'s agent dies, and another starts",
            "partition": f"{where} is cut off for {self.lasts:g} s",
            "shift": f"samples of {self.tokens} tokens",
            "takeover": "the leader dies",
        }[self.kind]
        return f"{said}, for {self.lasts:g} s" if self.lasts and self.kind in ENDINGS else said

    @property
    def when(self) -> str:
        return f"step {self.step}" if self.step is not None else f"{self.seconds:g} s"

    def devices(self, names: Sequence[str]) -> list[str]:
        """Those of the cluster's devices that it is about."""
        return [name for name in names if name == self.device or name.rpartition("/")[0] == self.node]

    def ending(self, now: float) -> Fault | None:
        """What follows by itself once it has lasted, where it does; `now`: seconds, when it happens."""
        kind = ENDINGS.get(self.kind)
        if kind is None or not self.lasts:
            return None
        return Fault(kind=kind, device=self.device, node=self.node, seconds=now + self.lasts)
