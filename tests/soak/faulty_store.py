"""A client of the in-memory store whose transactions are late, lost, refused, or made twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from elasticd_planner.value import Value

from elasticd.simulator.engine import EventEngine
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import (
    Compare,
    KeyValue,
    Op,
    OutcomeUnknown,
    Snapshot,
    StoreError,
    StoreTooLarge,
    StoreUnavailable,
    TransactResult,
)


class StoreFaults(Value, frozen=True, kw_only=True):
    """How often a transaction meets with each fault, and how long calls take."""

    lost: float = 0.03  # the request never reaches the store, and its sender learns nothing
    unanswered: float = 0.03  # it is made, and its sender learns nothing
    late: float = 0.03  # its sender learns nothing, and it lands later, maybe under another leader
    repeated: float = 0.02  # it is made, and lands a second time later
    away: float = 0.02  # the store is away from here on
    refused: float = 0.0  # the store takes it for too large
    full: float = 0.005  # the store is at its quota from here on
    latency_seconds: float = 0.05  # of a call, at most
    late_seconds: float = 12.0  # until a late request lands, at most
    away_seconds: float = 9.0  # for which the store is away, at most
    full_seconds: float = 12.0  # until an operator frees space, at most


#: Nothing goes wrong.
CALM = StoreFaults(lost=0, unanswered=0, late=0, repeated=0, away=0, full=0)


class FaultyStore(MemoryStore):
    """`fates` counts what became of transactions. `faults` may be replaced while it is used; `cut` says whether
    its client reaches it."""

    def __init__(
        self, server: MemoryServer, engine: EventEngine, faults: StoreFaults, draw: random.Random
    ) -> None:
        super().__init__(server)
        self._engine, self.faults, self._draw = engine, faults, draw
        self._back_at = 0.0
        self.cut: Callable[[], bool] = lambda: False
        self.fates: Counter[str] = Counter()

    def get(self, key: str) -> KeyValue | None:
        self._reach()
        return super().get(key)

    def snapshot(self, prefix: str) -> Snapshot:
        self._reach()
        return super().snapshot(prefix)

    def grant(self, ttl_seconds: int) -> int:
        self._reach()
        return super().grant(ttl_seconds)

    def keep_alive(self, lease: int) -> int:
        self._reach()
        return super().keep_alive(lease)

    def revoke(self, lease: int) -> None:
        self._reach()
        super().revoke(lease)

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        self._reach()
        compares, fate = tuple(compares), self._fate()
        self.fates[fate] += 1
        match fate:
            case "lost":
                raise OutcomeUnknown("the request was lost")
            case "unanswered":
                super().transact(compares, then)
                raise OutcomeUnknown("the answer was lost")
            case "late":
                self._land_later(compares, then)
                raise OutcomeUnknown("the request is on its way still")
            case "repeated":
                self._land_later(compares, then)
            case "away":
                self._back_at = self._engine.now() + self._draw.uniform(0.1, self.faults.away_seconds)
                self._reach()
            case "full":
                self._fill()
            case "refused":
                raise StoreTooLarge("more than the store takes")
        return super().transact(compares, then)

    def _fate(self) -> str:
        kinds = ("lost", "unanswered", "late", "repeated", "away", "refused", "full")
        shares = [getattr(self.faults, kind) for kind in kinds]
        return self._draw.choices(("made", *kinds), (1 - sum(shares), *shares))[0]

    def _reach(self) -> None:
        if self.cut() or self._engine.now() < self._back_at:
            raise StoreUnavailable("the store is away")

    def _land_later(self, compares: tuple[Compare, ...], then: Sequence[Op]) -> None:
        """It is the network's by now: it lands whatever has become of its sender."""
        plain = MemoryStore(self.server)

        def land() -> None:
            with suppress(StoreError):  # nobody hears the answer
                plain.transact(compares, then)

        self._engine.after(self._draw.uniform(0.1, self.faults.late_seconds), land)

    def _fill(self) -> None:
        """The server is at its quota, for all clients, until an operator frees space."""

        def free() -> None:
            self.server.full = False

        self.server.full = True
        self._engine.after(self._draw.uniform(0.1, self.faults.full_seconds), free)
