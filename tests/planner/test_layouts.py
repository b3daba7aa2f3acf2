"""Layouts of random plans: every element held, every member's boxes, gradients as terms of a sum."""

from typing import Any

import numpy as np
import pytest
from elasticd_planner.layout.layouts import Layouts, sections_of
from elasticd_planner.spec.box import Box, Holding
from elasticd_planner.spec.model import member_box
from elasticd_planner.spec.plan import Plan, StatePolicy
from hypothesis import given, settings

from tests.planner.drawn_plans import SPEC as DRAWN_SPEC
from tests.planner.drawn_plans import drawn_plan
from tests.planner.models import LAYERS, SPEC, plan, plans
from tests.sizes import examples


@settings(max_examples=examples(40))
@given(plans())
def test_every_lane_covers_every_parameter(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    for name in layouts.names:
        layout = layouts.parameter(name)
        for lane in made.by_lane:
            members = {device for stage in lane.stages for device in stage.devices}
            covered = np.zeros(layout.shape, dtype=bool)
            for holding in layout.holdings:
                if holding.device in members:
                    covered[holding.box.slices(Box.whole(layout.shape))] = True
            assert covered.all(), name


@settings(max_examples=examples(40))
@given(plans())
def test_what_a_device_holds_is_what_the_layouts_say_it_holds(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    for device in made.members:
        held = layouts.of(device)
        for name in layouts.names:
            boxes = layouts.parameter(name).of(device)
            assert boxes == held.get(name, ())
    assert layouts.of("n9/9") == {}


def test_names_leave_out_aliases_of_tied_parameters() -> None:
    names = Layouts(SPEC, plan((1, [(LAYERS, ["n0/0"], [1])]))).names
    assert "embed.tokens.weight" in names
    assert "head.output.weight" not in names
    assert len(names) == 1 + 6 * LAYERS + 1


def test_tied_parameters_on_two_stages_are_held_by_both_and_add() -> None:
    split = plan((2, [(1, ["n0/0"], [1]), (2, ["n0/1"], [1])]))
    gradient = Layouts(SPEC, split).gradient("embed.tokens.weight")
    assert [(h.device, h.partial) for h in gradient.holdings] == [("n0/0", "0.0"), ("n0/1", "0.1")]


def test_tied_parameters_on_one_stage_are_one_term() -> None:
    one = plan((2, [(LAYERS, ["n0/0", "n0/1"], [1, 1])]))
    gradient = Layouts(SPEC, one).gradient("embed.tokens.weight")
    assert [(h.device, h.partial) for h in gradient.holdings] == [("n0/0", "0.0"), ("n0/1", "0.0")]


def test_a_group_wider_than_the_kv_heads_replicates_them_as_terms() -> None:
    wide = plan((2, [(LAYERS, [f"n0/{i}" for i in range(4)], [1, 1, 1, 1])]))
    layouts = Layouts(SPEC, wide)
    kv = layouts.gradient("blocks.0.k.weight").holdings
    assert [h.box.start[0] for h in kv] == [0, 0, 2, 2]
    assert len({h.partial for h in kv}) == 4
    norm = layouts.gradient("blocks.0.norm.weight").holdings
    assert {h.partial for h in norm} == {"0.0"}


def test_pipelines_add_even_where_they_hold_the_same_box() -> None:
    twice = plan((1, [(LAYERS, ["n0/0"], [1])]), (1, [(LAYERS, ["n0/1"], [1])]))
    terms = [h.partial for h in Layouts(SPEC, twice).gradient("blocks.0.norm.weight").holdings]
    assert terms == ["0.0", "1.0"]


def test_the_parameter_layout_is_that_of_the_rules() -> None:
    uneven = plan((1, [(LAYERS, ["n0/0", "n0/1"], [3, 1])]))
    layout = Layouts(SPEC, uneven).parameter("blocks.1.q.weight")
    q = SPEC.kinds[0][1]
    assert [h.box for h in layout.holdings] == [member_box(SPEC, q, (3, 1), i) for i in (0, 1)]
    assert all(h.partial is None for h in layout.holdings)


def test_holdings_are_made_for_what_is_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are made lazily: for a family of parameters at a time, when the first of them is asked for."""
    made: list[str] = []

    def counted(**fields: Any) -> Holding:
        made.append(fields["device"])
        return Holding(**fields)

    monkeypatch.setattr("elasticd_planner.layout.layouts.Holding", counted)
    plan = drawn_plan(4, carriers=False).replace(state=StatePolicy())
    found = Layouts(DRAWN_SPEC, plan)
    assert made == [], "nobody has asked"
    holders = found.parameter("blocks.0.q.weight").holdings
    assert len(made) == len(holders)
    for _ in range(2):
        found.parameter("blocks.0.q.weight")
    assert len(made) == len(holders)
    stages = [set(sections_of(DRAWN_SPEC, stage)) for _, _, stage in plan.walk()]
    alike = [n for n in range(12) if all((f"blocks.{n}" in s) == ("blocks.0" in s) for s in stages)]
    assert len(alike) > 1
    for number in alike:
        assert found.parameter(f"blocks.{number}.q.weight").holdings is holders
    assert len(made) == len(holders), "they are of one family"
