"""A fitted profile explains what was measured, and says the same of other plans."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec
import pytest
from elasticd_planner.cost.model import after_seconds
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem
from elasticd_planner.profiling import fit as fitting
from elasticd_planner.profiling.fit import STEPS, fit, remeasured
from elasticd_planner.search.recompute import flagged
from elasticd_planner.search.sequence_parallel import sliced
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import ModulePlan, Plan, Stage, Strategy
from elasticd_planner.spec.step_measurements import Step
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import workers
from tests.planner.models import cluster, plan, plans, predict, profile
from tests.sizes import examples

TWO_BY_TWO = plan((5, [(5, ["n0/0", "n0/1"], [4, 4])]), (5, [(5, ["n1/0", "n1/1"], [4, 4])]))
CLUSTER = cluster(2, 2)


def steps(
    made: Plan,
    count: int = STEPS,
    change: Callable[[Measurement], Measurement] = lambda measured: measured,
    **options: object,
) -> list[Step]:
    return [
        Step.of(map(change, workers.measure(made, step, **options)))  # type: ignore[arg-type]
        for step in range(count)
    ]


def predicted(model: ModelProfile, made: Plan, rates: dict[str, float] | None = None) -> float:
    given = Problem(cluster=CLUSTER, profile=model, global_batch=10, micro_batch=1, rates=rates or {})
    return predict(made, given).step_seconds


def test_seconds_are_those_of_the_workers() -> None:
    fitted = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO), CLUSTER)
    assert fitted.fitted
    assert fitted.block.seconds == pytest.approx(workers.BLOCK)
    assert fitted.embed.seconds == pytest.approx(workers.EMBED)
    # The synthetic workers have a collective in head, which the profile of the tests has as well.
    assert fitted.head.seconds == pytest.approx(workers.HEAD)
    assert fitted.collective_seconds == {2: pytest.approx(workers.COLLECTIVE)}
    assert fitted.block.cut_bytes == profile().block.cut_bytes


@pytest.mark.parametrize("measured", [0.05, 1.0, 2.0, 30.0])
def test_the_plan_that_was_measured_is_predicted_as_it_was(measured: float) -> None:
    fitted = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO, step_seconds=measured), CLUSTER)
    assert predicted(fitted, TWO_BY_TWO) == pytest.approx(measured)
    assert fitted.overhead_seconds >= 0
    assert 0 < fitted.pipeline_scale <= 1


@pytest.mark.parametrize("measured", [0.05, 1.0, 2.0, 30.0])
def test_so_is_one_of_unequal_stages_and_pipelines(measured: float) -> None:
    """The schedule's time scales with its stages, so one factor is enough."""
    uneven = plan((7, [(2, ["n0/0", "n0/1"], [6, 2]), (3, ["n1/0"], [8])]), (3, [(5, ["n1/1"], [8])]))
    rates = {"n0/1": 3.0}
    fitted = fit(profile(), uneven, steps(uneven, rates=rates, step_seconds=measured), CLUSTER, rates)
    assert predicted(fitted, uneven, rates) == pytest.approx(measured)


def test_what_pipelines_and_reduction_do_not_explain_is_overhead() -> None:
    fitted = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO, step_seconds=3.0), CLUSTER)
    block = 256 * workers.BLOCK / 2 + 4 * workers.COLLECTIVE
    edges = 256 * (workers.EMBED + workers.HEAD) / 2 + 2 * workers.COLLECTIVE
    assert fitted.overhead_seconds == pytest.approx(3.0 - 0.03 - 5 * (5 * block + edges))
    assert fitted.pipeline_scale == 1.0


def test_the_fit_is_the_same_whatever_plan_and_rates_it_was_measured_under() -> None:
    rates = {"n0/1": 3.0}
    uneven = plan((10, [(2, ["n0/0", "n0/1"], [6, 2]), (3, ["n1/0", "n1/1"], [4, 4])]))
    one = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO), CLUSTER)
    other = fit(profile(), uneven, steps(uneven, rates=rates), CLUSTER, rates)
    assert other.block.seconds == pytest.approx(one.block.seconds)
    assert other.head.seconds == pytest.approx(one.head.seconds)
    assert other.collective_seconds[2] == pytest.approx(one.collective_seconds[2])


def test_waiting_for_a_slow_member_is_no_collective_time() -> None:
    fitted = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO, rates={"n0/1": 3.0}), CLUSTER, {"n0/1": 3.0})
    assert fitted.collective_seconds[2] == pytest.approx(workers.COLLECTIVE)


def test_noise_and_wild_steps_move_the_fit_little() -> None:
    noisy = [
        Step.of(workers.measure(TWO_BY_TWO, step, noise=0.05, wild={"n1/0": 5.0} if step % 7 == 3 else None))
        for step in range(20)
    ]
    assert fit(profile(), TWO_BY_TWO, noisy, CLUSTER).block.seconds == pytest.approx(workers.BLOCK, rel=0.03)


class Plain(NamedTuple):
    """What a fit says, by a loop over single measurements."""

    block: float
    embed: float
    collectives: dict[int, float]
    reduction: float


def plainly(
    model: ModelProfile, made: Plan, measured: list[list[Measurement]], rates: dict[str, float]
) -> Plain:
    blocks, embeds, least = [], [], dict[tuple[int, Stage], float]()
    for m in (m for step in measured for m in step if m.block_work > 0):
        place = made.places[m.device]
        stage, pipeline = made.stage(place), made.pipeline(place)
        rate, width = rates.get(m.device, 1.0), len(stage.devices)
        blocks.append(m.block_seconds / (model.block.seconds * model.block.factor(width) * m.block_work * rate))
        if m.embed_seconds > 0:
            embeds.append(m.embed_seconds / (m.tokens * stage.fraction(place.position) * rate))
        count = stage.layers * model.block.collectives * (1.5 if stage.recompute else 1.0)
        count += model.embed.collectives * (stage.start == 0)
        count += model.head.collectives * (stage.stop == pipeline.layers)
        if width > 1 and m.tensor_seconds > 0:
            spent = m.tensor_seconds / (count * pipeline.micro_batches)
            least[m.step, stage] = min(spent, least.get((m.step, stage), spent))
    by_width = {len(stage.devices): [] for _, stage in least}
    for (_, stage), seconds in least.items():
        by_width[len(stage.devices)].append(seconds)
    waited = [min(m.reduce_seconds for m in step if m.block_work > 0) for step in measured]
    return Plain(
        block=model.block.seconds * median(blocks),
        embed=median(embeds),
        collectives={width: median(seconds) for width, seconds in by_width.items()},
        reduction=median(waited),
    )


@settings(max_examples=examples(40), deadline=None)
@given(plans(), st.integers(0, 1000), st.data())
def test_arrays_say_what_a_loop_over_the_measurements_does(made: Plan, start: int, data: st.DataObject) -> None:
    """Of devices that are slow, of steps in which some measured no work, or are missing."""
    members = st.sampled_from(made.members)
    rates = data.draw(st.dictionaries(members, st.floats(1.1, 4), max_size=2))
    idle = data.draw(st.sets(members, max_size=len(made.members) - 1))
    measured = [workers.measure(made, start + step, rates, noise=0.1) for step in range(STEPS)]
    measured[3] = [
        msgspec.structs.replace(m, block_work=0.0, reduce_seconds=0.0) if m.device in idle else m
        for m in measured[3]
    ]
    measured[5] = [m for m in reversed(measured[5]) if m.device not in idle]
    model, everybody = profile(), cluster(3, 3, 3)
    expected = plainly(model, made, measured, rates)
    fitted = fit(model, made, [Step.of(step) for step in measured], everybody, rates)
    assert fitted.block.seconds == pytest.approx(expected.block)
    assert fitted.embed.seconds == pytest.approx(expected.embed)
    assert fitted.collective_seconds == pytest.approx(expected.collectives)
    again = remeasured(model, made, [Step.of(step) for step in measured], rates)
    assert again == msgspec.structs.replace(model, block=fitted.block, embed=fitted.embed, head=fitted.head)
    if len(made.pipelines) > 1:
        without = msgspec.structs.replace(fitted, reduction_scale=0.0)
        costs = [after_seconds(made, everybody, ProfileCost(each)) for each in (fitted, without)]
        assert (costs[0] - costs[1]) / fitted.pipeline_scale == pytest.approx(expected.reduction)


def test_widths_known_before_are_kept() -> None:
    fitted = fit(profile(collective_seconds={2: 9.0, 4: 7.0}), TWO_BY_TWO, steps(TWO_BY_TWO), CLUSTER)
    assert fitted.collective_seconds[4] == 7.0
    assert fitted.collective_seconds[2] == pytest.approx(workers.COLLECTIVE)


@pytest.mark.parametrize("slices", [False, True])
def test_seconds_of_every_member_keep_their_proportion(slices: bool) -> None:
    base = profile()
    block = msgspec.structs.replace(base.block, whole_seconds=base.block.seconds / 4)
    pipelines = sliced(TWO_BY_TWO.pipelines, on=slices)
    made = msgspec.structs.replace(
        TWO_BY_TWO, strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),)
    )
    found = fit(profile(block=block), made, steps(made), CLUSTER).block
    assert found.whole_seconds == pytest.approx(found.seconds / 4)
    # A member of two has half of the block, and of what all have half or all.
    assert found.seconds / 2 + found.whole_seconds / (2 if slices else 1) == pytest.approx(workers.BLOCK / 2)


def test_blocks_that_make_their_activations_again_teach_how_long_that_takes() -> None:
    """Their block's seconds and collectives are those of any plan; what was not measured stays."""
    pipelines = flagged(TWO_BY_TWO.pipelines, on=True)
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),))
    again = TWO_BY_TWO.replace(strategies=(strategy,))
    plain, fitted = (fit(profile(), p, steps(p), CLUSTER) for p in (TWO_BY_TWO, again))
    assert fitted.recompute_factor == pytest.approx(1 + workers.AGAIN)
    assert plain.recompute_factor == profile().recompute_factor
    assert fitted.block.seconds == pytest.approx(workers.BLOCK)
    assert fitted.collective_seconds == {2: pytest.approx(workers.COLLECTIVE)}


def test_all_reduces_are_told_from_gathers_of_sequence_parallelism() -> None:
    """A block of such a group has a quarter more of collectives."""
    pipelines = sliced(TWO_BY_TWO.pipelines, on=True)
    made = TWO_BY_TWO.replace(
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),)
    )
    fitted = fit(profile(), made, steps(made), CLUSTER)
    assert fitted.collective_seconds == {2: pytest.approx(workers.COLLECTIVE)}


def test_so_do_blocks_that_the_user_chose() -> None:
    half = profile(recomputed_part=0.5)

    def again(m: Measurement) -> Measurement:
        return msgspec.structs.replace(m, again_seconds=0.5 * workers.AGAIN * m.block_seconds)

    assert fit(half, TWO_BY_TWO, steps(TWO_BY_TWO, change=again), CLUSTER).recompute_factor == pytest.approx(
        1 + workers.AGAIN
    )


def test_of_a_large_job_some_pipelines_tell_what_all_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others the longest step alone is looked at."""
    whole = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO), CLUSTER)
    monkeypatch.setattr(fitting, "ENOUGH", 2)

    def other(m: Measurement) -> Measurement:
        if not m.device.startswith("n1/"):
            return m
        return msgspec.structs.replace(
            m, block_seconds=9 * m.block_seconds, tensor_seconds=9 * m.tensor_seconds
        )

    sampled = fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO, change=other), CLUSTER)
    assert sampled == whole


def test_too_few_steps_of_this_plan_are_refused() -> None:
    with pytest.raises(Invalid, match="needs 10 steps of plan 1, not 9"):
        fit(profile(), TWO_BY_TWO, steps(TWO_BY_TWO, STEPS - 1), CLUSTER)
    other = TWO_BY_TWO.replace(number=2)
    with pytest.raises(Invalid, match="of plan 2, not 0"):
        fit(profile(), other, steps(TWO_BY_TWO), CLUSTER)
