"""Plans of models with experts: placed by load and slowdown, near to where they are, where memory allows."""

from typing import Any

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.placement.state_movement import expert_bytes_beyond_shares
from elasticd_planner.problem import ModuleProblem, Problem, SearchSpace
from elasticd_planner.profiling.fit import fit, predicted_seconds
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.packed import cost_of
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.expert_load import ExpertLoad, costed, expert_part, fractions_in, held_by_device
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.model import Cut, Units
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.plan_checks import check_experts
from elasticd_planner.spec.sequence_lengths import even
from elasticd_planner.spec.step_measurements import Step
from elasticd_planner.value import Invalid

from tests.models.mixture import Mixture
from tests.planner.models import cluster

MODEL = Mixture().describe().spec

LAYERS, EXPERTS = 4, 16
ROWS = (1000 / np.arange(1, EXPERTS + 1) ** 0.9).tolist()


def load_of(*, seed: int = 0, part: float = 0.8, expert_bytes: int = 1000) -> ExpertLoad:
    rng = np.random.default_rng(seed)
    rows = {block: tuple(np.array(ROWS)[rng.permutation(EXPERTS)].tolist()) for block in range(LAYERS)}
    return ExpertLoad(rows=rows, part=part, expert_bytes=expert_bytes)


def problem(devices: int = 4, memory: int = 10**9, **more: Any) -> Problem:
    profile = ModelProfile(
        name="mixture",
        layers=LAYERS,
        share_units=16,
        tokens=100.0,
        block=SectionProfile(seconds=1e-4, cut_bytes=EXPERTS * 1000, whole_bytes=1000),
    )
    return Problem(
        cluster=cluster(devices, memory=memory),
        profile=profile,
        global_batch=8,
        micro_batch=1,
        search_space=SearchSpace(fixed_tp=devices, fixed_dp=1),
        **more,
    )


def made(given: Problem) -> Plan:
    answer = plan(given)
    assert answer.plan is not None, answer.refusal
    return answer.plan


def unevenness(found: Plan, load: ExpertLoad, rates: dict[str, float]) -> float:
    """Of the worst block the busiest device over the bound."""
    worst = 0.0
    for _, _, lane in found.walk():
        slow = [rates.get(device, 1.0) for device in lane.devices]
        for fractions in fractions_in(lane, load):
            busiest = max(x * part for x, part in zip(slow, fractions, strict=True))
            worst = max(worst, busiest * sum(1 / x for x in slow))
    return worst


@pytest.mark.parametrize("rates", [{}, {"n0/1": 2.0}])
def test_experts_are_as_even_as_the_devices_are_fast(rates: dict[str, float]) -> None:
    load = load_of()
    by_share, found = made(problem(rates=rates)), made(problem(rates=rates, experts=load))
    assert unevenness(by_share, load, rates) > 1.2
    assert unevenness(found, load, rates) <= 1.02
    assert "experts placed by load" in found.reason
    assert found.prediction is not None
    assert by_share.prediction is not None
    assert (
        found.prediction.step_seconds <= by_share.prediction.step_seconds * 1.02
    )  # which counted them as even
    assert found.version == 4


def test_an_even_load_places_nothing() -> None:
    load = msgspec.structs.replace(load_of(), rows=dict.fromkeys(range(LAYERS), (100.0,) * EXPERTS))
    assert made(problem(experts=load)).strategies == made(problem()).strategies


@pytest.mark.parametrize(("heavier", "moves"), [(1.5, False), (20.0, True)])
def test_the_running_plan_is_counted_under_the_load_and_few_experts_move(heavier: float, moves: bool) -> None:
    """None where devices that divide each pass anew are even without."""
    load = load_of()
    running = made(problem(experts=load))
    factors = [heavier if expert == 3 else 1.0 for expert in range(len(load.rows[0]))]
    rows = tuple(own * factor for own, factor in zip(load.rows[0], factors, strict=True))
    drifted = msgspec.structs.replace(load, rows=load.rows | {0: rows})
    answer = plan(problem(experts=drifted, current=running))
    assert answer.plan is not None
    assert answer.plan.prediction is not None
    assert answer.current_seconds is not None
    assert (answer.plan.prediction.step_seconds < answer.current_seconds) == moves
    before, after = held_by_device(running, load), held_by_device(answer.plan, load)
    moved = sum(len({*after[d][b]} - {*before[d][b]}) for d in after for b in after[d])
    assert 0 < moved <= 4 if moves else moved == 0
    assert all(after[device][block] == before[device][block] for device in after for block in (1, 2, 3))
    assert plan(problem(experts=drifted, current=answer.plan)).plan is not None


def test_the_running_plan_is_placed_anew_beside_one_that_leaves_its_slow_device_idle() -> None:
    given = msgspec.structs.replace(
        problem(devices=3, experts=load_of()), global_batch=1, search_space=SearchSpace(), rates={"n0/2": 50.0}
    )
    running = made(given)
    assert running.idle == ("n0/2",)
    found = made(msgspec.structs.replace(given, current=running, rates={"n0/0": 50.0}))
    assert found.idle == ("n0/0",)


def test_placements_that_are_given_up_are_in_the_reason() -> None:
    load = load_of()
    running = made(problem(experts=load))
    smaller = problem(devices=2, current=running)
    found = made(smaller)
    assert not any(stage.experts for _, _, stage in found.walk())
    assert "; experts are divided by shares again: no load of them is known" in found.reason
    assert "again" not in made(msgspec.structs.replace(smaller, experts=load)).reason
    assert "again" not in made(msgspec.structs.replace(smaller, current=None)).reason


def test_memory_limits_how_many_experts_a_device_has() -> None:
    load = load_of()
    roomy = made(problem(experts=load))
    assert roomy.prediction is not None
    most = max(roomy.prediction.memory.values())
    tight = problem(memory=int(most * 0.9), experts=load)
    found = made(tight)
    assert found.prediction is not None
    assert max(found.prediction.memory.values()) <= int(most * 0.9)
    assert 1.0 < unevenness(found, load, {}) < unevenness(made(problem()), load, {})


def packed_problem(**more: Any) -> Problem:
    """Of sequences that are cut over lanes of two devices."""
    lengths = PackedSequences(sequences=8.0, lengths=even(100.0), longest=100, linear=96, row_tokens=60)
    given = problem(packed=lengths, **more)
    return msgspec.structs.replace(given, search_space=SearchSpace(fixed_tp=2, lanes=2))


def test_experts_of_a_packed_plan_are_placed_in_each_lane() -> None:
    load, rates = load_of(), {"n0/1": 1.5}
    by_share, found = made(packed_problem(rates=rates)), made(packed_problem(rates=rates, experts=load))
    assert [len(pipeline.packed) for pipeline in found.pipelines] == [2]
    assert unevenness(by_share, load, rates) > 1.2
    assert unevenness(found, load, rates) <= 1.02
    assert not any(stage.shared_blocks for pipeline in found.pipelines for stage in pipeline.stages)
    assert found.prediction is not None
    few = made(packed_problem(rates=rates, experts=msgspec.structs.replace(load, replicas=0)))
    assert few.prediction is not None
    assert found.prediction.bound_seconds <= found.prediction.step_seconds < few.prediction.step_seconds
    answer = plan(packed_problem(rates=rates, experts=load, current=found))
    assert answer.plan is not None
    assert answer.plan.strategies == found.strategies
    assert answer.current_seconds == found.prediction.step_seconds


def test_experts_of_a_packed_plan_take_no_memory_from_its_rows() -> None:
    """Where rows need all memory, devices swap experts, and have no copies of them."""
    load = load_of(expert_bytes=10**6)
    profile = msgspec.structs.replace(
        problem().profile,
        block=SectionProfile(seconds=1e-4, cut_bytes=EXPERTS * 10**6, cut_activation=1e5, whole_bytes=1000),
    )
    given = msgspec.structs.replace(packed_problem(memory=500 * 10**6), profile=profile)
    assert given.packed is not None
    most = sum(cost_of(unbounded(given, 100)).capacity(made(given))[0])
    given = unbounded(given, most // 4 * 4)
    by_share, found = made(given), made(msgspec.structs.replace(given, experts=load))
    assert len(found.pipelines) == 1
    assert found.prediction is not None
    assert max(found.prediction.memory.values()) <= 500 * 10**6
    blocks = held_by_device(found, load)
    assert sum(len(own) for device in blocks.values() for own in device.values()) == 2 * LAYERS * EXPERTS
    assert 1.0 < unevenness(found, load, {}) < unevenness(by_share, load, {})


def unbounded(given: Problem, longest: int) -> Problem:
    """The problem with rows as long as memory holds, and a sequence of this length."""
    assert given.packed is not None
    packed = msgspec.structs.replace(given.packed, row_tokens=10**6, longest=longest)
    return msgspec.structs.replace(given, packed=packed)


def module_problem(**more: Any) -> Problem:
    """The mixture beside an encoder of images."""
    rows = 64.0
    encoder = ModelProfile(
        name="vision",
        layers=2,
        share_units=16,
        tokens=rows,
        block=SectionProfile(seconds=1e-5, cut_bytes=1000),
        boundary_bytes=64.0,
    )
    vision = ModuleProblem(
        name="vision", profile=encoder, items="images", items_a_sample=1.5, rows_an_item=rows
    )
    return msgspec.structs.replace(problem(**more), module="language", modules=(vision,))


@pytest.mark.parametrize("rates", [{}, {"n0/1": 2.0}])
def test_experts_of_a_language_model_beside_an_encoder_are_placed(rates: dict[str, float]) -> None:
    load = load_of()
    by_share, found = made(module_problem(rates=rates)), made(module_problem(rates=rates, experts=load))
    assert unevenness(by_share.loss_view, load, rates) > 1.2
    assert unevenness(found.loss_view, load, rates) <= 1.02
    assert "experts placed by load" in found.reason
    assert found.prediction is not None
    costs = ModuleCosts(module_problem(rates=rates, experts=load))
    assert costs.timed(found) == found
    assert found.prediction.step_seconds == costs.seconds(found) < costs.seconds(costs.timed(by_share))
    assert found.prediction.memory == costs.memory(found)
    assert found.prediction.bound_seconds <= found.prediction.step_seconds
    answer = plan(module_problem(rates=rates, experts=load, current=found))
    assert answer.plan is not None
    assert answer.plan.strategies == found.strategies
    assert answer.current_seconds == found.prediction.step_seconds
    unloaded = made(module_problem(rates=rates, current=found))
    assert unloaded.strategies[0].untimed == found.strategies[0].untimed, "it stays"
    smaller = module_problem(rates=rates, current=found, devices=3)
    assert "; experts are divided by shares again: no load of them is known" in made(smaller).reason


def test_few_experts_move_beside_an_encoder() -> None:
    load = load_of()
    running = made(module_problem(experts=load))
    drifted = msgspec.structs.replace(
        load,
        rows=load.rows | {0: tuple(rows * (1.5 if e == 3 else 1.0) for e, rows in enumerate(load.rows[0]))},
    )
    found = made(module_problem(experts=drifted, current=running))
    before, after = held_by_device(running.loss_view, load), held_by_device(found.loss_view, load)
    moved = sum(len({*after[d][b]} - {*before[d][b]}) for d in after for b in after[d])
    assert moved <= 4
    profile = module_problem().profile
    assert (
        0
        <= expert_bytes_beyond_shares(profile, drifted, running, found)
        == moved * 1000 * (1 + profile.optimizer_factor)
    )


def test_after_a_device_was_lost_the_others_keep_their_experts() -> None:
    load = load_of()
    running = made(problem(experts=load))
    found = made(problem(devices=3, experts=load, current=running))
    before, after = held_by_device(running, load), held_by_device(found, load)
    lost = [{*before["n0/3"][block]} - {e for d in after for e in before[d][block]} for block in range(LAYERS)]
    moved = sum(len({*own} - {*before[d][block]}) for d in after for block, own in after[d].items())
    assert sum(map(len, lost)) <= moved <= sum(map(len, lost)) + 2 * LAYERS
    assert unevenness(found, load, {}) <= 1.02


def test_copies_that_a_new_limit_forbids_are_given_up() -> None:
    load = load_of()
    running = made(problem(experts=load))
    found = made(problem(experts=msgspec.structs.replace(load, replicas=0), current=running))
    for blocks in held_by_device(running, load), held_by_device(found, load):
        copies = sum(len(own) for device in blocks.values() for own in device.values()) - LAYERS * EXPERTS
        assert (copies == 0) == (blocks == held_by_device(found, load))


def test_no_plan_is_faster_than_the_bound_under_a_load() -> None:
    load = load_of()
    slow = {"n0/1": 2.0, "n0/2": 1.3}
    found = made(problem(rates=slow, experts=load))
    assert found.prediction is not None
    few = problem(rates=slow, experts=msgspec.structs.replace(load, replicas=0))
    worse = made(few)
    assert worse.prediction is not None
    bounds = found.prediction.bound_seconds, worse.prediction.bound_seconds
    assert max(bounds) <= found.prediction.step_seconds
    assert min(bounds) > 0.9 * found.prediction.step_seconds, "by enumeration, of shares as small as one likes"


def test_blocks_that_share_their_experts_are_placed_alike() -> None:
    tied = msgspec.structs.replace(
        MODEL,
        ties=tuple(
            (f"blocks.1.{p.name}", f"blocks.0.{p.name}") for p in MODEL.section("blocks.0") if p.experts
        ),
    )
    rows = {
        block: tuple(np.random.default_rng(block).permutation(ROWS[: len(ROWS) // 2])) for block in range(4)
    }
    load = costed(tied, 50, rows, 2.0)
    assert load is not None
    assert load.same == ((0, 1),)
    profile = problem().profile
    eight = msgspec.structs.replace(profile, share_units=8)
    found = made(msgspec.structs.replace(problem(experts=load), profile=eight))
    assert any(stage.experts for _, _, stage in found.walk())
    check_experts(found, tied)
    with pytest.raises(Invalid, match="in two ways"):
        check_experts(
            made(
                msgspec.structs.replace(problem(experts=msgspec.structs.replace(load, same=())), profile=eight)
            ),
            tied,
        )


def test_blocks_of_modules_of_unlike_numbers_of_experts_are_left_out() -> None:
    block = tuple(MODEL.section("blocks.0"))
    first = next(p for p in block if p.experts)
    other = msgspec.structs.replace(
        first, name="more.up", shape=(4, *first.shape[1:]), cut=Cut(dim=0, units="few")
    )
    two = msgspec.structs.replace(
        MODEL,
        kinds=(*MODEL.kinds, (*block, other)),
        layers=(0, 1, 0, 0),
        units=(*MODEL.units, Units(kind="few", count=4)),
    )
    load = costed(two, 50, dict.fromkeys(range(4), (1.0,) * 8), 2.0)
    assert load is not None
    assert {*load.rows} == {0, 2, 3}


def test_the_part_of_experts_is_that_of_the_mean_block() -> None:
    """Dense blocks beside sparse ones: all blocks count as alike, and what experts take stays what it is."""
    block = tuple(MODEL.section("blocks.0"))
    wide = msgspec.structs.replace(next(p for p in block if p.name == "router.weight"), shape=(8, 4096))
    dense = tuple(p for p in block if not p.experts and p.name != wide.name)
    mixed = msgspec.structs.replace(MODEL, kinds=(*MODEL.kinds, (*dense, wide)), layers=(0, 1, 0, 1))
    rows = dict.fromkeys(range(4), (1.0,) * 8)
    alike, load = costed(MODEL, 50, rows, 2.0), costed(mixed, 50, rows, 2.0)
    assert alike is not None
    assert load is not None
    assert alike.part == pytest.approx(expert_part(MODEL, 50, 2.0, 8))
    elements = [sum(np.prod(p.shape) for p in kind if not p.experts) + MODEL.width * 50 for kind in mixed.kinds]
    own = 2 / 8 * sum(np.prod(p.shape) for p in block if p.experts)
    assert load.part == pytest.approx(own / ((elements[0] + own + elements[1]) / 2))


def test_a_fit_takes_what_an_uneven_load_costs_for_no_overhead() -> None:
    given, load = problem(), load_of()
    by_share = made(given)
    seconds = predicted_seconds(given.profile, by_share, given.cluster, {}, None, load)
    assert seconds > predicted_seconds(given.profile, by_share, given.cluster, {}) * 1.1
    work = given.profile.tokens * LAYERS * 8 / 4
    own = given.profile.block.seconds * work
    steps = [
        Step.of(
            [
                Measurement(
                    device=device,
                    plan=by_share.number,
                    step=step,
                    tokens=800,
                    micro_batches=8,
                    block_seconds=own,
                    block_work=work,
                    step_seconds=seconds,
                )
                for device in by_share.members
            ]
        )
        for step in range(10)
    ]
    blind = fit(given.profile, by_share, steps, given.cluster)
    known = fit(given.profile, by_share, steps, given.cluster, load=load)
    assert blind.overhead_seconds > 0.09 * seconds
    assert known.overhead_seconds < 0.01 * seconds
