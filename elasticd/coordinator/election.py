"""Election of the leader: reach the store, win the leader's key, keep its lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor

from elasticd_planner.value import Value

from elasticd.backoff import jittered
from elasticd.codec.decoding import VersionRefused
from elasticd.config.tree import Config
from elasticd.records import Keys, SchemaRecord, encode, schema_refusal
from elasticd.store import etcd_release
from elasticd.store.configured import etcd_options
from elasticd.store.etcd import EtcdStore
from elasticd.store.leader import (
    AlreadyLed,
    ElectedLeader,
    Leadership,
    LeadershipLost,
    await_vacancy,
    campaign,
)
from elasticd.store.lease import LeaseKeeper
from elasticd.store.protocol import (
    Compare,
    KeyValue,
    LeaseLost,
    Put,
    Snapshot,
    Store,
    StoreError,
    StoreRefused,
    StoreReplaced,
    StoreUnavailable,
)
from elasticd.store.state_file import StateFile
from elasticd.version import __version__

#: Seconds that the leader's key outlives its last refresh: the least that etcd grants with its default timing.
LEASE_SECONDS = 2
#: Seconds for which the event loop of a leader may stand still until its lease is left to run out.
STILL_SECONDS = 10.0
#: Seconds between attempts of an election that the store broke off.
RETRY_SECONDS = 0.2

_log = logging.getLogger(__name__)


class CannotLead(Exception):
    """This coordinator cannot lead, or not any longer; the message says why and what to do."""


class Deposed(CannotLead):
    """This coordinator led, and does not any longer: it may stand by again."""


class Term(Value, frozen=True, kw_only=True):
    """One time of leading, with what the store held as it began."""

    leadership: Leadership  # the proof of it
    jobs: Snapshot  # records of all jobs
    config: Snapshot  # changes of the configuration
    drains: Snapshot  # wishes to drain nodes
    journal: Snapshot  # pages of the journal


def connect(config: Config, memory: StateFile | None = None) -> Store:
    """The configured etcd. Raises `CannotLead` when it is not there, does not want us, or is not the one that
    is remembered."""
    endpoints = ", ".join(config.etcd.endpoints)
    known = memory.identity if memory is not None else None
    store = EtcdStore(etcd_options(config), known=known)
    try:
        store.identity()
    except StoreUnavailable as error:
        store.close()
        raise CannotLead(
            f"no etcd answers at {endpoints} ({error}): start one there, or set endpoints in section [etcd] "
            "of the configuration"
        ) from error
    except StoreReplaced as error:
        store.close()
        raise CannotLead(memory.refusal(error) if memory is not None else str(error)) from error
    except StoreRefused as error:
        store.close()
        raise CannotLead(f"the etcd at {endpoints} refuses us: {error}") from error
    etcd_release.warn(store.release)
    return store


def refused(error: StoreRefused, memory: StateFile | None) -> CannotLead:
    """Why nobody can lead by this store, and what to do where it is not the one remembered."""
    if memory is not None and isinstance(error, StoreReplaced):
        return CannotLead(memory.refusal(error))
    return CannotLead(str(error))


def elect(
    store: Store,
    keys: Keys,
    name: str,
    url: str,
    *,
    told: Callable[[ElectedLeader], None],
    ready: Callable[[], None],
    stopped: threading.Event,
) -> Term | None:
    """Wins the key, standing by while another leads (`told` hears who) and over every outage; None once
    `stopped` is set. `ready` is called before each try: whoever reads the key comes at once. Raises
    StoreRefused, and `CannotLead` where the key is not a leader's. Blocks: for a thread."""
    try:
        while await_vacancy(store, keys.leader, told, stopped):
            try:
                check_schema(store, keys)
                ready()
                return _win(store, keys, name, url)
            except AlreadyLed:
                continue  # another that stood by was quicker
            except StoreUnavailable as error:
                _log.warning("the store went away during the election, trying again: %s", error)
                stopped.wait(jittered(RETRY_SECONDS))
            except (LeaseLost, LeadershipLost) as error:
                _log.warning("the store was too slow for the election, trying again: %s", error)
                stopped.wait(jittered(RETRY_SECONDS))
    except VersionRefused as error:
        raise CannotLead(str(error)) from error
    except ValueError as error:
        raise CannotLead(f"{error}: another program's key? choose another [cluster] name") from error
    return None


def _win(store: Store, keys: Keys, name: str, url: str) -> Term:
    leadership = campaign(store, keys.leader, name, url, LEASE_SECONDS)
    try:
        write_schema(store, keys, leadership)
        # What there is to read may take longer than the lease lasts. One that is lost is noticed by `keep`.
        keeper = LeaseKeeper(store, leadership.lease, leadership.ttl, _log.warning).start()
        try:
            return Term(
                leadership=leadership,
                jobs=store.snapshot(keys.jobs),
                config=store.snapshot(keys.config),
                drains=store.snapshot(keys.drains),
                journal=store.snapshot(keys.journal),
            )
        finally:
            keeper.stop()
    except (StoreError, CannotLead):
        try:
            leadership.resign(store)
        except StoreError:
            _log.debug("the key just won is left to expire")
        raise


def check_schema(store: Store, keys: Keys) -> KeyValue | None:
    """The store's schema record; None where no leader wrote one yet. Raises `CannotLead` where this release
    cannot read what the store holds."""
    item = store.get(keys.schema)
    if item is not None and (refusal := schema_refusal(item.value)):
        raise CannotLead(f"the key {keys.schema}: {refusal}")
    return item


def write_schema(store: Store, keys: Keys, leadership: Leadership) -> None:
    """Writes this release and its schema's version to the store, if another record is there: all records that
    this leader writes later have that version. Raises StoreError and, as `check_schema`, `CannotLead`."""
    record = encode(SchemaRecord(release=__version__))
    while True:
        item = check_schema(store, keys)
        if item is not None and item.value == record:
            return
        seen = Compare.modified(keys.schema, item.mod_revision if item is not None else 0)
        leadership.transact(store, (seen,), (Put(keys.schema, record),))


def keep(
    store: Store, term: Term, lost: Callable[[CannotLead], None], memory: StateFile | None = None
) -> LeaseKeeper:
    """Keeps the leader's lease from a thread of its own, while the running loop answers; `lost` is called on
    that loop, with `Deposed` or with why the store refuses us."""
    loop = asyncio.get_running_loop()
    leadership = term.leadership

    def tell(error: CannotLead) -> None:
        try:
            loop.call_soon_threadsafe(lost, error)
        except RuntimeError:
            _log.debug("nobody is left to hear it: %s", error)

    def on_lost(reason: str) -> None:
        tell(Deposed(f"this coordinator does not lead any longer: {reason}"))

    def on_refused(error: StoreRefused) -> None:
        tell(refused(error, memory))

    asked_at: float | None = None

    def answer() -> None:
        nonlocal asked_at
        asked_at = None

    def works() -> bool:
        nonlocal asked_at
        asked = asked_at  # which the loop may take back meanwhile
        if asked is not None:
            return time.monotonic() - asked < STILL_SECONDS
        asked_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer)
        return True

    keeper = LeaseKeeper(
        *(store, leadership.lease, leadership.ttl, on_lost), on_refused=on_refused, works=works
    )
    return keeper.start()


async def resign(executor: Executor, keeper: LeaseKeeper) -> None:
    """Gives the key back, so that a successor need not wait for the lease."""
    await asyncio.get_running_loop().run_in_executor(executor, lambda: keeper.stop(revoke=True))
