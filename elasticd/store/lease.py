"""Keeps a lease alive from a thread of its own, and tells when it is lost.

An outage is no loss: an etcd that returns gives its leases their full time again.  So `on_lost` is
called only when the store answers that the lease is gone.  A store that refuses us (it was restored from
an old copy, say) is no loss either, but nothing that passes: `on_refused` is called, or the log says so,
once for each time.

A lease says that its holder works, not that this thread does: while `works` says no, the lease is not
refreshed, and another holder may have it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elasticd.store.protocol import LeaseLost, Store, StoreError, StoreRefused

#: Seconds without an answer after which the store counts as away.
AWAY_SECONDS = 2.0

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Refreshes `lease` three times every `ttl` seconds, while `works()`; `on_lost(reason)` is called once, on
    its thread."""

    def __init__(
        self,
        store: Store,
        lease: int,
        ttl: int,
        on_lost: Callable[[str], None],
        *,
        on_refused: Callable[[StoreRefused], None] | None = None,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        self._on_refused = on_refused or _say
        self._works = works
        self._refused = self._failed = self._idle = self._said_away = False
        self._failing_since: float | None = None  # seconds of the monotonic clock
        self._store = store
        self._lease = lease
        self._ttl = ttl
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> bool:
        """True if the store said that the lease is gone."""
        return self._lost.is_set()

    def start(self) -> LeaseKeeper:
        """Starts the thread; returns itself."""
        self._thread = threading.Thread(target=self._run, name=f"lease {self._lease:x}", daemon=True)
        self._thread.start()
        return self

    def refresh(self) -> bool:
        """Refresh once, now; False when that told us that the lease is lost, or it was before."""
        if self.lost:
            return False
        try:
            self._store.keep_alive(self._lease)
            self._refused = False
        except LeaseLost as error:
            self._lost.set()
            self._on_lost(str(error))
            return False
        except StoreRefused as error:
            if not self._refused:
                self._on_refused(error)
            self._refused = True
        except StoreError as error:
            _log.debug("lease %x was not refreshed: %s", self._lease, error)
            self._failing_since = self._failing_since or time.monotonic()
            if self.away and not self._said_away:
                _log.warning("the store does not answer: %s", error)
                self._said_away = True
        else:
            if self._said_away:
                _log.warning("the store answers again")
            self._failing_since, self._said_away = None, False
        return True

    @property
    def away(self) -> bool:
        """True once the store has not answered for `AWAY_SECONDS`."""
        since = self._failing_since
        return since is not None and time.monotonic() - since >= AWAY_SECONDS

    def stop(self, *, revoke: bool = False) -> None:
        """End the thread; with `revoke` give the lease back, if the store can be reached."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if revoke and not self.lost:
            try:
                self._store.revoke(self._lease)
            except StoreError as error:
                _log.debug("lease %x was left to expire: %s", self._lease, error)

    def _run(self) -> None:
        while not self._stop.wait(self._ttl / 3):
            if not self._works():
                if not self._idle:
                    _log.error("this process stands still: lease %x is left to run out", self._lease)
                self._idle = True
                continue
            self._idle = False
            try:
                if not self.refresh():
                    return
            except Exception:  # a defect; without this thread the lease would run out in silence
                level = logging.DEBUG if self._failed else logging.ERROR
                _log.log(level, "elasticd failed to refresh lease %x, trying again", self._lease, exc_info=True)
                self._failed = True


def _say(error: StoreRefused) -> None:
    _log.error("the store refuses us, nothing is read or written until that ends: %s", error)
