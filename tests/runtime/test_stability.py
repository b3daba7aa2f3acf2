"""Updates that would harm the weights are left out on all devices alike, and a job that makes none stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elasticd
from elasticd.checkpoints.folder import scan
from elasticd.models import next_token_loss
from elasticd.records import Vote
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.engine.mixed_precision import LossScale, LossScaler
from elasticd.runtime.engine.stability import StabilityGuard, StabilityOptions
from tests.runtime import test_one_process
from tests.runtime.test_engine import engine_on
from tests.runtime.test_one_process import job
from tests.runtime.test_optimizer_groups import PLANS, by_dimensions, loss, recipe

alone = test_one_process.alone


def vote(step: int, norm: float | None = 1.0, *, lost: float | None = 1.0, count: float = 4.0) -> Vote:
    apply = norm is not None and count > 0
    return Vote(step=step, loss=lost, norm=norm, count=count, tokens=4, apply=apply)


def guard(*, scaled: bool = False, **options: Any) -> StabilityGuard:
    return StabilityGuard(StabilityOptions(**options), scaled=scaled)


def see(guard: StabilityGuard, *votes: Vote) -> list[bool]:
    """Returns whether each update is made."""
    made = []
    for each in votes:
        judged = guard.judged(each)
        guard.after(judged)
        made.append(judged.apply)
    return made


def test_a_spike_is_left_out_once_it_is_known_what_is_usual() -> None:
    seen = guard(spike=10.0)
    assert see(seen, *(vote(step, 100.0 if step == 3 else 1.0) for step in range(60))) == [True] * 60
    assert see(seen, vote(60, 100.0), vote(61, 2.0)) == [False, True]
    assert see(guard(), *(vote(step) for step in range(60)), vote(60, 1e9))[-1], "none is asked for"


def test_what_is_usual_follows_the_norms() -> None:
    seen = guard(spike=3.0)
    assert all(see(seen, *(vote(step, 1.02**step) for step in range(300))))


def test_who_goes_back_leaves_out_the_updates_up_to_the_harmful_one_and_asks_once() -> None:
    seen = guard(action="roll back")
    see(seen, *(vote(step) for step in range(8)))
    older = seen.state_dict()
    see(seen, vote(8), vote(9), vote(10, None, lost=None))
    assert seen.back_reason == "step 10 would have harmed the weights: its loss is not finite"
    assert seen.stop_reason == ""
    back = guard(action="roll back")
    back.load_state_dict(older)
    back.leave_out(10)
    assert see(back, vote(8), vote(9), vote(10, None, lost=None)) == [False] * 3
    assert (back.back_reason, back.told, back.left_out, back.first) == ("", 0, 1, 10), (
        "the sound ones do not count"
    )
    again = guard(action="roll back")
    again.load_state_dict(back.state_dict())
    assert see(again, vote(11), vote(12, None, lost=None)) == [True, False]
    assert again.back_reason.startswith("step 12 would have harmed")


def test_who_finds_nothing_to_go_back_to_goes_on_and_asks_no_more() -> None:
    seen = guard(action="roll back")
    see(seen, vote(0), vote(1, None, lost=None))
    seen.leave_out(1)
    assert seen.back_reason == ""
    assert see(seen, vote(2)) == [True]


def test_a_job_whose_every_step_is_harmful_stops_though_it_goes_back_each_time() -> None:
    """Snapshots of every fourth step, none of a harmful one's."""
    kept, step = guard(action="roll back", stop_after=6).state_dict(), 0
    through, gone_back = -1, 0
    while True:
        seen = guard(action="roll back", stop_after=6)
        seen.load_state_dict(kept)
        seen.leave_out(through)
        while not seen.back_reason and not seen.stop_reason:
            see(seen, vote(step, None, lost=None))
            step += 1
            if step % 4 == 0 and not seen.back_reason:
                kept = seen.state_dict()
        if seen.stop_reason:
            break
        gone_back, through, step = gone_back + 1, step - 1, step // 4 * 4 if step % 4 else step - 4
    assert seen.stop_reason.startswith("6 steps in a row changed no weight, from step 0 on")
    assert gone_back <= 6


def test_a_job_that_could_not_go_back_is_refused() -> None:
    StabilityOptions().check(None)
    StabilityOptions(action="roll back", stop_after=1).check(100)
    with pytest.raises(ValueError, match="goes back to snapshots: CheckpointingOptions"):
        StabilityOptions(action="roll back").check(None)


@pytest.mark.parametrize(
    ("bad", "why", "limit"),
    [
        ({"norm": None, "lost": None}, "its loss is not finite", 3),
        ({"norm": None}, "its gradient is not finite", 30),
        ({"count": 0.0, "norm": 0.0}, "it has no target, since all labels are -100", 3),
    ],
)
def test_updates_left_out_in_a_row_are_counted_from_their_first(bad: Any, why: str, limit: int) -> None:
    seen = guard(stop_after=40)
    see(seen, vote(0), *(vote(step, **bad) for step in range(1, limit)))
    assert (seen.left_out, seen.first, seen.told) == (limit - 1, 1, 0)
    see(seen, vote(limit, **bad))
    assert (seen.told, seen.why) == (limit, why)
    see(seen, *(vote(step, **bad) for step in range(limit + 1, 41)))
    assert seen.stop_reason.startswith(
        f"40 steps in a row changed no weight, from step 1 on; of the last, {why}"
    )
    see(seen, vote(41))
    assert (seen.left_out, seen.stop_reason) == (0, "")


def test_a_job_that_is_to_stop_for_harm_does_not_for_what_its_loss_scale_explains() -> None:
    overflow, nan, empty = vote(1, None), vote(1, None, lost=None), vote(1, 0.0, count=0.0)
    for scaled, bad, stops in (
        (True, overflow, False),
        (True, nan, True),
        (False, overflow, True),
        (False, empty, False),
    ):
        seen = guard(scaled=scaled, action="stop")
        see(seen, vote(0), bad)
        assert bool(seen.stop_reason) == stops, (scaled, bad)
    assert not guard(action="stop").stop_reason


def test_a_guard_goes_on_from_its_state_and_one_that_stopped_counts_anew() -> None:
    seen, other, anew = (guard(spike=10.0, stop_after=5) for _ in range(3))
    see(seen, *(vote(step) for step in range(30)), vote(30, None))
    other.load_state_dict(seen.state_dict())
    assert other.state_dict() == seen.state_dict()
    assert see(other, vote(31, 50.0)) == see(seen, vote(31, 50.0)) == [False]
    see(seen, *(vote(step, None) for step in range(32, 40)))
    assert seen.stop_reason
    anew.load_state_dict(seen.state_dict())
    anew.restart()
    assert (anew.left_out, anew.stop_reason) == (0, "")


@pytest.mark.parametrize("options", [{"action": "stop"}, {"stop_after": 1}])
def test_a_switch_keeps_the_decision_to_stop(options: Any) -> None:
    """The vote of the harmful step may also agree on a plan, and a fault may end the last checkpoint."""
    lost = [False]

    def failing_once(output: torch.Tensor, batch: Any) -> Any:
        total, count = loss(output, batch)
        return total * (math.nan if lost[0] else 1.0), count

    job = replace(recipe(by_dimensions, stability=StabilityOptions(**options)), loss=failing_once)
    plan = PLANS["TP 2 beside two stages"]

    def worker(plan_groups: MemoryPlanGroups) -> tuple[str, str]:
        engine = engine_on(plan_groups, job, plan)
        engine.step(0, lambda: 0)
        engine.gather(0)
        lost[0] = True
        engine.gather(0)
        engine.step(1, lambda: 0)
        engine.settle()
        reason, state = engine.guard.stop_reason, engine.state()
        engine.adopt(state)
        return reason, engine.guard.stop_reason

    for before, after in run_threads(plan.members, worker).values():
        assert before
        assert after == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"spike": 0.5}, "spike is 0.5; it must be above 1"),
        ({"spike": math.nan}, "spike is nan; it must be above 1"),
        ({"action": "explode"}, "action is 'explode'; it must be one of 'skip', 'roll back', 'stop'"),
        ({"stop_after": 0}, "stop_after is 0; it must be at least 1, or None"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StabilityOptions(**options)


def test_the_scale_of_the_loss_has_a_floor() -> None:
    scaler = LossScaler(LossScale(first=2.0**10, least=2.0))
    for _ in range(200):
        scaler.after(applied=False)
    assert scaler.scale == 2.0
    default = LossScaler(LossScale(first=2.0**10))
    for _ in range(2000):
        default.after(applied=False)
    assert default.scale == 2.0**-22
    with pytest.raises(ValueError, match="least between 0 and first"):
        LossScale(first=1.0, least=2.0)


def failing(steps: range, factor: float) -> Callable[..., Any]:
    """The loss, times a factor in these steps."""
    calls = [0]

    def wrong(output: torch.Tensor, batch: Any) -> Any:
        step = calls[0] // 3  # three micro-batches
        calls[0] += 1
        total, count = next_token_loss(output, batch)
        return total * (factor if step in steps else 1.0), count

    return wrong


def run(trained: elasticd.Job, steps: int) -> Iterator[elasticd.Step]:
    yield from trained.steps(steps)


def test_a_job_whose_losses_are_not_finite_saves_its_state_and_stops(tmp_path: Path) -> None:
    trained = job(
        tmp_path,
        layers=1,
        loss=failing(range(2, 99), math.nan),
        stability=elasticd.StabilityOptions(stop_after=4),
    )
    seen: list[bool] = []
    with pytest.raises(elasticd.JobStopped, match="4 steps in a row changed no weight, from step 2 on"):
        seen.extend(step.applied for step in run(trained, 50))
    assert scan(tmp_path)[0].step == 6
    again = job(tmp_path, layers=1, stability=elasticd.StabilityOptions(stop_after=4))
    assert [step.applied for step in run(again, 8)] == [True, True]


def test_a_job_that_is_to_stop_for_a_spike_stops_with_the_weights_before_it(tmp_path: Path) -> None:
    trained = job(
        tmp_path,
        layers=1,
        clip=None,
        loss=failing(range(24, 25), 1e6),
        stability=elasticd.StabilityOptions(spike=50.0, action="stop"),
    )
    weights = []

    def script() -> None:
        for _ in run(trained, 50):
            weights.append({name: value.clone() for name, (_, value) in trained.parameters().items()})

    with pytest.raises(elasticd.JobStopped, match="step 24 would have harmed the weights: the norm"):
        script()
    assert len(weights) == 25
    assert all(torch.equal(weights[-1][name], weights[-2][name]) for name in weights[-1])


def test_all_devices_leave_out_the_same_updates_also_after_a_switch() -> None:
    """The numbers of the guard are a part of the state."""
    spiked = [0]

    def spiking(output: torch.Tensor, batch: Any) -> Any:
        total, count = loss(output, batch)
        return total * (1e5 if spiked[0] else 1.0), count

    job = recipe(by_dimensions, stability=StabilityOptions(spike=20.0))
    job = replace(job, loss=spiking)
    plan = PLANS["TP 2 beside two stages"]

    def worker(plan_groups: MemoryPlanGroups) -> Any:
        engine = engine_on(plan_groups, job, plan)
        for step in range(22):
            engine.step(step, lambda: 0)
        engine.settle()
        before, state = engine.guard.state_dict(), engine.state()
        assert plan_groups.me in plan.members
        engine.gather(0)
        spiked[0] = 1
        engine.gather(0)
        applied = engine.step(22, lambda: 0).outcome.vote.apply
        return before, state.extras["stability"], applied, engine.guard.state_dict()

    results = list(run_threads(plan.members, worker).values())
    assert all(result == results[0] for result in results)
    assert results[0][2] is False
