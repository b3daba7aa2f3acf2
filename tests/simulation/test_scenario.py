"""Scenarios: what is read, what is refused and with which words, faults drawn from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd.chaos.faults import Fault
from elasticd.config.tree import ConfigError
from elasticd.simulator.scenarios.model_shapes import PRESETS, model_spec
from elasticd.simulator.scenarios.random_faults import DAY, RandomFaults, draw
from elasticd.simulator.scenarios.scenario import load, parse
from tests.simulation.scenes import SLOW, SMALL

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "examples" / "scenarios").glob("*.toml"))


def test_a_scenario_is_read_with_its_units_and_its_name() -> None:
    scenario = parse(SMALL + SLOW, "somewhere/small.toml")
    assert scenario.name == "small"
    assert scenario.cluster.memory == 736 * 2**20
    assert [fault.text for fault in scenario.faults] == ["n0/1 runs 3x slower", "n0/1 recovers"]
    assert scenario.policy.bandwidth == 2 * 5e9, "what moves goes over all nodes' links"
    assert scenario.truth().share_units == 8


BAD = [
    ("steps = 90", "steps = 90\nhours = 2.0", "give either steps or hours"),
    ("steps = 90", "", "give either steps or hours"),
    ("steps = 90", "steps = 0", "steps must be at least 1"),
    ("steps = 90", 'steps = "many"', "steps = 'many': expected `?int"),
    ("seed = 3", "sede = 3", "has no key 'sede' \\(= 3\\): did you mean 'seed'\\?"),
    ("seed = 3", "seed = 3\ntimes = 3", "times = 3 must be a section: write \\[times\\] and keys below it"),
    ("nodes = 2", "nodes = 0", "nodes = 0 and devices = 2 must be at least 1"),
    ("nodes = 2", "", "\\[cluster\\] needs nodes"),
    ("nodes = 2", "nodes = 2\ncores = 3", "\\[cluster\\] has no key 'cores' \\(= 3\\)"),
    ('"736 MiB"', '"400 parsecs"', "memory = '400 parsecs': '400 parsecs' is not a size"),
    (
        "nodes = 2",
        'nodes = 2\nlevels = [{ name = "rack", link = {}, groups = [["n0", "n2"]] }]',
        "level rack has 'n2', which is none of the nodes n0 to n1",
    ),
    ("bandwidth = 5e9", "bandwidth = -1.0", "bandwidth must be positive"),
    ("heads = 8", "heads = 7", "width divide by heads"),
    ("heads = 8", 'preset = "llama-70b"', "has shapes of its own: leave out layers"),
    ("global_batch = 8", "global_batch = 9\nmicro_batch = 2", "global_batch = 9 does not divide"),
    ("[model]", "[modell]", "\\[model\\] is missing"),
    ("step = 30", "step = 30\nseconds = 2.0", "fault 1: give either step or seconds"),
    ("step = 30", "", "fault 1: give either step or seconds"),
    ("step = 30", "step = -1", "must not be negative"),
    ("factor = 3.0", "factor = 0.5", "factor = 0.5 must be above 1"),
    ("factor = 3.0", "factor = inf", "factor = inf must be above 1"),
    ('"n0/1"\nfactor', '"n7/1"\nfactor', "fault 1: device = 'n7/1' is not in the cluster: it has n0/0 to"),
    ('"n0/1"\nfactor', '"n0/9"\nfactor', "device = 'n0/9' is not in the cluster"),
    ('device = "n0/1"\nfactor', "factor", "needs either device"),
    ('kind = "slow"', 'kind = "slwo"', "kind = 'slwo' must be one of "),
    ('kind = "slow"', 'kind = "cut"', "is about a node \\(as 'n0'\\), not about device = 'n0/1'"),
    ('kind = "slow"', 'kind = "partition"', "is about a node \\(as 'n0'\\), not about device = 'n0/1'"),
    ('kind = "slow"', 'kind = "kill"', "kind = 'kill' has no factor \\(= 3.0\\)"),
    ('kind = "slow"', 'kind = "shift"', "kind = 'shift' is about no place: leave out 'n0/1'"),
    ('device = "n0/1"\nfactor = 3.0', "tokens = 0", "needs either device"),
    ('kind = "slow"\ndevice = "n0/1"\nfactor = 3.0', 'kind = "shift"', "tokens = 0 must be how many a sample"),
    ('kind = "slow"\ndevice = "n0/1"\nfactor = 3.0', 'kind = "partition"\nnode = "n1"', "lasts = 0.0 must be"),
    ('kind = "slow"\ndevice = "n0/1"\nfactor = 3.0', 'kind = "join"\nnode = "n9"', "'n9' is not in the"),
    ("[model]", "[random]\nrepair_hours = 0.0\n[model]", "hours and repair_hours must be positive"),
    ("[[fault]]\nkind", "[fault]\nkind", "is not TOML|fault must be a list"),
    ("[model]", "[detect]\nslow = 1.0\n[model]", "\\[detect\\].*must be at least 1 and below slow"),
    ("[model]", "[policy]\ninterleave = 2\n[model]", "interleave = 2: the simulator plays plain stages"),
    ("[model]", "[times]\nplaning = 1.0\n[model]", "no key 'planing' \\(= 1.0\\): did you mean 'planning'\\?"),
    ("[model]", "[times]\nnoise = -1.0\n[model]", "noise = -1.0 must be between"),
    ("[model]", "[restart]\ncheckpoint_steps = 0\n[model]", "checkpoint_steps at least 1"),
    ("[model]", "[random]\nslow_per_device_day = 1.0\n[model]", "\\[random\\] needs hours"),
    ("seed = 3", "seed = [", "is not TOML"),
]


@pytest.mark.parametrize(("old", "new", "wrong"), BAD, ids=[new[:40] or old for old, new, _ in BAD])
def test_a_wrong_scenario_is_refused_by_key_and_value(old: str, new: str, wrong: str) -> None:
    text = (SMALL + SLOW).replace(old, new, 1)
    assert text != SMALL + SLOW
    with pytest.raises(ConfigError, match=wrong) as refused:
        parse(text, "bad.toml")
    assert str(refused.value).startswith("bad.toml")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the scenario nowhere\.toml"):
        load("nowhere.toml")


def test_drawn_faults_are_a_function_of_the_seed_and_come_in_pairs() -> None:
    settings = RandomFaults(slow_per_device_day=2.0, hours=3.0)
    names = [f"n0/{i}" for i in range(50)]
    drawn = draw(settings, names, DAY, 1)
    assert drawn == draw(settings, names, DAY, 1)
    assert drawn != draw(settings, names, DAY, 2)
    assert [f.seconds for f in drawn] == sorted(f.seconds or 0.0 for f in drawn)
    by_device: dict[str, list[Fault]] = {}
    for fault in drawn:
        assert settings.least <= fault.factor <= settings.most or fault.kind == "recover"
        by_device.setdefault(fault.device, []).append(fault)
    for faults in by_device.values():
        assert [f.kind for f in faults] == (["slow", "recover"] * len(faults))[: len(faults)]
    slow = sum(f.kind == "slow" for f in drawn)
    assert 60 < slow < 120, "two a day and device, less the hours in which a device is slow already"


def test_drawn_deaths_leave_what_is_slow_as_it_was_and_each_is_repaired() -> None:
    names = [f"n0/{i}" for i in range(50)]
    slow = RandomFaults(slow_per_device_day=2.0, hours=3.0)
    both = RandomFaults(slow_per_device_day=2.0, hours=3.0, stop_per_device_day=1.0, repair_hours=2.0)
    drawn = draw(both, names, DAY, 1)
    assert [f for f in drawn if f.speed] == list(draw(slow, names, DAY, 1))
    by_device: dict[str, list[str]] = {}
    for fault in drawn:
        if not fault.speed:
            by_device.setdefault(fault.device, []).append(fault.kind)
    for kinds in by_device.values():
        assert kinds == (["kill", "join"] * len(kinds))[: len(kinds)]
    assert 25 < sum(kinds.count("kill") for kinds in by_device.values()) < 75


def test_a_seed_that_is_given_draws_other_faults() -> None:
    text = SMALL.replace("steps = 90", "hours = 24.0") + "[random]\nslow_per_device_day = 5.0\n"
    assert parse(text, "x.toml").faults == parse(text, "x.toml", seed=3).faults
    assert parse(text, "x.toml").faults != parse(text, "x.toml", seed=4).faults


@pytest.mark.parametrize(("name", "billions"), [("llama-32b", 32), ("llama-70b", 70), ("llama-110b", 110)])
def test_a_preset_is_as_large_as_its_name_says(name: str, billions: float) -> None:
    spec = model_spec(name, PRESETS[name])
    count = sum(
        p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1)
        for section in (spec.embed, *(spec.kinds[kind] for kind in spec.layers), spec.head)
        for p in section
    )
    assert count / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_can_be_read(path: Path) -> None:
    assert load(path).faults


def test_scenarios_are_shipped_for_all_three_models_and_a_day() -> None:
    names = {path.stem for path in SHIPPED}
    assert {"walk-32b", "walk-70b", "walk-110b", "day-1024"} <= names
