"""Faults to inject: the same values for a real cluster (the soak's script) and for a simulated one (the faults
of a scenario).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import Value, refuse

#: What each kind does, and needs beside its time: "place" (a device or a node), "device", "node", or nothing;
#: and a key of its own. kill, freeze and cut may have `lasts`: after so many seconds join, thaw or heal follows
#: by itself.
KINDS: dict[str, tuple[str, str]] = {
    "slow": ("place", "factor"),  # the device, or each of the node, runs `factor` times slower than normal
    "recover": ("place", ""),  # it runs at normal speed again
    "kill": ("place", "lasts"),  # a device's process dies, or the machine with all of them
    #: it is there again, at normal speed; simulated, one that was killed at step 0 is new; a real torchrun
    #: starts a worker again by itself
    "join": ("place", ""),
    "freeze": ("device", "lasts"),  # the device's process stands still (SIGSTOP)
    "thaw": ("device", ""),  # it goes on
    "cut": ("node", "lasts"),  # the agent reaches neither leader nor store, while its workers train on
    "heal": ("node", ""),  # it reaches them again
    "restart": ("node", ""),  # the agent dies, and another is started
    "partition": ("node", "lasts"),  # nobody reaches the node
    #: the node and its `peer` do not reach each other on the data network; "out": what the node sends alone is
    #: lost
    "sever": ("node", "lasts"),
    #: the agent dies, then the leader, and another agent comes only after `lasts`: the next leader does not
    #: know the node
    "unmet": ("node", "lasts"),
    #: the main thread stands still in the loss, in a sleep or in C with the interpreter's lock
    "hang": ("device", "lasts"),
    #: the same between two steps, in the script's own code ("lock": with that lock, too), or in its loader
    "pause": ("device", "lasts"),
    "raise": ("device", ""),  # the user's code raises, once, in the loss or in the body of the loop
    #: simulated: a sample has `tokens` from now on, in the mean; or so many `items`, of a model of modules
    "shift": ("", "tokens"),
    "takeover": ("", ""),  # the leader is gone, and another takes over
}

#: How a kind may come about that has several ways; the first one unless `how` says another.
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
    """A fault at a step or at a time, of one of KINDS.

    What would come at a step may never come where training stands until it does.
    """

    kind: str  # one of KINDS
    device: str = ""  # as "n0/3"
    node: str = ""  # as "n0"
    peer: str = ""  # of sever: the other node
    how: str = ""  # one of its kind's WAYS (empty: the first)
    factor: float = 1.0  # of slow: how many times slower than normal
    lasts: float = 0.0  # seconds (0: until something ends it)
    tokens: int = 0  # of shift: tokens of a sample
    items: float = 0.0  # or, of shift: items of a sample for each module of items
    step: int | None = None  # when: once so many steps are done
    seconds: float | None = None  # or when: seconds since the beginning

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
        shift = self.kind == "shift"
        for name, default in (("factor", 1.0), ("lasts", 0.0), ("tokens", 0), ("items", 0.0)):
            if name != own and not (shift and name == "items") and getattr(self, name) != default:
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
        if shift and (self.tokens > 0) == (self.items > 0):
            refuse(
                f"tokens = {self.tokens} must be how many a sample has from then on, as 8192; or items = "
                f"{self.items:g} how many items, as 2.5"
            )

    @property
    def speed(self) -> bool:
        """True if it is about how fast devices run."""
        return self.kind in ("slow", "recover")

    @property
    def where(self) -> str:
        """Its device or node, for people."""
        return self.device or (f"node {self.node}" if self.node else "")

    @property
    def text(self) -> str:
        """The fault, for people."""
        where = self.where
        way = f" ({self.how})" if self.how else ""
        sentences = {
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
            "shift": f"samples of {f'{self.items:g} items' if self.items else f'{self.tokens} tokens'}",
            "takeover": "the leader dies",
        }[self.kind]
        return f"{sentences}, for {self.lasts:g} s" if self.lasts and self.kind in ENDINGS else sentences

    @property
    def way(self) -> str:
        """The way in which it comes about, where there are several."""
        return self.how or WAYS.get(self.kind, ("",))[0]

    @property
    def when(self) -> str:
        """Its step or time, for people."""
        return f"step {self.step}" if self.step is not None else f"{self.seconds:g} s"

    def devices(self, names: Sequence[str]) -> list[str]:
        """Those of the cluster's devices that it is about."""
        return [name for name in names if name == self.device or node_of(name) == self.node]

    def ending(self, now: float) -> Fault | None:
        """The fault's end, which follows by itself once it has lasted, or None; `now`: seconds, when it
        happens."""
        kind = ENDINGS.get(self.kind)
        if kind is None or not self.lasts:
            return None
        return Fault(kind=kind, device=self.device, node=self.node, seconds=now + self.lasts)
