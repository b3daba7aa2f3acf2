"""What tests of whole scenarios look at, and what holds of every run."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from elasticd.simulator.results.result import Outcome, Totals
from elasticd.simulator.scenarios.scenario import Scenario, parse
from tests.simulation.scenes import SLOW, SMALL


def scenario(text: str = SMALL + SLOW, **changes: object) -> Scenario:
    return msgspec.structs.replace(parse(text, "small.toml"), **changes)


def kinds(outcome: Outcome) -> list[str]:
    return [event.kind for event in outcome.timeline]


def total(outcome: Outcome, name: str) -> Totals:
    return next(run for run in outcome.totals if run.name == name)


def mean(outcome: Outcome, plan: int, after: int = 0, before: int = 1 << 30) -> float:
    """Seconds a step under a plan, in some steps."""
    chosen = [s for s in outcome.stretches if s.plan == plan and after <= s.first_step < before]
    return sum(s.stop - s.start for s in chosen) / sum(s.steps for s in chosen)


def check_history(outcome: Outcome) -> None:
    """What holds of every run: steps without holes, one proposal at a time, nothing beats the bound."""
    for before, after in pairwise(outcome.stretches):
        assert after.start >= before.stop - 1e-5
        if after.start_number == before.start_number:
            assert after.first_step == before.first_step + before.steps
            assert after.plan >= before.plan
        else:
            assert after.first_step <= before.first_step + before.steps
            assert after.start_number > before.start_number
    for stretch in outcome.stretches:
        assert stretch.step_seconds >= stretch.bound * (1 - 1e-4)
    best = total(outcome, "bound").tokens_per_second
    assert all(run.tokens_per_second <= best * (1 + 1e-9) for run in outcome.totals)
    times = [event.seconds for event in outcome.timeline]
    assert times == sorted(times)
    open_proposals = 0
    numbers = []
    for event in outcome.timeline:
        if event.kind == "proposed":
            open_proposals += 1
            numbers.append(event.data["number"])
        elif event.kind in ("recorded", "aborted"):
            open_proposals -= 1
        elif event.kind == "fenced":  # closes what is open; its number is one of theirs
            open_proposals = 0
            numbers.append(event.data["number"])
        elif event.kind == "restart":  # of another job, with numbers of its own
            open_proposals = 0
            numbers = []
        assert open_proposals in (0, 1)
    assert numbers == sorted(set(numbers))
    ours = total(outcome, "elasticd")
    assert ours.recoveries == kinds(outcome).count("resumed")
    assert ours.restarts == kinds(outcome).count("restart")
    assert ours.steps == pytest.approx(sum(stretch.steps for stretch in outcome.stretches) - ours.lost_steps)
