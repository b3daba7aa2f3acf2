"""The invariants of the job's machine, checked at every write to the store."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan

from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import Write
from elasticd.records import DoneRecord, Fence, Keys, PlanRecord, Proposal, decode
from elasticd.store.memory import MemoryStore
from elasticd.wire.snapshots import Held
from tests.machines.cast import JOB, FakeWorker

KEYS = Keys(cluster="test")


class Checked:
    """What the checks read of a world: store, leader, workers (and those whose place another has), the numbers
    used, those that somebody switched to, and the plans recorded."""

    store: MemoryStore
    state: CoordinatorState
    workers: dict[str, FakeWorker]
    ended: dict[tuple[str, str], FakeWorker]
    numbers: list[int]
    swapped: set[int]
    recorded: dict[int, Plan]
    vaults: dict[str, dict[Held, None]]

    def _check(self, effect: Write) -> None:
        """Invariants 1 to 3 and 5 of the job's machine."""
        if effect.forget:
            over, begun = (self.store.get(KEYS.job(JOB, part)) for part in ("done", "spec"))
            assert over is not None or begun is None, "only what is over, or never began, is forgotten"
            assert not effect.records
            if effect.keep_history:  # the job starts again, and the numbers of its plans go on
                history = KEYS.job(JOB, "history/")
                plans = {int(item.key.removeprefix(history)) for item in self.store.snapshot(history).items}
                self.numbers = [number for number in self.numbers if number in plans]
            else:
                self.numbers.clear()
                self.recorded.clear()
            return
        part = {name: self.store.get(KEYS.job(JOB, name)) for name in ("plan", "proposal", "done")}
        if part["done"] is not None:
            self._check_same(decode(part["done"].value, DoneRecord), effect)
        before = decode(part["proposal"].value, Proposal) if part["proposal"] else None
        for record in effect.records:
            if isinstance(record, Proposal) and record.status == "open":
                assert before is None or before.status == "aborted", "one proposal is open at a time"
                assert record.number > max(self.numbers, default=0), "numbers only grow"
                if self._unresolved() and (self.plan() is not None or record.recovery is not None):
                    self._check_stood(before, record)
                else:
                    self._check_kept(before, record)
                self.numbers.append(record.number)
            elif isinstance(record, Proposal):
                assert before is not None
                assert before.number == record.number, "only the open one is aborted"
            elif isinstance(record, Fence):
                self._check_fence(record)
            elif isinstance(record, PlanRecord):
                number = record.plan.number
                assert self.recorded.setdefault(number, record.plan) == record.plan, "one plan a number"
                assert number in self.swapped, "a member swapped"

    def _check_same(self, before: DoneRecord, effect: Write) -> None:
        (record,) = effect.records
        assert isinstance(record, DoneRecord), "nothing is written after the end"
        assert (record.step, record.reason) == (before.step, before.reason), "but the same, by a new leader"
        assert record.epoch == self.state.epoch > before.epoch

    def _check_fence(self, record: Fence) -> None:
        assert record.number > max(self.numbers, default=0), "numbers only grow"
        assert record.epoch == self.state.epoch
        self.numbers.append(record.number)

    def _check_stood(self, before: Proposal | None, record: Proposal) -> None:
        """After a fence: all that live and hold a copy of what is gone on from have said so."""
        assert record.recovery is not None, "after a fence every proposal is a recovery"
        fence = decode(self.fence_record, Fence)
        assert record.recovery.fence == fence.number < record.number
        assert not {*record.plan.members} & {
            d for d, i in fence.gone.items() if d in self.workers and self.workers[d].incarnation == i
        }
        if record.old is None or record.recovery.all_read(record.old):
            self._check_older(record)
            return
        self._check_read(record)
        for device, incarnation in record.recovery.sources.items():
            worker = self.ended.get((device, incarnation)) or self.workers[device]
            assert worker.incarnation == incarnation
            assert worker.fence == fence.number, "a source that has not stood"
            assert any(copy.number == record.old.number for copy in worker.copies)

    def _check_older(self, record: Proposal) -> None:
        """What it goes back to is there: of each member's share a snapshot on the node of who is to read it."""
        recovery = record.recovery
        assert recovery is not None
        if record.old is None:
            assert record.checkpoints, "nothing is made anew"
            assert not recovery.sources
            return
        assert {*recovery.snapshots} == {*record.old.members}
        assert {*recovery.snapshots.values()} == {*recovery.sources} <= {*record.plan.members}
        for reader, incarnation in recovery.sources.items():
            assert incarnation == record.plan.binding[reader] == self.workers[reader].incarnation
        self._check_read(record)

    def _check_read(self, record: Proposal) -> None:
        """Each snapshot that is to be read is with the reader's own agent."""
        recovery = record.recovery
        assert recovery is not None
        assert record.old is not None
        for device, reader in recovery.snapshots.items():
            assert reader in recovery.sources or reader in record.plan.members
            found = (device, record.old.binding[device], record.old.number, recovery.step)
            held = {(h.device, h.incarnation, h.plan, h.step) for h in self.vaults[self.workers[reader].node]}
            assert found in held, "its own agent holds it"

    @property
    def fence_record(self) -> bytes:
        item = self.store.get(KEYS.job(JOB, "fence"))
        return item.value if item is not None else b""

    def _unresolved(self) -> bool:
        plan, raw = self.plan(), self.fence_record
        return bool(raw) and (plan is None or plan.number < decode(raw, Fence).number)

    def _check_kept(self, before: Proposal | None, record: Proposal) -> None:
        if before is not None and before.old is not None:
            for device in before.old.members:
                kept = before.number in self.workers[device].kept
                assert kept, "the next opens only after all kept the old plan"
        else:
            assert before is None or self._unresolved(), "an abort of the first plan stops the job"
        assert record.epoch == self.state.epoch

    def plan(self) -> Plan | None:
        item = self.store.get(KEYS.job(JOB, "plan"))
        return decode(item.value, PlanRecord).plan if item is not None else None

    def proposal(self) -> Proposal | None:
        item = self.store.get(KEYS.job(JOB, "proposal"))
        return decode(item.value, Proposal) if item is not None else None

    def done(self) -> DoneRecord | None:
        item = self.store.get(KEYS.job(JOB, "done"))
        return decode(item.value, DoneRecord) if item is not None else None
