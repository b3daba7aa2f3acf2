"""Random walks of a job's machine: faults, messages and answers of the planner in any order that can happen."""

from __future__ import annotations

import random
from collections import deque

from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.copies.holdings import lost_boxes
from elasticd.machines.job.state.events import AgentDown, AgentUp, CoordinatorTick, Event, Received
from elasticd.machines.job.state.job_state import OVER
from elasticd.records import Fence, Proposal, decode, decode_history
from elasticd.wire.rendezvous import Joined
from elasticd.wire.worker import PeersLost
from tests.machines.cast import JOB
from tests.machines.checked import KEYS
from tests.machines.test_recovery import ROOM, recovered
from tests.machines.world import World

#: Bytes of a device: for a whole replica, and for parts of one alone.
MEMORIES = (ROOM, ROOM, 6_000_000)
#: What may happen next, and how often.
MOVES = {
    "deliver": 10,
    "answer": 12,
    "wait": 3,
    "go_on": 3,
    "kill_one": 1,
    "start_anew": 3,
    "deafen": 2,
    "open_ears": 2,
    "cut_off": 1,
    "reach_all": 1,
    "new_leader": 1,
    "slow_down": 1,
    "lose_peers": 1,
    "overtake": 1,
}
LENGTH = 60


class Walk(World):
    """A world in which processes come and go between any two events."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        nodes = ("alpha", "beta", "gamma")[: self.draw.choice((2, 3))]
        super().__init__(nodes, memory=self.draw.choice(MEMORIES))
        self.begin()
        self.planner_waits = True

    def begin(self) -> None:
        """What was before the walk: the job has trained for a while."""
        self.start()
        self.train(self.draw.randrange(14))

    def walk(self) -> None:
        for move in self.draw.choices([*MOVES], [*MOVES.values()], k=LENGTH):
            if self.phase in OVER:
                return
            getattr(self, move)()
            waited = {(device, one) for device, one in self.job.takeover.unmet.items()}
            bound = {each for plan in self.job.candidates for each in plan.binding.items()}
            assert waited <= bound, "who is waited for may hold a copy"

    def heal(self) -> None:
        """All nodes can be reached and hear, torchruns start what died, and the job has time."""
        self.reach_all()
        self.planner_waits = False
        self.settle()
        for _ in range(100):
            steps = self.steps
            for node in self.records:
                self._start(node)
            self.settle()
            self.go_on()
            self.open_ears()
            self.settle()
            if self.phase in OVER or (recovered(self) and self.steps > steps):
                return

    # -- what may happen -----------------------------------------------------------------------------------

    def deliver(self) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            if self.inbox:
                self.turn()

    def answer(self) -> None:
        """The planner's answer comes before what is on its way."""
        if self.planning is not None:
            waiting, self.inbox = self.inbox, deque[Event]()
            self.turn()
            self.inbox.extend(waiting)

    def wait(self) -> None:
        self.now += self.draw.choice((0.05, 0.3, 1.0, 4.0, 12.0))
        self.say(CoordinatorTick())

    def go_on(self) -> None:
        """A step, if all who would make it are there."""
        if all(device in self.workers for plan in self._plans() for device in plan.members):
            self.train()
        else:
            self.tick(1.0)

    def kill_one(self) -> None:
        there = [each.device for each in self.workers.values() if each.alive and each.node not in self.cut]
        if there:
            self.kill(self.draw.choice(there))

    def start_anew(self) -> None:
        self._start(self.draw.choice([*self.records]))

    def deafen(self) -> None:
        self.deaf.add(self.draw.choice([*self.workers] or [""]))

    def open_ears(self) -> None:
        """Who did not hear for a while reads what is in the store."""
        self.deaf = set()
        self._catch_up({*self.records} - self.cut)

    def cut_off(self) -> None:
        node = self.draw.choice([*self.records])
        if node not in self.cut:
            self.cut.add(node)
            self.disconnect(node)

    def reach_all(self) -> None:
        for node in sorted(self.cut):
            self.cut.discard(node)
            self._catch_up({node})
            self.reconnect(node)

    def slow_down(self) -> None:
        self.rates = {device: self.draw.choice((1.0, 1.0, 2.0, 4.0)) for device in self.workers}

    def lose_peers(self) -> None:
        there = [worker for worker in self.workers.values() if worker.alive and worker.plan]
        if there:
            self.outcome(self.draw.choice(there), PeersLost(step=self.steps, reason="timeout"))

    def overtake(self) -> None:
        """What nodes say comes in the order of each node's own."""
        waiting: dict[str, deque[Event]] = {}
        for event in self.inbox:
            waiting.setdefault(_speaker(event), deque()).append(event)
        self.inbox.clear()
        while waiting:
            speaker = self.draw.choice([*waiting])
            self.say(waiting[speaker].popleft())
            if not waiting[speaker]:
                del waiting[speaker]

    # -- the world, where processes may be missing ---------------------------------------------------------

    def _start(self, node: str) -> None:
        """torchrun starts a node's workers once all that it had are gone."""
        if node not in self.cut and not any(w.alive for w in self.workers.values() if w.node == node):
            self.restart(node)

    def _catch_up(self, nodes: set[str]) -> None:
        if self.fence_record:
            self.fence_at(decode(self.fence_record, Fence), nodes)
        proposal = self.proposal()
        if proposal is not None:
            self._read(proposal)

    def _members(self, proposal: Proposal) -> tuple[str, ...]:
        return tuple(device for device in super()._members(proposal) if device in self.workers)

    def _vote(self) -> None:
        proposal = self.proposal()
        if proposal is None or {*super()._members(proposal)} <= {*self.workers}:
            super()._vote()

    def _started(self, node: str, joined: Joined) -> None:
        if self.joined.get(node, joined) == joined:  # a torchrun that has its answer hears no other
            super()._started(node, joined)


def _speaker(event: Event) -> str:
    if isinstance(event, Received | AgentDown):
        return event.node
    return event.record.node if isinstance(event, AgentUp) else ""


def whole(world: World) -> list[Plan]:
    """The plans whose state those that live hold together."""
    assert world.job.spec is not None
    found = []
    for number in {worker.plan for worker in world.workers.values() if worker.alive and worker.plan}:
        item = world.store.get(KEYS.history(JOB, number))
        assert item is not None
        plan = decode_history(item.value).plan
        here = [world.workers[device] for device in plan.members if device in world.workers]
        held = {w.device for w in here if w.alive and w.plan == number}
        if not lost_boxes(world.job.spec.specs, plan, held, set()):
            found.append(plan)
    return found
