"""What must hold of the records that leaders wrote, whatever happened meanwhile.

1. Every record carries the epoch of who leads as it is written: nobody else's word is in the store.
2. A number is given to one plan: whoever writes it again (as aborted, as recorded, as history) means the same.
3. Numbers only grow: of proposals, of fences, and of recorded plans; a new one is above all before it.
4. A plan is recorded after it was proposed, and none that a fence closed.
5. The steps at which plans are recorded never run back, and nothing is written once a job is over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.plan import Plan

from elasticd.codec.record_parts import Shelf
from elasticd.records import DoneRecord, Fence, Keys, MemberRecord, PlanRecord, Proposal, decode, decode_history
from elasticd.store.protocol import WatchEvent

#: What a leader writes under its epoch.
Led = Proposal | PlanRecord | Fence | DoneRecord


@dataclass(kw_only=True)
class JobHistory:
    """What was read of one job. `plans`: the number and first step of each plan that was in force, in order;
    `gone`: who was fenced off, by the fence's number, device to incarnation; `pids`: the process of each
    incarnation; `recoveries`: by number the first step of each recovery's plan, and the plan (number) whose
    state it goes on from.

    A recovery has no vote: its members make steps before it is recorded. If a fence closes it then, the next
    recovery goes on from their state, and their plan was in force though it is not recorded. So it was where
    no recovery follows, as the job is over by then."""

    plans: list[tuple[int, int]] = field(default_factory=list)
    gone: dict[int, dict[str, str]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    recoveries: dict[int, tuple[int, int]] = field(default_factory=dict)
    highest: int = 0
    fenced: int = 0
    proposals: int = 0
    over: bool = False

    def runs(self, number: int, step: int) -> bool:
        """Whether members of plan `number` may make this step: the store's proposal of it is what they obey.

        Members that nobody can reach switch by a proposal, and may finish the job before a leader hears of it.
        If that leader has fenced the job meanwhile, it records its end alone.
        """
        if number not in self.digests:
            return False
        recorded = [plan for plan, first_step in self.plans if first_step <= step]
        if not recorded or recorded[-1] == number:
            return True
        first_step, _ = self.recoveries.get(number, (self.plans[-1][1], 0))
        return self.over and self.plans[-1][0] < number <= self.fenced and first_step <= step

    @property
    def fenced_off(self) -> dict[int, int]:
        """The highest number of a fence that named an incarnation of a process, by its pid."""
        found: dict[int, int] = {}
        for number, gone in self.gone.items():
            for incarnation in gone.values():
                if incarnation in self.pids:
                    pid = self.pids[incarnation]
                    found[pid] = max(number, found.get(pid, 0))
        return found


class History:
    """Reads the store's events in order; `wrong` says what broke which rule."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.jobs: dict[str, JobHistory] = {}
        self.leaders: list[int] = []
        self.wrong: list[str] = []
        self._epoch = 0
        self._shelf = Shelf(keys.jobs)

    def read(self, events: Iterable[WatchEvent]) -> None:
        for event in events:
            if event.key == self._keys.leader:
                self._lead(event)
            elif self._shelf.take(event.key, event.item.value if event.kind == "put" else None):
                continue
            elif event.key.startswith(self._keys.members) and event.kind == "put":
                self._member(event)
            elif event.key.startswith(self._keys.jobs) and event.kind == "put":
                self._record(event)

    def _lead(self, event: WatchEvent) -> None:
        if event.kind == "delete":
            self._epoch = 0
            return
        self._epoch = event.item.create_revision
        if self.leaders and self._epoch < self.leaders[-1]:
            self._say(event, f"epoch {self._epoch} is below {self.leaders[-1]}")
        if not self.leaders or self.leaders[-1] != self._epoch:
            self.leaders.append(self._epoch)

    def _member(self, event: WatchEvent) -> None:
        name = event.key.removeprefix(self._keys.members).rpartition("/")[0]
        member = decode(event.item.value, MemberRecord)
        self.jobs.setdefault(name, JobHistory()).pids[member.incarnation] = member.pid

    def _record(self, event: WatchEvent) -> None:
        name, _, part = event.key.removeprefix(self._keys.jobs).partition("/")
        job, parts = self.jobs.setdefault(name, JobHistory()), self._shelf.of(event.key)
        if part.startswith("history/"):
            record = decode_history(event.item.value, parts)
            self._same(event, job, record.number, _digest(record.plan))
            return
        found = _decoded(part, event.item.value, parts)
        if found is None:
            return
        self._led(event, found.epoch)
        if job.over and part != "done":
            self._say(event, "the job was over")
        if isinstance(found, Proposal):
            self._proposal(event, job, found)
        elif isinstance(found, Fence):
            self._fence(event, job, found)
        elif isinstance(found, PlanRecord):
            self._plan(event, job, found)
        else:
            job.over = True

    def _led(self, event: WatchEvent, epoch: int) -> None:
        if epoch != self._epoch:
            who = f"of epoch {self._epoch} leads" if self._epoch else "nobody leads"
            self._say(event, f"a record of epoch {epoch} was written while {who}")

    def _proposal(self, event: WatchEvent, job: JobHistory, found: Proposal) -> None:
        if found.number not in job.digests and found.status == "open":
            job.proposals += 1
            self._grows(event, job, found.number)
        self._same(event, job, found.number, _digest(found.plan))
        if found.recovery is not None and found.old is not None:
            job.recoveries[found.number] = found.recovery.step, found.old.number

    def _fence(self, event: WatchEvent, job: JobHistory, found: Fence) -> None:
        self._grows(event, job, found.number)
        job.fenced = max(job.fenced, found.number)
        before = {pair for gone in job.gone.values() for pair in gone.items()}
        job.gone[found.number] = {
            device: worker for device, worker in found.gone.items() if (device, worker) not in before
        }

    def _plan(self, event: WatchEvent, job: JobHistory, found: PlanRecord) -> None:
        number = found.plan.number
        if number not in job.digests:
            self._say(event, f"plan {number} is recorded and never was proposed")
        self._same(event, job, number, _digest(found.plan))
        if number <= job.fenced:
            self._say(event, f"plan {number} is recorded after fence {job.fenced} closed it")
        if job.plans and job.plans[-1] == (number, found.step):
            return  # a new leader wrote again what it had read
        if job.plans and number <= job.plans[-1][0]:
            self._say(event, f"plan {number} is recorded after plan {job.plans[-1][0]}")
        if job.plans and found.step < job.plans[-1][1]:
            self._say(
                event, f"plan {number} goes on at step {found.step}, the one before at {job.plans[-1][1]}"
            )
        job.plans += [*unrecorded(job, number), (number, found.step)]

    def _grows(self, event: WatchEvent, job: JobHistory, number: int) -> None:
        if number <= job.highest:
            self._say(event, f"number {number} is not above {job.highest}")
        job.highest = max(job.highest, number)

    def _same(self, event: WatchEvent, job: JobHistory, number: int, digest: str) -> None:
        before = job.digests.setdefault(number, digest)
        if before != digest:
            self._say(event, f"number {number} has two plans, {before} and {digest}")

    def _say(self, event: WatchEvent, text: str) -> None:
        self.wrong.append(f"revision {event.mod_revision}, {event.key}: {text}")


def unrecorded(job: JobHistory, number: int) -> list[tuple[int, int]]:
    """The plans in force between the last that is recorded and this one."""
    found: list[tuple[int, int]] = []
    last = job.plans[-1][0] if job.plans else 0
    _, old = job.recoveries.get(number, (0, 0))
    while old > last and old in job.recoveries:
        step, before = job.recoveries[old]
        found.insert(0, (old, step))
        old = before
    return found


def _digest(plan: JobPlan) -> str:
    """The same for plans that train alike."""
    if isinstance(plan, Plan):
        return plan.digest
    alike = plan.names, plan.shape, plan.members, plan.samples, sorted(plan.binding.items())
    return hashlib.sha256(msgspec.json.encode(alike)).hexdigest()[:16]


def _decoded(part: str, value: bytes, parts: Mapping[str, bytes]) -> Led | None:
    match part:
        case "proposal":
            return decode(value, Proposal, parts)
        case "plan":
            return decode(value, PlanRecord, parts)
        case "fence":
            return decode(value, Fence, parts)
        case "done":
            return decode(value, DoneRecord, parts)
    return None
