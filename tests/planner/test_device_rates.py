"""A step of many devices is judged in arrays, of few one by one: the results are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pytest
from elasticd_planner.detection import stragglers
from elasticd_planner.detection.device_rates import DeviceRate, Devices, as_mapping
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.slowness_history import Episode
from elasticd_planner.detection.stragglers import Change, RateState, all_believed, forget, judged, observe
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.step_measurements import Step
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples

NAMES = tuple(f"n{node}/{device}" for node in range(3) for device in range(4))
FACTORS = (1.02, 1.06, 1.12, 1.3, 2.0, 5.0)
FEW, MANY = 10**9, 0

names = st.sampled_from(NAMES)
#: How what is measured goes on: steps, of which some devices are missing, and what happens between them.
happenings = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 12), st.frozensets(names, max_size=6)),
    st.tuples(st.just("slow"), st.sampled_from(FACTORS), st.frozensets(names, min_size=1, max_size=12)),
    st.tuples(st.just("recover"), st.none(), st.frozensets(names, min_size=1, max_size=12)),
    st.tuples(st.just("spike"), st.sampled_from(FACTORS), st.frozensets(names, min_size=1, max_size=3)),
    st.tuples(st.just("forget"), st.none(), st.frozensets(names, min_size=1, max_size=2)),
    st.tuples(
        st.just("believed"), st.sampled_from((None, 1.0, 1.5)), st.frozensets(names, min_size=1, max_size=1)
    ),
    st.tuples(st.just("plan"), st.none(), st.frozensets(names, max_size=12)),
    st.tuples(st.just("settings"), st.integers(3, 16), st.frozensets(names, max_size=0)),
)
scripts = st.lists(happenings, min_size=1, max_size=24)


class Told(NamedTuple):
    """After a step: what detection says, and all that it knows."""

    changes: tuple[Change, ...]
    state: RateState


def played(script: list[tuple[str, object, frozenset[str]]], seed: int, many: int) -> Iterator[Told]:
    """Goes through a script, where so many devices are judged in arrays. The noise is the seed's."""
    rng = np.random.default_rng(seed)
    state, detect, plan, step = RateState(), DetectSettings(), 1, 0
    factors: dict[str, float] = {}
    wild: dict[str, float] = {}
    absent: frozenset[str] = frozenset()
    for what, how, which in [*script, ("steps", 6, frozenset())]:
        if what == "slow":
            factors |= dict.fromkeys(which, how)  # type: ignore[arg-type]
        elif what == "recover":
            factors = {name: factor for name, factor in factors.items() if name not in which}
        elif what == "spike":
            wild = dict.fromkeys(which, how)  # type: ignore[arg-type]
        elif what == "plan":
            plan, absent = plan + 1, which if len(which) < len(NAMES) else frozenset()
        elif what == "settings":
            slow = 1.1 if how % 2 else 3.0  # type: ignore[operator]
            detect = DetectSettings(slow=slow, refine_after_steps=how, window=min(5, how))  # type: ignore[arg-type, type-var]
        with mock.patch.object(stragglers, "MANY", many):
            if what == "forget":
                for name in sorted(which):
                    state = forget(state, name)
            elif what == "believed":
                (name,) = which
                state, changes = all_believed(state, {name: (1.4, how)}, detect, "others")  # type: ignore[dict-item]
                yield Told(changes, state)
            for _ in range(how if what == "steps" else 0):  # type: ignore[call-overload]
                drawn = measured(rng, plan, step, factors, wild)
                here = [each for each in drawn if each.device not in which | absent]
                wild, step = {}, step + 1
                state, changes = observe(state, here, detect)
                yield Told(changes, state)


def measured(
    rng: np.random.Generator, plan: int, step: int, factors: dict[str, float], wild: dict[str, float]
) -> list[Measurement]:
    """What all devices would measure, in the order of a plan; in every fifth step one computes nothing."""
    made = []
    for place, name in enumerate(NAMES if plan % 2 else reversed(NAMES)):
        tokens = int(rng.integers(500, 5000))
        length = float(rng.uniform(100, 900)) if rng.random() < 0.9 else 0.0
        spent = tokens * (1 + length / 2000) * math.exp(rng.normal(0, 0.03))
        made.append(
            Measurement(
                device=name,
                plan=plan,
                step=step,
                tokens=tokens,
                block_seconds=spent * factors.get(name, 1.0) * wild.get(name, 1.0),
                block_work=0.0 if step % 5 == place else float(tokens),
                squares=tokens * length,
            )
        )
    return made


def same(one: RateState, other: RateState) -> None:
    """All that is counted is equal, and what is computed but for rounding."""
    for name in ("plan", "step", "fresh", "seen", "window"):
        assert getattr(one, name) == getattr(other, name)
    assert one.noise == pytest.approx(other.noise)
    assert msgspec.structs.astuple(one.curve) == pytest.approx(msgspec.structs.astuple(other.curve))
    assert one.devices.keys() == other.devices.keys()
    assert (one.rates, set(one.troubled)) == (other.rates, set(other.troubled))
    for name, known in one.devices.items():
        there = other.devices[name]
        for field in ("rate", "age", "seen", "spikes", "episodes"):
            assert getattr(known, field) == getattr(there, field), (name, field)
        assert (known.offset, *known.residuals) == pytest.approx((there.offset, *there.residuals))
        for mine, its in ((known.cusum_up, there.cusum_up), (known.cusum_down, there.cusum_down)):
            assert (mine.clear, mine.since) == (its.clear, its.since), name
            assert mine.total == pytest.approx(its.total, abs=1e-9)
        assert one.ratio(name) == pytest.approx(other.ratio(name))
        assert one.slowness(name) == other.slowness(name)


@settings(max_examples=examples(200), deadline=None)
@given(scripts, st.integers(0, 2**32))
def test_many_devices_are_judged_as_each_by_itself(
    script: list[tuple[str, object, frozenset[str]]], seed: int
) -> None:
    one_by_one, together = (list(played(script, seed, many)) for many in (FEW, MANY))
    for few, many in zip(one_by_one, together, strict=True):
        assert many.changes == few.changes
        same(many.state, few.state)
        assert Devices.of(dict(many.state.devices)) == many.state.devices


def test_the_scripts_bring_about_all_that_can_happen() -> None:
    """Else the test above would show little."""
    troubled = frozenset({"n0/1", "n1/2"})
    script = [
        ("steps", 12, frozenset({"n2/3"})),
        ("slow", 1.12, troubled),
        ("steps", 12, frozenset()),
        ("slow", 2.0, troubled),
        ("steps", 12, frozenset({"n0/0"})),
        ("slow", 1.3, troubled),
        ("steps", 12, frozenset()),
        ("spike", 5.0, frozenset({"n2/0"})),
        ("recover", None, troubled),
        ("steps", 12, frozenset()),
    ]
    kinds = {change.kind for seed in range(8) for told in played(script, seed, MANY) for change in told.changes}
    assert kinds == {"slow", "slower", "faster", "recovered", "corrected"}
    *_, last = played(script, 0, MANY)
    assert isinstance(last.state.devices, Devices)
    assert last.state.devices["n2/0"].spikes


def test_the_step_at_which_a_fleet_becomes_many_changes_nothing() -> None:
    script = [("steps", 9, frozenset()), ("slow", 2.0, frozenset({"n0/1"})), ("steps", 9, frozenset())]
    few = list(played(script, 3, FEW))
    state = few[4].state
    same(RateState(**{**parts(state), "devices": Devices.of(state.devices)}), state)
    rng = np.random.default_rng(3)
    steps = [measured(rng, 1, step, {"n0/1": 2.0} if step >= 9 else {}, {}) for step in range(18)]
    with mock.patch.object(stragglers, "MANY", MANY):
        for step in steps[5:]:
            state, _ = observe(state, step, DetectSettings())
    same(state, few[17].state)


def parts(state: RateState) -> dict[str, object]:
    return {name: getattr(state, name) for name in state.__struct_fields__}


def test_links_are_judged_alike() -> None:
    residuals = [{name: 0.01 * place - 0.002 * step for place, name in enumerate(NAMES)} for step in range(5)]
    states = []
    for many in (FEW, MANY):
        state = RateState()
        with mock.patch.object(stragglers, "MANY", many):
            for each in residuals:
                state, changes = judged(state, each, DetectSettings())
                assert changes == ()
        states.append(state)
    same(*states)


def test_what_makes_no_sense_is_left_out() -> None:
    """Costs that overflow or vanish; the last report of a step must not fail for them."""
    for many in (FEW, MANY):
        state = RateState()
        with mock.patch.object(stragglers, "MANY", many):
            for step in range(3):
                made = [
                    Measurement(device=name, plan=1, step=step, tokens=1, block_seconds=1.0, block_work=work)
                    for name, work in zip(NAMES, (1.0, 1.0, 1e308, 1e-320), strict=False)
                ]
                made[2] = msgspec.structs.replace(made[2], block_seconds=1e-300)
                state, _ = observe(state, made, DetectSettings())
        assert {*state.devices} == {*NAMES[:2]}


# -- the columns themselves --------------------------------------------------------------------------------

KNOWN = {
    "a/0": DeviceRate(rate=1.5, residuals=(0.1, 0.4), age=3, episodes=(Episode(start=4, stop=None, rate=1.5),)),
    "a/1": DeviceRate(residuals=(0.1,), offset=0.01, seen=7, spikes=(3, 9)),
    "b/0": DeviceRate(),
}


def test_columns_are_a_mapping_that_nothing_changes() -> None:
    devices = Devices.of(KNOWN)
    assert dict(devices) == KNOWN
    assert devices == KNOWN == devices
    assert devices.get("c/0") is None
    other = devices.replaced({"a/1": DeviceRate(rate=2.0, residuals=(0.7,) * 5), "c/0": DeviceRate()})
    assert dict(devices) == KNOWN
    assert other["a/1"] == DeviceRate(rate=2.0, residuals=(0.7,) * 5)
    assert other["a/0"] == KNOWN["a/0"]
    assert other != devices
    assert other.slow == {"a/0": 1.5, "a/1": 2.0}
    assert dict(other.without("a/0")) == {name: each for name, each in other.items() if name != "a/0"}
    assert other.without("d/0") is other
    with pytest.raises(ValueError, match="read-only"):
        devices.table[0, 0] = 9.0


def test_columns_are_equal_in_whatever_order() -> None:
    devices = Devices.of(KNOWN)
    turned = devices.led_by(("b/0", "a/1"))
    assert turned.names == ("b/0", "a/1", "a/0")
    assert turned == devices
    assert devices.led_by(("a/0",)) is devices
    assert dict(devices.led_by(("c/0", "a/1"))) == {**KNOWN, "c/0": DeviceRate()}


@pytest.mark.parametrize(("kept", "left"), [(3, (4.0, 5.0, 9.0)), (6, (1.0, 2.0, 3.0, 4.0, 5.0, 9.0))])
def test_columns_keep_so_many_residuals_and_zeros_before_them(kept: int, left: tuple[float, ...]) -> None:
    """One device has reported, and keeps so many from now on; the other keeps what it has."""
    before = Devices.of(dict.fromkeys(("a", "b"), DeviceRate(residuals=(1.0, 2.0, 3.0, 4.0, 5.0))))
    after = before.stepped(before.longer(np.array([9.0]), kept), {})
    assert dict(after) == {"a": DeviceRate(residuals=left), "b": before["b"]}
    assert after.table.tolist() == Devices.of(dict(after)).table.tolist()


def test_columns_survive_json_as_a_mapping_does() -> None:
    """Recordings of every release have a mapping by name."""
    state = RateState(devices=Devices.of(KNOWN), step=5)
    text = msgspec.json.encode(state, enc_hook=as_mapping)
    assert text == msgspec.json.encode(RateState(devices=KNOWN, step=5))
    assert msgspec.json.decode(text, type=RateState) == state


def test_a_step_keeps_what_its_measurements_say_by_device() -> None:
    made = [
        Measurement(
            device=name,
            plan=2,
            step=7,
            tokens=place,
            block_seconds=place / 8,
            block_work=1.0,
            reduce_seconds=place,
        )
        for place, name in enumerate(NAMES)
    ]
    step = Step.of([made[0], *made])
    assert (step.plan, step.step, step.devices, step.lengths) == (2, 7, NAMES, None)
    for name in step.columns:
        assert step.column(name).tolist() == [getattr(each, name) for each in made]
    assert step.rows == [(each.block_seconds, 1.0, each.tokens, 0.0) for each in made]
    turned = msgspec.structs.replace(step, columns=(*step.columns[1:], "block_seconds"))
    assert turned.rows[3] == (
        turned.column("block_seconds")[3],
        *(turned.column(n)[3] for n in step.columns[1:4]),
    )
    assert msgspec.json.decode(msgspec.json.encode(step), type=Step) == step
