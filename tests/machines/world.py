"""A small world around the coordinator's machine: a store, agents, and workers that train and switch.

It executes effects, checks the machine's invariants at every write, and can replace the leader at any event:
the new one starts from the store's content and from what the agents say again.
"""

from __future__ import annotations

from collections import deque

from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan
from msgspec import structs

from elasticd.coordinator.store_transactions import StoreTransactions, Sweep
from elasticd.coordinator.store_writer import stored
from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    CoordinatorTick,
    Effect,
    Event,
    Log,
    Planned,
    Received,
    RequestPlan,
    Write,
)
from elasticd.machines.job.state.job_state import ASKING, JobPhase, JobSettings, JobState
from elasticd.records import Fence, Proposal, decode
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import Put
from elasticd.wire.coordinator import FromClient, ToClient, WorkerLost
from elasticd.wire.rendezvous import Join, Joined, Leave
from elasticd.wire.worker import (
    Closed,
    Copy,
    DrainNotice,
    Finished,
    FromWorker,
    Hello,
    Prepared,
    Raised,
    Refused,
    Report,
    Shutdown,
    StateReport,
    StayedOnPlan,
    Switched,
    ToWorker,
)
from tests.machines.cast import JOB, MEMORY, FakeWorker, Outcome, answer_to, measurement, node_record, spec
from tests.machines.checked import KEYS, Checked


class World(Checked):
    """Time stands still but for `tick`. `inbox` holds the messages on their way to the leader."""

    def __init__(
        self,
        nodes: tuple[str, ...] = ("alpha", "beta"),
        settings: JobSettings | None = None,
        memory: int = MEMORY,
    ) -> None:
        self.settings = settings or JobSettings(prepare_seconds=10.0, retry_seconds=5.0)
        self.now = 0.0
        self.store = MemoryStore()
        self.ledger = StoreTransactions(KEYS, self.store.limits)
        self.records = {name: node_record(name, memory=memory) for name in nodes}
        self.state = CoordinatorState(epoch=1, settings=self.settings)
        self.inbox: deque[Event] = deque()
        self.notes: list[CoordinatorNote] = []
        self.logs: list[str] = []  # of events that a phase has nothing for
        self.sent: list[CoordinatorSend] = []
        self.joins: dict[str, Join] = {}
        self.joined: dict[str, Joined] = {}
        self.told: dict[str, list[ToWorker]] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.planning: RequestPlan | None = None
        self.planner_waits = False
        self.ended: dict[tuple[str, str], FakeWorker] = {}
        self.numbers: list[int] = []
        self.swapped: set[int] = set()
        self.recorded: dict[int, Plan] = {}
        self.rates: dict[str, float] = {}
        self.length = 64  # tokens of each sequence
        self.longest = 0  # of any step: workers remember it
        self.saved_longest = 0  # of the checkpoints that workers see
        self.slowdowns: dict[str, int] = {}  # by which devices say that their lanes get shares of tokens
        self.of_spec: dict[str, object] = {}  # what workers say of the job beside what is usual
        self.counts_joined = False  # the world size is that of the nodes that have joined, not of all there are
        self.closes = True  # workers can make a last checkpoint that another one asks for
        self.saves_now = True  # workers have a folder for checkpoints
        self.refuse: set[str] = set()
        self.deaf: set[str] = set()
        self.forgotten: set[str] = set()
        self.steps = 0
        self.restarts = 0
        self.cut: set[str] = set()
        self.proposals: list[Proposal] = []
        self.crash_at: int | None = None
        self.crash_how = "after"
        self.events = 0
        for name in nodes:
            self.say(AgentUp(record=self.records[name]))

    # -- the leader ----------------------------------------------------------------------------------------

    @property
    def job(self) -> JobState:
        return self.state.jobs[JOB]

    @property
    def phase(self) -> JobPhase:
        return self.job.phase

    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]

    def say(self, event: Event) -> None:
        self.inbox.append(event)

    def up(self, device: str, body: FromWorker) -> None:
        if node_of(device) in self.cut:
            return
        self.say(Received(node=node_of(device), message=self.workers[device].up(body)))

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.say(CoordinatorTick())
        self.settle()

    def settle(self) -> None:
        """Events until there are none, and the planner has answered."""
        while self.inbox or (self.planning is not None and not self.planner_waits):
            self.turn()

    def turn(self) -> None:
        """One event, or the planner's answer."""
        if self.inbox:
            self._event(self.inbox.popleft())
        elif self.planning is not None:
            asked, self.planning = self.planning, None
            self._event(Planned(job=JOB, token=asked.token, answer=answer_to(asked.problem)))

    def _event(self, event: Event) -> None:
        self.events += 1
        crash = self.events == self.crash_at
        self.state, effects = machine.step(self.state, event, self.now)
        for job in self.state.jobs.values():
            assert job.planning.asked is None or job.phase in ASKING
        if crash and self.crash_how == "before":
            effects = ()
        for effect in effects:
            if not (crash and self.crash_how == "between" and not isinstance(effect, Write)):
                self._execute(effect)
        if crash:
            self.new_leader()

    def new_leader(self) -> None:
        """The leader is gone with all that was on its way to it; another begins."""
        self.inbox.clear()
        self.planning = None
        snapshot = self.store.snapshot(KEYS.jobs)
        found = stored(KEYS, snapshot.items)
        self.ledger = StoreTransactions(KEYS, self.store.limits, snapshot.items)
        self.state = machine.takeover(self.state.epoch + 1, found, self.settings, self.now)
        self.now += 0.1
        for name in self.records:
            self.reconnect(name)

    def reconnect(self, node: str) -> None:
        """The agent's hello, and what its clients last said, as the agent's machine repeats it."""
        self.say(AgentUp(record=self.records[node]))
        for worker in (*self.ended.values(), *self.workers.values()):
            if worker.node == node and not worker.alive and worker.device not in self.forgotten:
                for body in worker.said:
                    self.say(Received(node=node, message=worker.up(body)))
                self.say(Received(node=node, message=self.lost(worker)))
        if node in self.joins:
            self._join(node)
        for worker in self.workers.values():
            if worker.node == node and worker.alive:
                self.up(worker.device, self.hello(worker))
                for body in worker.said:
                    self.up(worker.device, body)

    # -- effects -------------------------------------------------------------------------------------------

    def _execute(self, effect: Effect) -> None:
        if isinstance(effect, CoordinatorNote):
            self.notes.append(effect)
        elif isinstance(effect, CoordinatorSend):
            self.sent.append(effect)
            if not isinstance(effect.message, ToClient):
                return
            if effect.message.client.startswith("w"):
                assert not isinstance(effect.message.body, Closed | Shutdown), "they hear it from the store"
            self.told.setdefault(effect.message.client, []).append(effect.message.body)
            if isinstance(effect.message.body, Joined):
                self._started(effect.node, effect.message.body)
        elif isinstance(effect, RequestPlan):
            self.planning = effect
        elif isinstance(effect, CancelPlan):
            self.planning = None
        elif isinstance(effect, Log):
            self.logs.append(effect.text)
        else:
            self._write(effect)

    def _write(self, effect: Write) -> None:
        self._check(effect)
        for asked in (effect, Sweep(job=effect.job)):
            for ops in self.ledger.transactions(asked):
                made = self.store.transact(self.ledger.compares(ops), ops)
                assert made.succeeded
                self.ledger.done(ops, {op.key: made.revision for op in ops if isinstance(op, Put)})
        self.notes += effect.notes
        for record in effect.records:
            if isinstance(record, Proposal):
                self.proposals.append(record)
                self._read(record)
            elif isinstance(record, Fence):
                self._fenced(record)

    # -- nodes and workers ---------------------------------------------------------------------------------

    def join(self, node: str, least: int = 2, most: int = 2, pid: int = 7) -> None:
        self.joins[node] = Join(job=JOB, min_nodes=least, max_nodes=most, pid=pid)
        self._join(node)

    def _join(self, node: str) -> None:
        up = FromClient(client=f"t{node}", job=JOB, device="", incarnation="", body=self.joins[node])
        self.say(Received(node=node, message=up))

    def leave(self, node: str) -> None:
        self.joins.pop(node)
        up = FromClient(client=f"t{node}", job=JOB, device="", incarnation="", body=Leave(job=JOB))
        self.say(Received(node=node, message=up))

    def _started(self, node: str, joined: Joined) -> None:
        """torchrun got its answer and starts the node's workers."""
        assert self.joined.setdefault(node, joined) == joined, "a node's rank never changes"
        for device in self.records[node].devices:
            if device.name not in self.workers:
                worker = FakeWorker(device=device.name, incarnation=f"i{self.restarts}-{device.name}")
                self.workers[device.name] = worker
                self.up(device.name, self.hello(worker))

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        world_size = sum(len(record.devices) for record in self.records.values())
        if self.counts_joined and worker.node in self.joined:
            world_size = self.joined[worker.node].nodes * len(self.records[worker.node].devices)
        made = spec(**{**self.of_spec, **changes})
        return Hello(
            job=JOB,
            local_rank=0,
            world_size=world_size,
            pid=100,
            spec=made,
            closes=self.closes,
            saves_now=self.saves_now,
            longest=self.saved_longest,
        )

    def _read(self, proposal: Proposal) -> None:
        """What the members of both plans do about a proposal as their agents read it."""
        for device in self._members(proposal):
            worker = self.workers[device]
            if not worker.alive or worker.plan >= proposal.number or device in self.deaf:
                continue
            if proposal.status == "aborted":
                worker.aborted = proposal.number
                if proposal.old is not None and device in proposal.old.members:
                    self.outcome(worker, StayedOnPlan(number=proposal.number, step=self.steps))
            elif device in self.refuse:
                self.outcome(worker, Refused(number=proposal.number, reason="no memory for both copies"))
            else:
                worker.prepared = proposal.number
                self.outcome(worker, Prepared(number=proposal.number))
        if proposal.recovery is not None and proposal.status == "open":
            self._vote()

    def stand(self, device: str, body: StateReport) -> None:
        """A worker's answer to a fence, as a test wants it."""
        worker = self.workers[device]
        worker.fence, worker.copies = body.fence, body.copies
        self.outcome(worker, body)

    def thaw(self, device: str) -> None:
        """A worker that heard nothing for a while hears the fence now."""
        self._fenced(decode(self.fence_record, Fence))

    def restart(self, node: str) -> None:
        """torchrun asks again after a local restart, and starts the node's workers anew."""
        for device in self.records[node].devices:
            worker = self.workers.pop(device.name, None)
            if worker is not None:
                self.ended[worker.device, worker.incarnation] = worker
        self.joined.pop(node, None)
        self.restarts += 1
        self.join(node, len(self.records), len(self.records))

    def _members(self, proposal: Proposal) -> tuple[str, ...]:
        """Old and new ones; of the old, after a fence, the sources."""
        old = proposal.old.members if proposal.old is not None else ()
        if proposal.recovery is not None:
            old = tuple(device for device in old if device in proposal.recovery.sources)
        return tuple(dict.fromkeys((*old, *proposal.plan.members)))

    def _fenced(self, fence: Fence) -> None:
        """Those that live stand still, and say what they hold; who is fenced off comes again as another."""
        self.fence_at(fence, {worker.node for worker in self.workers.values()} - self.cut)

    def fence_at(self, fence: Fence, nodes: set[str]) -> None:
        """The agents of these nodes read it."""
        for worker in list(self.workers.values()):
            if not worker.alive or worker.device in self.deaf or worker.node not in nodes:
                continue
            if fence.gone.get(worker.device) == worker.incarnation:
                again = FakeWorker(device=worker.device, incarnation=worker.incarnation + "+")
                self.workers[worker.device] = again
                self.up(worker.device, self.hello(again))
                continue
            worker.fence = fence.number
            held = (Copy(number=worker.plan, step=self.steps),) if worker.plan else ()
            worker.copies = tuple({copy.number: copy for copy in (*worker.copies, *held)}.values())
            self.outcome(worker, StateReport(fence=fence.number, copies=worker.copies))

    def outcome(self, worker: FakeWorker, body: Outcome) -> None:
        if isinstance(body, Switched):
            self.swapped.add(body.number)
        if isinstance(body, StayedOnPlan):
            worker.kept.add(body.number)
        worker.said = [*(old for old in worker.said if isinstance(old, Finished | Raised | DrainNotice)), body]
        self.up(worker.device, body)

    def train(self, steps: int = 1) -> None:
        """Steps of a second each: a vote, which switches when all have prepared, and everybody's report."""
        for _ in range(steps):
            self._vote()
            running = max((worker.plan for worker in self.workers.values()), default=0)
            plan = next((plan for plan in self._plans() if plan.number == running), None)
            if plan is not None and self.done() is None and not self._unresolved() and self._all_there(plan):
                self.steps += 1
                for device in plan.members:
                    self.up(device, self.report(plan, device))
            self.tick(1.0)

    def _all_there(self, plan: Plan) -> bool:
        """Whether the workers that the plan was made for live: another one on a device is no member."""
        members = [self.workers[device] for device in plan.members]
        return all(worker.alive and worker.incarnation == plan.binding[worker.device] for worker in members)

    def _plans(self) -> list[Plan]:
        proposal, plan = self.proposal(), self.plan()
        return [found for found in (plan, proposal.plan if proposal is not None else None) if found is not None]

    def _vote(self) -> None:
        proposal = self.proposal()
        if proposal is None or self.done() is not None:
            return
        if self._unresolved() and proposal.recovery is None and proposal.old is not None:
            return  # who is fenced does not vote
        members = [self.workers[device] for device in self._members(proposal)]
        if all(w.alive and w.prepared == proposal.number != w.aborted for w in members):
            for worker in members:
                if worker.plan < proposal.number:
                    worker.plan, worker.copies = proposal.number, ()
                    swapped = Switched(
                        number=proposal.number,
                        step=self.steps,
                        pause_seconds=0.1,
                        bytes_sent=10,
                        bytes_lacking=10,
                        bytes_state=100,
                    )
                    self.outcome(worker, swapped)

    def report(self, plan: Plan, device: str) -> Report:
        """What a device of this rate would report of a step."""
        measured = measurement(plan, device, self.records, self.rates, length=self.length, step=self.steps - 1)
        self.longest = max(self.longest, self.length)
        slowdown = self.slowdowns.get(device, 0)
        measured = structs.replace(measured, slowdown=slowdown, longest_so_far=self.longest)
        if plan.members[0] != device:
            return Report(measurement=measured, loss=None, tokens=None)
        return Report(measurement=measured, loss=2.0, tokens=self.length * plan.global_batch)

    def lost(self, worker: FakeWorker, clean: bool = False, how: str = "") -> WorkerLost:
        return WorkerLost(
            job=JOB,
            device=worker.device,
            incarnation=worker.incarnation,
            clean=clean,
            how=how or ("exit status 0" if clean else "killed by signal 9"),
        )

    def leave_cleanly(self, device: str, reason: str) -> None:
        self.workers[device].alive = False
        gone = self.lost(self.workers[device], clean=True, how=reason)
        self.say(Received(node=node_of(device), message=gone))

    def kill(self, device: str) -> None:
        self.workers[device].alive = False
        self.say(Received(node=node_of(device), message=self.lost(self.workers[device])))

    def finish(self) -> None:
        """The last step's vote: every member says so."""
        plan = self.plan()
        assert plan is not None
        for device in plan.members:
            self.outcome(self.workers[device], Finished(step=self.steps))

    def disconnect(self, node: str) -> None:
        self.say(AgentDown(node=node))
        self.settle()

    def start(self) -> None:
        """Both nodes join, their workers come, the first plan runs."""
        for name in self.records:
            self.join(name, len(self.records), len(self.records))
        self.settle()
        self.train(1)
