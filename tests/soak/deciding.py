"""Simulations in which leaders decide and write as the coordinator's daemon does, and users are told of it.

A leader of these has the daemon's own `Leader` and `Writer`, on simulated time and over a `FaultyStore`. Users
ask for changes of the configuration, have jobs forgotten, and stop the one that trains, at the newest leader or
at one that was replaced and does not know. Each answer is noted. Where it says that a decision was made, the
store must have it then, and so must each leader that follows; where it says that nothing was changed, the store
must never have it.

Users ask by the coordinator's own HTTP application (`tests.soak.front_door`), and are told by its statuses.
Agents keep their keys by their own `Registrar` (`tests.soak.registering`). Wall clocks of leaders are wrong by
up to years, and jump: what is kept of jobs that ended is deleted by nobody but users.

In one simulation of three a node lies: its agent says what it likes about the workers of other nodes, in any
words, with values that nobody means, and at the largest sizes that messages may have. In one of five the store
takes small requests alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from elasticd_planner.spec.cluster import node_of

from elasticd.config.tree import Config
from elasticd.coordinator import live_config
from elasticd.coordinator.commands import UNCHANGED
from elasticd.coordinator.events.event_pages import Pages
from elasticd.coordinator.leader import Leader
from elasticd.coordinator.store_transactions import StoreTransactions
from elasticd.coordinator.store_writer import Writer, aged, read_times
from elasticd.machines.agent.state import AgentDrained
from elasticd.machines.coordinator import message_checks
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    Event,
    RequestPlan,
    Stored,
)
from elasticd.machines.job.state.job_state import OVER
from elasticd.records import ConfigRecord, DoneRecord, StopRecord, decode_at, encode
from elasticd.simulator.cluster.leader import SimulatedLeader
from elasticd.simulator.cluster.nodes import Node, NodeShape
from elasticd.simulator.engine import EventEngine
from elasticd.simulator.planning import Planner
from elasticd.simulator.run import KEYS, Simulation
from elasticd.simulator.scenarios.scenario import Scenario
from elasticd.store.leader import LeadershipLost
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import Limits, Put, WatchEvent, WatchItem
from elasticd.wire.coordinator import AgentHello, Drain, FromClient, ToLeader
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.worker import Hello
from tests.machines.hostile import Hostile
from tests.soak.engine_loop import EngineLoop, StoreThread
from tests.soak.faulty_store import CALM, FaultyStore, StoreFaults
from tests.soak.front_door import FrontDoor
from tests.soak.registering import RegisteredNode, on_simulated_time, unlike
from tests.soak.virtual_threads import VirtualThreads

#: Jobs of before, which users have forgotten.
OLD_JOBS = tuple(f"old-{number}" for number in range(12))
#: What is kept in the store with its user's name; a drain is kept without one, a checkpoint is asked for once.
KEPT = ("config", "forget", "stop")
#: Seconds between two questions of users, at most.
ASKING_SECONDS = 6.0
#: Seconds for which a leader that was replaced stands still before it goes on, at most.
FROZEN_SECONDS = 20.0
#: Unix seconds at which a simulation begins, and those after which a job that ended is forgotten.
BEGAN, KEPT_SECONDS = 1.8e9, 7 * 86_400.0
#: Seconds by which the wall clocks of leaders are wrong.
WRONG_SECONDS = (0.0, 0.0, -3600.0, 3600.0, 8 * 86_400.0, 4000 * 86_400.0, -4000 * 86_400.0)
#: Seconds for which an agent's process stands still, at most, and between two such.
STANDS_SECONDS, BETWEEN_SECONDS = 12.0, 20.0
#: The share of a lying agent's messages that are as large as their types may be.
LARGE_SHARE = 0.1
#: Bytes of a request that the store takes, in simulations that have a small one.
SMALL_REQUEST = 24 << 10


class Call(msgspec.Struct, kw_only=True):
    """What a user asked, and was told."""

    what: str  # "config", "forget" or "stop"
    about: str  # the value, or the job
    by: str  # the user, another one in each call
    term: int  # of the leader that was asked
    seconds: float = 0.0  # of "stop": for a last checkpoint
    on: bool = False  # of "drain": the node is to be left
    at: float = 0.0  # seconds of simulated time
    answer: str = "none"  # "ok", "unchanged", "unknown" (it may be made), "refused", "none"


class DecidingLeading(Leader):
    """The daemon's, whose effects on agents and planner are the simulator's."""

    def __init__(self, state: CoordinatorState, leader: WritingLeader) -> None:
        self._leader = leader
        super().__init__(
            state,
            chaos=False,
            failed=leader.failed,
            clock=leader.loop.time,
            wall=leader.wall_time,
            times=leader.times,
        )

    def send(self, message: CoordinatorSend) -> None:
        if isinstance(message.message, Drain):
            if self._leader.alive:
                self._leader.drain(message.node, message.message.on)
        else:
            self._leader.send(message)

    def request_plan(self, request: RequestPlan) -> None:
        self._leader.request_plan(request)

    def cancel_plan(self, request: CancelPlan) -> None:
        self._leader.cancel_plan(request)

    def record(self, note: CoordinatorNote) -> None:
        super().record(note)
        self._leader.note(note)


class WritingLeader(SimulatedLeader):
    """A simulated leader that writes as the daemon does. `wrong` hears what must not be; `drain` takes an order
    to a node's agent."""

    leading: DecidingLeading | None = None
    turned_away = 0  # messages that a node had no say in

    def __init__(
        self,
        *args: Any,
        faults: StoreFaults,
        draw: random.Random,
        wrong: list[str],
        drain: Callable[[str, bool], None],
        **options: Any,
    ) -> None:
        self._draw, self._wrong, self.drain = draw, wrong, drain
        self._wrong_seconds = draw.choice(WRONG_SECONDS)
        self.engine: EventEngine = args[0]
        super().__init__(*args, **options)
        engine, server = self._engine, self._store.server
        engine.after(draw.uniform(0.0, 30.0), self._jump)
        self.loop = EngineLoop(engine)
        self.store = FaultyStore(server, engine, faults, draw)
        items = self._store.snapshot(self._keys.config).items
        jobs = self._store.snapshot(self._keys.jobs).items
        drained = self._store.snapshot(self._keys.drains).items
        self._ledger = StoreTransactions(
            self._keys, self._store.limits, (*jobs, *items, *drained, *self._journal)
        )
        leading = DecidingLeading(self.state, self)
        leading.writer = Writer(
            self.store,
            StoreThread(engine, lambda: draw.uniform(0.001, faults.latency_seconds)),
            self._leadership,
            self._keys,
            self._ledger,
            told=leading.record,
            refused=leading.unwritten,
            failed=self.failed,
            wrote=leading.shares.wrote,
        )
        self.leading, self.door = leading, FrontDoor(leading)
        leading.follow(live_config.of(_file(self.state), self._keys, items), "as changed while running")
        leading.pages.restore(self._pages, self._kept, leading.state.jobs)
        self._tasks = [self.loop.create_task(task) for task in (leading.writer.run(), leading.pages.keeping())]

    @property
    def state(self) -> CoordinatorState:
        return self.leading.state if self.leading is not None else super().state

    def _read(self, jobs: list[Stored]) -> list[Stored]:
        """As the daemon does, after what the journal has."""
        self._journal = self._store.snapshot(self._keys.journal).items
        self._pages = Pages(self._keys, self._journal)
        self._kept = [*self._pages.restored()]
        self.times = read_times(jobs, self._kept, self.wall_time())
        return aged(jobs, self.times)

    def wall_time(self) -> float:
        """Unix seconds by its machine's clock."""
        return BEGAN + self.engine.now() + self._wrong_seconds

    def _jump(self) -> None:
        """Its machine's clock is set, right or wrong."""
        self._wrong_seconds = self._draw.choice(WRONG_SECONDS)

    def heard(self, node: str, message: ToLeader) -> None:
        """Takes what the daemon's door lets in."""
        record = self.state.nodes[node].record if node in self.state.nodes else None
        if record is not None and message_checks.refusal(record, message, self.state.jobs):
            self.turned_away += 1
        else:
            super().heard(node, message)

    def apply(self, event: Event) -> None:
        if not self.alive or self.leading is None:
            return
        self.leading.apply(event)
        self._watch_time()

    def die(self) -> None:
        """The process ends; or it stands still for a while, and does not know that another leads."""
        super().die()
        if self._draw.random() < 0.5:
            self.loop.end()
        else:
            self.loop.hold()
            self._engine.after(self._draw.uniform(6.0, FROZEN_SECONDS), self.loop.release)

    def failed(self, error: Exception) -> None:
        """The leader ends itself: only once another leads."""
        if self.alive or not isinstance(error, LeadershipLost):
            self._wrong.append(f"leader {self._leadership.term} failed: {type(error).__name__}: {error}")

    @property
    def changed_by(self) -> set[str]:
        """The users whose changes of the configuration it knows."""
        return {record.by for record in self.leading.changes.history} if self.leading is not None else set()

    def send(self, message: CoordinatorSend) -> None:
        if self.alive:
            super().send(message)

    def request_plan(self, request: RequestPlan) -> None:
        if self.alive:
            super().request_plan(request)
        else:
            self._cancel(request.job)

    def note(self, note: CoordinatorNote) -> None:
        if note.kind == "defect":
            self._wrong.append(f"leader {self._leadership.term}: {note.text}")
        if self.alive:
            self._tell(note)


def _file(state: CoordinatorState) -> Config:
    return Config(detect=state.settings.detect, policy=state.settings.policy)


class Deciding(Simulation):
    """A simulation with users. `calls` are theirs; `wrong` says what answers were not true."""

    def __init__(self, scenario: Scenario, planner: Planner, faults: StoreFaults | None = None) -> None:
        self._draw = random.Random(f"{scenario.seed}/users")
        self._faults = faults or StoreFaults()
        self._old = list(OLD_JOBS)
        self._registered: list[RegisteredNode] = []
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        self.stored: set[str] = set()  # users whose decisions the store has, or had
        self.fates: Counter[str] = Counter()
        self.largest_bytes = 0  # of what a lying agent said
        self.writing: list[WritingLeader] = []
        super().__init__(scenario, planner=planner)
        if scenario.seed % 5 == 0:
            self.server.limits = Limits(request_bytes=SMALL_REQUEST)
        MemoryStore(self.server).watch(KEYS.root, self.first_revision, self._stored)

    def run(self) -> None:
        self.engine.after(self._draw.uniform(0.5, ASKING_SECONDS), self._ask)
        self.engine.after(self._draw.uniform(0.5, BETWEEN_SECONDS), self._stand)
        if self.scenario.seed % 3 == 0:
            self.engine.after(self._draw.uniform(2.0, 10.0), self._lie)
        with on_simulated_time(self._threads, random.Random(f"{self.scenario.seed}/pauses")):
            try:
                super().run()
                self.settle()
            finally:
                for node in self._registered:
                    node.power_off()

    def _ended(self) -> bool:
        """Not while an end that a leader has decided waits for the store: nobody has heard of it."""
        writer = self.writing[-1].leading.writer if self.writing[-1].leading is not None else None
        return self.leader.alive and writer is not None and not writer.busy and super()._ended()

    def _built(self, shape: NodeShape) -> Node:
        """A node whose agent keeps its keys."""
        if not self._registered:
            self._threads = VirtualThreads(self.engine)
        draw = random.Random(f"{self.scenario.seed}/agent/{shape.name}")
        # A client sends each request once; a leader's writes hold against more than that.
        faults = msgspec.structs.replace(self._faults, repeated=0.0)
        store = FaultyStore(self.server, self.engine, faults, draw)
        node = RegisteredNode(
            shape, self.worker_group, self._up, self._refused, threads=self._threads, store=store
        )
        store.cut = lambda: node.apart
        self._registered.append(node)
        return node

    def settle(self) -> None:
        """Nothing more is asked, and what is under way comes to its end; then all answers are checked."""
        self._faults = CALM
        for store in (*(node.store for node in self._registered), *(leader.store for leader in self.writing)):
            store.faults = CALM
        end = self.engine.now() + 60.0
        self.engine.call_at(end, lambda: None)
        self.engine.run(lambda: self.engine.now() >= end)
        if self.leader.alive:
            self.take_over()
            self.engine.call_at(end + 10.0, lambda: None)
            self.engine.run(lambda: self.engine.now() >= end + 10.0)
        for call in self.calls:
            if call.answer == "ok":
                self._check_lasts(call)
            elif call.answer == "unchanged" and call.by in self.stored:
                self.wrong.append(f"{call.by} was told that nothing was changed, and the store had {call.what}")
        self.wrong += [error for leader in self.writing for error in leader.loop.errors]
        self.wrong += self._threads.errors
        self.wrong += unlike(self.server, self._registered)

    # -- leaders -------------------------------------------------------------------------------------------

    def _elected(self) -> SimulatedLeader:
        if not self.writing:
            self._plant()
        self.server.full = False  # else no leader could come before an operator freed space
        leader = WritingLeader(
            self.engine,
            self.server,
            KEYS,
            self.settings,
            self.planner,
            name=f"c{len(self._leaders) + 1}",
            send=self._down,
            tell=self._publish,
            faults=self._faults,
            draw=random.Random(f"{self.scenario.seed}/store/{len(self._leaders)}"),
            wrong=self.wrong,
            drain=self._drain,
        )
        self._leaders.append(leader)
        self.writing.append(leader)
        for call in self.calls:
            if call.answer == "ok":
                self._check_known(call, leader)
        return leader

    def _plant(self) -> None:
        """Jobs that ended before the first leader came."""
        store = MemoryStore(self.server)
        for job in OLD_JOBS:
            done = DoneRecord(step=3, epoch=0, at=BEGAN - 60.0)
            store.transact((), (Put(KEYS.job(job, "done"), encode(done)),))
        self.first_revision = self.server.revision + 1

    def _drain(self, name: str, on: bool) -> None:
        node = self._node[name]
        self._later(lambda: node.emit(AgentDrained(on=on)) if node.linked else None)

    def _stored(self, item: WatchItem) -> None:
        """Notes whose decision came into the store."""
        if not isinstance(item, WatchEvent):
            return
        if item.kind == "delete":
            job, _, part = item.key.removeprefix(KEYS.jobs).partition("/")
            if job in OLD_JOBS and part == "done":
                asked = {call.by for call in self.calls if (call.what, call.about) == ("forget", job)}
                self.stored |= asked
                if not asked:
                    self.wrong.append(f"{job} was deleted, which nobody had asked for")
        elif item.key.startswith(f"{KEYS.config}-history/"):
            self.stored.add(decode_at(item.key, item.item.value, ConfigRecord).by)
        elif item.key.endswith("/stop"):
            self.stored.add(decode_at(item.key, item.item.value, StopRecord).by)
        elif item.key.endswith("/done"):
            reason = decode_at(item.key, item.item.value, DoneRecord).reason
            self.stored |= {call.by for call in self.calls if f"stopped by {call.by}," in reason}

    # -- users ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.worker_group.over:
            return
        self.engine.after(self._draw.uniform(0.2, ASKING_SECONDS), self._ask)
        leader = self._draw.choice(self.writing[-2:])
        what = self._draw.choices(("config", "forget", "stop", "checkpoint", "drain"), (6, 4, 0.3, 1, 2))[0]
        number = len(self.calls)
        if what == "forget" and not self._old:
            return
        job, node = self.launcher.job, self.nodes[-1].name
        about = {"config": str(1000 + number), "stop": job, "checkpoint": job, "drain": node}
        if what == "forget":  # each by one user
            about["forget"] = self._old.pop()
        call = Call(
            what=what,
            about=about[what],
            by=f"user-{number}",
            term=leader.state.epoch,
            seconds=self._draw.choice((0.0, 5.0, 600.0)),
            at=self.engine.now(),
        )
        self.calls.append(call)
        if not leader.loop.ended:
            leader.loop.create_task(self._answered(leader, call))

    def _lie(self) -> None:
        """The first node's agent speaks of the workers of others."""
        if self.worker_group.over:
            return
        self.engine.after(self._draw.uniform(0.5, 4.0), self._lie)
        liar = self.nodes[0]
        job = self.leader.job(self.launcher.job)
        if job is None or not self.script.linked(liar):
            return
        devices = [device.name for device in self.cluster.devices if node_of(device.name) != liar.name]
        incarnations = [worker.incarnation for worker in job.workers.values()]
        seed = self._draw.randrange(1 << 30)
        hostile = Hostile(seed, devices, [job.job], incarnations, large=LARGE_SHARE)
        for message in hostile.messages(4):
            body = message.body if isinstance(message, FromClient) else message
            if not isinstance(
                body, AgentHello | Join | Leave | Hello
            ):  # which a client would have to answer for
                self.leader.heard(liar.name, message)
        self.largest_bytes = max(self.largest_bytes, *hostile.sizes, 0)

    async def _answered(self, leader: WritingLeader, call: Call) -> None:
        path, body = f"/v1/jobs/{call.about}/{call.what}", dict[str, Any](by=call.by)
        if call.what == "config":
            path, body = "/v1/config", {"values": {"policy.horizon_steps": int(call.about)}, "by": call.by}
        elif call.what == "stop":
            body["seconds"] = call.seconds
        elif call.what == "drain":
            call.on = not self._node[call.about].state.record.draining
            path, body = f"/v1/nodes/{call.about}/drain", {"on": call.on}
        status, text = await leader.door.post(path, body)
        if status == 200:
            call.answer = "ok"
            self._check_lasts(call)
        elif status == 503:
            call.answer = "unchanged" if UNCHANGED in text else "unknown"
        else:
            call.answer = "refused"
            if status >= 500:
                self.wrong.append(f"{call.by} was told {status} for {call.what}: {text}")

    def _stand(self) -> None:
        """An agent's process stands still for a while."""
        if self.worker_group.over:
            return
        self.engine.after(self._draw.uniform(0.5, BETWEEN_SECONDS), self._stand)
        self._draw.choice(self._registered).freeze(self._draw.uniform(0.1, STANDS_SECONDS))

    def _check_lasts(self, call: Call) -> None:
        if call.what in KEPT and call.by not in self.stored:
            self.wrong.append(f"{call.by} was told that {call.what} is decided, and the store never had it")

    def _check_known(self, call: Call, leader: WritingLeader) -> None:
        """A new leader knows what users were told before it came."""
        job = leader.state.jobs.get(call.about)
        if call.what == "forget" and job is not None:
            self.wrong.append(f"{call.by} had {call.about} forgotten, and leader {leader.state.epoch} knows it")
        elif call.what == "stop" and job is not None and job.phase not in OVER and not job.ending.stopping:
            self.wrong.append(f"{call.by} stopped {call.about}, and leader {leader.state.epoch} trains it")
        elif call.what == "stop" and job is not None and job.phase not in OVER:
            self._check_time(call, job.ending.stop_at, leader)
        elif (
            call.what == "drain"
            and call is self._newest_drain
            and leader.state.drains.get(call.about) != call.on
        ):
            self.wrong.append(f"{call.by} drained {call.about} ({call.on}), and not for {leader.state.epoch}")
        elif call.what == "config" and call.by not in leader.changed_by:
            self.wrong.append(f"{call.by} changed the configuration, and not for leader {leader.state.epoch}")

    @property
    def _newest_drain(self) -> Call | None:
        """The newest that may have been decided."""
        drains = (call for call in reversed(self.calls) if call.what == "drain")
        return next((call for call in drains if call.answer not in ("unchanged", "refused")), None)

    def _check_time(self, call: Call, stop_at: float, leader: WritingLeader) -> None:
        """Whatever clocks say, a stop leaves its workers the time that its user gave them."""
        least = call.at + call.seconds - 1.0
        if stop_at < least:
            text = f"{call.by} gave {call.about} {call.seconds:g} s, and leader {leader.state.epoch} ends it"
            self.wrong.append(f"{text} {least - stop_at:.0f} s before")
