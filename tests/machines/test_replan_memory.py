"""What a job says of its memory reaches the planner: numbers, and who may make activations again."""

from __future__ import annotations

from typing import Any

from elasticd_planner.cost.model_profile import Numbers

from elasticd.records import JobSpec, decode, encode
from tests.machines import cast, world
from tests.machines.world import World

#: Bytes of a device: enough, so few that no plan fits unless blocks make their activations again, and enough
#: where TP groups have slices of the tokens.
ENOUGH, TIGHT, SCARCE = 12_000_000, 1_800_000, 2_400_000


def started(monkeypatch: Any, memory: int = ENOUGH, **said: Any) -> World:
    monkeypatch.setattr(world, "spec", lambda **changes: cast.spec(**said, **changes))
    made = World(memory=memory)
    made.start()
    return made


def recomputing(made: World) -> set[bool]:
    plan = made.plan()
    assert plan is not None
    return {stage.recompute for _, _, stage in plan.walk()}


def test_a_job_may_ask_for_recomputation_everywhere(monkeypatch: Any) -> None:
    assert recomputing(started(monkeypatch)) == {False}
    assert recomputing(started(monkeypatch, recompute="always")) == {True}


def test_a_plan_recomputes_only_where_memory_demands_it(monkeypatch: Any) -> None:
    assert recomputing(started(monkeypatch, recompute=True)) == {False}
    refused = started(monkeypatch, TIGHT)
    assert refused.plan() is None
    assert 'ParallelismOptions(recompute="plan")' in refused.job.reason
    assert True in recomputing(started(monkeypatch, TIGHT, recompute=True))


def test_a_job_may_ask_for_sequence_parallelism_everywhere_or_where_memory_demands_it(
    monkeypatch: Any,
) -> None:
    def groups(memory: int, said: bool | str) -> list[tuple[int, bool]]:
        plan = started(monkeypatch, memory, sequence_parallel=said).plan()
        stages = [] if plan is None else [stage for _, _, stage in plan.walk()]
        return [(len(stage.devices), stage.sequence_parallel) for stage in stages]

    assert groups(ENOUGH, True) == groups(ENOUGH, "always") == [(1, False)] * 4
    assert groups(SCARCE, False) == []
    assert groups(SCARCE, True) == [(2, True), (2, False)]
    assert groups(SCARCE, "always") == [(2, True), (2, True)]


def test_blocks_and_numbers_of_the_users_choice_are_counted_once(monkeypatch: Any) -> None:
    numbers = Numbers(compute="float32", master="float64", gradients="float64")
    made = started(monkeypatch, numbers=numbers, recomputed=(0, 1))
    made.train(16)
    profile = made.job.learned.profile
    assert profile is not None
    assert profile.fitted
    assert (profile.gradient_factor, profile.optimizer_factor) == (2.0, 6.0)
    assert profile.recomputed_part == 2 / profile.layers


def test_such_a_spec_travels_as_it_is() -> None:
    for said in ({"recompute": "always"}, {"recompute": True, "recomputed": (1, 3)}):
        sent = cast.spec(numbers=Numbers(compute="bfloat16"), **said)
        assert decode(encode(sent), JobSpec) == sent
