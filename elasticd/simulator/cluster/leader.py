"""The leading coordinator: IO around its real machine, on the in-memory store and the virtual clock.

It has no lease keeper: the key's lease is long, and is revoked when the script lets the leader die.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticd_planner.spec.plan import Plan

from elasticd.clock import Due
from elasticd.coordinator.store_transactions import StoreTransactions, Sweep
from elasticd.coordinator.store_writer import drains, stored
from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.coordinator.machine_runner import MachineRunner
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    CoordinatorTick,
    Event,
    Log,
    Planned,
    Received,
    RequestPlan,
    Stored,
    Write,
)
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobSettings, JobState, NodeState, Worker
from elasticd.records import Keys
from elasticd.simulator.engine import LATE, EventEngine
from elasticd.simulator.planning import Planner
from elasticd.store.leader import campaign
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Put
from elasticd.wire.coordinator import AgentHello, FromClient, Frozen, ToClient, ToLeader, WorkerLost
from elasticd.wire.main_thread import Halted
from elasticd.wire.snapshots import SnapshotInventory

#: Seconds between looks at what has become due, while anything may.
TICK_SECONDS = 0.5

#: Longer than any scenario.
_LEASE = 10 * 365 * 86_400


class Known:
    """The last result that was derived from values that are replaced, never changed, where nothing replaced
    them since: each of a thousand reports of a step asks the same of a thousand workers."""

    def __init__(self) -> None:
        self._found: dict[Callable[..., bool], tuple[tuple[object, ...], bool]] = {}

    def of(self, ask: Callable[..., bool], *values: object) -> bool:
        """The answer of `ask(*values)`. It is asked again only if one of the values is another object than
        before."""
        before, answer = self._found.get(ask, ((), False))
        if len(before) != len(values) or any(a is not b for a, b in zip(before, values, strict=True)):
            answer = ask(*values)
            self._found[ask] = values, answer
        return answer


def _member_away(plan: Plan | None, nodes: Mapping[str, NodeState]) -> bool:
    names = plan.nodes if plan is not None else ()
    return any((node := nodes.get(name)) is None or not node.connected for name in names)


def _one_lost_peers(workers: Mapping[str, Worker]) -> bool:
    return any(worker.peers_lost_at is not None for worker in workers.values())


class SimulatedLeader:
    """One time of leading, from winning the key to `die`."""

    def __init__(
        self,
        engine: EventEngine,
        server: MemoryServer,
        keys: Keys,
        settings: JobSettings,
        planner: Planner,
        *,
        name: str,
        send: Callable[[str, ToClient], None],
        tell: Callable[[CoordinatorNote], None],
    ) -> None:
        self._engine, self._keys, self._planner = engine, keys, planner
        self._send, self._tell = send, tell
        self._store = MemoryStore(server)
        self._leadership = campaign(self._store, keys.leader, name, name, _LEASE)
        known = self._store.snapshot(keys.jobs).items
        self._ledger = StoreTransactions(keys, self._store.limits, known)
        jobs = self._read(stored(keys, known))
        drained = drains(keys, self._store.snapshot(keys.drains).items)
        state = machine.takeover(self._leadership.term, jobs, settings, engine.now(), drains=drained)
        self._runner = MachineRunner(state, self)
        self.alive = True
        self.planning_seconds, self.plans = 0.0, 0
        self._asked: dict[str, Due] = {}
        self._known = Known()
        self._tick: Due | None = None
        self._watch_time()

    def _read(self, jobs: list[Stored]) -> list[Stored]:
        """The jobs that it has read as it takes over, with their ages: here time begins with each leader."""
        return jobs

    @property
    def state(self) -> CoordinatorState:
        """All that this leader knows of nodes and jobs."""
        return self._runner.state

    def job(self, name: str) -> JobState | None:
        """The job's state; None for a job that this leader does not know."""
        return self.state.jobs.get(name)

    def idle(self, name: str) -> bool:
        """Returns True if nothing is under way that further steps or time would bring to an end."""
        job = self.job(name)
        if not self.alive or job is None or job.phase is not JobPhase.RUNNING:
            return False
        learning = (
            job.learned.first_step is not None
            or bool(job.learned.sampled)
            or not (job.learned.profile and job.learned.profile.fitted)
        )
        waiting = job.takeover.settle_until is not None or job.planning.not_before > self._engine.now()
        undecided = (
            job.planning.asked is not None or job.planning.decided is None or job.planning.deferred is not None
        )
        return not (learning or waiting or undecided or self._away(job))

    def _away(self, job: JobState) -> bool:
        """Returns True if a member's node cannot be reached."""
        return self._known.of(_member_away, job.plan, self.state.nodes)

    def heard(self, node: str, message: ToLeader) -> None:
        """Takes a message of a node's agent: a hello as `AgentUp`, others as `Received`. Kinds that the
        simulator does not model are dropped."""
        if isinstance(message, AgentHello):
            self.apply(AgentUp(record=message.record, factors=message.factors))
        elif isinstance(message, FromClient | WorkerLost | Frozen | Halted | SnapshotInventory):
            self.apply(Received(node=node, message=message))

    def waits(self, name: str) -> str:
        """Why a job that lost members cannot go on without more of them; nothing while it need not wait."""
        job = self.job(name)
        if not self.alive or job is None or job.phase is not JobPhase.RECOVERING:
            return ""
        planned = (
            job.planning.asked is not None or job.planning.remedy is not None or job.planning.decided is None
        )
        return "" if planned or job.takeover.settle_until is not None else job.reason

    def lost(self, node: str) -> None:
        """The link to a node's agent broke."""
        self.apply(AgentDown(node=node))

    def apply(self, event: Event) -> None:
        """One step of its machine, whose effects are carried out at once. After `die` events are dropped."""
        if not self.alive:
            return
        self._runner.perform(self._runner.step(event, self._engine.now()))
        self._watch_time()

    def die(self) -> None:
        """Nothing it was doing goes on."""
        self.alive = False
        for due in self._asked.values():
            due.cancel()

    def expire(self) -> None:
        """The lease of its key has run out."""
        self._leadership.resign(self._store)

    def record(self, note: CoordinatorNote) -> None:
        """To the script that made this leader."""
        self._tell(note)

    def log(self, line: Log) -> None:
        """Nobody reads a log here."""

    def send(self, message: CoordinatorSend) -> None:
        """To a node's workers. There are no snapshots here, and the script does the harm."""
        if isinstance(message.message, ToClient):
            self._send(message.node, message.message)

    def write(self, write: Write) -> None:
        """Into the store. A job that it does not take is an error of the scenario, not one to be simulated."""
        for asked in (write, Sweep(job=write.job)):
            for ops in self._ledger.transactions(asked):
                result = self._leadership.transact(self._store, self._ledger.compares(ops), ops)
                assert result.succeeded, "nobody else writes the leader's records here"
                self._ledger.done(ops, {op.key: result.revision for op in ops if isinstance(op, Put)})
        for note in write.notes:
            self.record(note)

    def request_plan(self, request: RequestPlan) -> None:
        """Of the scenario's planner, which answers after some time."""
        self._cancel(request.job)
        seconds = self._planner.seconds(request.problem)

        def answered() -> None:
            self.planning_seconds += seconds
            self.plans += 1
            self._asked.pop(request.job, None)
            answer = self._planner.answer(request.problem)
            self.apply(Planned(job=request.job, token=request.token, answer=answer))

        self._asked[request.job] = self._engine.after(seconds, answered)

    def cancel_plan(self, request: CancelPlan) -> None:
        """The planner's answer is not waited for."""
        self._cancel(request.job)

    def _cancel(self, job: str) -> None:
        due = self._asked.pop(job, None)
        if due is not None:
            due.cancel()

    def _watch_time(self) -> None:
        """A tick while some job waits for time to pass; the reports of running jobs are events enough, unless
        they may have stopped."""
        if self._tick is not None or not self.alive:
            return
        now = self._engine.now()
        waits = any(
            job.phase is not JobPhase.RUNNING
            or job.takeover.settle_until is not None
            or job.planning.not_before > now
            or self._known.of(_one_lost_peers, job.workers)
            or self._away(job)
            for job in self.state.jobs.values()
            if job.phase not in OVER
        )
        if waits:
            self._tick = self._engine.after(TICK_SECONDS, self._ticked, LATE)

    def _ticked(self) -> None:
        self._tick = None
        self.apply(CoordinatorTick())
