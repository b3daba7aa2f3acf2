"""Plans from annotations, and back: HSPMD's published strategies, drawn plans, and what no plan can be."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.layout.annotated_plan import annotations_of, plan_of
from elasticd_planner.layout.annotations import Annotation, State, alike, annotated
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import ModulePlan, Plan, StatePolicy, Strategy
from elasticd_planner.value import Invalid

from tests import sizes
from tests.migration.plans import SPEC as TIED
from tests.migration.plans import plan
from tests.planner import hspmd_strategies
from tests.planner.drawn_plans import SPEC, drawn_plan

PUBLISHED = {name: rest for name, *rest in hspmd_strategies.strategies()}


def stages(made: Plan) -> list[list[tuple[tuple[tuple[int, int], ...], tuple[str, ...], tuple[int, ...]]]]:
    return [[(s.chunks, s.devices, s.shares) for s in pipeline.stages] for pipeline in made.pipelines]


# -- their strategies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_strategy_becomes_a_plan_and_comes_back_identical(name: str) -> None:
    pipelines, micro_batches, merged = PUBLISHED[name]
    model = hspmd_strategies.spec(len(pipelines[0]))
    configs = hspmd_strategies.theirs(pipelines, merged)
    made = hspmd_strategies.plan(model, configs, micro_batches)
    assert hspmd_strategies.back(model, made, merged) == configs


def test_the_strategy_of_their_readme_has_the_stages_that_it_names() -> None:
    """24 H20 and 15 H800: layers [6, 6, 6, 21, 21] and [6, 6, 6, 22, 13, 7], the last on one device."""
    pipelines, micro_batches, merged = PUBLISHED["case 6"]
    configs = hspmd_strategies.theirs(pipelines, merged)
    assert configs["blocks.59.dense"] == {
        "split": {"0": [4, 1]},
        "dup": [2, 2],
        "device_group_union": [[28, 29, 30, 31], [38]],
        "type": "variable",
    }
    made = hspmd_strategies.plan(hspmd_strategies.spec(60), configs, micro_batches)
    assert [[s.layers for s in p.stages] for p in made.pipelines] == [[6, 6, 6, 21, 21], [6, 6, 6, 22, 13, 7]]
    assert [[len(s.devices) for s in p.stages] for p in made.pipelines] == [[4] * 5, [4, 4, 4, 4, 2, 1]]
    assert [p.micro_batches for p in made.pipelines] == [33, 31]
    assert made.pipelines[1].stages[-1].devices == ("n4/6",)


# -- plans there and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sizes.beside(range(20), range(500)))
def test_a_plan_comes_back_from_its_annotations(seed: int) -> None:
    """Interleaved or not, with uneven shares and kv-heads that follow heads; lanes as pipelines."""
    drawn = drawn_plan(seed)
    module = ModulePlan(module="model", pipelines=drawn.by_lane)
    made = drawn.replace(strategies=(Strategy(modules=(module,)),))
    again = plan_of(
        SPEC, annotations_of(SPEC, drawn), [p.micro_batches for p in made.pipelines], state=made.state
    )
    assert [p.micro_batches for p in again.pipelines] == [p.micro_batches for p in made.pipelines]
    before, after = Layouts(SPEC, made), Layouts(SPEC, again)
    for name in before.names:
        assert after.parameter(name) == before.parameter(name)
        assert after.gradient(name) == before.gradient(name)
    assert [[s[:2] for s in p] for p in stages(again)] == [[s[:2] for s in p] for p in stages(made)]


def test_an_annotation_that_a_plan_gives_says_the_layout_that_the_plan_has() -> None:
    made = plan(1, [(3, [("n0/0", 2), ("n0/1", 2)])], [(2, [("n1/0", 1), ("n1/1", 1)]), (1, [("n2/0", 1)])])
    layouts = Layouts(TIED, made)
    given = annotations_of(TIED, made)
    for name in ("blocks.0.q.weight", "blocks.2.o.weight", "blocks.1.norm.weight"):
        layout = layouts.parameter(name)
        assert given[name].layout(layout.shape).holdings == layout.holdings
        found = annotated(layout)
        assert found is not None
        assert alike(found.layout(layout.shape), layout)


# -- what a user writes --------------------------------------------------------------------------------------

FIRST = Annotation(groups=[("n0/0", "n0/1"), ("n2/0",)], states=[{"tp": (3, 1)}, {}])
SECOND = Annotation(groups=[("n1/0", "n1/1", "n1/2"), ("n2/0",)], states=[{"tp": 3}, {}])


def test_patterns_name_ranges_of_blocks_and_the_first_that_matches_counts() -> None:
    made = plan_of(
        TIED,
        {"blocks.0-1.*": FIRST, "blocks.*": SECOND, "embed.*": FIRST, "head.*": SECOND},
        [5, 3],
        micro_batch=2,
    )
    assert stages(made) == [
        [(((0, 2),), ("n0/0", "n0/1"), (3, 1)), (((2, 3),), ("n1/0", "n1/1", "n1/2"), (1, 1, 1))],
        [(((0, 3),), ("n2/0",), (1,))],
    ]
    assert (made.global_batch, made.micro_batch) == (16, 2)
    assert Plan.from_json(made.to_json()) == made


def test_dimensions_are_named_as_well_and_whole_parameters_need_no_word_but_their_copies() -> None:
    devices = [("n0/0", "n0/1"), ("n1/0",)]

    def split(dim: int) -> Annotation:
        return Annotation(groups=devices, states=[{dim: (3, 1)}, {}])

    made = plan_of(
        TIED,
        {
            "*.norm.weight": Annotation(groups=[("n0/1", "n1/0", "n0/0")], states=[{"same": 3}]),
            "*.scale": Annotation(groups=devices, states=[{"same": 2}, {}]),
            "*.o.weight": split(1),
            "*.down.weight": split(1),
            "*.k.weight": Annotation(groups=devices, states=[{"tp": (3, 1)}, {}]),
            "*.weight": split(0),
        },
        [1, 1],
    )
    assert stages(made) == [[(((0, 3),), ("n0/0", "n0/1"), (3, 1))], [(((0, 3),), ("n1/0",), (1,))]]


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ({"same": 2, "tp": 2}, [("n0/0", "n0/1"), ("n1/0", "n1/1")]),
        ({"tp": 2, "same": 2}, [("n0/0", "n1/0"), ("n0/1", "n1/1")]),
        ({"same": 2, "tp": 2, "sum": 1}, [("n0/0", "n0/1"), ("n1/0", "n1/1")]),
        ({"tp": (1, 1), "same": 2, "sum": 1}, [("n0/0", "n1/0"), ("n0/1", "n1/1")]),
    ],
)
def test_copies_around_parts_are_pipelines_also_beside_axes_of_one(
    state: State, groups: list[tuple[str, str]]
) -> None:
    four = Annotation(groups=[("n0/0", "n0/1", "n1/0", "n1/1")], states=[state])
    made = plan_of(TIED, {"*": four}, [1, 1])
    assert [[s.devices for s in p.stages] for p in made.pipelines] == [[group] for group in groups]


def test_a_dimension_in_one_part_is_not_split() -> None:
    state: State = {0: 2, 1: (7,)}
    both = Annotation(groups=[("n0/0", "n0/1")], states=[state])
    rest = Annotation(groups=both.groups, states=[{"tp": 2}])
    made = plan_of(TIED, {"blocks.*.q.weight": both, "*": rest}, [1])
    assert stages(made) == [[(((0, 3),), ("n0/0", "n0/1"), (1, 1))]]


def test_copies_alone_are_data_parallel() -> None:
    made = plan_of(TIED, {"*": Annotation(groups=[("n0/0", "n0/1")], states=[{"same": 2}])}, [2, 1])
    assert [[s.devices for s in p.stages] for p in made.pipelines] == [[("n0/0",)], [("n0/1",)]]


def test_groups_that_take_turns_are_interleaved_stages() -> None:
    one, other = (Annotation(groups=[(device,)], states=[{}]) for device in ("n0/0", "n0/1"))
    turns = {f"blocks.{b}.*": (one, other)[b % 2] for b in range(12)}
    made = plan_of(SPEC, turns | {"embed.*": one, "head.*": other}, [4])
    assert [s.chunks for s in made.pipelines[0].stages] == [
        tuple((b, b + 1) for b in range(first, 12, 2)) for first in (0, 1)
    ]


def test_the_state_of_the_optimizer_has_its_policy() -> None:
    policy = StatePolicy(zero=1, replicas=2)
    made = plan_of(TIED, {"*": FIRST}, [1, 1], state=policy, number=7, reason="by hand")
    assert (made.state, made.number, made.reason) == (policy, 7, "by hand")


# -- what is refused -----------------------------------------------------------------------------------------

WHOLE = Annotation(groups=[("n0/0", "n0/1")], states=[{"tp": 2}])


def with_first(pattern: str, annotation: Annotation) -> dict[str, Annotation]:
    return {pattern: annotation, "*": WHOLE}


@pytest.mark.parametrize(
    ("annotations", "micro_batches", "said"),
    [
        (
            with_first("*.o.weight", WHOLE.replace(states=[{0: 2}])),
            [1],
            "blocks.0.o.weight is split along dimension 0, its rule cuts dimension 1",
        ),
        (
            with_first("blocks.1.norm.weight", WHOLE.replace(states=[{0: 2}])),
            [1],
            'blocks.1.norm.weight is split along dimension 0, and it has no rule .* give it "same": 2, or',
        ),
        (
            with_first("*.q.weight", Annotation(groups=[[*"abcd"]], states=[{0: 2, 1: 2}])),
            [1],
            r"blocks.0.q.weight is split along dimensions \[0, 1\], and a rule cuts one",
        ),
        (
            with_first("*.q.weight", WHOLE.replace(states=[{"sum": 2}])),
            [1],
            "blocks.0.q.weight: a parameter is no sum",
        ),
        (
            with_first("*.q.weight", Annotation(groups=[[*"a"], [*"b"]], states=[{}, {}], across="sum")),
            [1],
            "blocks.0.q.weight: its groups are 'sum', and those of a parameter are pipelines",
        ),
        (
            with_first("*.q.weight", WHOLE.replace(states=[{0: (2, 1)}])),
            [1],
            r"blocks.0.q.weight is on \(n0/0, n0/1\) in shares \(2, 1\), and blocks.0.norm.weight of the same "
            r"section on \(n0/0, n0/1\);",
        ),
        (
            with_first("blocks.2.norm.weight", Annotation(groups=[("n0/0", "n5/0")], states=[{"same": 2}])),
            [1],
            "blocks.2.norm.weight is on other devices than its section.*: n0/1 differs",
        ),
        (
            {"*": Annotation(groups=[[*"abcde"]], states=[{"tp": 5}])},
            [1],
            "blocks.0.q.weight: 4 heads cannot be split into 5 parts",
        ),
        (
            with_first("*.k.weight", Annotation(groups=[[*"abcd"]], states=[{0: 4}])),
            [1],
            r"blocks.0.k.weight: its 2 kv_heads follow heads, so that 4 devices hold \[1, 1, 1, 1\] of them",
        ),
        (
            {"blocks.*": WHOLE, "head.*": WHOLE},
            [1],
            "embed.tokens.weight: no annotation; none of the patterns",
        ),
        (
            with_first("blocks.3-5.*", WHOLE),
            [1],
            "annotation 'blocks.3-5.\\*' is of no parameter",
        ),
        (
            with_first("head.*", Annotation(groups=[[*"ab"]], states=[{"tp": 2}])),
            [1],
            r"head is on \(a, b\), and block 2 on",
        ),
        (
            with_first("embed.*", Annotation(groups=[[*"ab"]], states=[{"tp": 2}])),
            [1],
            r"embed is on \(a, b\), and block 0 on",
        ),
        (
            with_first("blocks.1.*", Annotation(groups=[("n0/0", "n0/1"), ("n1/0",)], states=[{"tp": 2}, {}])),
            [1],
            "block 1 has 2 groups, and block 0 has 1; each pipeline has all blocks",
        ),
        ({"*": WHOLE}, [1, 1], "micro_batches has 2 entries, and there are 1 pipelines"),
        ({"*": WHOLE}, [0], "pipeline 0: pipeline: micro_batches must be at least 1"),
        (
            with_first("blocks.1.*", Annotation(groups=[[*"ab"]], states=[{"tp": 2}])),
            [1],
            r"pipeline 0 has its blocks in this order: 1 on \(n0/0, n0/1\), 1 on \(a, b\), 1 on \(n0/0, n0",
        ),
        (
            {"blocks.1.*": WHOLE.replace(states=[{"tp": (2, 1)}]), "*": WHOLE},
            [1],
            r"pipeline 0: \(n0/0, n0/1\) in shares \(2, 1\) has other shares of block 1",
        ),
    ],
)
def test_annotations_that_are_no_plan_of_the_model_are_refused_by_name(
    annotations: dict[str, Annotation], micro_batches: list[int], said: str
) -> None:
    with pytest.raises(Invalid, match=said):
        plan_of(TIED, annotations, micro_batches)


def test_a_device_in_two_stages_is_refused() -> None:
    overlapping: dict[str, Any] = {
        "blocks.0.*": Annotation(groups=[[*"ab"]], states=[{"tp": 2}]),
        "embed.*": Annotation(groups=[[*"ab"]], states=[{"tp": 2}]),
        "*": Annotation(groups=[[*"bc"]], states=[{"tp": 2}]),
    }
    with pytest.raises(Invalid, match="device b is placed twice"):
        plan_of(TIED, overlapping, [1])
