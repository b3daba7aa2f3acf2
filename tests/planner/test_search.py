"""The planner's answers: the demo's cluster, near-equal plans, refusals, yardsticks, speed, the child."""

import subprocess
import sys

import msgspec
import pytest
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Answer, Problem, ideal_ratio, without
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid

from tests import sizes
from tests.planner.models import cluster, predict, profile, replica_bytes

SMALL = profile()


def problem(
    *sizes: int, part: float = 0.6, model: ModelProfile = SMALL, batch: int = 10, **rest: object
) -> Problem:
    """Devices that hold `part` of a whole replica's state."""
    memory = int(replica_bytes(model) * part)
    return Problem(
        cluster=cluster(*sizes, memory=memory),
        profile=model,
        global_batch=batch,
        micro_batch=1,
        **rest,  # type: ignore[arg-type]
    )


def planned(given: Problem, **options: float) -> Plan:
    answer = plan(given, **options)  # type: ignore[arg-type]
    assert answer.plan is not None, answer.refusal
    return answer.plan


def shape(made: Plan) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [[(s.layers, s.shares) for s in p.stages] for p in made.pipelines]


def seconds(made: Plan) -> float:
    assert made.prediction is not None
    return made.prediction.step_seconds


def test_healthy_devices_form_two_equal_pipelines_across_the_nodes() -> None:
    made = planned(problem(2, 2))
    assert shape(made) == [[(5, (4, 4))], [(5, (4, 4))]]
    assert [p.micro_batches for p in made.pipelines] == [5, 5]
    assert made.idle == ()
    assert made.binding == {}


def test_a_slow_network_does_not_change_the_plan_of_one_node_of_many_devices() -> None:
    model = profile(layers=8, boundary_bytes=4096.0)
    given = problem(9, part=0.5, model=model, batch=8, rates={"n0/0": 2.5})
    slow = msgspec.structs.replace(given.cluster, between=Link(bandwidth=1e6, latency=1e-2))
    beside = msgspec.structs.replace(given, cluster=slow)
    assert planned(beside).pipelines == planned(given).pipelines


def test_a_slow_device_is_worth_more_than_none_and_gets_a_smaller_share() -> None:
    healthy = planned(problem(2, 2))
    slowed = problem(2, 2, rates={"n0/1": 3.0}, current=healthy)
    answer = plan(slowed, number=2)
    assert answer.plan is not None
    assert answer.plan.number == 2
    assert answer.current_seconds is not None
    assert seconds(answer.plan) < 0.5 * answer.current_seconds
    assert seconds(answer.plan) < 0.85 * seconds(planned(without(slowed, "n0/1")))
    slow = answer.plan.stage(answer.plan.places["n0/1"])
    assert slow.devices == ("n0/0", "n0/1")
    assert slow.shares == (6, 2)
    assert len({s.layers for p in answer.plan.pipelines for s in p.stages}) > 1
    assert "n0/1 3x" in answer.plan.reason


def test_memory_that_binds_holds_for_every_device() -> None:
    given = problem(2, 2, rates={"n0/1": 3.0})
    made = planned(given)
    assert made.prediction is not None
    assert set(made.prediction.memory) == set(made.members)
    for name, size in made.prediction.memory.items():
        assert size <= given.cluster.device(name).memory


def test_the_same_problem_gives_the_same_plan() -> None:
    given = problem(2, 3, rates={"n1/2": 2.0})
    assert plan(given) == plan(given)


def test_a_replan_of_what_is_best_already_changes_nothing() -> None:
    given = problem(2, 2, rates={"n0/1": 3.0})
    made = planned(given)
    again = planned(msgspec.structs.replace(given, current=made))
    assert again.digest == made.digest
    assert bytes_to_move(given.profile, made, again) == 0


def test_a_small_change_of_a_rate_does_not_change_the_plan() -> None:
    made = planned(problem(2, 2, rates={"n0/1": 3.0}))
    moved = planned(problem(2, 2, rates={"n0/1": 3.05}, current=made))
    assert moved.digest == made.digest


def test_of_equal_plans_the_one_that_moves_least_is_taken() -> None:
    """The best plan with its devices permuted costs the same, and is kept as it is."""
    given = problem(1, 1, 1, 1, part=0.55, model=profile(layers=6))
    made = planned(given)
    shuffled = made.replace(
        strategies=planned(problem(1, 1, 1, 1, part=0.55, model=profile(layers=6))).strategies
    )
    names = dict(zip(("n0/0", "n1/0", "n2/0", "n3/0"), ("n3/0", "n1/0", "n0/0", "n2/0"), strict=True))
    text = made.to_json().decode()
    for name in names:
        text = text.replace(f'"{name}"', f'"@{name}"')
    for name, other in names.items():
        text = text.replace(f'"@{name}"', f'"{other}"')
    shuffled = Plan.from_json(text.encode())
    again = planned(msgspec.structs.replace(given, current=shuffled))
    assert again.digest == shuffled.digest


def test_everything_moves_where_nothing_was_held() -> None:
    made = planned(problem(2, 2))
    whole = replica_bytes(SMALL) * (SMALL.state_factor - 1) / SMALL.state_factor
    lacking = bytes_to_move(SMALL, None, made)
    copies = len(made.pipelines)
    uncut = copies * 5 * SMALL.block.whole_bytes * (SMALL.state_factor - 1)
    assert lacking == pytest.approx(copies * whole + uncut)


def test_only_the_units_that_change_hands_move() -> None:
    equal = planned(problem(2, part=2.0, batch=4))
    assert shape(equal) != []
    given = problem(2, part=0.9, batch=4)
    old, new = (planned(msgspec.structs.replace(given, rates=rates)) for rates in ({}, {"n0/1": 3.0}))
    if shape(old) == [[(5, (4, 4))]] and shape(new) == [[(5, (6, 2))]]:
        moved = 2 / 8 * (5 * SMALL.block.cut_bytes + SMALL.embed.cut_bytes) * (SMALL.state_factor - 1)
        assert bytes_to_move(given.profile, old, new) == pytest.approx(moved)
    else:
        pytest.fail(f"expected equal and 6:2 shares, not {shape(old)} and {shape(new)}")


def test_a_dead_device_is_left_idle() -> None:
    made = planned(problem(2, 2, rates={"n1/0": float("inf")}))
    assert "n1/0" in made.idle


def test_a_current_plan_with_a_device_that_is_gone_is_replaced() -> None:
    given = problem(2, 2)
    made = planned(given)
    answer = plan(without(msgspec.structs.replace(given, current=made), "n1/1"))
    assert answer.plan is not None
    assert answer.current_seconds is None
    assert "n1/1" not in answer.plan.members


def test_a_current_plan_that_does_not_fit_any_more_cannot_run() -> None:
    roomy = problem(1, 1, part=2.0)
    current = planned(roomy)
    tight = problem(1, 1, part=0.7, current=current)
    assert plan(msgspec.structs.replace(roomy, current=current)).current_seconds == pytest.approx(
        seconds(current)
    )
    answer = plan(tight)
    assert answer.current_seconds is None
    assert answer.plan is not None
    assert answer.plan.strategies != current.strategies
    assert seconds(answer.plan) > seconds(current), "though that is slower"


def test_what_does_not_fit_is_refused_with_the_bytes_missing_and_the_remedy() -> None:
    answer = plan(problem(2, part=0.3))
    assert answer.plan is None
    assert answer.refusal.startswith("does not fit: the nearest plan needs ")
    assert answer.cause == "memory"
    assert "MiB more on n0/" in answer.refusal
    assert "more node" in answer.refusal


def test_the_bytes_named_missing_are_enough() -> None:
    small = problem(2, part=0.3)
    words = plan(small).refusal.split()
    missing = float(words[words.index("needs") + 1]) * 2**20
    memory = small.cluster.devices[0].memory
    enough = msgspec.structs.replace(small, cluster=cluster(2, memory=int(memory + missing + 2**17)))
    short = msgspec.structs.replace(small, cluster=cluster(2, memory=int(memory + missing - 2**17)))
    assert plan(enough).plan is not None
    assert plan(short).plan is None


@pytest.mark.parametrize(
    "nodes",
    [(1,) * 11, *(pytest.param(n, marks=pytest.mark.full) for n in [(5, 4), (13,), (7, 7), (8, 8, 8, 7)])],
)
def test_any_number_of_devices_has_a_plan_that_fits_and_a_bound(nodes: tuple[int, ...]) -> None:
    given = problem(*nodes, part=0.4, batch=24, model=profile(layers=9), rates={"n0/0": 2.5})
    fits(given, planned(given))


def fits(given: Problem, made: Plan) -> None:
    """The plan keeps memory, and its bound is none of a slower step."""
    assert made.prediction is not None
    assert made.prediction.bound_seconds <= made.prediction.step_seconds
    for name, size in made.prediction.memory.items():
        assert size <= given.cluster.device(name).memory


def test_of_many_devices_a_replan_moves_less_than_a_plan_that_knows_no_current_one_or_nothing() -> None:
    """Nothing moves where what runs is the best already."""
    nodes = sizes.number(full=4, quick=3)
    healthy = problem(*[nodes] * nodes, part=0.4, batch=8 * nodes, model=profile(layers=3 * nodes))
    old = planned(healthy)
    slowed = msgspec.structs.replace(healthy, rates={"n2/1": 3.0})
    fresh, near = planned(slowed), planned(msgspec.structs.replace(slowed, current=old))
    assert seconds(near) <= seconds(fresh) * 1.005 * (1 + 1e-9)
    assert bytes_to_move(healthy.profile, old, near) <= bytes_to_move(healthy.profile, old, fresh)
    fits(slowed, fresh)
    again = planned(msgspec.structs.replace(slowed, current=fresh))
    assert again.digest == fresh.digest
    assert bytes_to_move(healthy.profile, fresh, again) == 0


def test_of_many_devices_a_straggler_is_answered_in_its_own_group_where_that_is_near_the_best() -> None:
    healthy = problem(8, 8, part=0.12, batch=32, model=profile(layers=8))
    old = planned(healthy)
    group = next(s for p in old.pipelines for s in p.stages if len(s.devices) > 1)
    slowed = msgspec.structs.replace(healthy, rates={group.devices[1]: 2.57})
    fresh = planned(slowed)
    near = planned(msgspec.structs.replace(slowed, current=old), tolerance=0.02)
    assert seconds(near) <= seconds(fresh) * 1.02 * (1 + 1e-9)
    moved = bytes_to_move(healthy.profile, old, near)
    assert moved < 0.25 * replica_bytes(healthy.profile)
    assert moved < bytes_to_move(healthy.profile, old, fresh)


def test_what_does_not_fit_on_many_devices_is_refused_with_the_bytes_missing() -> None:
    answer = plan(problem(3, 3, 3, part=0.05, batch=24))
    assert answer.plan is None
    assert "does not fit: the nearest plan needs " in answer.refusal
    assert "more on n" in answer.refusal


def test_a_cluster_without_a_live_device_is_refused() -> None:
    assert "every device is dead" in plan(problem(1, rates={"n0/0": float("inf")})).refusal


def test_without_takes_one_device_and_its_rate_away() -> None:
    left = without(problem(2, 1, rates={"n1/0": 2.0}), "n1/0")
    assert [device.name for device in left.cluster.devices] == ["n0/0", "n0/1"]
    assert left.rates == {}
    with pytest.raises(Invalid, match="not in the cluster"):
        without(problem(2), "n7/0")


def test_ideal_ratio_is_the_harmonic_yardstick() -> None:
    assert ideal_ratio([1, 1, 1, 3]) == pytest.approx(1.2)


def test_the_bound_holds_and_the_gap_is_small_where_the_work_divides() -> None:
    given = problem(2, 2)
    made = planned(given)
    found = predict(made, given)
    assert 0 <= found.gap < 0.1


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(Invalid, match="global_batch 10 does not divide into micro-batches of 3"):
        msgspec.structs.replace(problem(2), micro_batch=3)


@pytest.mark.parametrize(("nodes", "most"), [((2, 2), 500), ((4, 4), 40_000), ((8,), 20_000)])
def test_the_work_of_planning_stays_small(nodes: tuple[int, ...], most: int) -> None:
    """Counted in candidates, which are the same on every machine."""
    given = problem(*nodes, part=0.3 if sum(nodes) == 8 else 0.6, batch=32, model=profile(layers=16))
    last = given.cluster.devices[-1].name
    answer = plan(msgspec.structs.replace(given, rates={"n0/1": 3.0, last: 1.5}))
    assert answer.plan is not None
    assert 0 < answer.candidates < most


def test_the_child_answers_each_line_on_standard_output() -> None:
    given = problem(2, 2), problem(2, 1), problem(2, 2)
    done = subprocess.run(
        [sys.executable, "-m", "elasticd_planner", "7"],
        input=b"\n".join(map(msgspec.json.encode, given)),
        capture_output=True,
        timeout=300,
        check=True,
    )
    answers = [msgspec.json.decode(line, type=Answer) for line in done.stdout.splitlines()]
    assert answers == [plan(each, 7) for each in given]


def test_the_child_says_what_is_wrong_with_its_problem() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticd_planner"], input=b'{"cluster": 3}', capture_output=True, timeout=300
    )
    assert done.returncode == 2
    assert b"the problem on standard input is wrong" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("part", sizes.beside([0.4], [0.4, 0.6, 2.0]))
def test_without_groups_it_does_not_matter_which_nodes_devices_are_in(part: float) -> None:
    """With one unit there is no TP; with equal links eight nodes of one device are one node of eight."""
    model = profile(share_units=1, layers=4)
    apart, together = problem(*[1] * 8, part=part, model=model), problem(8, part=part, model=model)
    assert apart.cluster.inside == apart.cluster.between
    assert seconds(planned(apart)) == pytest.approx(seconds(planned(together)))
