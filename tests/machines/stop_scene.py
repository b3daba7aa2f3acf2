"""A user stops a job, and one or two workers or nodes die before, meanwhile, or as the last checkpoint is made.

Workers do as theirs do: one that hears of the stop drains; once all members of the plan in force drain, and all
live, they make a last checkpoint, which takes a while, and leave.
"""

from __future__ import annotations

import random

from elasticd_planner.value import Value

from elasticd.machines.job.state.events import AgentDown, CoordinatorSend, Effect, StopAsked
from elasticd.machines.job.state.job_state import OVER
from elasticd.wire.coordinator import End
from elasticd.wire.worker import DrainNotice
from tests.machines.cast import JOB
from tests.machines.test_recovery import ROOM
from tests.machines.world import World

#: Seconds that a user gives the workers, and those after which a scene is given up.
GRACE_SECONDS, MOST_SECONDS = 600.0, 650.0
TICK_SECONDS = 0.25
#: Seconds within which a stop is to end.
END_SECONDS = 30.0


class Death(Value, frozen=True, kw_only=True):
    """A worker's process ends, or a node is gone without a word."""

    at: float  # seconds after the stop, negative before it
    victim: str  # a device, or a node


class StopScene(World):
    """Drawn by `seed`; `play` has it happen."""

    def __init__(self, seed: int, deaths: int = 2) -> None:
        self.draw = random.Random(seed)
        super().__init__(("alpha", "beta", "gamma"), memory=ROOM)
        self.counts_joined = True
        self.drains: dict[str, float] = {}  # when the worker of a device hears of the stop
        self.drained: set[tuple[str, str]] = set()
        self.saving: tuple[int, float] | None = None  # the plan whose members save, and when they are done
        self.saved_step = 0
        self.stop_at = 0.0
        self.planning_since: float | None = None
        self.planning_seconds = self.draw.uniform(0.2, 5.0)
        self.save_seconds = self.draw.uniform(0.5, 4.0)
        nodes = ["alpha", "beta", *(["gamma"] if self.draw.random() < 0.5 else [])]
        for node in nodes:
            self.join(node, len(nodes), 3)
        self.settle()
        self.tick(2.0)
        self.train(self.draw.randrange(2, 14))
        if len(nodes) < 3:  # its workers stand by, unless the next plan takes them up
            self.join("gamma", 2, 3)
            self.settle()
            self.train(1)
        victims = [*self.workers, *self.records]
        chosen = self.draw.sample(victims, self.draw.randrange(1, deaths + 1))
        self.deaths = [Death(at=round(self.draw.uniform(-4.0, 12.0), 2), victim=victim) for victim in chosen]

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def seconds(self) -> float:
        """Since the stop."""
        return self.now - self.stop_at

    @property
    def lost_steps(self) -> int:
        """The steps that no checkpoint has."""
        return self.steps - self.saved_step

    def play(self) -> None:
        """Has all of it happen, until the job is over or has taken too long."""
        self.planner_waits = True
        self.stop_at = self.now + 5.0
        asked = False
        while not self.over and self.seconds < MOST_SECONDS:
            if not asked and self.seconds >= 0:
                asked = True
                self.say(StopAsked(job=JOB, by="alice", seconds=GRACE_SECONDS))
            self._die_and_hear()
            self._save()
            if not self.saving and self._trains():
                self.train(1)
            else:
                self.tick(TICK_SECONDS)
            self._plan()

    def _execute(self, effect: Effect) -> None:
        super()._execute(effect)
        if isinstance(effect, CoordinatorSend) and isinstance(effect.message, End):
            for device in effect.message.devices:
                self.drains.setdefault(device, self.now + self.draw.uniform(0.05, 1.0))

    def _die_and_hear(self) -> None:
        for death in [death for death in self.deaths if death.at <= self.seconds]:
            self.deaths.remove(death)
            if death.victim in self.records:
                for worker in self.workers.values():
                    worker.alive = worker.alive and worker.node != death.victim
                self.cut.add(death.victim)
                self.say(AgentDown(node=death.victim))
            elif self.workers[death.victim].alive:
                self.kill(death.victim)
        for device, at in self.drains.items():
            worker = self.workers[device]
            if at <= self.now and worker.alive and (device, worker.incarnation) not in self.drained:
                self.drained.add((device, worker.incarnation))
                self.outcome(worker, DrainNotice(reason="SIGTERM", saves=True))
        self.settle()

    def _trains(self) -> bool:
        """Whether the members of the plan in force make another step."""
        plan = self.plan()
        return plan is not None and not self._unresolved() and self._all_there(plan) and not self._all_drain()

    def _all_drain(self) -> bool:
        plan = self.plan()
        return plan is not None and {*plan.binding.items()} <= self.drained

    def _save(self) -> None:
        """Begins a last checkpoint where all members live under one plan and drain. It is made a while later if
        they still do."""
        plan = self.plan()
        if plan is None or self._unresolved() or not self._all_drain() or not self._all_there(plan):
            self.saving = None
            return
        if any(self.workers[device].plan != plan.number for device in plan.members):
            return
        if self.saving is None or self.saving[0] != plan.number:
            self.saving = plan.number, self.now + self.save_seconds
        elif self.now >= self.saving[1] and self.saved_step != self.steps:
            self.saved_step = self.steps
            for device in plan.members:
                self.outcome(self.workers[device], DrainNotice(reason="SIGTERM"))
            self.settle()
            for device in plan.members:
                if self.workers[device].alive and not self.over:
                    self.leave_cleanly(device, "it was told to stop")
            self.settle()

    def _plan(self) -> None:
        """The planner takes its time."""
        if self.planning is None:
            self.planning_since = None
        elif self.planning_since is None:
            self.planning_since = self.now
        elif self.now - self.planning_since >= self.planning_seconds:
            self.planning_since = None
            self.turn()
            self.settle()
