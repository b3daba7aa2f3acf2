"""How a coordinator comes to lead: reach the store, win the leader's key, keep its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from elasticd_planner.value import Value

from elasticd.config import Config
from elasticd.records import Keys
from elasticd.remembered import StateFile
from elasticd.store.etcd import EtcdStore
from elasticd.store.keeper import LeaseKeeper
from elasticd.store.leader import AlreadyLed, Leadership, campaign
from elasticd.store.protocol import Snapshot, Store, StoreRefused, StoreReplaced, StoreUnavailable
from elasticd.store.session import EtcdOptions

#: Seconds that the leader's key outlives its last refresh.
LEASE_SECONDS = 5


class CannotLead(Exception):
    """This coordinator cannot lead, or not any longer; the message says why and what to do."""


class Term(Value, frozen=True, kw_only=True):
    """One time of leading: the proof of it, and all the jobs' records as they were when it began."""

    leadership: Leadership
    jobs: Snapshot


def connect(config: Config, memory: StateFile | None = None) -> Store:
    """The configured etcd. Raises `CannotLead` when it is not there, does not want us, or is not the one that
    is remembered."""
    endpoints = ", ".join(config.etcd.endpoints)
    known = memory.identity if memory is not None else None
    store = EtcdStore(EtcdOptions(endpoints=config.etcd.endpoints), known=known)
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
    return store


def elect(store: Store, keys: Keys, name: str, url: str) -> Term:
    """Wins the key, waiting for a former self's to expire. Raises `CannotLead`. Blocks: for a thread."""
    try:
        leadership = campaign(store, keys.leader, name, url, LEASE_SECONDS)
        return Term(leadership=leadership, jobs=store.snapshot(keys.jobs))
    except AlreadyLed as error:
        raise CannotLead(str(error)) from error
    except StoreUnavailable as error:
        raise CannotLead(f"the store went away during the election ({error}): try again") from error


def keep(store: Store, term: Term, lost: Callable[[CannotLead], None]) -> LeaseKeeper:
    """Keeps the leader's lease from a thread of its own; `lost` is called on the running loop."""
    loop = asyncio.get_running_loop()
    leadership = term.leadership

    def on_lost(reason: str) -> None:
        error = CannotLead(f"this coordinator does not lead any longer ({reason}): start it again")
        loop.call_soon_threadsafe(lost, error)

    return LeaseKeeper(store, leadership.lease, leadership.ttl, on_lost).start()


async def resign(executor: Executor, keeper: LeaseKeeper) -> None:
    """Gives the key back, so that a successor need not wait for the lease."""
    await asyncio.get_running_loop().run_in_executor(executor, lambda: keeper.stop(revoke=True))
