"""Mixtures of experts train in TP groups as in one process: in columns of each expert, and expert by expert."""

from __future__ import annotations

import copy
import random
from itertools import cycle, islice
from typing import Any, Literal

import msgspec
import pytest
import torch
from elasticd_migration.local_state import VALUE, LocalState, LocalTensor, Shard
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.reshard import bytes_lacking
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.batch import short_batch_plan
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import HeldExperts, Plan, Stage, StatePolicy, Strategy
from elasticd_planner.spec.plan_checks import check_model
from elasticd_planner.value import Invalid
from torch import Tensor, nn

import elasticd
from elasticd import Column, Experts, PartialGrad, Row, UnitsOf
from elasticd.models import next_token_loss
from elasticd.models.huggingface import fused_experts
from elasticd.models.huggingface.proof import fill
from elasticd.runtime.comm.running_group import running_group
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.expert_holders import ExpertHolders
from elasticd.runtime.parallel.held_experts import held_experts
from elasticd.runtime.parallel.router_choices import RouterChoices
from tests import sizes
from tests.migration.ranks import together
from tests.models import families, mixture
from tests.models.double import DoubleThroughout
from tests.models.families import Whole
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.mixture import EXPERTS, LAYERS, VOCABULARY, Margins, Mixture, MixtureBlock, StackedExperts
from tests.models.test_huggingface import made, theirs
from tests.models.test_huggingface_cut import Cut
from tests.models.test_recompute import again_in
from tests.models.texts import Text
from tests.runtime.test_engine_parity import plan_of, stage

transformers = pytest.importorskip("transformers")

NEAR, MARGIN = 1e-12, 1e-9
PLANS: dict[str, Plan] = layouts_of(LAYERS)
PLANS |= {
    "zero 1, twice, recomputing": again_in(PLANS["tp3 uneven beside a pipeline"]).replace(
        state=StatePolicy(zero=1, replicas=2)
    ),
    "zero 2": PLANS["tp3 uneven beside a pipeline"].replace(state=StatePolicy(zero=2, replicas=1)),
    "lanes of tp2 and tp1": plan_of(
        ((5, 3), [stage(0, LAYERS, ("a/0", 2), ("a/1", 1), ("b/0", 1), lanes=(2, 1))])
    ),
    "interleaved, tp2": plan_of(
        (
            8,
            [
                stage(0, 1, ("a/0", 2), ("a/1", 1), later=((2, 3),)),
                stage(1, 2, ("b/0", 1), ("b/1", 1), later=((3, 4),)),
            ],
        )
    ),
}


def placed(of: Stage, *blocks: HeldExperts) -> Stage:
    """The stage with these experts on its devices, block by block and over again."""
    return msgspec.structs.replace(of, experts=tuple(islice(cycle(blocks), of.layers)))


#: Experts of three members: sets of several runs, some in two places, and none.
SETS: list[HeldExperts] = [((0, 2, 5), (1, 3), (4, 6, 7)), ((1, 2, 3, 4, 5, 6, 7), (), (0, 2, 3, 4, 7))]
THREE = placed(stage(0, LAYERS, ("a/0", 3), ("a/1", 3), ("a/2", 2)), *SETS)
#: Their rows divided unequally: all of an expert's on one of its devices, too.
DIVIDED = msgspec.structs.replace(THREE, splits=((), ((2, 1, 3), (4, 0, 1), (7, 60000, 5536)), (), ()))
#: Divided in each pass by its own rows.
ANEW = msgspec.structs.replace(THREE, slowdowns=(64, 128, 80))
PLACED: dict[str, Plan] = {
    "sets divided in each pass": plan_of((8, [ANEW])),
    "sets in a lane": plan_of((5, [THREE]), (3, [stage(0, 1, ("b/0", 1)), stage(1, LAYERS, ("b/1", 1))])),
    "sets in unequal parts": plan_of((8, [DIVIDED])),
    "sets, interleaved": plan_of(
        (
            8,
            [
                placed(stage(0, 1, ("a/0", 2), ("a/1", 1), later=((2, 3),)), ((0, 3, 6), (1, 2, 4, 5, 7))),
                stage(1, 2, ("b/0", 1), ("b/1", 1), later=((3, 4),)),
            ],
        )
    ),
}
#: Lanes that share experts: unlike numbers of rows, an expert on two devices, one on none of a lane's.
SHARED = placed(
    stage(0, LAYERS, ("a/0", 2), ("a/1", 1), ("b/0", 1), lanes=(2, 1)),
    ((0, 1, 5, 7), (0, 2, 6), (3, 4, 6)),
    ((), (), tuple(range(EXPERTS))),
    (),
    ((0, 1, 2, 3), (4, 5, 6, 7), ()),
)
SHARED = msgspec.structs.replace(SHARED, splits=(((0, 1, 3), (6, 2, 1)), (), (), ()))
PLACED["over lanes"] = plan_of(((5, 2), [SHARED]), (1, [stage(0, LAYERS, ("c/0", 1))]))
PLACED |= {
    "over lanes, zero 2, recomputing": again_in(PLACED["over lanes"]).replace(
        state=StatePolicy(zero=2, replicas=1)
    ),
    "over lanes, two stages": plan_of(
        (
            (3, 5),
            [
                placed(stage(0, 2, ("a/0", 1), ("b/0", 1), lanes=(1, 1)), ((0, 1, 2), (3, 4, 5, 6, 7))),
                placed(stage(2, 4, ("a/1", 1), ("b/1", 1), ("b/2", 1), lanes=(1, 2)), SETS[0]),
            ],
        )
    ),
    "over lanes, interleaved, in one stage": plan_of(
        (
            (3, 4),
            [
                placed(
                    stage(0, 1, ("a/0", 1), ("b/0", 1), lanes=(1, 1), later=((2, 3),)),
                    ((0, 1, 2), (3, 4, 5, 6, 7)),
                ),
                stage(1, 2, ("a/1", 1), ("b/1", 1), lanes=(1, 1), later=((3, 4),)),
            ],
        ),
        (1, [stage(0, 1, ("c/0", 1), later=((2, 3),)), stage(1, 2, ("c/1", 1), later=((3, 4),))]),
    ),
    "over lanes, interleaved": plan_of(
        (
            (2, 6),
            [
                placed(
                    stage(0, 1, ("a/0", 1), ("b/0", 1), lanes=(1, 1), later=((2, 3),)),
                    ((0, 1, 2), (3, 4, 5, 6, 7)),
                ),
                placed(
                    stage(1, 2, ("a/1", 1), ("b/1", 1), lanes=(1, 1), later=((3, 4),)),
                    ((1, 3, 5, 7), (0, 2, 4, 6)),
                ),
            ],
        )
    ),
}
PLACED |= {
    "sets, zero 1, twice": PLACED["sets in a lane"].replace(state=StatePolicy(zero=1, replicas=2)),
    "sets, zero 2, recomputing": again_in(PLACED["sets in a lane"]).replace(
        state=StatePolicy(zero=2, replicas=1)
    ),
}
#: Experts in columns and one by one, dense layers before sparse ones, experts that all tokens share, biases.
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [0, 2],
    },
    "GptOss": {"num_local_experts": 8, "pad_token_id": 0, "layer_types": ["full_attention"] * LAYERS},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "head_dim": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
CutIn = Literal["columns", "experts"]
CASES: list[tuple[str, CutIn, str]] = [
    (kind, cut_in, name)
    for kind in MODELS
    for cut_in in ("columns", "experts")
    for name in PLANS
    if (kind, cut_in) != ("GptOss", "columns")  # its biases are added once only where experts are whole
]


def with_experts(kind: str) -> Any:
    """A small model in double precision."""
    torch.manual_seed(0)
    model = made(kind, **MODELS[kind]).double()
    model.set_experts_implementation("eager")
    fill(model, 1.0)
    return model


def apart(training: Training, whole: nn.Module, plan: Plan, names: Any) -> tuple[float, str]:
    """How far a weight is from one process's after two steps, in double precision throughout."""
    margins = Margins()
    with margins:
        expected = alone(training, whole)
    assert margins.least > MARGIN, "a router's choice hangs on the last digits"
    found = under(training, plan, within=DoubleThroughout)
    assert found[0] == pytest.approx(expected[0], rel=NEAR)
    return furthest(found, expected, {full: names(full) for full in found[1]})


@pytest.mark.parametrize(
    ("kind", "cut_in", "name"),
    sizes.beside(
        [
            ("Mixtral", "columns", "zero 1, twice, recomputing"),
            ("Qwen3Moe", "columns", "tp1 to tp4 and back"),
            ("GptOss", "experts", "tp3 uneven beside a pipeline"),
            ("DeepseekV3", "columns", "lanes of tp2 and tp1"),
            ("DeepseekV3", "experts", "interleaved, tp2"),
        ],
        CASES,
    ),
)
def test_models_of_transformers_train_like_one_process(kind: str, cut_in: CutIn, name: str) -> None:
    model = with_experts(kind)
    described = elasticd.from_hf(model, experts=cut_in)
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    assert apart(training, Whole(copy.deepcopy(model)), PLANS[name], theirs) < (NEAR, "")


def fitting(plan: Plan, spec: ModelSpec) -> Plan:
    """The plan with experts placed where the model has some."""
    sparse = [block for block in range(LAYERS) if any(p.experts for p in spec.section(f"blocks.{block}"))]

    def fitted(of: Stage) -> Stage:
        blocks = [block for chunk in of.chunks for block in range(*chunk)]
        kept = [held if block in sparse else () for block, held in zip(blocks, of.experts, strict=False)]
        splits = [own if block in sparse else () for block, own in zip(blocks, of.splits, strict=False)]
        return msgspec.structs.replace(of, experts=tuple(kept), splits=tuple(splits))

    pipelines = tuple(
        msgspec.structs.replace(pipeline, stages=tuple(map(fitted, pipeline.stages)))
        for pipeline in plan.pipelines
    )
    module = msgspec.structs.replace(plan.module, pipelines=pipelines)
    return plan.replace(strategies=(Strategy(modules=(module,)),))


@pytest.mark.parametrize(
    ("kind", "name"),
    sizes.beside(
        [("Qwen3Moe", "over lanes, two stages")], [(kind, name) for kind in MODELS for name in PLACED]
    ),
)
def test_placed_experts_of_transformers_train_cut_sequences_like_one_process(kind: str, name: str) -> None:
    model = with_experts(kind)
    described = elasticd.from_hf(model, experts="experts")
    given: dict[str, Any] = {"model": described, "loss": next_token_loss, "dataset": Text(41)}
    training = Cut(**given) if name.startswith("over lanes") and kind != "DeepseekV3" else Training(**given)
    whole = Whole(copy.deepcopy(model))
    assert apart(training, whole, fitting(PLACED[name], described.spec), theirs) < (NEAR, "")


def drawn_plan(seed: int) -> Plan:
    """A stage of one, two or three lanes beside a pipeline of two stages. Each expert is on one or two devices
    of the lanes, which divide its rows in drawn parts."""
    drawn = random.Random(seed)
    lanes = drawn.choice([(3,), (2, 1), (1, 2), (1, 1, 2)])
    names = [f"a/{number}" for number in range(sum(lanes))]
    experts, splits = [], []
    for _ in range(LAYERS):
        holders = [sorted(drawn.sample(range(len(names)), drawn.choice([1, 2]))) for _ in range(EXPERTS)]
        experts.append(
            tuple(tuple(e for e, on in enumerate(holders) if place in on) for place in range(len(names)))
        )
        splits.append(
            tuple((e, drawn.randrange(9), 1 + drawn.randrange(9)) for e, on in enumerate(holders) if on[1:])
        )
    members = [(name, drawn.choice([1, 2])) for name in names]
    of = stage(0, LAYERS, *members, lanes=lanes if len(lanes) > 1 else ())
    of = msgspec.structs.replace(of, experts=tuple(experts), splits=tuple(splits))
    rows = tuple(3 - place for place in range(len(lanes)))
    return plan_of((rows, [of]), (8 - sum(rows), [stage(0, 1, ("b/0", 1)), stage(1, LAYERS, ("b/1", 1))]))


@pytest.mark.parametrize("seed", sizes.beside([0, 1], list(range(24))))
def test_drawn_placements_train_packed_and_cut_rows_like_one_process(seed: int) -> None:
    model = with_experts("Qwen3Moe")
    described = elasticd.from_hf(model, experts="experts")
    training = Cut(model=described, loss=next_token_loss, dataset=Text(41))
    plan = fitting(drawn_plan(seed), described.spec)
    assert apart(training, Whole(copy.deepcopy(model)), plan, theirs) < (NEAR, "")


def only_first(scores: Tensor) -> Tensor:
    """All rows go to the first two experts: the others, and all members but the first, have none."""
    return torch.arange(mixture.CHOSEN).expand(len(scores), -1)


@pytest.mark.parametrize(
    "name", sizes.beside(["tp3 uneven beside a pipeline", "zero 2", *PLACED], PLANS | PLACED)
)
@pytest.mark.parametrize("choose", [None, only_first])
def test_experts_by_hand_train_like_one_process(choose: Any, name: str) -> None:
    torch.manual_seed(0)
    whole = Mixture(choose).double()
    training = Training(model=copy.deepcopy(whole).describe(), loss=next_token_loss, dataset=Text(VOCABULARY))
    assert apart(training, whole, (PLANS | PLACED)[name], lambda full: full) < (NEAR, "")


class NamedArguments(MixtureBlock):
    """Calls its experts with names for all but the rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        index = self._choose(scores)
        return x + self.experts(rows, index=index, weights=scores.gather(1, index)).view_as(x)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("over lanes, zero 2, recomputing", MixtureBlock),
        ("over lanes", NamedArguments),
        ("sets in a lane", NamedArguments),
    ],
)
def test_the_load_of_experts_is_that_of_one_process_on_every_rank(name: str, block: type[MixtureBlock]) -> None:
    """Rows of a block that makes its activations again count once, and those of an evaluation do not count."""
    torch.manual_seed(0)
    whole = Mixture().double()
    for layer in whole.blocks:
        layer.__class__ = block
    dataset = Text(VOCABULARY)
    loads: list[dict[str, list[int]]] = []

    def told(engine: Engine) -> None:
        held_out = engine.held_out(dataset, pad, None)
        engine.forward(short_batch_plan(engine.plan, 0, range(8)), held_out, next_token_loss)
        loads.append(engine.expert_load())

    training = Training(model=copy.deepcopy(whole).describe(), loss=next_token_loss, dataset=dataset, steps=1)
    under(training, PLACED[name], after=told, within=DoubleThroughout)
    expected: dict[str, list[int]] = {}
    for index, layer in enumerate(whole.blocks):
        counts = expected[f"blocks.{index}"] = [0] * EXPERTS

        def note(_: object, args: Any, named: Any, counts: list[int] = counts) -> None:
            for expert in (args[1] if len(args) > 1 else named["index"]).flatten().tolist():
                counts[expert] += 1

        layer.experts.register_forward_pre_hook(note, with_kwargs=True)
    for sample in training.recipe().sampler.samples(0):  # one by one, without what pads a batch
        whole(pad([dataset[sample]]))
    assert loads == [expected] * len(PLACED[name].members)


@pytest.mark.parametrize("name", ["over lanes", "over lanes, zero 2, recomputing"])
def test_lanes_that_share_experts_of_frozen_blocks_wait_for_no_backward_pass_there(name: str) -> None:
    """A lane that only serves makes none in a block up to which nothing is trained."""
    torch.manual_seed(0)
    whole = Mixture().double()
    for parameter, value in whole.named_parameters():
        value.requires_grad_(not parameter.startswith(("embed.", "blocks.0.", "blocks.1.")))
    training = Training(model=copy.deepcopy(whole).describe(), loss=next_token_loss, dataset=Text(VOCABULARY))
    assert apart(training, whole, PLACED[name], lambda full: full) < (NEAR, "")


def test_an_evaluation_of_lanes_that_share_experts_is_that_of_one_process() -> None:
    """Also of fewer samples than a step has, so that lanes have none."""
    torch.manual_seed(0)
    whole = Mixture().double()
    dataset = Text(VOCABULARY)
    totals: list[list[tuple[float, float]]] = []

    def evaluate(engine: Engine) -> None:
        held_out = engine.held_out(dataset, pad, None)
        done = [
            engine.forward(short_batch_plan(engine.plan, 0, ids), held_out, next_token_loss)
            for ids in (range(8), range(2), range(1))
        ]
        totals.append([(float(each.loss), float(each.count)) for each in done])

    training = Training(model=copy.deepcopy(whole).describe(), loss=next_token_loss, dataset=dataset, steps=0)
    weights = {name: p.detach() for name, p in whole.named_parameters()}
    _, found = under(training, PLACED["over lanes"], after=evaluate, within=DoubleThroughout)
    assert furthest(([], found), ([], weights), {name: name for name in found}) < (NEAR, "")
    for at, ids in enumerate((range(8), range(2), range(1))):
        batches = [pad([dataset[index]]) for index in ids]
        with torch.no_grad():
            expected = [next_token_loss(whole(batch), batch) for batch in batches]
        found_loss, found_count = (sum(each[at][part] for each in totals) for part in (0, 1))
        assert found_loss == pytest.approx(sum(float(loss) for loss, _ in expected), rel=NEAR)
        assert found_count == sum(int(count) for _, count in expected)


def test_a_member_has_some_experts_whole_or_columns_of_each() -> None:
    experts = elasticd.from_hf(with_experts("Qwen3Moe"), experts="experts")
    columns = elasticd.from_hf(with_experts("Qwen3Moe"))
    where = "blocks.*.layer.mlp.experts"
    assert experts.rules[f"{where}.gate_up_proj"] == experts.rules[f"{where}.down_proj"] == Experts("experts")
    assert experts.units["experts"] == UnitsOf(8, attribute=(f"{where}.num_experts",))
    assert columns.rules[f"{where}.gate_up_proj"] == Column("expert_columns_12", dim=1, parts=2)
    assert columns.rules[f"{where}.down_proj"] == Row("expert_columns_12", dim=2)
    # Layer 0 is dense, layer 1 has experts, and both are cut.
    assert columns.rules["blocks.*.layer.mlp.down_proj.*"] == Row("columns_44")
    assert columns.spec.collectives == 2


@pytest.mark.parametrize(
    ("kind", "columns", "down"),
    [
        ("AriaText", Column("expert_columns_48", dim=2, parts=2), Row("expert_columns_48", dim=1)),
        ("NemotronH", Column("expert_columns_48", dim=1), Row("expert_columns_48", dim=2)),
    ],
)
def test_experts_that_are_transposed_or_have_no_gate_are_cut_as_they_are(
    kind: str, columns: Column, down: Row
) -> None:
    found = families.found(f"{kind}ForCausalLM")
    with torch.device("meta"):
        model = found(families.small_config(found))
    experts = next(module for module in model.modules() if fused_experts.is_fused(module))
    assert list(fused_experts.expert_cuts(experts, {}, "experts", "columns").rules.values()) == [columns, down]


def test_columns_that_grouped_mm_takes_are_cut_in_units_of_eight() -> None:
    with torch.device("meta"):
        model = elasticd.from_hf(made("Mixtral", num_local_experts=8, intermediate_size=512))
    assert model.spec.units_of("expert_columns_512").count == 64


def test_a_member_calls_its_experts_for_their_rows_alone() -> None:
    """Arguments by position and by name; further ones are handed on."""
    calls = []

    def forward(rows: Tensor, index: Tensor, weights: Tensor, scale: float = 1.0) -> Tensor:
        calls.append((rows.tolist(), index.tolist(), weights.tolist()))
        return rows * weights * scale

    term = held_experts(forward, ExpertHolders(((0, 1), (2, 3)), (), 4), 1)
    rows, index = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0, 2], [3, 2], [1, 0]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.5], [1.0, 1.0]])
    assert term(rows, index, weights=weights, scale=2.0).tolist() == [[0.5], [6.0], [0.0]]
    assert calls == [([[1.0], [2.0], [2.0]], [[0], [1], [0]], [[0.25], [1.0], [0.5]])]


def test_a_member_without_a_row_keeps_its_place_in_the_backward_pass() -> None:
    holders = ExpertHolders(((0, 1), (2, 3)), (), 4)
    term = held_experts(lambda rows, index, weights: pytest.fail("no row is its own"), holders, 1)
    rows = torch.full((2, 3), torch.inf, requires_grad=True)
    weights = torch.ones(2, 1, requires_grad=True)
    given = term(rows, torch.zeros(2, 1, dtype=torch.long), weights)
    assert given.tolist() == [[0.0] * 3] * 2
    given.sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    assert rows.grad.count_nonzero() == weights.grad.count_nonzero() == 0


@pytest.mark.parametrize("rules", [mixture.RULES, mixture.COLUMNS], ids=["experts", "columns"])
def test_a_member_whose_router_chooses_otherwise_ends_the_step_by_name(rules: Any) -> None:
    def choose(scores: Tensor) -> Tensor:
        group = running_group()
        scores = scores.roll(1, -1) if (group.me, group.size) == ("a/1", 3) else scores
        return torch.topk(scores, mixture.CHOSEN, dim=-1).indices

    mixture_of = Mixture(choose).double()
    for block in mixture_of.blocks if rules is mixture.COLUMNS else ():
        block.experts.bias = None
    model = mixture_of.describe(rules=rules, units=mixture.UNITS if rules is mixture.RULES else {})
    training = Training(model=model, loss=next_token_loss, dataset=Text(VOCABULARY))
    with pytest.raises(
        LedgerError, match=r"step 0: routers on ranks \[0, 1, 2\], one TP group, chose unlike exp"
    ):
        under(training, PLANS["tp3 uneven beside a pipeline"])


def test_choices_are_compared_by_row_and_in_any_order_of_the_experts_of_a_row() -> None:
    def digest(*passes: list[list[int]]) -> float:
        choices = RouterChoices(torch.device("cpu"))
        model = Mixture().describe()
        choices.attach(model, "blocks.0", model.sections["blocks.0"], compares=True)
        for index in passes:
            choices.note(torch.tensor(index))
        return float(choices.digest)

    assert digest([[0, 3], [1, 2]]) == digest([[3, 0], [2, 1]])
    unlike = {digest([[0, 3], [1, 2]]), digest([[1, 2], [0, 3]]), digest([[1, 2], [1, 2]])}
    unlike |= {digest([[0, 3]], [[1, 2]]), digest([[1, 2]], [[0, 3]])}
    assert len(unlike) == 5


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (((0, 1, 2), (3, 4, 6), (7,)), "block 0: expert 5 is on no device of a/0, a/1, a/2"),
        (((0, 1, 2), (3, 4, 5, 6), (7, 8)), "block 0: a/2 is to have expert 8, and there are 8, from 0"),
    ],
)
def test_plans_that_place_other_experts_are_refused(held: HeldExperts, said: str) -> None:
    of = placed(stage(0, LAYERS, ("a/0", 3), ("a/1", 3), ("a/2", 2)), held)
    with pytest.raises(Invalid, match=f"plan 1, pipeline 0, {said}"):
        check_model(plan_of((8, [of])), Mixture().describe().spec)
    with pytest.raises(Invalid, match="plan 1, pipeline 0, block 0: has no experts that a plan can place"):
        Layouts(Mixture().describe(rules={}).spec, plan_of((8, [of])))


def test_blocks_that_share_experts_have_them_placed_alike_on_a_stage() -> None:
    whole = Mixture()
    whole.blocks[1].experts = whole.blocks[0].experts
    spec = whole.describe().spec
    with pytest.raises(
        Invalid, match="blocks 0 and 1 share their experts, and the plan places these in two ways"
    ):
        check_model(plan_of((8, [THREE])), spec)
    Layouts(spec, plan_of((8, [placed(stage(0, LAYERS, ("a/0", 3), ("a/1", 3), ("a/2", 2)), SETS[0])])))
    for block in (whole.blocks[2], whole.blocks[3]):
        block.experts = whole.blocks[0].experts
    owner_elsewhere = [
        stage(0, 1, ("b/0", 1)),
        placed(stage(1, LAYERS, ("a/0", 3), ("a/1", 3), ("a/2", 2)), *SETS),
    ]
    with pytest.raises(Invalid, match="blocks 1 and 2 share their experts"):
        check_model(plan_of((8, owner_elsewhere)), whole.describe().spec)


def test_a_module_without_the_rule_keeps_its_number_of_experts() -> None:
    """Also where an attribute of `units` has a pattern that matches it, in another block and in its own."""

    class Two(MixtureBlock):
        def __init__(self) -> None:
            super().__init__()
            self.more = StackedExperts(EXPERTS, mixture.WIDTH, 4)

    model = Mixture().describe(
        blocks=[Two(), MixtureBlock()],
        rules={"blocks.0.experts.*": Experts("experts")},
        units={"experts": UnitsOf(attribute=("blocks.*.experts.count", "blocks.*.more.count"))},
    )
    local = local_model(model, stage(0, 2, ("a/0", 1), ("a/1", 1)), 0)
    first, second = (local.modules[f"blocks.{block}"] for block in range(2))
    assert (first.experts.count, first.more.count, second.experts.count) == (EXPERTS // 2, EXPERTS, EXPERTS)


class Uneven(MixtureBlock):
    """One parameter has a row more than there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.bias = nn.Parameter(torch.zeros(EXPERTS * 2, 2))


class Scaled(MixtureBlock):
    """A buffer has a number for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.register_buffer("scale", torch.ones(EXPERTS))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"blocks": [Scaled()]}, "blocks.0.experts.scale is a buffer of all 8 experts"),
        (
            {"rules": {"blocks.*.router.*": Experts("experts")}},
            r"blocks.0.router.weight: Experts of a Linear, whose forward does not take \(rows, index, w",
        ),
        (
            {"rules": {"blocks.*.experts.up": Experts("experts")}},
            r"blocks.0.experts.down has no Experts rule, and blocks.0.experts.up has one",
        ),
        (
            {"rules": {"blocks.*.experts.[ud]*": Experts("experts"), "blocks.*.experts.bias": PartialGrad()}},
            r"blocks.0.experts.bias has no Experts rule",
        ),
        (
            {"blocks": [Uneven()]},
            r"blocks.0.experts.bias \(16, 2\) has not the 8 experts as its dimension 0",
        ),
        ({"rules": {"blocks.*.experts.*": Experts()}}, r"Experts must say its units, as Experts\('experts'\)"),
    ],
)
def test_rules_of_experts_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Mixture().describe(**given)


def test_sequence_parallelism_of_experts_is_refused_by_name() -> None:
    from elasticd.runtime.parallel.sequence_parallel import refuse_model

    with pytest.raises(ModelError, match=r"blocks.0.experts has experts, which take rows that a router chose"):
        refuse_model(Mixture().describe())


def test_an_unknown_way_to_cut_experts_is_refused() -> None:
    with pytest.raises(
        ModelError, match="experts = 'lanes': a TP group cuts experts in 'columns' or in 'experts'"
    ):
        elasticd.from_hf(made("Mixtral"), experts="lanes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        (
            "Mixtral",
            {"output_router_logits": True},
            r"output_router_logits = False, and give Job\(balance=elasticd.B",
        ),
        ("Qwen3Moe", {"output_router_logits": True}, r"depends on which samples are in a micro-batch"),
    ],
)
def test_routers_that_depend_on_the_layout_are_refused_with_the_remedy(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        elasticd.from_hf(made(kind, **{**MODELS[kind], **changes}))


def test_experts_that_drop_rows_beyond_a_capacity_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other samples decide which ones are dropped."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    forward = MixtralExperts.forward

    def dropping(self: Any, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = torch.nn.functional.one_hot(index, self.num_experts).flatten(0, 1)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
        kept = place <= len(rows) * index.shape[1] // self.num_experts
        output: Tensor = forward(self, rows, index, weights * kept)
        return output

    monkeypatch.setattr(MixtralExperts, "forward", dropping)
    with pytest.raises(ModelError, match="depends on the others of the micro-batch"):
        elasticd.from_hf(made("Mixtral", **MODELS["Mixtral"]))


def test_double_precision_with_grouped_matrices_is_refused_with_the_remedy() -> None:
    model = with_experts("Mixtral")
    model.config._experts_implementation = "grouped_mm"
    with pytest.raises(ModelError, match=r"set_experts_implementation\('eager'\)"):
        elasticd.from_hf(model)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_new_placement_moves_the_experts_that_a_device_lacks_alone(in_place: bool) -> None:
    """Boxes of one memory, of which some leave: what stays has memory of its own size."""
    model = Mixture().double().describe()
    moved = msgspec.structs.replace(SHARED, splits=(), experts=(SHARED.experts[3], *SHARED.experts[:3]))
    plans = (
        PLACED["over lanes"],
        plan_of(((5, 2), [moved]), (1, [stage(0, LAYERS, ("c/0", 1))])).replace(number=2),
    )
    old, new = (Layouts(model.spec, plan) for plan in plans)
    states = {device: first_state(model, old, device, 1) for device in plans[0].members}
    for device, state in states.items():  # as an engine has them: boxes of a parameter in one memory
        local = local_model(model, plans[0].stage(plans[0].places[device]), plans[0].places[device].position)
        for name, held in local.parameters.items():
            for shard in state.tensors[Item(name, "value")].shards if held.boxes else ():
                held.part(shard.box).copy_(shard.planes[VALUE])
        own = {
            Item(name, "value"): LocalTensor(
                shards=tuple(Shard(box=box, planes={VALUE: held.part(box)}) for box in held.boxes)
            )
            for name, held in local.parameters.items()
            if held.boxes
        }
        states[device] = LocalState(tensors={**state.tensors, **own})
    lacks = bytes_lacking(old, new, states["c/0"].schema().sizes)
    ends = MemoryTransport.connect(plans[0].members)
    results = together(
        ends, lambda end: migrate(old, new, states[end.members[end.rank]], end, in_place=in_place)
    )
    for end, result in zip(ends, results, strict=True):
        assert isinstance(result, Moved), result
        device = end.members[end.rank]
        assert result.bytes_received == lacks.get(device, 0)
        expected = first_state(model, new, device, 1)
        for item, tensor in expected.tensors.items():
            for shard, found in zip(tensor.shards, result.state.tensors[item].shards, strict=True):
                assert torch.equal(found.planes[VALUE], shard.planes[VALUE])
                if item.name.startswith("blocks.0.experts"):
                    assert found.planes[VALUE].untyped_storage().nbytes() == shard.planes[VALUE].nbytes
    assert sum(lacks.values()) > 0
