"""A plan's invariants, its JSON and its digest."""

from typing import Any

import msgspec
import pytest
from elasticd_planner.spec.plan import (
    Edge,
    ModulePlan,
    PackedLane,
    Pipeline,
    Place,
    Plan,
    Prediction,
    Stage,
    StatePolicy,
    Strategy,
)
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import plan, planned, plans
from tests.sizes import examples

SIMPLE = plan(
    (5, [(2, ["n0/0", "n0/1"], [6, 2]), (1, ["n1/0"], [1])]),
    (3, [(3, ["n1/1"], [1])]),
    idle=("n2/0",),
)


def group(width: int, lanes: tuple[int, ...] = ()) -> Stage:
    """One layer on a node's first devices."""
    devices = tuple(f"n0/{i}" for i in range(width))
    return Stage(start=0, stop=1, devices=devices, shares=(1,) * width, lanes=lanes)


def lanes(rows: tuple[int, ...], micro_batches: int) -> Pipeline:
    """Two lanes of one device."""
    return Pipeline(stages=(group(2, lanes=(1, 1)),), micro_batches=micro_batches, rows=rows)


@settings(max_examples=examples(50))
@given(plans())
def test_a_plan_survives_json(made: Plan) -> None:
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.digest == made.digest
    assert again.members == made.members


def test_rank_follows_pipeline_stage_and_position() -> None:
    assert SIMPLE.members == ("n0/0", "n0/1", "n1/0", "n1/1")
    assert SIMPLE.places["n1/0"] == Place(pipeline=0, stage=1, position=0)
    assert SIMPLE.rank("n1/1") == 3
    assert SIMPLE.stage(SIMPLE.places["n0/1"]).fraction(1) == 0.25


def test_digest_is_the_same_in_every_process_and_release() -> None:
    assert SIMPLE.digest == DIGEST


DIGEST = "3df1e2b91f4cd00c"


def test_digest_covers_layout_batch_and_binding_and_nothing_else() -> None:
    same = SIMPLE.replace(
        number=7, reason="other words", prediction=Prediction(step_seconds=1, bound_seconds=1), idle=()
    )
    assert same.digest == SIMPLE.digest
    bound = SIMPLE.replace(binding={name: f"worker of {name}" for name in SIMPLE.members})
    other = bound.replace(binding={**bound.binding, "n0/0": "its next incarnation"})
    shares = plan((5, [(2, ["n0/0", "n0/1"], [5, 3]), (1, ["n1/0"], [1])]), (3, [(3, ["n1/1"], [1])]))
    batch = plan((4, [(2, ["n0/0", "n0/1"], [6, 2]), (1, ["n1/0"], [1])]), (4, [(3, ["n1/1"], [1])]))
    assert len({p.digest for p in (SIMPLE, bound, other, shares, batch)}) == 5


def test_digest_does_not_depend_on_the_order_in_which_bindings_were_made() -> None:
    names = SIMPLE.members
    forth = SIMPLE.replace(binding={name: name for name in names})
    back = SIMPLE.replace(binding={name: name for name in reversed(names)})
    assert forth.digest == back.digest


def test_placed_experts_make_a_plan_of_version_4_and_go_with_other_layers() -> None:
    stage = Stage(start=0, stop=2, devices=("a", "b", "c"), shares=(1, 1, 1), lanes=(2, 1))
    held = (((0, 2), (), (1,)), ())
    placed = msgspec.structs.replace(stage, experts=held)
    assert [lane.experts for lane in placed.by_lane] == [(((0, 2), ()), ()), (((1,),), ())]
    assert (placed.experts_of(0), placed.experts_of(1), stage.experts_of(0)) == (held[0], (), ())
    assert msgspec.structs.replace(stage, experts=((), ())) == stage
    pipeline = Pipeline(stages=(placed,), micro_batches=2, rows=(1, 1))
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),))
    plan = Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=2)
    assert plan.version == 4
    assert Plan.from_json(plan.to_json()) == plan
    assert pipeline.with_layers([2]).stages == (stage,)


def test_splits_go_with_the_experts_and_lanes_have_the_parts_of_their_own_devices() -> None:
    stage = Stage(
        start=0,
        stop=1,
        devices=("a", "b", "c"),
        shares=(1, 1, 1),
        lanes=(2, 1),
        experts=(((0, 1), (0, 1), (0, 1)),),
        splits=(((0, 1, 2, 5), (1, 0, 0, 1)),),
    )
    assert [lane.splits for lane in stage.by_lane] == [(((0, 1, 2),),), ()]
    assert stage.splits_of(0) == ((0, 1, 2, 5), (1, 0, 0, 1))
    assert msgspec.structs.replace(stage, splits=((),)).splits == ()


@pytest.mark.parametrize("split", [(), (0, 1), (2, 1, 1), (0, 1, 1, 1), (0, 0, 0), (0, -1, 2)])
def test_a_split_of_other_devices_than_have_the_expert_is_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(Invalid, match="a split of block 0 must be an expert that several devices have"):
        Stage(
            start=0,
            stop=1,
            devices=("a", "b"),
            shares=(1, 1),
            experts=(((0, 1), (0, 2)),),
            splits=((split,),),
        )


def test_two_splits_of_one_expert_are_refused() -> None:
    with pytest.raises(Invalid, match="block 0 has two splits of one expert"):
        Stage(
            start=0,
            stop=1,
            devices=("a", "b"),
            shares=(1, 1),
            experts=(((0, 1), (0, 2)),),
            splits=(((0, 1, 3), (0, 3, 1)),),
        )


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ((((0,), (1,)),), "experts must say of each of its 2 blocks who has which"),
        ((((0,), (1,)), ((0,),)), "experts of block 1 must be those of each of its 2 devices, not of 1"),
        ((((1, 1), ()), ()), "a has expert 1 of block 0 twice"),
        ((((), (2, 1)), ()), r"the experts of block 0 on b must be in order, from 0, not \(2, 1\)"),
        ((((-1,), ()), ()), r"the experts of block 0 on a must be in order, from 0, not \(-1,\)"),
    ],
)
def test_placed_experts_that_do_not_fit_their_stage_are_refused(experts: Any, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        Stage(start=0, stop=2, devices=("a", "b"), shares=(1, 1), experts=experts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage(start=1, stop=1, devices=("n0/0",), shares=(1,)), "must not be empty"),
        (lambda: Stage(start=0, stop=1, devices=("n0/0",), shares=(1, 1)), "1 devices need as many shares"),
        (lambda: Stage(start=0, stop=1, devices=("n0/0",), shares=(0,)), "positive integers"),
        (lambda: Pipeline(stages=(), micro_batches=1), "must start at layer 0"),
        (lambda: plan((0, [(1, ["n0/0"], [1])])), "micro_batches must be at least 1"),
        (
            lambda: Pipeline(
                stages=tuple(Stage(start=a, stop=a + 1, devices=(f"n0/{a}",), shares=(1,)) for a in (0, 2)),
                micro_batches=1,
            ),
            "ends at layer 1, the next starts at 2",
        ),
        (lambda: ModulePlan(module="model", pipelines=()), "needs at least one pipeline"),
        (
            lambda: plan((1, [(1, ["n0/0"], [1])]), (1, [(2, ["n0/1"], [1])])),
            "different numbers of layers",
        ),
        (lambda: plan((1, [(1, ["n0/0", "n0/0"], [1, 1])])), "device n0/0 is placed twice"),
        (lambda: SIMPLE.replace(idle=("n0/1",)), "device n0/1 is placed twice"),
        (lambda: SIMPLE.replace(global_batch=9), "takes 8 samples a step, the global batch is 9"),
        (lambda: SIMPLE.replace(strategies=()), "exactly one strategy"),
        (lambda: SIMPLE.replace(binding={"n0/0": "x"}), "binding must name exactly the members"),
        (lambda: SIMPLE.replace(version=5), "version 5 .* reads versions 1 to 4"),
        (lambda: group(3, lanes=(2, 2)), r"lanes of \(2, 2\) devices must have one each and be 3 in all"),
        (lambda: group(3, lanes=(3, 0)), r"lanes of \(3, 0\) devices must have one each"),
        (lambda: lanes((1, 1), micro_batches=4), r"rows \(1, 1\) must say how many of its 4 micro-batches"),
        (lambda: lanes((4, 0), micro_batches=4), "each of 2 lanes has, at least 1"),
        (lambda: lanes((), micro_batches=4), r"rows \(\) must say .* each of 2 lanes"),
        (
            lambda: lanes((1,), micro_batches=1),
            "2 lanes need a micro-batch each, .* batch is 1: give it fewer lanes",
        ),
        (
            lambda: Pipeline(stages=(group(1),), micro_batches=3, rows=(2, 1)),
            r"rows \(2, 1\) must say .* each of 1 lane has",
        ),
        (
            lambda: Pipeline(
                stages=(
                    group(2, lanes=(1, 1)),
                    Stage(start=1, stop=2, devices=("n1/0",), shares=(1,)),
                ),
                micro_batches=2,
                rows=(1, 1),
            ),
            "all stages need the same number of lanes, not 2, 1",
        ),
        (lambda: StatePolicy(zero=1), "needs replicas"),
        (lambda: StatePolicy(zero=3, replicas=1), "must be 0, 1 or 2"),
        (lambda: StatePolicy(replicas=2), "go with zero 1 or 2"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        make()  # type: ignore[operator]


#: Two lanes, one of them with tensor parallelism on the first stage, before a pipeline of one device.
LANES = planned(
    Pipeline(
        stages=(
            Stage(start=0, stop=2, devices=("n0/0", "n0/1", "n1/0"), shares=(3, 1, 5), lanes=(2, 1)),
            Stage(start=2, stop=3, devices=("n0/2", "n1/1"), shares=(1, 1), lanes=(1, 1)),
        ),
        micro_batches=5,
        rows=(3, 2),
    ),
    Pipeline(stages=(Stage(start=0, stop=3, devices=("n2/0",), shares=(1,)),), micro_batches=1),
)


def test_a_lane_is_seen_as_a_pipeline_of_its_own() -> None:
    assert LANES.members == ("n0/0", "n0/1", "n0/2", "n1/0", "n1/1", "n2/0"), "lane by lane"
    assert LANES.places["n1/1"] == Place(pipeline=0, stage=1, position=0, lane=1)
    tensor = LANES.places["n0/1"]
    assert LANES.stage(tensor).devices == ("n0/0", "n0/1")
    assert LANES.stage(tensor).fraction(tensor.position) == 0.25
    assert [LANES.pipelines[0].stages[0].fraction(i) for i in range(3)] == [0.75, 0.25, 1.0]
    assert [LANES.pipeline(place).micro_batches for place in LANES.places.values()] == [3, 3, 3, 2, 2, 1]
    assert [stage.devices for _, _, stage in LANES.walk()] == [
        ("n0/0", "n0/1"),
        ("n0/2",),
        ("n1/0",),
        ("n1/1",),
        ("n2/0",),
    ]
    assert LANES.tp_widths == {2}
    assert LANES.seats.lane.tolist() == [0, 0, 1, 1, 2]
    assert LANES.seats.part.tolist() == [0.75, 0.25, 1.0, 1.0, 1.0, 1.0]


def test_a_single_lane_is_written_as_before() -> None:
    """Whoever says it as lanes gets the same plan, bytes and digest."""
    stages = tuple(msgspec.structs.replace(stage, lanes=stage.widths) for stage in SIMPLE.pipelines[0].stages)
    first = Pipeline(stages=stages, micro_batches=5, rows=(5,))
    said = planned(first, SIMPLE.pipelines[1], idle=("n2/0",))
    assert said.to_json() == SIMPLE.to_json()
    assert b"lanes" not in said.to_json()
    assert b"rows" not in said.to_json()
    assert (said.version, said.digest) == (1, DIGEST)


def test_lanes_have_a_version_that_older_releases_refuse() -> None:
    assert LANES.version == 3
    assert Plan.from_json(LANES.to_json()) == LANES
    apart = planned(*LANES.by_lane)
    assert apart.version == 1
    assert apart.digest != LANES.digest
    tree = msgspec.json.decode(LANES.to_json())
    assert tree["version"] == 3
    assert tree["strategies"][0]["modules"][0]["pipelines"][0]["rows"] == [3, 2]


@settings(max_examples=examples(50))
@given(plans(), st.data())
def test_views_are_the_plans_of_the_modules(first: Plan, data: st.DataObject) -> None:
    """However many devices are in both modules, and wherever they stand in the second."""
    shared = data.draw(st.permutations(first.members))
    count = data.draw(st.integers(0, len(shared)))
    names = dict(
        zip(first.members, [*shared[:count], *(f"x/{i}" for i in range(count, len(shared)))], strict=True)
    )

    def renamed(stage: Stage) -> Stage:
        return msgspec.structs.replace(stage, devices=tuple(names[device] for device in stage.devices))

    pipelines = tuple(
        msgspec.structs.replace(pipeline, stages=tuple(map(renamed, pipeline.stages)))
        for pipeline in first.pipelines
    )
    alone = first.replace(carriers=(), idle=(), binding={}, prediction=None)
    vision = ModulePlan(module="vision", pipelines=pipelines, items="images")
    second = alone.replace(strategies=(Strategy(modules=(vision,)),))
    edges = (Edge(source="vision", target="model"),)
    both = alone.replace(strategies=(Strategy(modules=(*first.modules, vision), edges=edges),))
    both = both.replace(binding={device: f"i-{device}" for device in both.members})
    for each in (alone, second):
        view = both.view(each.module.module)
        assert view.replace(binding={}) == each
        assert view.places == each.places
        assert view.binding == {device: f"i-{device}" for device in each.members}
    assert {*both.members} == {*alone.members, *second.members}
    assert both.members[: len(alone.members)] == alone.members


def test_json_that_breaks_an_invariant_names_the_place() -> None:
    tree = msgspec.json.decode(SIMPLE.to_json())
    tree["strategies"][0]["modules"][0]["pipelines"][0]["stages"][0]["shares"] = [1, 0]
    with pytest.raises(msgspec.ValidationError, match=r"positive integers.*pipelines\[0\]\.stages\[0\]"):
        Plan.from_json(msgspec.json.encode(tree))


def test_the_gap_says_how_far_from_optimal_a_plan_can_be() -> None:
    assert Prediction(step_seconds=1.1, bound_seconds=1.0).gap == pytest.approx(0.1)
    assert Prediction(step_seconds=1.1, bound_seconds=0.0).gap == 0.0


def test_a_device_has_at_most_one_place_in_each_module() -> None:
    pipeline = SIMPLE.pipelines[0]
    others = Pipeline(
        stages=(Stage(start=0, stop=1, devices=("n9/0", pipeline.stages[0].devices[0]), shares=(1, 1)),),
        micro_batches=SIMPLE.global_batch // SIMPLE.micro_batch,
    )
    vision = ModulePlan(module="vision", pipelines=(others,), items="images")
    edges = (Edge(source="vision", target="model"),)
    both = SIMPLE.replace(strategies=(Strategy(modules=(*SIMPLE.modules, vision), edges=edges),))
    shared = pipeline.stages[0].devices[0]
    assert both.members == (*SIMPLE.members, "n9/0")
    assert both.version == 4
    assert Plan.from_json(both.to_json()) == both
    for question in ("pipelines", "by_lane", "places", "seats", "module"):
        with pytest.raises(Invalid, match="it has the modules model, vision, each of which has pipelines"):
            getattr(both, question)
    assert both.view("model") == SIMPLE.replace(idle=())
    assert both.view("model").places == SIMPLE.places
    assert both.view("vision").pipelines == (others,)
    assert both.view("vision").members == ("n9/0", shared)
    assert both.view("vision").version == 4
    assert both.view("model").version == 1
    assert both.loss_module == both.view("model").loss_module == SIMPLE.module
    with pytest.raises(Invalid, match="module vision takes items, and has no loss"):
        _ = both.view("vision").loss_module
    with pytest.raises(Invalid, match="it has no module 'audio'"):
        both.view("audio")
    assert SIMPLE.view("model") is SIMPLE
    twice = msgspec.structs.replace(
        others, stages=(msgspec.structs.replace(others.stages[0], devices=(shared,) * 2),)
    )
    with pytest.raises(Invalid, match=f"device {shared} is placed twice"):
        SIMPLE.replace(strategies=(Strategy(modules=(ModulePlan(module="vision", pipelines=(twice,)),)),))


# -- several modules -------------------------------------------------------------------------------------------


def of_items(name: str = "vision", *, items: str = "images", **rest: Any) -> ModulePlan:
    """A module of three layers on a device of its own and on one of SIMPLE's."""
    pipelines = tuple(
        Pipeline(stages=(Stage(start=0, stop=3, devices=(device,), shares=(1,)),), micro_batches=weight)
        for device, weight in ((f"{name}/0", 1), (SIMPLE.members[0], 2))
    )
    return ModulePlan(module=name, pipelines=pipelines, items=items, **rest)


def modules(*others: ModulePlan, edges: str = "vision model") -> Plan:
    """These modules beside SIMPLE's, with edges as "source target, source target"."""
    listed = tuple(Edge(source=a, target=b) for a, b in (edge.split() for edge in edges.split(",") if edge))
    return SIMPLE.replace(strategies=(Strategy(modules=(*SIMPLE.modules, *others), edges=listed),), idle=())


def test_a_module_of_items_has_weights_and_says_how_early_its_passes_run() -> None:
    plan = modules(of_items(ahead=4, lead=2))
    assert plan.version == 4
    assert Plan.from_json(plan.to_json()) == plan
    tree = msgspec.json.decode(plan.to_json())
    model, vision = tree["strategies"][0]["modules"]
    assert {*model} == {"module", "pipelines", "trainable"}
    assert (vision["items"], vision["ahead"], vision["lead"], vision["trainable"]) == ("images", 4, 2, True)
    assert {*msgspec.json.decode(modules(of_items()).to_json())["strategies"][0]["modules"][1]} == {
        *("module", "pipelines", "trainable", "items")
    }
    assert modules(of_items(ahead=4, lead=1)).digest != plan.digest


def test_times_of_passes_make_a_plan_of_version_4_and_go_with_other_layers() -> None:
    (first, second), *_ = (pipeline.stages for pipeline in SIMPLE.pipelines)
    timed = msgspec.structs.replace(first, microseconds=(1000, 2000))
    pipeline = msgspec.structs.replace(SIMPLE.pipelines[0], stages=(timed, second))
    plan = SIMPLE.replace(
        strategies=(
            Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline, *SIMPLE.pipelines[1:])),)),
        )
    )
    assert plan.version == 4
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.to_json().count(b"microseconds") == 1
    again = plan.to_json().replace(b"[1000,2000]", b"[0,0]")
    assert Plan.from_json(again).to_json() == SIMPLE.to_json()
    sizes = [stage.layers for stage in pipeline.stages]
    assert pipeline.with_layers(sizes) == SIMPLE.pipelines[0]
    with pytest.raises(Invalid, match=r"microseconds of its passes must not be negative, not \(-1, 2\)"):
        msgspec.structs.replace(first, microseconds=(-1, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_items(ahead=0), "module vision: ahead must be at least 1 micro-batch, not 0"),
        (lambda: of_items(ahead=2, lead=3), "module vision: lead must be from 0 to ahead, 2, not 3"),
        (lambda: of_items(lead=-1), "lead must be from 0 to ahead, 1, not -1"),
        (lambda: of_items(items="", ahead=2), "ahead, lead and item_rows are of modules of items"),
        (lambda: modules(of_items(), edges=""), "vision takes images and has 0 edges: it needs one, to model"),
        (
            lambda: modules(of_items(), edges="vision model,vision model"),
            "vision takes images and has 2 edges: it needs one, to model",
        ),
        (lambda: modules(of_items(items="")), "one takes samples .* here 2 take samples: model, vision"),
        (
            lambda: SIMPLE.replace(
                strategies=(
                    Strategy(
                        modules=(of_items("vision"), of_items("audio")),
                        edges=(Edge(source="vision", target="audio"),),
                    ),
                )
            ),
            "here 0 take samples: none",
        ),
        (lambda: modules(of_items(), of_items()), "2 modules are named 'vision'"),
        (
            lambda: modules(of_items(), edges="vision text"),
            "edge vision -> text: there is no module 'text'",
        ),
        (
            lambda: modules(of_items(), edges="audio model"),
            "edge audio -> model: there is no module 'audio'",
        ),
        (
            lambda: modules(of_items(), of_items("audio"), edges="vision model,model audio,audio vision"),
            "in a cycle: (vision -> model -> audio -> vision|model -> audio -> vision -> model"
            "|audio -> vision -> model -> audio)",
        ),
        (lambda: modules(of_items(), edges="vision vision"), "in a cycle: vision -> vision"),
        (
            lambda: modules(of_items(), of_items("audio"), edges="vision model,audio vision"),
            "audio feeds vision, and modules of items feed model directly: encoders of encoders are not",
        ),
        (lambda: modules(of_items(), edges="model vision"), "model feeds vision"),
        (
            lambda: modules(of_items()).replace(global_batch=9),
            "module model takes 8 samples a step, the global batch is 9",
        ),
    ],
)
def test_modules_that_do_not_fit_each_other_are_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        make()  # type: ignore[operator]


def test_of_several_modules_that_with_the_loss_alone_may_be_packed() -> None:
    def packed(pipelines: tuple[Pipeline, ...]) -> tuple[Pipeline, ...]:
        return tuple(msgspec.structs.replace(each, packed=(PackedLane(capacity=64),)) for each in pipelines)

    def of_two(*, items: bool) -> Plan:
        vision = of_items().pipelines
        modules = (
            ModulePlan(module="model", pipelines=packed(SIMPLE.pipelines)),
            ModulePlan(module="vision", items="images", pipelines=packed(vision) if items else vision),
        )
        strategy = Strategy(modules=modules, edges=(Edge(source="vision", target="model"),))
        return SIMPLE.replace(strategies=(strategy,))

    plan = of_two(items=False)
    assert plan.packed
    assert plan.loss_view.packed
    assert not plan.view("vision").packed
    with pytest.raises(Invalid, match="module vision takes images, one at a time: only the module"):
        of_two(items=True)
