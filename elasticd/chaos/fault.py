"""One fault: what happens to what, and when; the same value for a real cluster and a simulated one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elasticd_planner.spec.cluster import node_of
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
    "sever": ("node", "lasts"),
    "unmet": ("node", "lasts"),
    "hang": ("device", "lasts"),
    "pause": ("device", "lasts"),
    "raise": ("device", ""),
    "shift": ("", "tokens"),
    "takeover": ("", ""),
}

#: How those kinds may come about that have several ways; the first one unless `how` says another.
WAYS: dict[str, tuple[str, ...]] = {
    "hang": ("sleep", "lock"),
    "pause": ("script", "lock", "loader"),
    "raise": ("loss", "script"),
    "sever": ("both", "out"),
}
#: What a modelled cluster has nothing of: user code, and a data network beside the other one.
REAL = ("sever", "unmet", "hang", "pause", "raise")

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

    hang: for `lasts` seconds the device's main thread stands still in the loss, in a sleep or in C with the
    interpreter's lock (`how`); pause: the same between two steps, in the script's own code ("lock" with that
    lock, too), or in its loader. raise: the user's code raises there, once, in the loss or in the body of the
    loop. sever: for `lasts` seconds the node and its `peer` do not reach each other on the data network; "out":
    what the node sends alone is lost. unmet: the node's agent dies, then the leader, and another agent comes
    only after `lasts` seconds, so that the next leader does not know the node.

    kill, freeze and cut may have `lasts`: after so many seconds join, thaw or heal follows by itself. What
    would come at a step may never come where training stands until it does.
    """

    kind: str
    device: str = ""
    node: str = ""
    peer: str = ""
    how: str = ""
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
        if self.kind in REAL and own == "lasts" and not self.lasts:
            refuse(f"lasts = {self.lasts} must be the seconds that kind = {self.kind!r} lasts, as 5.0")
        if self.how and self.how not in WAYS.get(self.kind, ()):
            ways = ", ".join(WAYS.get(self.kind, ())) or "nothing"
            refuse(f"how = {self.how!r} is no way of kind = {self.kind!r}, which has: {ways}")
        if (self.kind == "sever") != bool(self.peer) or (self.peer and self.peer == self.node):
            refuse(f"peer = {self.peer!r} must be the other node of kind = 'sever', and of no other kind")
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
        way = f" ({self.how})" if self.how else ""
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
            "sever": f"{where} loses node {self.peer} on the data network{way} for {self.lasts:g} s",
            "unmet": f"{where}'s agent dies for {self.lasts:g} s, and the leader meanwhile",
            "hang": f"{where} hangs in the loss{way} for {self.lasts:g} s",
            "pause": f"{where} is between two steps{way} for {self.lasts:g} s",
            "raise": f"the user's code raises on {where}{way}",
            "shift": f"samples of {self.tokens} tokens",
            "takeover": "the leader dies",
        }[self.kind]
        return f"{said}, for {self.lasts:g} s" if self.lasts and self.kind in ENDINGS else said

    @property
    def way(self) -> str:
        """How it comes about, where there are several ways."""
        return self.how or WAYS.get(self.kind, ("",))[0]

    @property
    def when(self) -> str:
        return f"step {self.step}" if self.step is not None else f"{self.seconds:g} s"

    def devices(self, names: Sequence[str]) -> list[str]:
        """Those of the cluster's devices that it is about."""
        return [name for name in names if name == self.device or node_of(name) == self.node]

    def ending(self, now: float) -> Fault | None:
        """What follows by itself once it has lasted, where it does; `now`: seconds, when it happens."""
        kind = ENDINGS.get(self.kind)
        if kind is None or not self.lasts:
            return None
        return Fault(kind=kind, device=self.device, node=self.node, seconds=now + self.lasts)
