"""Generated traces, and what detection makes of them: each trouble is told for what it is."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from elasticd_planner.detection.data_shift import Shift, ShiftState, watch
from elasticd_planner.detection.links import LinkState, observe_links
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, RateState, observe
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.step_measurements import Step
from elasticd_planner.value import Invalid

from tests.simulation.generated_traces import Data, Grid, Rough, SlowLink, Trace, Trouble

SETTINGS = DetectSettings()
FIXTURE = Path(__file__).parent / "traces" / "eight_devices.jsonl"
SMALL = Grid(pipelines=2, stages=2, width=4, node=8)
DEVICE = "n1/3"


def detect(trace: Trace, steps: int) -> tuple[RateState, list[Change], list[Shift]]:
    state, data = RateState(), ShiftState()
    changes: list[Change] = []
    shifts: list[Shift] = []
    for step, measured in enumerate(trace.steps(0, steps)):
        state, found = observe(state, measured, SETTINGS)
        changes += found
        data, shift = watch(data, step, Step.of(measured).lengths, SETTINGS)
        shifts += [shift] if shift else []
    return state, changes, shifts


def traced(*troubles: Trouble, seed: int = 1, **rest: object) -> Trace:
    return Trace(seed=seed, grid=SMALL, troubles=troubles, **rest)  # type: ignore[arg-type]


def test_a_step_is_the_same_whatever_was_made_before_it() -> None:
    trace = traced(Trouble(device=DEVICE, factor=2, start=3))
    assert list(trace.steps(0, 6))[5] == trace.step(5)
    assert trace.step(5) != msgspec.structs.replace(trace, seed=2).step(5)
    with pytest.raises(Invalid, match="n9/0 is not one of n0/0 to n1/7"):
        traced(Trouble(device="n9/0", factor=2))


def test_the_shipped_trace_is_what_the_generator_makes() -> None:
    """Eight devices, 12 steps, seed 7; n0/2 is three times slower from step 5 on."""
    grid = Grid(pipelines=2, stages=2, width=2, sequences=4)
    trace = Trace(seed=7, grid=grid, troubles=(Trouble(device="n0/2", factor=3, start=5),))
    shipped = [msgspec.json.decode(line, type=list[Measurement]) for line in FIXTURE.read_bytes().splitlines()]
    for step, measured in enumerate(shipped):
        for ours, theirs in zip(trace.step(step), measured, strict=True):
            for name in Measurement.__struct_fields__:
                mine, other = getattr(ours, name), getattr(theirs, name)
                assert mine == (
                    pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(other, float) else other
                )
    state = RateState()
    for measured in shipped:
        state, _ = observe(state, measured, SETTINGS)
    assert state.rates == {"n0/2": pytest.approx(3.0, rel=0.1)}


def test_peers_wait_for_a_slow_device_in_communication_alone() -> None:
    plain = traced(rough=Rough(noise=0.0, differing=0.0, pauses=0.0, checkpoint=0))
    slow = msgspec.structs.replace(plain, troubles=(Trouble(device=DEVICE, factor=12),))
    for before, after in zip(plain.step(3), slow.step(3), strict=True):
        if before.device != DEVICE:
            assert after.block_seconds == before.block_seconds
        assert after.step_seconds > before.step_seconds
    group = [m for m in slow.step(3) if m.device in ("n1/0", "n1/1", "n1/2")]
    assert min(m.tensor_seconds for m in group) > 10 * max(m.block_seconds for m in group)


@pytest.mark.parametrize(("factor", "most"), [(1.1, 25), (1.5, 3), (12.0, 3)])
def test_a_slow_device_is_found_soon_and_none_of_its_peers(factor: float, most: int) -> None:
    trace = traced(Trouble(device=DEVICE, factor=factor, start=40))
    state, changes, _ = detect(trace, 40 + most + 10)
    assert {change.device for change in changes} == {DEVICE}
    assert changes[0].step < 40 + most
    assert state.rates[DEVICE] == pytest.approx(trace.rate(DEVICE, 50), rel=0.06)


def test_what_is_normal_alarms_nobody() -> None:
    """Noise, lengths, collections, checkpoints and a slow first step; longer in `make bench NAME=sensing`."""
    assert detect(traced(seed=3), 600)[1:] == ([], [])


def test_a_device_that_recovers_is_normal_again() -> None:
    state, changes, _ = detect(traced(Trouble(device=DEVICE, factor=2, start=20, stop=50)), 70)
    assert [change.kind for change in changes if change.kind != "corrected"] == ["slow", "recovered"]
    assert state.rates == {}
    assert state.slowness(DEVICE).kind == "one-off"


def test_a_device_that_is_slow_from_the_very_start_is_found() -> None:
    state, changes, _ = detect(traced(Trouble(device=DEVICE, factor=1.5)), 30)
    assert changes[0].step <= 4
    assert state.rates == {DEVICE: pytest.approx(1.5, rel=0.06)}


def test_a_flapping_device_is_periodic_and_a_lasting_one_chronic() -> None:
    flapping, lasting = "n0/6", "n1/1"
    troubles = (
        Trouble(device=flapping, factor=2, start=20, period=30, on=12),
        Trouble(device=lasting, factor=1.5, start=30),
    )
    state, _, _ = detect(traced(*troubles), 250)
    found = state.slowness(flapping)
    assert (found.kind, found.period) == ("periodic", pytest.approx(30, abs=2))
    assert state.slowness(lasting).kind == "chronic"


def test_single_slow_steps_in_a_rhythm_are_told_without_an_alarm() -> None:
    state, changes, _ = detect(traced(Trouble(device=DEVICE, factor=2, start=10, period=25)), 200)
    assert changes == []
    found = state.slowness(DEVICE)
    assert (found.kind, found.period) == ("periodic", 25)


def test_a_drifting_device_is_followed() -> None:
    trace = traced(Trouble(device=DEVICE, factor=1.6, start=20, drift=200))
    state, changes, _ = detect(trace, 240)
    assert len(changes) <= 12
    assert state.rates[DEVICE] == pytest.approx(trace.rate(DEVICE, 239), rel=0.08)


def test_lengths_that_double_are_a_shift_of_the_data_and_no_slow_device() -> None:
    _, changes, shifts = detect(traced(data=Data(shifted=60)), 100)
    assert changes == []
    assert shifts
    assert shifts[0].step < 80
    assert shifts[-1].after.mean / shifts[0].before.mean == pytest.approx(2.0, rel=0.2)


def test_how_cost_grows_with_length_is_learned_from_the_fleet() -> None:
    state, _, _ = detect(Trace(seed=5), 150)
    assert state.curve.per_token == pytest.approx(1 / 4096, rel=0.25)


def test_a_slow_link_is_told_apart_from_a_slow_device() -> None:
    trace = Trace(
        seed=1,
        links=(SlowLink(source="n2", target="n3", factor=3, start=30),),
        troubles=(Trouble(device="n5/1", factor=2, start=30),),
    )
    state, told = LinkState(), []
    for step in range(50):
        state, found = observe_links(state, trace.transfers(step), step, Link(), SETTINGS)
        told += found
    assert {change.device for change in told} == {"n2 - n3"}
    assert math.isclose(told[0].after, 3.0, rel_tol=0.2)
    assert {change.device for change in detect(trace, 50)[1]} == {"n5/1"}
