"""The story's machine: each phase waits for what it should, and a story that cannot end fails plainly."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan

from elasticd.demo.story import OVER, STEP_TIMEOUT_SECONDS, TRANSITIONS, Action, DemoPhase, Seen, Story, step
from elasticd.wire.api_types import JobStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord
from tests.demo.records import SCENARIO, history

PLANS = [entry.plan for entry in history()]


class Job:
    """What the story sees, grown by hand."""

    def __init__(self) -> None:
        self.state, self.now = Story(), 100.0
        self.plan: Plan | None = None
        self.phase, self.reason = "planning", ""
        self.events: list[EventRecord] = []
        self.steps: list[StepRecord] = []
        self.actions: list[Action] = []

    def look(self) -> DemoPhase:
        number = self.plan.number if self.plan else 0
        job = JobStatus(
            job="demo",
            phase=self.phase,
            reason=self.reason,
            plan=self.plan,
            proposal=None,
            step=len(self.steps),
            loss=None,
            tokens_per_second=None,
            members=(),
        )
        assert number >= 0
        self.state, action = step(
            self.state, Seen(job=job, events=self.events, steps=self.steps), SCENARIO, self.now
        )
        self.actions += [action] if action else []
        return self.state.phase

    def tell(self, *kinds: str) -> None:
        for kind in kinds:
            data = {"device": SCENARIO.slow_device}
            identity = len(self.events) + 1
            self.events.append(EventRecord(id=identity, time=0, kind=kind, job="demo", text=kind, data=data))

    def train(self, count: int) -> DemoPhase:
        assert self.plan is not None
        for _ in range(count):
            self.now += 1
            record = StepRecord(
                step=len(self.steps), plan=self.plan.number, loss=1, tokens=1, seconds=1, time=0
            )
            self.steps.append(record)
            self.look()
        return self.look()

    def switch(self, plan: Plan) -> None:
        self.plan = plan
        self.tell("planning", "proposed", "recorded")


def slowed() -> Job:
    """A job whose device was just slowed."""
    job = Job()
    assert job.look() is DemoPhase.STARTING
    job.switch(PLANS[0])
    assert job.train(SCENARIO.healthy_steps) is DemoPhase.HEALTHY  # nothing is fitted yet
    job.tell("fitted", "planning")
    assert job.look() is DemoPhase.HEALTHY  # and now a decision is open
    job.tell("kept_plan")
    assert job.look() is DemoPhase.SLOWED
    assert job.actions == [Action.SLOW]
    return job


def test_whole_story_slows_once_recovers_once_and_ends() -> None:
    job = slowed()
    assert job.train(3) is DemoPhase.SLOWED
    job.tell("slow")
    assert job.look() is DemoPhase.SLOWED  # found, and not yet replanned
    job.switch(PLANS[1])
    assert job.train(SCENARIO.replanned_steps - 1) is DemoPhase.REPLANNED
    assert job.train(1) is DemoPhase.RECOVERING
    job.tell("recovered")
    assert job.train(2) is DemoPhase.RECOVERING
    job.switch(PLANS[2])
    assert job.train(SCENARIO.recovered_steps) is DemoPhase.RECOVERED  # until the job's own end
    job.phase = "done"
    assert job.look() is DemoPhase.ENDED
    assert job.actions == [Action.SLOW, Action.RECOVER]


def test_healthy_phase_starts_anew_with_each_plan() -> None:
    job = Job()
    job.switch(PLANS[0])
    job.tell("fitted", "kept_plan")
    assert job.train(SCENARIO.healthy_steps - 1) is DemoPhase.HEALTHY
    job.switch(PLANS[1])
    assert job.train(SCENARIO.healthy_steps - 1) is DemoPhase.HEALTHY
    assert job.train(1) is DemoPhase.SLOWED


def test_plan_that_is_not_for_the_slow_device_is_not_taken_for_it() -> None:
    job = slowed()
    job.switch(PLANS[1])
    assert job.train(3) is DemoPhase.SLOWED


def test_job_that_ends_too_early_says_so_and_what_to_do() -> None:
    job = slowed()
    job.phase = "done"
    assert job.look() is DemoPhase.FAILED
    assert "before it replanned around alpha/1: give it more, as --steps" in job.state.reason


def test_job_that_stopped_says_why() -> None:
    job = slowed()
    job.phase, job.reason = "stopped", "worker alpha/0 died"
    assert job.look() is DemoPhase.FAILED
    assert job.state.reason == "the job stopped: worker alpha/0 died"


def test_job_that_stands_still_is_given_up() -> None:
    job = slowed()
    job.train(1)
    job.now += STEP_TIMEOUT_SECONDS - 1
    assert job.look() is DemoPhase.SLOWED
    job.now += 2
    assert job.look() is DemoPhase.FAILED
    assert "no step for 60 s" in job.state.reason


def test_job_that_never_shows_up_is_given_up() -> None:
    state = Story()
    nothing = Seen(job=None, events=(), steps=())
    for now in (1.0, 100.0):
        state, _ = step(state, nothing, SCENARIO, now)
        assert state.phase is DemoPhase.STARTING
    state, _ = step(state, nothing, SCENARIO, 200.0)
    assert "its start" in state.reason


def test_every_phase_can_fail_and_nothing_follows_an_end() -> None:
    for phase, following in TRANSITIONS.items():
        assert (not following) if phase in OVER else DemoPhase.FAILED in following
