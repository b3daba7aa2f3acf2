"""The demo's course as a machine: what is seen of the job comes in, what to do next goes out. Pure.

    starting ─► healthy ─► slowed ─► replanned ─► recovering ─► recovered ─► ended
    any of these ─► failed

starting    the job's first step has not been seen.
healthy     until the planner has settled and the plan in force has run long enough. Then: slow the device.
slowed      until a newer plan is recorded, made for the device's new rate.
replanned   until that plan has run long enough. Then: let the device recover.
recovering  until a newer plan is recorded.
recovered   until that plan has run long enough and the job has done its last step.
ended       the job is done, and every phase was long enough.
failed      the job stopped, stands still, or ended too early; `reason` says which.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
from elasticd_planner.value import Value

from elasticd.demo.scenario import DemoScenario
from elasticd.wire.api_types import JobStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord

#: Seconds without a new step after which the job counts as standing still; the start may take longer.
STEP_TIMEOUT_SECONDS = 60.0
START_TIMEOUT_SECONDS = 150.0

#: What opens a decision of the coordinator's about a plan, and what closes it.
_OPENS = {"planning", "proposed"}
_CLOSES = {"recorded", "kept_plan", "refused", "aborted"}


class DemoPhase(enum.Enum):
    """The phase of the story; the module's docstring explains each."""

    STARTING = "starting"
    HEALTHY = "healthy"
    SLOWED = "slowed"
    REPLANNED = "replanned"
    RECOVERING = "recovering"
    RECOVERED = "recovered"
    ENDED = "ended"
    FAILED = "failed"


TRANSITIONS: dict[DemoPhase, frozenset[DemoPhase]] = {
    DemoPhase.STARTING: frozenset({DemoPhase.HEALTHY, DemoPhase.FAILED}),
    DemoPhase.HEALTHY: frozenset({DemoPhase.SLOWED, DemoPhase.FAILED}),
    DemoPhase.SLOWED: frozenset({DemoPhase.REPLANNED, DemoPhase.FAILED}),
    DemoPhase.REPLANNED: frozenset({DemoPhase.RECOVERING, DemoPhase.FAILED}),
    DemoPhase.RECOVERING: frozenset({DemoPhase.RECOVERED, DemoPhase.FAILED}),
    DemoPhase.RECOVERED: frozenset({DemoPhase.ENDED, DemoPhase.FAILED}),
    DemoPhase.ENDED: frozenset(),
    DemoPhase.FAILED: frozenset(),
}
OVER = frozenset({DemoPhase.ENDED, DemoPhase.FAILED})


class Action(enum.Enum):
    """An action of the demo on the cluster."""

    SLOW = "slow"
    RECOVER = "recover"


class Seen(Value, frozen=True, kw_only=True):
    """All that is known of the job: its status (None before it is known), its events and steps so far."""

    job: JobStatus | None
    events: Sequence[EventRecord]
    steps: Sequence[StepRecord]


class Story(Value, frozen=True, kw_only=True):
    """The machine's state. `base` is the plan that a newer one is awaited to follow, `progress` the number of
    steps seen and `since` the time at which they grew."""

    phase: DemoPhase = DemoPhase.STARTING
    base: int = 0
    progress: int = 0
    since: float = 0.0
    reason: str = ""


def step(state: Story, seen: Seen, scenario: DemoScenario, now: float) -> tuple[Story, Action | None]:
    """One look at the job."""
    if state.phase in OVER or seen.job is None:
        return _waited(state, seen, now), None
    if seen.job.phase == "stopped":
        return _failed(state, f"the job stopped: {seen.job.reason}"), None
    state, action = _advance(state, seen, seen.job, scenario)
    if seen.job.phase == "done" and state.phase is not DemoPhase.ENDED:
        return _failed(state, _too_early(state, scenario)), None
    return _waited(state, seen, now), action


def _advance(state: Story, seen: Seen, job: JobStatus, scenario: DemoScenario) -> tuple[Story, Action | None]:
    number = job.plan.number if job.plan is not None else 0
    ran = sum(record.plan == number for record in seen.steps)
    newer = number > state.base
    match state.phase:
        case DemoPhase.STARTING if seen.steps:
            return _enter(state, DemoPhase.HEALTHY, 0), None
        case DemoPhase.HEALTHY if settled(seen) and ran >= scenario.healthy_steps:
            return _enter(state, DemoPhase.SLOWED, number), Action.SLOW
        case DemoPhase.SLOWED if newer and _told(seen, ("slow",), scenario.slow_device):
            return _enter(state, DemoPhase.REPLANNED, number), None
        case DemoPhase.REPLANNED if settled(seen) and ran >= scenario.replanned_steps:
            return _enter(state, DemoPhase.RECOVERING, number), Action.RECOVER
        case DemoPhase.RECOVERING if newer and _told(seen, ("recovered", "faster"), scenario.slow_device):
            return _enter(state, DemoPhase.RECOVERED, number), None
        case DemoPhase.RECOVERED if ran >= scenario.recovered_steps and job.phase == "done":
            return _enter(state, DemoPhase.ENDED, number), None
        case _:
            return state, None


def settled(seen: Seen) -> bool:
    """Returns True if the profile is fitted and no decision about a plan is open."""
    kinds = [event.kind for event in seen.events]
    decisions = [kind for kind in kinds if kind in _OPENS | _CLOSES]
    return "fitted" in kinds and bool(decisions) and decisions[-1] in _CLOSES


def _told(seen: Seen, kinds: tuple[str, ...], device: str) -> bool:
    return any(event.kind in kinds and event.data.get("device") == device for event in seen.events)


def _enter(state: Story, phase: DemoPhase, base: int) -> Story:
    assert phase in TRANSITIONS[state.phase], f"{state.phase.value} does not lead to {phase.value}"
    return msgspec.structs.replace(state, phase=phase, base=base)


def _failed(state: Story, reason: str) -> Story:
    return msgspec.structs.replace(state, phase=DemoPhase.FAILED, reason=reason)


def _waited(state: Story, seen: Seen, now: float) -> Story:
    """Fails where nothing has moved for too long."""
    if state.phase in OVER:
        return state
    if len(seen.steps) > state.progress or not state.since:
        return msgspec.structs.replace(state, progress=len(seen.steps), since=now)
    patience = STEP_TIMEOUT_SECONDS if seen.steps else START_TIMEOUT_SECONDS
    if now - state.since > patience:
        what = f"step {len(seen.steps)}" if seen.steps else "its start"
        return _failed(state, f"the job stands still: no step for {patience:g} s after {what}")
    return state


def _too_early(state: Story, scenario: DemoScenario) -> str:
    waited = {
        DemoPhase.STARTING: "before any step was seen",
        DemoPhase.HEALTHY: "before its plan had settled",
        DemoPhase.SLOWED: f"before it replanned around {scenario.slow_device}",
        DemoPhase.REPLANNED: f"too soon after it replanned around {scenario.slow_device}",
        DemoPhase.RECOVERING: f"before it gave {scenario.slow_device} its work back",
        DemoPhase.RECOVERED: f"too soon after it gave {scenario.slow_device} its work back",
    }
    return (
        f"the job ended after its {scenario.steps} steps {waited[state.phase]}: "
        f"give it more, as --steps {scenario.steps + 40}"
    )
