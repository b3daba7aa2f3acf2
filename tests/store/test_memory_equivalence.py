"""The store in memory does what etcd does, for any sequence of operations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.store.etcd import EtcdStore
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Compare, Delete, DeletePrefix, LeaseLost, Op, Put, Store, WatchEvent
from elasticd.store.session import EtcdOptions
from tests.sizes import examples

_runs = itertools.count()
_names = st.sampled_from(["a", "a/b", "ab", "b"])
_values = st.sampled_from([b"", b"1", b"2"])
_puts = st.builds(lambda name, value, lease: ("put", name, value, lease), _names, _values, st.integers(0, 2))
_deletes = st.builds(lambda name: ("delete", name), _names)
_folders = st.builds(lambda name: ("delete prefix", name), st.sampled_from(["a", "a/", "b"]))
_ops = st.lists(st.one_of(_puts, _deletes, _folders), max_size=3, unique_by=lambda op: op[1])
_compares = st.lists(
    st.tuples(
        st.sampled_from(["created", "modified", "absent", "untouched"]),
        *(_names, st.integers(0, 8)),
    ),
    max_size=2,
)
_actions = st.lists(
    st.one_of(
        st.tuples(st.just("transact"), _compares, _ops),
        st.tuples(st.just("revoke"), st.integers(1, 2)),
    ),
    max_size=8,
)


class Run:
    """One store driven by actions; it notes what it saw, with revisions counted from its own start."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.base = store.identity().revision
        self.leases = [0, store.grant(60), store.grant(60)]
        self.seen: list[object] = []

    def play(self, actions: list[tuple]) -> list[object]:
        for action in actions:
            try:
                self.seen.append(self._do(action))
            except LeaseLost:
                self.seen.append("lease lost")
            except ValueError:
                self.seen.append("a key is touched twice")
            self.seen.append(self._snapshot())
        self.seen.extend(self._history())
        return self.seen

    def _do(self, action: tuple) -> object:
        if action[0] == "revoke":
            return self.store.revoke(self.leases[action[1]])
        compares = [self._compare(*compare) for compare in action[1]]
        result = self.store.transact(compares, [self._op(op) for op in action[2]])
        return result.succeeded, result.revision - self.base

    def _compare(self, kind: str, name: str, revision: int) -> Compare:
        key = self.prefix + name
        if kind == "absent":
            return Compare.absent(key)
        absolute = self.base + revision if revision else 0
        if kind == "untouched":
            return Compare.untouched(key, absolute)
        return Compare.created(key, absolute) if kind == "created" else Compare.modified(key, absolute)

    def _op(self, op: tuple) -> Op:
        key = self.prefix + op[1]
        if op[0] == "delete prefix":
            return DeletePrefix(key)
        return Put(key, op[2], self.leases[op[3]]) if op[0] == "put" else Delete(key)

    def _snapshot(self) -> object:
        snapshot = self.store.snapshot(self.prefix)
        return snapshot.revision - self.base, [self._item(item) for item in snapshot.items]

    def _history(self) -> list[object]:
        end = self.store.put(self.prefix + "end", b"")
        watch = self.store.watch(self.prefix, self.base + 1)
        events = []
        while not events or events[-1].mod_revision < end:
            event = watch.get(timeout=15)
            assert isinstance(event, WatchEvent), event
            events.append(event)
        watch.cancel()
        return [(event.kind, self._item(event.item)) for event in events]

    def _item(self, item) -> tuple:
        created = item.create_revision - self.base if item.create_revision else 0
        lease = self.leases.index(item.lease)
        return (
            item.key[len(self.prefix) :],
            item.value,
            created,
            item.mod_revision - self.base,
            item.version,
            lease,
        )


@pytest.fixture(scope="module")
def etcd(etcd_server):
    store = EtcdStore(EtcdOptions(endpoints=(etcd_server.endpoint,)))
    yield store
    store.close()


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=_actions)
def test_memory_and_etcd_agree_on_every_answer_snapshot_and_event(etcd, actions):
    real = Run(etcd, f"/equal{next(_runs)}/")
    memory = Run(MemoryStore(MemoryServer()), "/m/")
    assert memory.play(actions) == real.play(actions)
