"""The agent's keys in the store: one that it does not take keeps no other waiting, and is tried again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from elasticd_agent import registration as registrars
from elasticd_agent.registration import NodeTaken, Registrar

from elasticd.records import Keys, NodeRecord, encode
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Compare, Delete, Op, OutcomeUnknown, Put, StoreRefused, TransactResult
from elasticd.testing.waiting import until

KEYS = Keys(cluster="test")
LARGE, SMALL = KEYS.root + "large", KEYS.root + "small"


class Denying(MemoryStore):
    """Has no permission for some keys; `tried` counts what it refused. What `loses` names is not carried out,
    and the answer is lost. What `none` names is no key."""

    def __init__(self) -> None:
        super().__init__(MemoryServer())
        self.denied: set[str] = set()
        self.loses: set[str] = set()
        self.none: set[str] = set()
        self.tried = 0

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        self._check(key)
        revision = super().put(key, value, lease)
        if key in self.loses:
            raise OutcomeUnknown("the answer was lost")
        return revision

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        for op in then:
            if isinstance(op, Delete):
                self._check(op.key)
        return super().transact(compares, then)

    def _check(self, key: str) -> None:
        if key in self.none:
            "\ud800".encode()
        if key in self.denied:
            self.tried += 1
            raise StoreRefused("etcd denies access (permission denied); check user, password and role")


@contextlib.contextmanager
def started(store: MemoryStore, failed: Callable[[str], None] = lambda why: None) -> Iterator[Registrar]:
    record = NodeRecord(node="n0", devices=(), address="127.0.0.1", agent="a")
    registrar = Registrar(store, KEYS, record, 30, failed=failed)
    registrar.claim()
    registrar.start()
    try:
        yield registrar
    finally:
        registrar.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrars, "_RETRY", (0.01, 0.01))
    monkeypatch.setattr(registrars, "_RETRY_REFUSED", (0.01, 0.01))
    monkeypatch.setattr(registrars, "_LOOKS", (0.01, 60.0))


def test_a_key_that_is_too_large_for_the_store_is_named_and_the_others_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, told = MemoryStore(MemoryServer()), dict[str, str]()
    with started(store) as registrar:
        registrar.hold(LARGE, b"x" * 2_000_000, lambda why: told.update(large=why))
        registrar.hold(SMALL, b"x", lambda why: told.update(small=why))
        until(lambda: len(told) == 2)
    assert told["small"] == ""
    assert "a request of 2,000" in told["large"], "who waits for a key that is not there hears why"
    assert "large is not written: a request of 2,000" in caplog.text


def test_a_key_without_a_permission_keeps_no_other_waiting_and_is_written_once_there_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, told = Denying(), dict[str, str]()
    store.denied.add(LARGE)
    with started(store) as registrar:
        registrar.hold(LARGE, b"x", lambda why: told.update(large=why))
        registrar.hold(SMALL, b"x", lambda why: told.update(small=why))
        until(lambda: len(told) == 2)
        assert (told["small"], "check user, password and role" in told["large"]) == ("", True)
        until(lambda: store.tried > 2)
        assert caplog.text.count("is not written") == 1, "said once, not at each try"
        store.denied.clear()
        until(lambda: store.get(LARGE) is not None)


def test_a_smaller_value_of_a_key_that_was_too_large_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrars, "_RETRY_REFUSED", (3600.0, 3600.0))
    store, told = MemoryStore(MemoryServer()), list[str]()
    with started(store) as registrar:
        registrar.hold(LARGE, b"x" * 2_000_000, told.append)
        until(lambda: told)
        registrar.hold(LARGE, b"x", told.append)
        until(lambda: told[1:])
        found = store.get(LARGE)
    assert found is not None
    assert (told[1], found.value) == ("", b"x")


def test_a_key_that_may_not_be_deleted_keeps_no_other_waiting_and_is_deleted_later() -> None:
    store, told = Denying(), list[str]()
    with started(store) as registrar:
        registrar.hold(LARGE, b"x", told.append)
        until(lambda: told)
        store.denied.add(LARGE)
        registrar.release(LARGE)
        registrar.hold(SMALL, b"x", told.append)
        until(lambda: told[1:])
        assert store.get(LARGE) is not None
        store.denied.clear()
        until(lambda: store.get(LARGE) is None)


def test_a_key_that_is_given_up_while_its_writing_is_in_doubt_does_not_stay() -> None:
    store = Denying()
    store.loses.add(LARGE)
    with started(store) as registrar:
        registrar.hold(LARGE, b"x", lambda why: None)
        until(lambda: store.get(LARGE) is not None)
        registrar.release(LARGE)
        until(lambda: store.get(LARGE) is None)


def test_keys_that_somebody_deletes_are_written_again() -> None:
    """As `etcdctl del --prefix` does; the agent's own watch says that the node's key is gone."""
    store = MemoryStore(MemoryServer())
    with started(store) as registrar:
        registrar.hold(SMALL, b"x")
        until(lambda: store.get(SMALL) is not None)
        for key in (SMALL, KEYS.node("n0")):
            store.delete(key)
        registrar.recheck()
        until(lambda: store.get(SMALL) is not None and store.get(KEYS.node("n0")) is not None)


def test_agent_waits_for_a_lease_of_its_own_that_holds_its_key_however_long_that_lives() -> None:
    """The answer to its grant was lost, and an election made the lease longer."""
    store, failed = MemoryStore(MemoryServer()), list[BaseException]()
    record = NodeRecord(node="n0", devices=(), address="127.0.0.1", agent="a")
    abandoned = store.grant(600)
    store.put(KEYS.node("n0"), encode(record), abandoned)
    registrar = Registrar(store, KEYS, record, 1, failed=lambda why: None)

    def claim() -> None:
        try:
            registrar.claim()
        except NodeTaken as error:
            failed.append(error)

    claiming = threading.Thread(target=claim)
    claiming.start()
    claiming.join(2.5)  # longer than it waits for another agent's
    assert claiming.is_alive(), failed
    store.revoke(abandoned)
    claiming.join(60)
    assert not failed
    item = store.get(KEYS.node("n0"))
    assert item is not None
    assert item.lease != abandoned
    registrar.close()


def test_agent_whose_node_another_one_took_meanwhile_ends_and_leaves_the_key() -> None:
    store, failed = MemoryStore(MemoryServer()), list[str]()
    with started(store, failed.append) as registrar:
        other = encode(NodeRecord(node="n0", devices=(), address="127.0.0.1", agent="another"))
        store.put(KEYS.node("n0"), other)
        registrar.recheck()
        until(lambda: failed)
        assert "is served by agent another" in failed[0]
    item = store.get(KEYS.node("n0"))
    assert item is not None
    assert item.value == other


def test_a_record_that_changes_while_the_node_is_claimed_is_written() -> None:
    """It changes between the request that takes the node's key and its answer, as by a drain."""
    record = NodeRecord(node="n0", devices=(), address="127.0.0.1", agent="a")
    changed = NodeRecord(node="n0", devices=(), address="127.0.0.2", agent="a")

    class Changing(MemoryStore):
        change: Callable[[], None] | None = None

        def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
            result = super().transact(compares, then)
            if self.change is not None:
                change, self.change = self.change, None
                change()
            return result

    store = Changing(MemoryServer())
    registrar = Registrar(store, KEYS, record, 30, failed=lambda why: None)
    store.change = lambda: registrar.set_node(changed)
    with contextlib.closing(registrar):
        registrar.claim()
        registrar.start()
        until(lambda: (item := store.get(KEYS.node("n0"))) is not None and item.value == encode(changed))


class Late(MemoryStore):
    """Carries out the first deletion when `comes` is called."""

    def __init__(self) -> None:
        super().__init__(MemoryServer())
        self.late: list[tuple[Iterable[Compare], Sequence[Op]]] = []

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        if not self.late and any(isinstance(op, Delete) for op in then):
            self.late.append((tuple(compares), then))
            raise OutcomeUnknown("the request is on its way still")
        return super().transact(compares, then)

    def comes(self) -> None:
        super().transact(*self.late[0])


def test_a_deletion_that_comes_late_leaves_what_the_next_agent_wrote() -> None:
    store = Late()
    with started(store) as registrar:
        registrar.hold(SMALL, b"of the first")
        until(lambda: store.get(SMALL) is not None)
        registrar.release(SMALL)
        until(lambda: store.late)
    with started(store) as registrar:
        registrar.hold(SMALL, b"of the second")
        until(lambda: store.get(SMALL) is not None)
        store.comes()
        item = store.get(SMALL)
        assert item is not None
        assert item.value == b"of the second"


class Slow(MemoryStore):
    """Answers so late to its first transactions that the lease they name has run out by then."""

    def __init__(self, late: int) -> None:
        super().__init__(MemoryServer())
        self.late = late

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        for op in then:
            if self.late and isinstance(op, Put) and op.lease:
                self.late -= 1
                self.revoke(op.lease)
        return super().transact(compares, then)


def test_an_agent_whose_lease_runs_out_before_the_store_answers_takes_another() -> None:
    store, told = Slow(2), list[str]()
    with started(store) as registrar:
        found = store.get(KEYS.node("n0"))
        assert found is not None
        store.late = 2  # the next keys find their lease gone, and so does the claim of another one
        registrar.hold(SMALL, b"x", told.append)
        until(lambda: store.get(SMALL) is not None)
        again = store.get(KEYS.node("n0"))
        assert again is not None
        assert again.lease != found.lease


def test_a_key_that_is_none_keeps_no_other_waiting() -> None:
    """As a name with half of a surrogate pair, which has no UTF-8."""
    store, told = Denying(), dict[str, str]()
    store.none.add(LARGE)
    with started(store) as registrar:
        registrar.hold(LARGE, b"x", lambda why: told.update(large=why))
        registrar.hold(SMALL, b"x", lambda why: told.update(small=why))
        until(lambda: len(told) == 2)
    assert told["small"] == ""
    assert "surrogates not allowed" in told["large"]


def test_a_defect_does_not_end_the_thread_that_keeps_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told, failed = MemoryStore(MemoryServer()), list[str](), list[int]()
    bring = Registrar._bring

    def failing(self: Registrar, key: str, value: bytes | None) -> None:
        if key == SMALL and not failed:
            failed.append(1)
            raise RuntimeError("a defect")
        bring(self, key, value)

    monkeypatch.setattr(Registrar, "_bring", failing)
    with started(store) as registrar:
        registrar.hold(SMALL, b"x", told.append)
        until(lambda: told)
    assert (told, failed) == ([""], [1])


class Thawing(MemoryStore):
    """An etcd that froze with a request: `hold` has the next one wait, `thaw` makes it."""

    def __init__(self) -> None:
        super().__init__(MemoryServer())
        self.held: list[tuple[tuple[Compare, ...], Sequence[Op]]] | None = None

    def hold(self) -> None:
        self.held = []

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        if self.held == []:
            self.held.append((tuple(compares), then))
            raise OutcomeUnknown("no answer in time")
        return super().transact(compares, then)

    def thaw(self) -> None:
        assert self.held
        (request,), self.held = self.held, None
        super().transact(*request)


def value_of(store: MemoryStore) -> bytes | None:
    item = store.get(SMALL)
    return item.value if item is not None else None


@pytest.mark.parametrize("first", [b"before", None])
@pytest.mark.parametrize("then", [b"after", None])
def test_a_request_that_a_frozen_etcd_makes_late_is_made_up_for(
    first: bytes | None, then: bytes | None
) -> None:
    """The first change is made once the second one was, which the agent knows to be there."""
    store = Thawing()
    with started(store) as registrar:

        def want(value: bytes | None) -> None:
            if value is None:
                registrar.release(SMALL)
            else:
                registrar.hold(SMALL, value)
            until(lambda: value_of(store) == value)

        want(b"at first")
        store.hold()
        want(first)
        want(then)
        store.thaw()
        assert value_of(store) == (first or then)  # a deletion is of what was there as it was asked for
        until(lambda: value_of(store) == then)
