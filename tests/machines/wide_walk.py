"""Random walks of a job's machine with every word that its table has a cell for, in every phase.

Beside what `tests.machines.walk` draws, writes land later, or never where the leader dies first; the store
refuses some for their size; agents are started anew; workers hang, raise, drain, leave and say again what they
said; users stop the job, ask for checkpoints and change settings. Half of the walks begin before the first
torchrun has asked. A walk goes on after the job's end, for words that come late, and where the job is started
again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from elasticd_planner.spec.cluster import node_of
from msgspec import structs

from elasticd.codec.decoding import tag_of
from elasticd.machines.job.lifecycle.fence import FALLIBLE
from elasticd.machines.job.machine import TABLE, ignored
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CheckpointAsked,
    Configured,
    CoordinatorSend,
    CoordinatorTick,
    Effect,
    Event,
    NodeDrained,
    Received,
    StopAsked,
    Unwritten,
    Write,
)
from elasticd.machines.job.state.job_state import OVER, JobPhase
from elasticd.records import DoneRecord, Proposal, StopRecord
from elasticd.wire.coordinator import Drain, Frozen, ToClient, ToMachine, Unreached, Unread
from elasticd.wire.main_thread import Halted
from elasticd.wire.rendezvous import Join, Leave, WorkerFailure
from elasticd.wire.snapshots import SnapshotInventory
from elasticd.wire.worker import (
    Closed,
    DrainNotice,
    Finished,
    FromWorker,
    Goodbye,
    InDoubt,
    Probed,
    Raised,
    Rehearsed,
    Rejected,
    Saved,
    SaveFailed,
)
from tests.machines.cast import JOB, FakeWorker, Outcome
from tests.machines.test_recovery import recovered
from tests.machines.walk import MOVES, Walk

Cell = tuple[JobPhase, type]
#: Cells of the table in which something follows.
CELLS: frozenset[Cell] = frozenset(cell for cell, handler in TABLE.items() if handler is not ignored)

#: What else may happen, and how often.
WORDS = {
    "join_one": 3,
    "join_all": 2,
    "leave_run": 1,
    "hold_writes": 3,
    "write": 4,
    "refuse_write": 0.5,
    "start_agent": 1,
    "freeze_one": 1,
    "thaw_all": 2,
    "refuse_one": 1,
    "refuse_none": 2,
    "doubt": 1,
    "give_up": 2,
    "drain_one": 1,
    "drain_none": 2,
    "pause_policy": 1,
    "say_again": 3,
    "halt_one": 2,
    "halt_all": 1,
    "move_all": 2,
    "notice": 1,
    "unreached": 2,
    "save": 1,
    "fail_to_save": 1,
    "inventory": 1,
    "unread": 1,
    "answer_probes": 1,
    "ask_checkpoint": 1,
}
#: What ends most jobs: drawn for one walk in three.
ENDINGS = {"raise_one": 2, "leave_cleanly_one": 1, "finish_one": 2, "stop": 1}
#: What happens around a job that is over.
AFTER_END = {
    **dict.fromkeys(("deliver", "wait", "kill_one", "say_again", "new_leader", "start_agent", "write"), 3),
    **dict.fromkeys(
        ("join_one", "leave_run", "unread", "hold_writes", "pause_policy", "cut_off", "reach_all"), 1
    ),
    "begin_again": 1,
}
LENGTH, AFTER_END_LENGTH = 70, 12


class WideWalk(Walk):
    """One walk; `cells` are those of the table that it came to."""

    def __init__(self, seed: int) -> None:
        self.cells: set[Cell] = set()
        self.pending: deque[Write] = deque()  # what the leader has decided and the store does not have yet
        self.holds = False  # the store takes nothing for now
        self.refuses = False  # it refuses the next write that may be too large
        self.too_large: set[int] = set()  # numbers of the proposals that it refuses
        self.frozen: set[tuple[str, str]] = set()
        self.agents = 0
        super().__init__(seed)

    def begin(self) -> None:
        self.counts_joined = True
        self.early = self.draw.random() < 0.5
        if not self.early:
            super().begin()

    def walk(self) -> None:
        endings = ENDINGS if self.draw.random() < 1 / 3 else {}
        moves: dict[str, float] = {**MOVES, **WORDS, **endings}
        for _ in range(2):
            self._moves(moves, LENGTH)
            if not self.over:
                return
            self._moves(AFTER_END, AFTER_END_LENGTH, ends=False)
            if self.over:
                return

    def _moves(self, weights: dict[str, float], length: int, *, ends: bool = True) -> None:
        for move in self.draw.choices([*weights], [*weights.values()], k=length):
            if self.over is ends:
                return
            getattr(self, move)()

    @property
    def known(self) -> bool:
        """Whether the leader knows the job."""
        return JOB in self.state.jobs

    @property
    def over(self) -> bool:
        return self.known and self.phase in OVER

    # -- the leader and its store --------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        if self.known:
            word: Any = event.message if isinstance(event, Received) else event
            self.cells.add((self.phase, type(getattr(word, "body", word))))
        super()._event(event)

    def _write(self, effect: Write) -> None:
        if self.holds:
            self.pending.append(effect)
        elif self._is_refused(effect):
            records = tuple(tag_of(record) for record in effect.records)
            self.inbox.appendleft(Unwritten(job=JOB, records=records, reason="too large"))
        else:
            super()._write(effect)

    def _is_refused(self, effect: Write) -> bool:
        """The store refuses what is large: not the end of a job by itself, nor a user's wish."""
        numbers = {record.number for record in effect.records if isinstance(record, Proposal)}
        if numbers & self.too_large:
            return True
        small = len(effect.records) == 1 and isinstance(effect.records[0], DoneRecord | StopRecord)
        if not self.refuses or small or not effect.records:
            return False
        self.refuses = False
        self.too_large |= numbers
        return True

    def hold_writes(self) -> None:
        self.holds = True

    def refuse_write(self) -> None:
        self.refuses = True

    def write(self) -> None:
        """Some of what waits for the store, or all."""
        self._write_out(self.draw.choice((1, 2, 99)))

    def _write_out(self, most: int) -> None:
        self.holds = False
        while self.pending and most:
            self._write(self.pending.popleft())
            most -= 1
        self.holds = bool(self.pending)

    def new_leader(self) -> None:
        self.pending.clear()
        self.holds = False
        super().new_leader()

    def reconnect(self, node: str) -> None:
        if node not in self.cut:
            super().reconnect(node)

    def wait(self) -> None:
        if self.pending:  # the machine's clock stands still while the store is away for longer than a moment
            self.now += 0.05
            self.say(CoordinatorTick())
        else:
            super().wait()

    # -- torchruns and agents ------------------------------------------------------------------------------

    def join_one(self) -> None:
        node = self.draw.choice([*self.records])
        if node not in self.cut and node not in self.joins:
            self.join(node, len(self.records), len(self.records))
        elif node not in self.cut:
            self._join(node)

    def join_all(self) -> None:
        for node in self.records:
            if node not in self.cut and node not in self.joins:
                self.join(node, len(self.records), len(self.records))

    def leave_run(self) -> None:
        """A torchrun ends, and its workers with it."""
        node = self.draw.choice([*self.records])
        if node not in self.joins or node in self.cut:
            return
        for worker in self.workers.values():
            if worker.node == node and worker.alive:
                self.kill(worker.device)
        failure = WorkerFailure(kind="KeyError", text="x") if self.draw.random() < 0.2 else None
        signal = "SIGTERM" if failure is None and self.draw.random() < 0.2 else ""
        self.joins.pop(node)
        self.joined.pop(node, None)
        self._torchrun(node, Leave(job=JOB, failure=failure, signal=signal))

    def begin_again(self) -> None:
        """Once all workers of a job that is over have ended, its torchruns are started again."""
        self.reach_all()
        for worker in self.workers.values():
            if worker.alive:
                self.kill(worker.device)
        self.settle()
        self._write_out(99)
        self.too_large.clear()
        self.refuse.clear()
        for worker in self.workers.values():
            self.ended[worker.device, worker.incarnation] = worker
        self.workers.clear()
        self.joined.clear()
        self.forgotten.update(device for device, _ in self.ended)
        self.restarts += 1
        self.now += 2.0
        self.joins.clear()
        size = len(self.records)
        for node in self.draw.sample([*self.records], self.draw.randrange(1, size + 1)):
            fresh = self.phase is JobPhase.DONE
            self.joins[node] = Join(job=JOB, min_nodes=size, max_nodes=size, pid=8, age=0.5, fresh=fresh)
            self._join(node)
            self.joins[node] = structs.replace(self.joins[node], age=None)
        self.turn()

    def _torchrun(self, node: str, body: Join | Leave) -> None:
        if node not in self.cut:
            up = FakeWorker(device=node, incarnation="").up(body)  # type: ignore[arg-type]
            up = structs.replace(up, client=f"t{node}", device="")
            self.say(Received(node=node, message=up))

    def start_agent(self) -> None:
        """An agent takes another's place."""
        node = self.draw.choice([*self.records])
        if node not in self.cut:
            self.agents += 1
            self.records[node] = structs.replace(self.records[node], agent=f"{node}-{self.agents}")
            self.disconnect(node)
            self.reconnect(node)

    def disconnect(self, node: str) -> None:
        """In the middle of all else."""
        self.say(AgentDown(node=node))

    def unreached(self) -> None:
        node = self.draw.choice([*self.records])
        others = {other: "no answer" for other in self.records if other != node and self.draw.random() < 0.6}
        number = self.job.network.round if self.known else 0
        self._of_agent(node, Unreached(job=JOB, round=number, nodes=others))

    def inventory(self) -> None:
        self._of_agent(self.draw.choice([*self.records]), SnapshotInventory(job=JOB, snapshots=()))

    def _of_agent(self, node: str, message: ToMachine | Unread) -> None:
        if node not in self.cut:
            self.say(Received(node=node, message=message))

    # -- workers -------------------------------------------------------------------------------------------

    def _one(self) -> FakeWorker | None:
        there = [worker for worker in self.workers.values() if worker.alive and worker.node not in self.cut]
        return self.draw.choice(there) if there else None

    def _says(self, body: Outcome) -> None:
        if (worker := self._one()) is not None:
            self.outcome(worker, body)

    def _says_beside(self, body: FromWorker) -> None:
        if (worker := self._one()) is not None:
            self.up(worker.device, body)

    def freeze_one(self) -> None:
        if (worker := self._one()) is not None:
            self.frozen.add((worker.device, worker.incarnation))
            self.deaf.add(worker.device)
            self._frozen(worker, "it is stopped")

    def thaw_all(self) -> None:
        for device, incarnation in sorted(self.frozen):
            worker = self.workers.get(device)
            if worker is not None and worker.incarnation == incarnation and worker.alive:
                self._frozen(worker, "")
        self.frozen.clear()
        self.open_ears()

    def _frozen(self, worker: FakeWorker, how: str) -> None:
        word = Frozen(job=JOB, device=worker.device, incarnation=worker.incarnation, how=how)
        self._of_agent(worker.node, word)

    def refuse_one(self) -> None:
        self.refuse.add(self.draw.choice([*self.workers] or [""]))

    def refuse_none(self) -> None:
        self.refuse = set()

    def doubt(self) -> None:
        proposal = self.proposal()
        if proposal is None or proposal.status != "open" or (worker := self._one()) is None:
            return
        if worker.plan < proposal.number == worker.prepared != worker.aborted:
            body = InDoubt(number=proposal.number, step=self.steps, reason="the last word did not come")
            self.outcome(worker, body)

    def give_up(self) -> None:
        """A proposal is overdue, and its members hear of nothing."""
        if self.known and self.phase is JobPhase.PROPOSED:
            self.deaf |= {*self.workers}
            self.now += 12.0
            self._event(CoordinatorTick())

    def say_again(self) -> None:
        """A node's agent has another connection, and repeats what its clients said."""
        node = self.draw.choice([*self.records])
        if node not in self.cut:
            self.disconnect(node)
            self.reconnect(node)

    def raise_one(self) -> None:
        if (worker := self._one()) is None or not (worker.plan or worker.prepared):
            return
        body = Raised(
            plan=worker.plan,
            step=self.steps,
            kind=self.draw.choice(("ValueError", "OSError")),
            text="x",
            traceback="t",
            holds=self.draw.random() < 0.7,
            saves=self._half,
        )
        self.outcome(worker, body)

    @property
    def _half(self) -> bool:
        return self.draw.random() < 0.5

    def halt_one(self) -> None:
        if (worker := self._one()) is not None:
            self._halted(worker, place="the loss", step=self.steps, computes=True, seconds=9.0)

    def halt_all(self) -> None:
        for worker in self.workers.values():
            self._halted(worker, place="a collective", step=self.steps, waits=True, rank=0, seconds=9.0)

    def move_all(self) -> None:
        for worker in self.workers.values():
            self._halted(worker)

    def _halted(self, worker: FakeWorker, **place: Any) -> None:
        if worker.alive:
            word = Halted(job=JOB, device=worker.device, incarnation=worker.incarnation, **place)
            self._of_agent(worker.node, word)

    def notice(self) -> None:
        self._says(DrainNotice(reason="SIGTERM", saves=self._half))

    def leave_cleanly_one(self) -> None:
        if (worker := self._one()) is not None:
            self.up(worker.device, Goodbye(reason="its script ended"))
            self.leave_cleanly(worker.device, "its script ended")

    def finish_one(self) -> None:
        """A member says that the last step's vote is complete: so it is for all of them."""
        plan = self.plan()
        there = {*self.workers}
        if plan is None or self._unresolved() or self.steps == 0 or not there.issuperset(plan.members):
            return
        if not self._all_there(plan):
            return
        heard = [device for device in plan.members if node_of(device) not in self.cut]
        self.draw.shuffle(heard)
        if len(heard) > 1 and self._half:
            self.kill(heard.pop())  # another one dies as it ends
        if heard:
            self.outcome(self.workers[heard[0]], Finished(step=self.steps))

    def save(self) -> None:
        if (worker := self._one()) is not None and worker.plan:
            self.up(worker.device, Saved(name=f"step-{self.steps}", step=self.steps, plan=worker.plan))

    def fail_to_save(self) -> None:
        if (worker := self._one()) is not None and worker.plan:
            self.up(worker.device, SaveFailed(step=self.steps, plan=worker.plan, reason="the disk is full"))

    def answer_probes(self) -> None:
        """The answers to what a leader before may have asked."""
        self._says_beside(Probed(seconds=(0.01, 0.01)))
        self._says_beside(Rehearsed(seconds={2: 0.001}))

    def unread(self) -> None:
        """A worker's hello that this release cannot decode: it is repeated to each leader."""
        if (worker := self._one()) is not None:
            word = Unread(
                client=f"w{worker.device}",
                job=JOB,
                device=worker.device,
                incarnation=worker.incarnation,
                reason="a newer release",
            )
            self._of_agent(worker.node, word)

    # -- users ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        if self.known and not self.over:  # else the user is told so, and nothing is decided
            self._event(StopAsked(job=JOB, by="alice", seconds=self.draw.choice((0.0, 5.0, 600.0))))

    def ask_checkpoint(self) -> None:
        if self.known:
            self._event(CheckpointAsked(job=JOB))

    def pause_policy(self) -> None:
        self._configure(paused=not self.state.settings.policy.paused)

    def _configure(self, *, paused: bool) -> None:
        settings = self.state.settings
        policy = structs.replace(settings.policy, paused=paused)
        self._event(Configured(detect=settings.detect, policy=policy, changes="a user's"))

    def drain_one(self) -> None:
        self._event(NodeDrained(node=self.draw.choice([*self.records]), on=True))

    def drain_none(self) -> None:
        for node in self.records:
            self._event(NodeDrained(node=node, on=False))

    def _execute(self, effect: Effect) -> None:
        if isinstance(effect, CoordinatorSend) and isinstance(effect.message, Drain):
            record = structs.replace(self.records[effect.node], draining=effect.message.on)
            self.records[effect.node] = record
            if effect.node not in self.cut:
                self.say(AgentUp(record=record))
            return
        super()._execute(effect)
        down = effect.message if isinstance(effect, CoordinatorSend) else None
        if isinstance(down, ToClient) and isinstance(down.body, Rejected | Closed):
            self._turned_away(down.client)

    def _turned_away(self, client: str) -> None:
        """A worker, or a torchrun, that cannot take part ends."""
        kind, name = client[0], client[1:]
        if kind == "t":
            self.joins.pop(name, None)
        elif (worker := self.workers.get(name)) is not None and worker.alive and worker.node not in self.cut:
            self.kill(name)

    # -- the world, where processes may be of several starts ----------------------------------------------

    def _members(self, proposal: Proposal) -> tuple[str, ...]:
        """A record is obeyed by the incarnations that it names alone."""
        bound: dict[str, set[str]] = {}
        for plan in (proposal.old, proposal.plan):
            for device, incarnation in plan.binding.items() if plan is not None else ():
                bound.setdefault(device, set()).add(incarnation)
        names = super()._members(proposal)
        return tuple(name for name in names if self.workers[name].incarnation in bound.get(name, ()))

    def _vote(self) -> None:
        proposal = self.proposal()
        binding = proposal.plan.binding if proposal is not None else {}
        there = {worker.device: worker.incarnation for worker in self.workers.values()}
        if all(there.get(device) == incarnation for device, incarnation in binding.items()):
            super()._vote()

    def heal(self) -> None:
        """Nothing is in anybody's way any more, and what is waited for comes."""
        self._write_out(99)
        self.refuse, self.refuses = set(), False
        self.reach_all()
        self.planner_waits = False
        self.settle()
        self.thaw_all()
        self.move_all()
        self.drain_none()
        self._configure(paused=False)
        self.settle()
        for _ in range(4):
            self._end_torn_nodes()
            self.join_all()
            self.settle()
            self.move_all()
            if not self.known:
                continue
            super().heal()
            if self.phase in OVER or recovered(self):
                return
            self.tick(5.0)

    def _end_torn_nodes(self) -> None:
        """A torchrun ends its other workers where one has died: before the first plan, and where the job waits
        for devices."""
        waits = self.known and self.job.reason.startswith("does not fit")
        if self.known and self.phase in FALLIBLE | OVER and not waits:
            return
        torn = {worker.node for worker in self.workers.values() if not worker.alive}
        for worker in self.workers.values():
            if worker.alive and worker.node in torn:
                self.kill(worker.device)
        self.settle()
