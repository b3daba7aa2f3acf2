"""What writes do to the store: within its limits, large records in parts, and a history that is bounded."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Cluster, Device, Node
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from hypothesis import given
from hypothesis import strategies as st

from elasticd.codec import record_parts
from elasticd.codec.decoding import VersionRefused, decode_stored
from elasticd.codec.record_parts import MOST_BYTES, Shelf, cut, whole
from elasticd.coordinator import store_transactions
from elasticd.coordinator.store_transactions import StoreTransactions, Sweep, operations
from elasticd.coordinator.store_writer import stored
from elasticd.machines.job.state.events import Write
from elasticd.records import (
    DoneRecord,
    Fence,
    HistoryRecord,
    Keys,
    PlanRecord,
    Proposal,
    decode,
    decode_at,
    encode,
)
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Limits, Put, Snapshot, Store, StoreTooLarge
from tests.etcds import SharedEtcd
from tests.machines.cast import model

KEYS = Keys(cluster="test")
JOB = "demo"


def plan(number: int, nodes: int = 3) -> Plan:
    """A pipeline on each node, of eight devices."""
    names = [f"node-{n}/{i}" for n in range(nodes) for i in range(8)]
    pipelines = tuple(
        Pipeline(
            stages=(Stage(start=0, stop=8, devices=tuple(names[8 * n : 8 * n + 8]), shares=(1,) * 8),),
            micro_batches=1,
        )
        for n in range(nodes)
    )
    return Plan(
        number=number,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),),
        micro_batch=1,
        global_batch=nodes,
        binding={name: f"{number:04d}{hash_of(name)}" for name in names},
    )


def hash_of(name: str) -> str:
    return record_parts._name(name.encode())[:12]


def problem(current: Plan | None, nodes: int = 3) -> Problem:
    cluster = Cluster(
        nodes=tuple(
            Node(
                name=f"node-{n}", devices=tuple(Device(name=f"node-{n}/{i}", memory=1 << 30) for i in range(8))
            )
            for n in range(nodes)
        )
    )
    return Problem(
        cluster=cluster,
        profile=derive(model(), 64.0, 1),
        global_batch=nodes,
        micro_batch=1,
        rates={device.name: 1.0 + i / 7 for i, device in enumerate(cluster.devices)},
        current=current,
    )


def proposed(number: int, old: int | None, nodes: int = 3) -> Write:
    before = plan(old, nodes) if old is not None else None
    made = plan(number, nodes)
    return Write(
        job=JOB,
        records=(
            Proposal(number=number, epoch=1, plan=made, old=before),
            HistoryRecord(number=number, plan=made, problem=problem(before, nodes), reason="a test"),
        ),
    )


def recorded(number: int, nodes: int = 3) -> Write:
    return Write(job=JOB, records=(PlanRecord(plan=plan(number, nodes), epoch=1, step=number),), close=True)


class Office:
    """A ledger, and a store that all of its transactions are made in."""

    def __init__(self, limits: Limits | None = None, store: Store | None = None, keys: Keys = KEYS) -> None:
        self.store = store or MemoryStore(MemoryServer(limits=limits))
        self.keys = keys
        self.take_over()

    def take_over(self) -> None:
        self.ledger = StoreTransactions(self.keys, self.store.limits, self.jobs().items)

    def jobs(self) -> Snapshot:
        return self.store.snapshot(self.keys.jobs)

    def write(self, write: Write) -> int:
        """Returns how many transactions it took."""
        made = [self._make(ops) for ops in self.ledger.transactions(write)]
        if self.ledger.sweeps(write.job):
            for ops in self.ledger.transactions(Sweep(job=write.job)):
                self._make(ops)
        return len(made)

    def _make(self, ops: store_transactions.Ops) -> None:
        result = self.store.transact(self.ledger.compares(ops), ops)
        assert result.succeeded
        self.ledger.done(ops, {op.key: result.revision for op in ops if isinstance(op, Put)})

    def names(self, folder: str) -> list[str]:
        prefix = f"{self.keys.jobs}{JOB}/{folder}"
        return [item.key.removeprefix(prefix) for item in self.store.snapshot(prefix).items]

    def read(self, key: str, kind: type[record_parts.StoredValue]) -> object:
        items = self.jobs().items
        shelf = Shelf(self.keys.jobs, ((item.key, item.value) for item in items))
        (value,) = [item.value for item in items if item.key == key]
        return decode_at(key, value, kind, shelf.of(key))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """A store for a few kilobytes, so that small records are large ones."""
    monkeypatch.setattr(store_transactions, "SMALL_BYTES", 300)
    monkeypatch.setattr(record_parts, "PART_BYTES", 1000)
    return Limits(request_bytes=3000)


# -- records in parts ------------------------------------------------------------------------------------------


def test_what_fits_is_written_as_releases_without_parts_read_it() -> None:
    office, write = Office(), proposed(1, None)
    (ops,) = office.ledger.transactions(write)
    assert ops == operations(KEYS, write)
    assert [op.value for op in ops if isinstance(op, Put)] == [encode(record) for record in write.records]


def test_a_write_that_does_not_fit_is_read_as_it_was_written(small: Limits) -> None:
    office, write = Office(small), proposed(1, None)
    assert office.write(write) > 1
    proposal, history = write.records
    assert office.read(KEYS.job(JOB, "proposal"), Proposal) == proposal
    assert office.read(KEYS.history(JOB, 1), HistoryRecord) == history
    (found,) = stored(KEYS, office.jobs().items)
    assert (found.proposal, found.history, found.highest) == (proposal, history, 1)


def test_the_last_transaction_of_a_write_shows_all_of_it(small: Limits) -> None:
    *before, last = Office(small).ledger.transactions(proposed(1, None))
    folder = KEYS.job(JOB, "parts/")
    assert all(isinstance(op, Put) and op.key.startswith(folder) for ops in before for op in ops)
    assert [op.key for op in last if isinstance(op, Put)] == [KEYS.job(JOB, "proposal"), KEYS.history(JOB, 1)]


def test_what_records_have_in_common_is_stored_once(small: Limits) -> None:
    office = Office(small)
    office.write(proposed(1, None))
    first = {*office.names("parts/")}
    office.write(recorded(1))
    added = {*office.names("parts/")} - first
    assert len(added) == 1, "what the record has beside the plan, which is the one of the history"
    office.write(proposed(2, 1))
    office.write(recorded(2))
    everything = [
        encode(record) for number in (1, 2) for record in proposed(number, number - 1 or None).records
    ]
    kept = sum(len(item.value) for item in office.store.snapshot(KEYS.job(JOB, "parts/")).items)
    assert kept < sum(map(len, everything)) / 4
    office.write(Write(job=JOB, records=(Fence(number=3, epoch=1, gone=plan(2).binding, reason="x"),)))
    assert office.read(KEYS.job(JOB, "fence"), Fence) == Fence(
        number=3, epoch=1, gone=plan(2).binding, reason="x"
    )
    assert office.read(KEYS.job(JOB, "plan"), PlanRecord) == recorded(2).records[0]


def test_another_leader_writes_no_part_again_and_deletes_those_that_nobody_needs(small: Limits) -> None:
    office = Office(small)
    office.write(proposed(1, None))
    before = {item.key: item.mod_revision for item in office.jobs().items}
    office.store.put(KEYS.job(JOB, "parts/") + "0" * 32, b"of a leader that ended before it wrote more")
    office.take_over()
    office.write(recorded(1))
    after = {item.key: item.mod_revision for item in office.jobs().items}
    assert {key: after[key] for key in before if "/parts/" in key and key in after}.items() <= before.items()
    assert "0" * 32 not in office.names("parts/")
    assert office.read(KEYS.job(JOB, "plan"), PlanRecord) == recorded(1).records[0]
    assert office.read(KEYS.history(JOB, 1), HistoryRecord) == proposed(1, None).records[1]


def test_a_record_that_is_too_large_even_in_parts_is_refused_with_its_size() -> None:
    gone = {f"node-{n}/0": "x" * 1000 for n in range(MOST_BYTES // 1000)}
    write = Write(job=JOB, records=(Fence(number=3, epoch=1, gone=gone, reason="x"),))
    with pytest.raises(StoreTooLarge, match=r"the record 'fence' has 1\d,.* bytes.* 16,777,216 are the most"):
        Office().ledger.transactions(write)


def test_a_release_that_knows_no_parts_says_which_release_does() -> None:
    index, _ = cut(encode(proposed(1, None).records[0]), "proposal")
    with pytest.raises(VersionRefused, match=r"'proposal' has version 3 \(elasticd .*knows version 1: install"):
        decode_stored(encode(index), Proposal)


def test_a_part_that_is_missing_or_another_is_said() -> None:
    index, made = cut(encode(recorded(1).records[0]), "running-plan")
    name = next(iter(made))
    for wrong, said in (
        ({**made, name: made[next(reversed(made))]}, "holds something else"),
        ({**made, name: b"no zlib"}, "cannot be unpacked"),
        ({}, "is not in the store"),
    ):
        with pytest.raises(msgspec.DecodeError, match=f"part .* {said}"):
            decode(encode(index), PlanRecord, wrong)


values = st.none() | st.integers(0, 1 << 40) | st.text() | st.dictionaries(st.text(), st.integers(0, 9))
texts = st.dictionaries(st.sampled_from(["type", "plan", "old", "number", "é"]), values)


@given(texts, st.sampled_from(["proposal", "job-done"]))
def test_any_json_is_put_together_as_it_was_cut(value: dict[str, object], of: str) -> None:
    index, made = cut(msgspec.json.encode(value), of)
    assert msgspec.json.decode(whole(encode(index), made)) == value
    assert index.parts == made.keys()


@pytest.mark.slow
def test_a_real_etcd_takes_the_plans_of_8000_devices(shared_etcd: SharedEtcd) -> None:
    with shared_etcd.store() as store:
        keys = Keys(cluster=shared_etcd.cluster("ledger"))
        office = Office(store=store, keys=keys)
        assert sum(len(encode(record)) for record in proposed(2, 1, 1000).records) > store.limits.request_bytes
        office.write(proposed(1, None, 1000))
        office.write(recorded(1, 1000))
        assert office.write(proposed(2, 1, 1000)) > 1
        office.write(recorded(2, 1000))
        (found,) = stored(keys, office.jobs().items)
        assert found.plan == recorded(2, 1000).records[0]
        assert found.history == proposed(2, 1, 1000).records[1]


# -- the history -----------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=30, max_size=60))
def test_the_history_is_bounded_whatever_takes_numbers_beside_plans(fences: list[bool]) -> None:
    most = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_transactions, "MOST_HISTORY", most)
        office, running = Office(), None
        for number, fence in enumerate(fences, start=1):
            if fence:
                office.write(Write(job=JOB, records=(Fence(number=number, epoch=1, gone={}, reason="x"),)))
                continue
            before = running  # its record stays when the next one is proposed, however old it is
            office.write(proposed(number, before, 1))
            if number < 10:
                office.write(recorded(number, 1))
                running = number
            left = [int(name) for name in office.names("history/")]
            assert [old for old in left if old <= number - most] in ([], [before])
            assert running is None or running in left


def test_a_history_that_an_older_release_left_behind_shrinks_with_each_plan() -> None:
    office = Office()
    for number in range(1, 201):
        office.store.put(KEYS.history(JOB, number), encode(proposed(number, None, 1).records[1]))
    office.take_over()
    for number in range(1001, 1006):
        office.write(proposed(number, None, 1))
    assert [int(name) for name in office.names("history/")] == [1001, 1002, 1003, 1004, 1005]


def test_the_history_of_large_plans_is_bounded_by_its_bytes(
    small: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_transactions, "MOST_PARTS_BYTES", 20_000)
    office, sizes = Office(small), []
    for number in range(1, 40):
        office.write(proposed(number, number - 1 or None))
        office.write(recorded(number))
        sizes.append(sum(len(item.value) for item in office.store.snapshot(KEYS.job(JOB, "parts/")).items))
    assert max(sizes) < 26_000
    assert sizes[-1] > 10_000
    assert len(office.names("history/")) > 3
    for number in map(int, office.names("history/")):
        office.read(KEYS.history(JOB, number), HistoryRecord)


def test_a_job_that_is_over_keeps_what_people_look_back_at(small: Limits) -> None:
    office = Office(small)
    office.write(proposed(1, None))
    office.write(recorded(1))
    office.write(Write(job=JOB, records=(DoneRecord(step=9, epoch=1),)))
    (found,) = stored(KEYS, office.jobs().items)
    assert found.done == DoneRecord(step=9, epoch=1)
    assert office.read(KEYS.history(JOB, 1), HistoryRecord) == proposed(1, None).records[1]


def test_a_job_that_is_forgotten_leaves_nothing_of_the_leaders_and_all_that_is_anothers(small: Limits) -> None:
    office = Office(small)
    office.write(proposed(1, None))
    office.write(recorded(1))
    office.write(Write(job=JOB, records=(DoneRecord(step=9, epoch=1),)))
    others = {
        f"{KEYS.jobs}{JOB}/members/alpha:0": b"m",  # of an agent of release 0.1
        KEYS.rendezvous(JOB) + "state": b"s",
        KEYS.job(f"{JOB}-2", "done"): b"d",
    }
    for key, value in others.items():
        office.store.put(key, value)
    assert office.names("parts/")
    office.write(Write(job=JOB, records=(), forget=True))
    assert {item.key: item.value for item in office.jobs().items} == others
    assert office.ledger._revisions == office.ledger._parts == office.ledger._needs == {}
    office.write(proposed(1, None))
    office.write(recorded(1))
    assert office.read(KEYS.job(JOB, "plan"), PlanRecord) == recorded(1).records[0]


def test_a_job_that_starts_again_keeps_its_plans_and_loses_the_rest(small: Limits) -> None:
    office = Office(small)
    for number in (1, 2):
        office.write(proposed(number, number - 1 or None))
        office.write(recorded(number))
    office.write(Write(job=JOB, records=(DoneRecord(step=9, epoch=1),)))
    office.write(Write(job=JOB, records=(), forget=True, keep_history=True))
    assert {name.partition("/")[0] for name in office.names("")} == {"history", "parts"}
    for number in (1, 2):
        record = office.read(KEYS.history(JOB, number), HistoryRecord)
        assert record == proposed(number, number - 1 or None).records[1]
    (found,) = stored(KEYS, office.jobs().items)
    assert (found.highest, found.plan, found.done, found.history) == (2, None, None, None)
    office.take_over()
    office.write(Write(job=JOB, records=(), forget=True))
    assert office.names("") == []
