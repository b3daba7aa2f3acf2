"""Rows that go to experts of other lanes are in the mean those of a count over all choices that there are."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product

import msgspec
import pytest
from elasticd_planner.cost.expert_messages import expert_flows, met_parts
from elasticd_planner.cost.model_profile import ExpertProfile
from elasticd_planner.layout.explained_plan import listed
from elasticd_planner.spec.plan import HeldExperts, Pipeline, Plan, SplitExperts, Stage, Strategy

from tests.planner.models import plan as plan_of

EXPERTS, CHOSEN = 6, 2
HELD: HeldExperts = ((0, 1, 5), (0, 2), (3, 4))
#: Experts 0 and 3 are on two devices, 5 on three.
SEVERAL: HeldExperts = ((0, 1, 5), (0, 2, 3, 5), (3, 4, 5))


def brute_force(weights: list[float], chosen: int, held: HeldExperts, splits: SplitExperts = ()) -> list[float]:
    """The chance of each device to have a row, over all sets of experts and many numbers of a row."""
    known = {expert: own for expert, *own in splits}
    numbers, met, every = 840, [0.0] * len(held), 0.0

    def holder(expert: int, number: float) -> int:
        places = [place for place, own in enumerate(held) if expert in own]
        parts = known.get(expert, [1] * len(places))
        at = 0
        while number > sum(parts[: at + 1]) / sum(parts):
            at += 1
        return places[at]

    for picked in combinations(range(len(weights)), chosen):
        chance = math.prod(weights[expert] for expert in picked)
        every += chance
        for number in range(numbers):
            for place in {holder(expert, (number + 0.5) / numbers) for expert in picked}:
                met[place] += chance / numbers
    return [each / every for each in met]


@pytest.mark.parametrize("splits", [(), ((0, 3, 1), (5, 1, 4, 2))])
@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("weights", [[1.0] * EXPERTS, [50.0, 20.0, 10.0, 9.0, 1.0, 0.5]])
def test_the_part_of_rows_that_meet_a_device(weights: list[float], chosen: int, splits: SplitExperts) -> None:
    expected = brute_force(weights, chosen, SEVERAL, splits)
    assert met_parts(weights, chosen, SEVERAL, splits) == pytest.approx(expected)


def shared(*, recompute: bool = False) -> Plan:
    """Two nodes, of which n0 has two lanes and n1 one; block 1 has its experts by shares."""
    stage = Stage(
        start=0,
        stop=2,
        devices=("n0/0", "n0/1", "n1/0"),
        shares=(1, 1, 1),
        lanes=(1, 1, 1),
        experts=(HELD, ()),
        recompute=recompute,
    )
    given = plan_of((4, [(2, ["n0/0"], [1])]))
    pipeline = Pipeline(stages=(stage,), micro_batches=4, rows=(2, 1, 1))
    module = msgspec.structs.replace(given.module, pipelines=(pipeline,))
    return given.replace(strategies=(Strategy(modules=(module,)),))


@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_by_level_are_those_of_a_count_row_by_row(recompute: bool) -> None:
    """Of rows that choose each set of two experts once; no expert is on two devices but 0, which sends half."""
    width, item = 16, 4
    rows = [*combinations(range(EXPERTS), CHOSEN)]
    plan = shared(recompute=recompute)
    (stage,) = plan.pipelines[0].stages
    forward, gradients = Counter[str](), Counter[str]()
    again = 2 if recompute else 1
    for source, passes in zip(stage.devices, plan.pipelines[0].rows, strict=True):
        for to in set(stage.devices) - {source}:
            level = "inside nodes" if source[:2] == to[:2] else "between nodes"
            own = HELD[stage.devices.index(to)]
            met = 0.0
            for row in rows:
                there = [expert for expert in row if expert in own]
                halves = [0.5 if expert == 0 else 1.0 for expert in there]
                met += 1 - math.prod(1 - each for each in halves) if there else 0.0
            forward[level] += passes * again * round(met * (width * item + CHOSEN * (item + 2)))
            forward[level] += passes * again * round(met * width * item)
            gradients[level] += passes * (round(met * width * item) + round(met * (width + CHOSEN) * item))
    for one, other in product(stage.devices, repeat=2):
        if (
            one != other
        ):  # counts before the rows, in each of two rounds: the longest lane has two micro-batches
            forward["inside nodes" if one[:2] == other[:2] else "between nodes"] += 48 * 2 * again
    experts = ExpertProfile(part=0.5, chosen=CHOSEN, count=EXPERTS)
    found = listed(expert_flows(plan, experts, len(rows), width * item, item), None)
    assert found.bytes("expert rows") == dict(forward)
    assert found.bytes("expert gradients") == dict(gradients)


def test_lanes_that_have_all_experts_send_nothing() -> None:
    plan = plan_of((4, [(2, ["n0/0", "n0/1"], [1, 1])]))
    experts = ExpertProfile(part=0.5, chosen=CHOSEN, count=EXPERTS)
    assert not list(expert_flows(plan, experts, 10, 64, 4))
