"""Measurements of several modules: each profile is fitted from its own, a device is judged by all of its
places, and a change of the items of samples is seen."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

import msgspec
import pytest
from elasticd_planner.batching.item_dealing import ItemDealing
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.detection.item_shift import ItemShiftState
from elasticd_planner.detection.module_work import as_one
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import RateState, observe
from elasticd_planner.problem import ModuleProblem, Problem
from elasticd_planner.profiling.fit import STEPS, fit_modules
from elasticd_planner.search.module_cost import ModuleCosts, predicted_seconds
from elasticd_planner.spec.cluster import Cluster, Rates
from elasticd_planner.spec.measurement import Measurement, ModuleMeasurement
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Strategy
from elasticd_planner.spec.step_measurements import NONE_REPORTED, Step

from tests.planner.models import cluster

#: Seconds of a token in a block: of vision, of language.
VISION, LANGUAGE = 2e-3, 1e-3
SETTINGS = DetectSettings()
ENCODER = "n0/0"  # it only encodes
PROFILE = ModelProfile(name="m", layers=4, share_units=4, tokens=64.0, block=SectionProfile(seconds=1.0))


def plan_of(encoders: tuple[str, ...], *, trainable: bool = True) -> Plan:
    def alone(device: str, layers: int, micro_batches: int) -> Pipeline:
        return Pipeline.from_layers([((device,), (1,))], [layers], micro_batches)

    vision = ModulePlan(
        module="vision",
        items="images",
        trainable=trainable,
        pipelines=tuple(alone(device, 2, 1) for device in encoders),
    )
    language = ModulePlan(module="language", pipelines=tuple(alone(f"n1/{i}", 4, 4) for i in range(2)))
    strategy = Strategy(modules=(vision, language), edges=(Edge(source="vision", target="language"),))
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=8)


ALONE, BOTH = plan_of((ENCODER,)), plan_of((ENCODER, "n1/0"))


def measured(
    plan: Plan,
    step: int,
    rates: Rates | None = None,
    *,
    vision: float = 1.0,
    step_seconds: float = 3.0,
    rows: int = 32,
) -> list[Measurement]:
    """Of all members. A step has 16 images of `rows` rows; `vision`: how many times longer encoding takes."""
    rates, rng = rates or {}, random.Random(step)
    encoders = {place.stages[0].devices[0]: place.micro_batches for place in plan.view("vision").by_lane}
    factor = 1.0 if plan.modules[0].trainable else PROFILE.forward
    found = []
    for device in plan.members:
        speed = rates.get(device, 1.0) * rng.gauss(1, 0.01)
        modules = {}
        if device in encoders:
            items = 16 * encoders[device] // sum(encoders.values())
            work = items * rows * 2
            modules["vision"] = ModuleMeasurement(
                block_seconds=work * VISION * vision * speed * factor,
                block_work=work,
                tokens=items * rows,
                items=items,
                reduce_seconds=0.01,
            )
        work = 4 * 64 * 4 if device.startswith("n1") else 0
        found.append(
            Measurement(
                device=device,
                plan=plan.number,
                step=step,
                tokens=work // 4,
                block_seconds=work * LANGUAGE * speed,
                block_work=work,
                micro_batches=4 if work else 0,
                step_seconds=step_seconds,
                modules=modules,
            )
        )
    return found


def test_a_step_has_the_rows_of_each_module() -> None:
    reports = measured(BOTH, 1)
    gathered = NONE_REPORTED
    for report in reports:
        gathered = gathered.after(report)
    whole = gathered.whole(plan=1, step=1, devices=BOTH.members)
    assert whole == Step.of(reports)
    vision = whole.modules["vision"]
    assert vision.devices == (ENCODER, "n1/0")
    assert vision.column("micro_batches").tolist() == [8, 8]
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Step) == whole


def profiles(*, fitted: bool = True) -> dict[str, ModelProfile]:
    def of(layers: int, seconds: float) -> ModelProfile:
        block = SectionProfile(seconds=seconds)
        return msgspec.structs.replace(PROFILE, layers=layers, block=block, fitted=fitted)

    return {"vision": of(2, VISION), "language": of(4, LANGUAGE)}


def judged(
    plan: Plan,
    known: Mapping[str, ModelProfile],
    steps: range,
    state: RateState | None = None,
    **changes: object,
) -> RateState:
    state = state or RateState()
    for step in steps:
        whole = Step.of(measured(plan, step, **changes))  # type: ignore[arg-type]
        state, _ = observe(state, as_one(whole, plan, known, state.rates, SETTINGS.noise), SETTINGS)
    return state


@pytest.mark.parametrize("trainable", [True, False])
def test_a_lone_encoder_that_is_slow_from_the_first_step_is_seen_by_profiles_of_other_machines(
    trainable: bool,
) -> None:
    """Those were measured on machines that take half as long. Of profiles by shapes nothing follows."""
    plan = plan_of((ENCODER,), trainable=trainable)
    known = {
        name: msgspec.structs.replace(each, block=SectionProfile(seconds=each.block.seconds / 2))
        for name, each in profiles(fitted=False).items()
    }
    for timed, rates in ((["vision", "language"], {ENCODER: pytest.approx(3.0, rel=0.05)}), ([], {})):
        state = RateState()
        for step in range(8):
            whole = Step.of(measured(plan, step, rates={ENCODER: 3.0}))
            one = as_one(whole, plan, known, state.rates, SETTINGS.noise, timed=timed)
            state, _ = observe(state, one, SETTINGS)
        assert state.rates == rates
    normal = RateState()
    for step in range(20):
        whole = Step.of(measured(plan, step))
        one = as_one(whole, plan, known, normal.rates, SETTINGS.noise, timed=["vision", "language"])
        normal, _ = observe(normal, one, SETTINGS)
    assert not normal.rates


def test_a_device_that_only_encodes_becomes_slow_and_recovers() -> None:
    """Alone in its module, its seconds compare with those of others by the fitted profiles."""
    for plan in (ALONE, BOTH, plan_of((ENCODER,), trainable=False)):
        state = judged(plan, profiles(), range(20))
        assert not state.rates
        state = judged(plan, profiles(), range(20, 40), state, rates={ENCODER: 6.0})
        assert state.rates == {ENCODER: pytest.approx(6.0, rel=0.05)}
        assert not judged(plan, profiles(), range(40, 60), state).rates


def test_a_device_of_both_modules_is_judged_by_both() -> None:
    state = judged(BOTH, profiles(), range(20), rates={"n1/0": 2.0})
    assert state.rates == {"n1/0": pytest.approx(2.0, rel=0.05)}


def test_before_the_fit_a_guess_makes_no_device_slow() -> None:
    """By the shapes an image takes a tenth of its time."""
    guessed = profiles(fitted=False)
    block = SectionProfile(seconds=VISION / 10)
    guessed["vision"] = msgspec.structs.replace(guessed["vision"], block=block)
    for plan in (ALONE, BOTH):
        assert not judged(plan, guessed, range(30)).rates


def test_images_that_take_longer_on_all_encoders_make_none_of_them_slow() -> None:
    assert not judged(BOTH, profiles(), range(30), vision=2.0).rates


def problem_of(plan: Plan, known: Mapping[str, ModelProfile], links: Cluster) -> Problem:
    vision = ModuleProblem(
        name="vision",
        profile=known["vision"],
        items="images",
        items_a_sample=2.0,
        rows_an_item=32.0,
        trained=plan.modules[0].trainable,
    )
    return Problem(
        cluster=links,
        profile=known["language"],
        global_batch=8,
        micro_batch=1,
        module="language",
        modules=(vision,),
    )


@pytest.mark.parametrize("trainable", [True, False])
def test_messages_that_wait_for_the_end_of_the_step_are_in_the_memory_of_a_plan(trainable: bool) -> None:
    """Gradients where images are taken, 8 on each of two devices; or outputs, all 16 where they are made."""
    plan, size = plan_of((ENCODER,), trainable=trainable), 1000.0
    problem = problem_of(plan, profiles(), cluster(1, 2))
    needed = []
    for output_bytes in (size, 2 * size):
        vision = msgspec.structs.replace(problem.modules[0], output_bytes=output_bytes)
        assert vision.output_row_bytes == output_bytes / 32
        needed.append(ModuleCosts(msgspec.structs.replace(problem, modules=(vision,))).memory(plan))
    more = {device: needed[1][device] - needed[0][device] for device in plan.members}
    window = ModuleCosts(problem).kept_items(plan, plan.modules[0])[0] * size
    waiting = {ENCODER: 0.0 if trainable else 16 * size}
    assert more[ENCODER] == pytest.approx(window + waiting[ENCODER], abs=1)
    assert [more["n1/0"], more["n1/1"]] == ([8 * size] * 2 if trainable else [0, 0])


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("step_seconds", [0.7, 3.0])
def test_each_profile_is_fitted_from_its_own_seconds(step_seconds: float, *, trainable: bool) -> None:
    """An encoder's time is in its own profile, and not once more in the overhead."""
    plan, links = plan_of((ENCODER, "n1/0"), trainable=trainable), cluster(1, 2)

    def predicted(known: Mapping[str, ModelProfile]) -> float:
        return predicted_seconds(plan, problem_of(plan, known, links))

    steps = [Step.of(measured(plan, step, step_seconds=step_seconds)) for step in range(STEPS)]
    fitted = fit_modules(profiles(fitted=False), plan, steps, links, predicted)
    assert all(profile.fitted for profile in fitted.values())
    assert fitted["vision"].block.seconds == pytest.approx(VISION, rel=0.01)
    assert fitted["language"].block.seconds == pytest.approx(LANGUAGE, rel=0.01)
    assert predicted(fitted) == pytest.approx(step_seconds, rel=0.01)
    explained = partial(msgspec.structs.replace, pipeline_scale=1.0, overhead_seconds=0.0)
    alone = predicted({name: explained(profile) for name, profile in fitted.items()})
    assert fitted["language"].overhead_seconds == pytest.approx(max(0.0, step_seconds - alone), abs=0.02)
    assert fitted["vision"].overhead_seconds == 0


def test_a_module_without_items_keeps_its_profile() -> None:
    steps = [
        Step.of([msgspec.structs.replace(each, modules={}) for each in measured(ALONE, step)])
        for step in range(STEPS)
    ]
    known = profiles(fitted=False)
    fitted = fit_modules(known, ALONE, steps, cluster(1, 2), lambda _: 1.0)
    assert fitted["vision"] == known["vision"]
    assert fitted["language"].fitted


def test_noise_of_the_items_is_no_shift_and_a_change_is_one() -> None:
    """Batches of 64 samples with 0 to 4 images; then all images are twice as large; then none come."""
    rng = random.Random(3)
    state, told = ItemShiftState.begin(2.0, 100.0), []

    def feed(count: int, most: int, size: float) -> None:
        nonlocal state
        for step in range(count):
            items = sum(rng.randint(0, most) for _ in range(64))
            state, shifted = state.after(items, items * size * rng.gauss(1, 0.05), 64, SETTINGS)
            told.extend([step] * shifted)

    feed(300, 4, 100.0)
    assert not told
    feed(60, 4, 200.0)
    assert told
    assert max(told) < 30
    assert state.rows.reference == pytest.approx(200.0, rel=0.1)
    assert state.items.reference == pytest.approx(2.0, rel=0.1)
    told.clear()
    feed(60, 2, 200.0)
    assert told
    assert state.items.reference == pytest.approx(1.0, rel=0.1)


def test_a_guess_of_the_items_is_corrected_once() -> None:
    rng, told = random.Random(1), 0
    state = ItemShiftState.begin(0.01, 1024.0)
    for _ in range(200):
        items = sum(rng.randint(0, 2) for _ in range(32))
        state, shifted = state.after(items, items * 48.0, 32, SETTINGS)
        told += shifted
    assert state.items.reference == pytest.approx(1.0, rel=0.15)
    assert state.rows.reference == pytest.approx(48.0)
    assert told <= 3


def test_a_large_image_makes_no_healthy_encoder_slow() -> None:
    """Attention makes its rows dearer, as the shapes of the module say. Without that it is taken for slow."""
    plan, rise = plan_of(("n0/0", "n0/1")), 1 / 6144
    sizes = {"n0/0": [4096], "n0/1": [256] * 16}
    known = profiles()
    known["vision"] = msgspec.structs.replace(known["vision"], tokens=256.0)

    def seconds(rows: int) -> float:
        return VISION * rows * (1 + rise * rows) / (1 + rise * 256)

    def state_after(rises: Mapping[str, float]) -> RateState:
        state = RateState()
        for step in range(60):
            reports = []
            for device in plan.members:
                rows = sizes.get(device, [])
                spent = 2 * sum(map(seconds, rows)) * random.Random(f"{device} {step}").gauss(1, 0.01)
                own = ModuleMeasurement(
                    block_seconds=spent,
                    block_work=2 * sum(rows),
                    tokens=sum(rows),
                    items=len(rows),
                    squares=float(sum(each * each for each in rows)),
                )
                work = 0 if rows else 1024
                reports.append(
                    Measurement(
                        device=device,
                        plan=plan.number,
                        step=step,
                        tokens=work // 4,
                        block_seconds=work * LANGUAGE,
                        block_work=work,
                        micro_batches=4 * bool(work),
                        step_seconds=3.0,
                        modules={"vision": own} if rows else {},
                    )
                )
            whole = Step.of(reports)
            state, _ = observe(state, as_one(whole, plan, known, state.rates, SETTINGS.noise, rises), SETTINGS)
        return state

    assert state_after({}).rates
    assert not state_after({"vision": rise}).rates
    dealing = ItemDealing(plan, "vision", rise)
    ratios = [
        dealing.ratio(device, sum(map(seconds, rows)), sum(rows), sum(each * each for each in rows))
        for device, rows in sizes.items()
    ]
    assert ratios[0] == pytest.approx(ratios[1])
