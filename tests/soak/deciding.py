"""Simulations in which leaders decide and write as the coordinator's daemon does, and users are told of it.

A leader of these has the daemon's own `Leading` and `Writer`, on simulated time and over a `FaultyStore`. Users
ask for changes of the configuration, have jobs forgotten, and stop the one that trains, at the newest leader or
at one that was replaced and does not know. Each answer is noted. Where it says that a decision was made, the
store must have it then, and so must each leader that follows; where it says that nothing was changed, the store
must never have it.

In one simulation of three a node lies: its agent says what it likes about the workers of other nodes, in any
words and with values that nobody means.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from elasticd_planner.spec.cluster import node_of

from elasticd.config.tree import Config
from elasticd.coordinator import live_config
from elasticd.coordinator.api_types import ApiError
from elasticd.coordinator.leader import UNCHANGED, Leading
from elasticd.coordinator.store_transactions import Ledger
from elasticd.coordinator.store_writer import Writer
from elasticd.machines.coordinator import message_checks
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    Effect,
    Event,
    RequestPlan,
)
from elasticd.machines.job.state.job_state import OVER
from elasticd.records import ConfigRecord, DoneRecord, StopRecord, decode_at, encode
from elasticd.simulator.cluster.leader import SimulatedLeader
from elasticd.simulator.planning import Planner
from elasticd.simulator.run import KEYS, Simulation
from elasticd.simulator.scenarios.scenario import Scenario
from elasticd.store.leader import LeadershipLost
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import Put, WatchEvent, WatchItem
from elasticd.wire.coordinator import AgentHello, FromClient, ToClient, ToLeader
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.worker import Hello
from tests.machines.hostile import Hostile
from tests.soak.engine_loop import EngineLoop, StoreThread
from tests.soak.faulty_store import FaultyStore, StoreFaults

#: Jobs of before, which users have forgotten.
OLD_JOBS = tuple(f"old-{number}" for number in range(12))
#: Seconds between two questions of users, at most.
ASKING_SECONDS = 6.0
#: Seconds for which a leader that was replaced stands still before it goes on, at most.
FROZEN_SECONDS = 20.0


class Call(msgspec.Struct, kw_only=True):
    """What a user asked, and was told."""

    what: str  # "config", "forget" or "stop"
    about: str  # the value, or the job
    by: str  # the user, another one in each call
    term: int  # of the leader that was asked
    answer: str = "none"  # "ok", "unchanged", "unknown" (it may be made), "refused", "none"


class DecidingLeading(Leading):
    """The daemon's, whose effects on agents and planner are the simulator's."""

    def __init__(self, state: CoordinatorState, leader: WritingLeader) -> None:
        self._leader = leader
        super().__init__(state, chaos=False, failed=leader.failed, clock=leader.loop.time)

    def _execute(self, effect: Effect) -> None:
        if isinstance(effect, CoordinatorSend):
            if isinstance(effect.message, ToClient):
                self._leader.send(effect.node, effect.message)
        elif isinstance(effect, RequestPlan | CancelPlan):
            self._leader.plan(effect)
        else:
            super()._execute(effect)

    def tell(self, note: CoordinatorNote) -> None:
        super().tell(note)
        self._leader.note(note)


class WritingLeader(SimulatedLeader):
    """A simulated leader that writes as the daemon does. `wrong` hears what must not be."""

    leading: DecidingLeading | None = None
    turned_away = 0  # messages that a node had no say in

    def __init__(
        self, *args: Any, faults: StoreFaults, draw: random.Random, wrong: list[str], **options: Any
    ) -> None:
        self._draw, self._wrong = draw, wrong
        super().__init__(*args, **options)
        engine, server = self._engine, self._store.server
        self.loop = EngineLoop(engine)
        self.store = FaultyStore(server, engine, faults, draw)
        items = self._store.snapshot(self._keys.config).items
        jobs = self._store.snapshot(self._keys.jobs).items
        self._ledger = Ledger(self._keys, self._store.limits, (*jobs, *items))
        leading = DecidingLeading(self._state, self)
        leading.writer = Writer(
            self.store,
            StoreThread(engine, lambda: draw.uniform(0.001, faults.latency_seconds)),
            self._leadership,
            self._keys,
            self._ledger,
            told=leading.tell,
            refused=leading.unwritten,
            failed=self.failed,
            wrote=leading.wrote,
        )
        self.leading = leading
        leading.follow(live_config.of(_file(self._state), self._keys, items), "as changed while running")
        self._writes = self.loop.create_task(leading.writer.run())

    @property
    def state(self) -> CoordinatorState:
        return self.leading.state if self.leading is not None else self._state

    @state.setter
    def state(self, state: CoordinatorState) -> None:
        self._state = state

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

    def send(self, node: str, message: ToClient) -> None:
        if self.alive:
            self._send(node, message)

    def plan(self, effect: RequestPlan | CancelPlan) -> None:
        if self.alive and isinstance(effect, RequestPlan):
            self._request(effect.job, effect.token, effect.problem)
        else:
            self._cancel(effect.job)

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
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        self.stored: set[str] = set()  # users whose decisions the store has, or had
        self.fates: Counter[str] = Counter()
        self.writing: list[WritingLeader] = []
        super().__init__(scenario, planner=planner)
        MemoryStore(self.server).watch(KEYS.root, self.first_revision, self._stored)

    def run(self) -> None:
        self.engine.after(self._draw.uniform(0.5, ASKING_SECONDS), self._ask)
        if self.scenario.seed % 3 == 0:
            self.engine.after(self._draw.uniform(2.0, 10.0), self._lie)
        super().run()
        self.settle()

    def settle(self) -> None:
        """Nothing more is asked, and what is under way comes to its end; then all answers are checked."""
        self._faults = StoreFaults(lost=0, unanswered=0, late=0, repeated=0, away=0)
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

    # -- leaders -------------------------------------------------------------------------------------------

    def _elected(self) -> SimulatedLeader:
        if not self.writing:
            self._plant()
        leader = WritingLeader(
            self.engine,
            self.server,
            KEYS,
            self.settings,
            self.planner,
            name=f"c{len(self._leaders) + 1}",
            send=self._down,
            tell=self._tell,
            faults=self._faults,
            draw=random.Random(f"{self.scenario.seed}/store/{len(self._leaders)}"),
            wrong=self.wrong,
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
            store.transact((), (Put(KEYS.job(job, "done"), encode(DoneRecord(step=3, epoch=0))),))
        self.first_revision = self.server.revision + 1

    def _stored(self, item: WatchItem) -> None:
        """Notes whose decision came into the store."""
        if not isinstance(item, WatchEvent):
            return
        if item.kind == "delete":
            job, _, part = item.key.removeprefix(KEYS.jobs).partition("/")
            if job in OLD_JOBS and part == "done":
                self.stored |= {call.by for call in self.calls if (call.what, call.about) == ("forget", job)}
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
        what = self._draw.choices(("config", "forget", "stop"), (6, 4, 0.3))[0]
        number = len(self.calls)
        if what == "forget" and not self._old:
            return
        about = {"config": str(1000 + number), "stop": self.operator.job}
        if what == "forget":  # each by one user
            about["forget"] = self._old.pop()
        call = Call(what=what, about=about[what], by=f"user-{number}", term=leader.state.epoch)
        self.calls.append(call)
        if not leader.loop.ended:
            leader.loop.create_task(self._answered(leader, call))

    def _lie(self) -> None:
        """The first node's agent speaks of the workers of others."""
        if self.worker_group.over:
            return
        self.engine.after(self._draw.uniform(0.5, 4.0), self._lie)
        liar = self.nodes[0]
        job = self.leader.job(self.operator.job)
        if job is None or not self.script.linked(liar):
            return
        devices = [device.name for device in self.cluster.devices if node_of(device.name) != liar.name]
        incarnations = [worker.incarnation for worker in job.workers.values()]
        hostile = Hostile(self._draw.randrange(1 << 30), devices, [job.job], incarnations)
        for message in hostile.messages(4):
            body = message.body if isinstance(message, FromClient) else message
            if not isinstance(
                body, AgentHello | Join | Leave | Hello
            ):  # which a client would have to answer for
                self.leader.heard(liar.name, message)

    async def _answered(self, leader: WritingLeader, call: Call) -> None:
        try:
            await self._decide(leader, call)
        except ApiError as error:
            unavailable = error.reason == "unavailable"
            call.answer = (
                "refused" if not unavailable else "unchanged" if UNCHANGED in str(error) else "unknown"
            )
        else:
            call.answer = "ok"
            self._check_lasts(call)

    def _decide(self, leader: WritingLeader, call: Call) -> Coroutine[Any, Any, Any]:
        leading = leader.leading
        assert leading is not None

        def audit() -> None:
            leading.asked(call.by, f"asks for {call.what}", action=call.what)

        decisions: dict[str, Callable[[], Any]] = {
            "forget": lambda: leading.forget(call.about, call.by),
            "stop": lambda: leading.stop(call.about, 5.0, call.by),
        }
        if call.what == "config":
            return leading.change({"policy.horizon_steps": int(call.about)}, call.by, audit)
        return leading.decide(decisions[call.what], audit)

    def _check_lasts(self, call: Call) -> None:
        if call.by not in self.stored:
            self.wrong.append(f"{call.by} was told that {call.what} is decided, and the store never had it")

    def _check_known(self, call: Call, leader: WritingLeader) -> None:
        """A new leader knows what users were told before it came."""
        job = leader.state.jobs.get(call.about)
        if call.what == "forget" and job is not None:
            self.wrong.append(f"{call.by} had {call.about} forgotten, and leader {leader.state.epoch} knows it")
        elif call.what == "stop" and job is not None and job.phase not in OVER and not job.stopping:
            self.wrong.append(f"{call.by} stopped {call.about}, and leader {leader.state.epoch} trains it")
        elif call.what == "config" and call.by not in leader.changed_by:
            self.wrong.append(f"{call.by} changed the configuration, and not for leader {leader.state.epoch}")
