"""Scripts of faults, written as one reads them:

    Faults().slow("alpha/1", 2.5).at_step(40).kill("beta/0").at_step(60)

In a script each `at_step` or `at_seconds` says when what was named since the one before it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from elasticd_planner.value import Value, refuse

from elasticd.chaos.faults import Fault


class Faults(Value, frozen=True, kw_only=True):
    """A script of faults; every method gives a longer one.

    A place is a device (as "alpha/1") or a node (as "alpha"), `lasts` seconds. Raises `Invalid` where a fault
    cannot be.
    """

    planned: tuple[Fault, ...] = ()  # faults with their time
    named: tuple[dict[str, Any], ...] = ()  # fields of faults whose time is not said yet

    def slow(self, place: str, factor: float) -> Faults:
        """It takes `factor` times as long for the same work."""
        return self._name("slow", place, factor=factor)

    def recover(self, place: str) -> Faults:
        """It runs at its normal speed again."""
        return self._name("recover", place)

    def kill(self, place: str, lasts: float = 0.0) -> Faults:
        """The device's process dies; simulated, it is back after `lasts`, if that is not 0."""
        return self._name("kill", place, lasts=lasts)

    def join(self, place: str) -> Faults:
        """Brings back the device or node that was killed."""
        return self._name("join", place)

    def freeze(self, device: str, lasts: float = 0.0) -> Faults:
        """The device's process stands still, until it is thawed."""
        return self._name("freeze", device, lasts=lasts)

    def thaw(self, device: str) -> Faults:
        """The device's process goes on."""
        return self._name("thaw", device)

    def cut(self, node: str, lasts: float = 0.0) -> Faults:
        """The node's agent loses leader and store, until it is healed."""
        return self._name("cut", node, lasts=lasts)

    def heal(self, node: str) -> Faults:
        """The node's agent finds leader and store again."""
        return self._name("heal", node)

    def restart(self, node: str) -> Faults:
        """The node's agent dies, and another is started."""
        return self._name("restart", node)

    def partition(self, node: str, lasts: float) -> Faults:
        """For `lasts` seconds nobody reaches the node."""
        return self._name("partition", node, lasts=lasts)

    def sever(self, node: str, peer: str, lasts: float, how: str = "both") -> Faults:
        """For `lasts` seconds the two nodes do not reach each other on the data network; "out": what `node`
        sends alone is lost."""
        return self._name("sever", node, peer=peer, lasts=lasts, how=how)

    def unmet(self, node: str, lasts: float) -> Faults:
        """The node's agent dies, then the leader; another agent comes after `lasts` seconds."""
        return self._name("unmet", node, lasts=lasts)

    def hang(self, device: str, lasts: float, how: str = "sleep") -> Faults:
        """The device's main thread stands still in the loss: by "sleep" or by "lock"."""
        return self._name("hang", device, lasts=lasts, how=how)

    def pause(self, device: str, lasts: float, how: str = "script") -> Faults:
        """It stands still between two steps: in the "script", with the interpreter's "lock", in the
        "loader"."""
        return self._name("pause", device, lasts=lasts, how=how)

    def throw(self, device: str, how: str = "loss") -> Faults:
        """The user's code raises there: in the "loss", or in the "script", the body of its loop."""
        return self._name("raise", device, how=how)

    def shift(self, tokens: int = 0, items: float = 0.0) -> Faults:
        """Simulated: a sample has so many tokens from then on; or so many items for each module of items."""
        return self._name("shift", "", tokens=tokens, items=items)

    def takeover(self) -> Faults:
        """The leader dies, and another takes over."""
        return self._name("takeover", "")

    def at_step(self, step: int) -> Faults:
        """Lets the faults named before happen once `step` steps are done."""
        return self._plan(step=step)

    def at_seconds(self, seconds: float) -> Faults:
        """Lets the faults named before happen `seconds` after the beginning."""
        return self._plan(seconds=seconds)

    def __iter__(self) -> Iterator[Fault]:
        if self.named:
            refuse(f"when does {self.named[-1]['kind']} happen? say at_step(...) or at_seconds(...) after it")
        return iter(self.planned)

    def __len__(self) -> int:
        return len(self.planned)

    def _name(self, kind: str, place: str, **own: Any) -> Faults:
        where = {"device" if "/" in place else "node": place} if place else {}
        return msgspec.structs.replace(self, named=(*self.named, {"kind": kind, **where, **own}))

    def _plan(self, **when: Any) -> Faults:
        if not self.named:
            refuse("at_step and at_seconds say when what was named before them happens: name a fault first")
        added = tuple(Fault(**fields, **when) for fields in self.named)
        return Faults(planned=(*self.planned, *added))
