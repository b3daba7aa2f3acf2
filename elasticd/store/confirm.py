"""Settles a transaction whose outcome is unknown, by doing it again and reading back.

Reading alone would not do: a request that a frozen etcd still holds may land after the read.  Doing
the same transaction again does, provided that at most one of the two can succeed or that a second
success changes nothing of meaning: so it must compare what it overwrites (`Compare.modified`,
`Compare.absent`), or be the write of a leader, who is its key's only writer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from elasticd.store.protocol import (
    Compare,
    Delete,
    DeletePrefix,
    KeyValue,
    Op,
    OutcomeUnknown,
    Store,
    TransactResult,
)


def settle(
    store: Store, compares: Sequence[Compare], then: Sequence[Op], *, patience: float = 0.0
) -> TransactResult:
    """Do a transaction and find out what became of it; use values that nobody else would write.

    The answer's revision is that at which the transaction was made, though others changed the store since.
    Tries for `patience` seconds after the first unknown outcome, at least once more.  Raises
    OutcomeUnknown when it is still unknown then, and what `Store.transact` raises otherwise.
    """
    try:
        return store.transact(compares, then)
    except OutcomeUnknown:
        deadline = time.monotonic() + patience
    while True:
        try:
            result = store.transact(compares, then)
            if result.succeeded:
                return result
            outcome = _landed(store, then)
            revision = result.revision if outcome is None else outcome or result.revision
            return TransactResult(succeeded=outcome is not None, revision=revision)
        except OutcomeUnknown:
            if time.monotonic() >= deadline:
                raise


def left(store: Store, op: Op) -> tuple[KeyValue, ...] | None:
    """The values of an operation's keys in the store, if that is as the operation leaves them; None
    otherwise."""
    if isinstance(op, DeletePrefix):
        return None if store.snapshot(op.prefix).items else ()
    item = store.get(op.key)
    if isinstance(op, Delete):
        return () if item is None else None
    put = item is not None and (item.value, item.lease) == (op.value, op.lease)
    return (item,) if item is not None and put else None


def _landed(store: Store, then: Sequence[Op]) -> int | None:
    """The revision of the one transaction that left every key as the operations do; 0 where they only delete,
    None where some key is otherwise."""
    revisions: set[int] = set()
    for op in then:
        leftover = left(store, op)
        if leftover is None:
            return None
        revisions |= {item.mod_revision for item in leftover}
    return revisions.pop() if len(revisions) == 1 else None if revisions else 0
