"""The result of a simulation: a timeline, stretches of steps, totals beside the baselines. JSON by msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
from elasticd_planner.value import StoredValue, Value

VERSION = 3


class Happening(Value, frozen=True, kw_only=True):
    """Something on the timeline: seconds since the beginning, steps done, a word for its kind, one line."""

    seconds: float
    step: int
    kind: str
    text: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Stretch(Value, frozen=True, kw_only=True):
    """Steps from `start` to `stop` (seconds) under one plan, of so many `tokens` each; `bound` is what a step
    cannot beat meanwhile. Where steps were counted and not played, one stretch has many. start_number: how
    often the job had been started; numbers of plans begin anew with each."""

    start: float
    stop: float
    first_step: int
    steps: int
    tokens: int
    start_number: int
    plan: int
    bound: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, in the mean over the stretch. It can be compared with `bound`."""
        return (self.stop - self.start) / self.steps


class Totals(Value, frozen=True, kw_only=True):
    """One way to run the scenario. `seconds` include planning (beside training), pauses and restarts.

    switches: changes of the plan; pause_seconds: what they took. plans: calls of the planner, beside training;
    planning_seconds: what they took. recoveries: plans that a job went on under after a fault, from what its
    members held; recovery_seconds: from the last step's end before the fault, so that a step made again counts.
    restarts: of the job after state was lost; down_seconds: nobody trained for want of a job. lost_steps:
    trained, and lost by going back to a checkpoint.
    """

    name: str
    seconds: float
    steps: float
    tokens_per_second: float
    switches: int = 0
    pause_seconds: float = 0.0
    plans: int = 0
    planning_seconds: float = 0.0
    bytes_moved: int = 0
    recoveries: int = 0
    recovery_seconds: float = 0.0
    restarts: int = 0
    down_seconds: float = 0.0
    lost_steps: float = 0.0
    note: str = ""


class Outcome(StoredValue, frozen=True, kw_only=True, tag="simulation-outcome"):
    """A whole simulation. All speeds in it are simulated. `stopped` says why the job could not go on."""

    scenario: str
    seed: int
    devices: int
    model: str
    timeline: tuple[Happening, ...]
    stretches: tuple[Stretch, ...]
    totals: tuple[Totals, ...]
    stopped: str = ""
    version: int = VERSION

    def to_json(self) -> bytes:
        """The same bytes for the same scenario and seed."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1)


def rounded(seconds: float) -> float:
    """To the microsecond: enough for people, and equal on every machine."""
    return round(seconds, 6)
