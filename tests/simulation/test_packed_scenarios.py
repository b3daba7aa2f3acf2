"""Packed jobs in the simulator: corpora, other planners on the same steps, controllers that do not fight."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from elasticd_planner.policy.stability import FREE, first_wait

from elasticd.config.tree import ConfigError
from elasticd.simulator.results.baselines import truth_of
from elasticd.simulator.results.packed_baselines import PLANNERS
from elasticd.simulator.results.result import Totals
from elasticd.simulator.run import Simulation, simulate
from elasticd.simulator.scenarios.corpus import BASELINES, CORPORA, Corpus
from elasticd.simulator.scenarios.scenario import Scenario, load, parse
from tests import sizes

#: Two lanes of two devices, whose groups have room for uneven shares.
SCENARIO = """
seed = 3
steps = {steps}
settle = 100000

[cluster]
nodes = 2
devices = 2
memory = "{memory}"
flops = 1e12
assumed = 1.3e12
inside = {{bandwidth = 2e10, latency = 1e-5}}
between = {{bandwidth = 5e9, latency = 2e-5}}

[model]
layers = 12
width = 512
heads = 8
kv_heads = 4
hidden = 1408
global_batch = 24

[data]
lognormal = [6.5, 1.0]
longest = 3000
row_tokens = 2048
{data}

[policy]
paused = {paused}
"""


def scenario(
    steps: int = 8,
    memory: str = "1536 MiB",
    data: str = "",
    *,
    paused: bool = False,
    oscillates: int = 0,
    factor: float = 2.5,
) -> Scenario:
    """A packed job. `oscillates`: after so many steps a device becomes slow, after as many normal again."""
    text = SCENARIO.format(steps=steps, memory=memory, data=data, paused=str(paused).lower())
    for number, at in enumerate(range(25, steps, oscillates) if oscillates else ()):
        slow = number % 2 == 0
        text += f'\n[[fault]]\nkind = "{"slow" if slow else "recover"}"\ndevice = "n0/1"\nstep = {at}\n'
        text += f"factor = {factor}\n" if slow else ""
    return parse(text, "packed")


def totals(given: Scenario) -> Totals:
    """elasticd's part alone."""
    simulation = Simulation(given)
    simulation.run()
    assert not simulation.stopped
    return simulation._totals()


@pytest.mark.parametrize(
    ("oscillates", "memory"),
    sizes.beside([(20, "1536 MiB")], [(20, "1536 MiB"), (20, "1152 MiB"), (7, "1536 MiB")]),
)
def test_the_shares_of_each_step_and_the_plans_do_not_fight_over_a_device_that_oscillates(
    oscillates: int, memory: str
) -> None:
    """Lanes of TP groups: a plan can give the slow member less of each layer, and a step the lane less tokens.
    Each alone helps, and so do both, with no more switches than plans alone may have."""
    steps = sizes.number(full=225, quick=105)

    def played(**changes: object) -> Totals:
        return totals(scenario(steps, memory, oscillates=oscillates, **changes))  # type: ignore[arg-type]

    both, shares, plans = played(), played(paused=True), played(data="follow = false")
    neither = played(paused=True, data="follow = false")
    wait = first_wait(200)
    assert both.switches <= FREE + 1 + 2 * math.log2(steps / 2 / wait + 1)
    assert shares.switches == 0
    assert both.seconds <= 1.02 * min(shares.seconds, plans.seconds)
    assert both.seconds < neither.seconds
    assert shares.seconds < neither.seconds


def test_a_step_takes_what_the_planner_has_predicted() -> None:
    given = scenario()
    simulation = Simulation(given)
    simulation.run()
    plan = simulation.worker_group.plan
    assert plan is not None
    assert plan.packed
    assert plan.prediction is not None
    # The coordinator takes devices for 1.3 times as fast as they are until it has measured.
    expected = plan.prediction.step_seconds * 1.3
    assert simulation.truth.typical(plan) == pytest.approx(expected, rel=0.06)


def test_other_planners_play_the_same_steps_and_take_longer() -> None:
    outcome = simulate(scenario(12, memory="4 GiB"))
    by_name = {each.name: each for each in outcome.totals}
    assert set(by_name) == {
        *("elasticd", "no reaction", "restart without the slow nodes", "bound"),
        *Corpus(corpus="files").baselines,
    }
    assert by_name["no reaction"].seconds < min(by_name["DHP"].seconds, by_name["FlexSP"].seconds)
    # Here small pieces are as fast as large ones, so that one degree for all is as even as can be.
    assert by_name["no reaction"].seconds < 1.05 * by_name["static degrees"].seconds
    assert by_name["bound"].seconds < 1.02 * by_name["no reaction"].seconds
    assert outcome.to_json() == simulate(scenario(12, memory="4 GiB")).to_json(), "the same, to the byte"


def test_the_planners_that_a_scenario_may_name_are_those_that_there_are() -> None:
    assert (*PLANNERS,) == BASELINES


def test_sequences_longer_after_a_shift_are_dealt_and_planned_for() -> None:
    given = scenario(60, memory="4 GiB")
    text = '\n[[fault]]\nkind = "shift"\ntokens = 400\nstep = 30\n'
    made = parse(SCENARIO.format(steps=60, memory="4 GiB", data="", paused="false") + text, "packed")
    simulation = Simulation(made)
    simulation.run()
    kinds = [each.kind for each in simulation.timeline]
    assert kinds.count("planning") > 1
    assert simulation.truth.tokens == 400 < given.model.tokens


@pytest.mark.parametrize("name", CORPORA)
def test_a_scenario_takes_a_corpus_by_its_name(name: str) -> None:
    corpus = Corpus(corpus=name, longest=8192)
    drawn = corpus.drawn(1, 2, 100)
    assert drawn.tolist() == corpus.drawn(1, 2, 100).tolist()
    assert drawn.tolist() != corpus.drawn(1, 3, 100).tolist()
    assert 1 <= drawn.min() <= drawn.max() <= 8192
    typical = corpus.typical(1.0, 64)
    assert typical.mean <= typical.effective <= typical.longest <= 8192


def test_a_scenario_takes_quantiles_and_files_of_lengths(tmp_path: Path) -> None:
    corpus = Corpus(quantiles=((0.0, 10.0), (0.5, 100.0), (1.0, 1000.0)))
    assert float(np.median(corpus.drawn(0, 0, 4000))) == pytest.approx(100, rel=0.1)
    (tmp_path / "lengths.txt").write_text("512 60,4096\n77\n")
    text = SCENARIO.format(steps=3, memory="4 GiB", data='file = "lengths.txt"', paused="false")
    path = tmp_path / "packed.toml"
    path.write_text(text.replace("lognormal = [6.5, 1.0]\n", "").replace("longest = 3000", "longest = 4096"))
    made = load(path)
    assert made.data is not None
    assert {*made.data.drawn(0, 0, 100).tolist()} == {512, 60, 4096, 77}
    assert made.model.tokens == round(made.data.mean)
    truth_of(made)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('corpus = "wikipedia"', "give one of corpus, quantiles, lognormal and file"),
        ("longest = 0", "longest = 0"),
        ('baselines = ["Megatron"]', "'Megatron' must be one of DHP"),
        ('file = "none.txt"', "none.txt"),
        ("row_tokens = -1", "row_tokens = -1"),
    ],
)
def test_a_section_of_data_that_makes_no_sense_is_refused_by_its_key(data: str, said: str) -> None:
    text = SCENARIO.format(steps=3, memory="4 GiB", data=data, paused="false")
    name = data.split(" = ")[0]
    lines = [line for line in text.splitlines() if not line.startswith(f"{name} =") or line == data]
    with pytest.raises(ConfigError, match=said):
        parse("\n".join(lines), "packed")


def test_a_corpus_that_makes_no_sense_is_refused() -> None:
    for wrong in (
        {"corpus": "books"},
        {"lognormal": (1.0,)},
        {"lognormal": (1.0, 0.0)},
        {"quantiles": ((0.1, 5.0), (1.0, 7.0))},
        {"quantiles": ((0.0, 5.0), (1.0, 4.0))},
        {"lengths": (3, 0)},
        {},
    ):
        with pytest.raises(ValueError, match=r"must|give one"):
            Corpus(**wrong)  # type: ignore[arg-type]
