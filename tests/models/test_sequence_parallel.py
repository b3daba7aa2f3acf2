"""Sequence parallelism trains like one process: on uneven and empty slices, with all that a plan has."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan, Stage, StatePolicy, Strategy
from msgspec import structs
from torch import Tensor, nn

import elasticd
from elasticd import Column, Row, Rule
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.models.huggingface import their_name
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.model.validation import ModelError, replace_dropouts
from elasticd.runtime.parallel.sequence_parallel import refuse_model, regions, single
from tests import sizes
from tests.models import families, test_check
from tests.models.families import Whole
from tests.models.layouts import SEED, Run, Training, alone, furthest, layouts_of, plan_of, stage, under
from tests.models.test_recompute import again_in, gpt
from tests.models.texts import Text

LAYERS = 4


def sliced(plan: Plan, only: Callable[[Stage], bool] = lambda stage: True) -> Plan:
    """The plan with sequence parallelism in some of its stages."""
    (module,) = plan.modules
    pipelines = tuple(
        structs.replace(
            pipeline,
            stages=tuple(structs.replace(each, sequence_parallel=only(each)) for each in pipeline.stages),
        )
        for pipeline in module.pipelines
    )
    return plan.replace(strategies=(Strategy(modules=(structs.replace(module, pipelines=pipelines),)),))


PLAIN = layouts_of(LAYERS)
TP3, TP4 = (sliced(PLAIN[name]) for name in ("tp3 uneven beside a pipeline", "tp1 to tp4 and back"))
PLANS = {
    "tp 2": sliced(plan_of((8, [stage(0, LAYERS, ("a/0", 1), ("a/1", 1))]))),
    "tp 3, uneven, beside a pipeline": TP3,
    "tp 1 to tp 4 and back": TP4,
    "in one of two stages with tp": sliced(PLAIN["tp1 to tp4 and back"], lambda stage: stage.stop < LAYERS),
    "zero 1, twice, recomputing": again_in(TP3).replace(state=StatePolicy(zero=1, replicas=2)),
    "zero 2, recomputing in part": again_in(TP4, every=2).replace(state=StatePolicy(zero=2, replicas=1)),
}


@pytest.mark.parametrize("name", sizes.beside(tuple(PLANS)[2:], PLANS))
def test_a_gpt_with_dropout_trains_like_one_process(name: str) -> None:
    training, whole = gpt()
    found, expected = under(training, PLANS[name]), alone(training, whole)
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in whole.named_parameters()}) < (1e-12, "")


class Short(Text):
    """Of one to three tokens, so that most members of a TP group have none."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: ids[: 1 + index % 3] for name, ids in super().__getitem__(index).items()}


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_members_without_a_token_take_part(micro_batch: int) -> None:
    """Of one token a single member has something, so that nothing is gathered or scattered evenly."""
    training, whole = gpt()
    training = replace(training, dataset=Short(41))
    shares = [("a/0", 1), ("a/1", 4), ("b/0", 2), ("b/1", 1)]
    plan = sliced(
        plan_of(
            (8 // micro_batch, [stage(0, 2, *shares[:3]), stage(2, LAYERS, shares[3])]), micro_batch=micro_batch
        )
    )
    found, expected = under(training, plan), alone(training, whole)
    assert furthest(found, expected, {full: full for full, _ in whole.named_parameters()}) < (1e-12, "")


@pytest.mark.parametrize("name", ["Llama", "Phi3", "GPTNeoX"])
def test_models_of_transformers_train_like_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision throughout: norms and rotary tables of transformers go through float32 otherwise."""
    kind = families.found(f"{name}ForCausalLM")
    model = families.made(kind, families.small_config(kind))
    described = elasticd.from_hf(model)
    refuse_model(described)
    rows = model.get_input_embeddings().weight.shape[0]
    training = Training(model=described, loss=next_token_loss, dataset=Text(rows), steps=2)
    stages = [stage(0, 1, ("a/0", 2), ("a/1", 1)), stage(1, described.layers, ("b/0", 1), ("b/1", 2))]
    families.double_throughout(monkeypatch)
    found = under(training, sliced(plan_of((2, stages), micro_batch=4)))
    expected = alone(training, Whole(copy.deepcopy(model)))
    names = {full: f"model.{their_name(described, full)}" for full in found[1]}
    assert found[0] == pytest.approx(expected[0], abs=1e-10)
    assert furthest(found, expected, names) < (1e-10, "")


def test_a_plan_with_it_takes_over_from_one_without_and_back() -> None:
    """Who holds what is the same; the terms of gradients are not."""
    training, whole = gpt()
    training = replace(training, steps=6)
    plain = PLAIN["tp3 uneven beside a pipeline"].replace(state=StatePolicy(zero=1, replicas=1))

    def worker(groups: MemoryPlanGroups) -> Run:
        losses, state = [], None
        for turn, plan in enumerate((plain, sliced(plain), plain)):
            recipe = training.recipe()
            layouts = Layouts(recipe.model.spec, plan)
            engine = Engine(recipe, layouts, cast(PlanGroups, groups), unpaced)
            engine.adopt(state or first_state(recipe.model, layouts, groups.me, SEED))
            assert (engine.module.slices is not None) == (turn == 1 and groups.me.startswith("a/"))
            losses += [engine.step(2 * turn + i, lambda: 0).outcome.vote.loss for i in range(2)]
            engine.settle()
            state = engine.state()
        return losses, {
            name: p.detach() for name, (_, p) in engine.module.local.parameters.items() if p.dim() == 1
        }

    expected = alone(training, whole)
    for losses, vectors in run_threads(plain.members, worker).values():
        assert losses == pytest.approx(expected[0], abs=1e-12)
        for name, value in vectors.items():
            assert value.shape != expected[1][name].shape or torch.allclose(
                value, expected[1][name], atol=1e-12
            )


def test_what_blocks_keep_is_divided_by_the_width_of_the_group() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import _sequence_side

    kept = _sequence_side.kept()
    assert len(kept) == 5
    for name, ratio in kept.items():
        assert (ratio <= 1.05) == ("sequence parallel" in name), f"{name}: {ratio}"


class Asking(nn.Module):
    """An attention that is called with queries, keys and values, as torch's own is."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o(y.transpose(1, 2).flatten(2)))


class AskingBlock(nn.Module):
    """Keys and values are one tensor, queries another, or all are one. A dropout has no width."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.attention, self.dropout = index, Asking(), nn.Dropout(0.3)
        self.norm1, self.norm2, self.gate = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.norm1(x), self.norm2(x)
        gate: Tensor = self.dropout(self.gate(x).squeeze(-1))
        if self.index == 0:
            return cast(Tensor, x + gate[..., None] * self.attention(y, key=z, value=z))
        return cast(Tensor, x + gate[..., None] * self.attention(y, y, y))


@pytest.mark.parametrize("recompute", [False, True])
def test_all_slices_that_an_attention_is_called_with_become_all_tokens(recompute: bool) -> None:
    torch.manual_seed(0)
    embed = _Ids()
    blocks, head = nn.ModuleList(AskingBlock(index) for index in range(2)), nn.Linear(16, 9)
    whole = nn.ModuleDict({"embed": embed, "blocks": blocks, "head": head}).double()
    model = elasticd.Model(
        embed=embed,
        blocks=list(blocks),
        head=head,
        width=16,
        rules={"blocks.*.attention.[qkv].*": Column("heads"), "blocks.*.attention.o.*": Row("heads")},
        units={"heads": elasticd.UnitsOf(attribute="blocks.*.attention.heads")},
    )
    alike = _Chain(copy.deepcopy(whole))
    training = Training(model=model, loss=next_token_loss, dataset=Text(9))
    plan = sliced(plan_of((2, [stage(0, 2, ("a/0", 2), ("a/1", 1))]), micro_batch=4))
    plan = again_in(plan) if recompute else plan
    found, expected = under(training, plan), alone(training, alike)
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: f"parts.{full}" for full in found[1]}) < (1e-12, "")


class _Ids(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(9, 16)

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["inputs"])


class _Chain(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts
        for index, block in enumerate(cast(nn.ModuleList, parts["blocks"])):
            replace_dropouts(f"blocks.{index}", block)

    def forward(self, batch: Any) -> Tensor:
        x: Tensor = self.parts["embed"](batch)
        for block in cast(nn.ModuleList, self.parts["blocks"]):
            x = block(x)
        return cast(Tensor, self.parts["head"](x))


class Counted:
    """The TP group of one member, whose collectives are counted."""

    def __init__(self, group: Any) -> None:
        self._group, self.gathers, self.sums = group, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.gathers += 1
        return cast(Tensor, self._group.all_gather(tensor))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        return cast(Tensor, self._group.all_reduce(tensor))


def test_a_backward_pass_gathers_a_tensor_once_however_many_modules_kept_it() -> None:
    """Queries, keys and values take one tensor, gate and up another: five collectives for each of both."""
    config = DecoderConfig(
        vocabulary=16, width=16, layers=1, heads=4, kv_heads=2, hidden=12, dtype=torch.float64
    )
    with torch.device("meta"):
        training = Training(model=Decoder(config).describe(), loss=next_token_loss, dataset=Text(16))
    plan = sliced(plan_of((1, [stage(0, 1, ("a/0", 1), ("a/1", 1))]), micro_batch=8))

    def worker(groups: MemoryPlanGroups) -> tuple[int, int, int, int]:
        recipe = training.recipe()
        layouts = Layouts(recipe.model.spec, plan)
        engine = Engine(recipe, layouts, cast(PlanGroups, groups), unpaced)
        engine.adopt(first_state(recipe.model, layouts, groups.me, SEED))
        assert engine.module.slices is not None
        counted = engine.module.slices._group = Counted(engine.module.slices._group)
        block, before = engine.module.local.modules["blocks.0"], list[int]()
        x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        entered = engine.module.slices.cut(x).requires_grad_()
        counted.gathers = counted.sums = 0
        out = block(entered)
        before += [counted.gathers, counted.sums]
        out.sum().backward()
        return before[0], before[1], counted.gathers - before[0], counted.sums - before[1]

    # Over gloo and in memory a reduce-scatter is an all-reduce of which each takes its own.
    assert set(run_threads(plan.members, worker).values()) == {(2, 2, 4, 2)}


class Plain(test_check.Block):
    """Its code reads the number of tokens off the input of the block."""

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            part(y).view(samples, tokens, -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        y = nn.functional.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm2(x)))))


def test_check_tries_it_and_says_where_it_is_not_for_a_model() -> None:
    good, text = test_check.said({})
    assert good
    assert "ok    TP 2 with shares 2:1, sequence parallel" in text
    good, text = test_check.said({}, Plain)
    assert good, "the job does not ask for it"
    assert "note  not for this model: TP 2 with shares 2:1, sequence parallel" in text


def test_check_fails_where_the_job_asks_for_it() -> None:
    lines: list[str] = []
    asked = replace(test_check.subject({}, Plain), parallelism=ParallelismOptions(sequence_parallel=True))
    assert not test_check.compared(asked, lines.append)
    assert "WRONG TP 2 with shares 2:1, sequence parallel" in lines


class Convolved(test_check.Block):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(test_check.WIDTH, test_check.WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mixer(x.mT).mT


@pytest.mark.parametrize(
    ("rules", "block", "said"),
    [
        ({}, Convolved, "blocks.0.mixer is a Conv1d, which takes several tokens at once"),
        (
            {"blocks.*.up.*": Column("columns", gather=True), "blocks.*.down.*": Row("columns", split=True)},
            test_check.Block,
            "blocks.0.up gathers its output",
        ),
    ],
)
def test_a_model_of_which_it_can_be_told_is_refused_by_name(
    rules: dict[str, Rule | None], block: type[test_check.Block], said: str
) -> None:
    made = test_check.subject(rules, block)
    with pytest.raises(ModelError, match=said):
        replace(made, parallelism=ParallelismOptions(sequence_parallel="plan"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bloom", r"layer.self_attention.query_key_value is whole on every member"),
        ("Olmo2", r"layer.self_attn.q_proj gathers its output"),
        ("OPT", r"layer.fc1 has samples and tokens in one dimension"),
    ],
)
def test_layers_of_transformers_that_cannot_be_on_slices_are_refused_by_name(name: str, said: str) -> None:
    kind = families.found(f"{name}ForCausalLM")
    described = elasticd.from_hf(families.made(kind, families.small_config(kind)))
    with pytest.raises(ModelError, match=said):
        refuse_model(described)


class Parts(nn.Module):
    """A list, which nobody calls, and a module whose code reads the number of tokens off its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.ModuleDict({"inner": nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4)})})
        self.up = nn.ModuleList([nn.Linear(4, 8)])
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_tokens_enter_at_the_outermost_module_that_is_cut_as_a_whole() -> None:
    def entrances(block: nn.Module, rules: dict[str, Rule]) -> dict[str, str]:
        head, embed = nn.Linear(4, 4), nn.Embedding(4, 4)
        model = elasticd.Model(embed=embed, blocks=[block], head=head, width=4, rules=rules)
        return regions(model, "blocks.0", model.sections["blocks.0"])

    rules: dict[str, Rule] = {
        "blocks.*.q.*": Column("units"),
        "blocks.*.o.*": Row("units"),
        "blocks.*.up.*": Column("columns"),
        "blocks.*.down.*": Row("columns"),
    }
    assert entrances(Parts(), rules) == {"attention.inner.q": "attention.inner.q", "up.0": "up.0"}
    training, _ = gpt()
    module = training.model.sections["blocks.0"]
    assert regions(training.model, "blocks.0", module) == {"attention.qkv": "attention", "up": "up"}


def test_options_are_what_a_user_may_say() -> None:
    assert [ParallelismOptions(sequence_parallel=said).may_slice for said in (False, True, "plan")] == [
        False,
        "always",
        True,
    ]
    with pytest.raises(ValueError, match='sequence_parallel must be True, False or "plan"'):
        ParallelismOptions(sequence_parallel=cast(Any, "always"))


def test_sections_that_give_named_tensors_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="one gives a dict: leave sequence_parallel out"):
        single({"hidden": torch.zeros(1, 2, 3)})
    x = torch.zeros(1, 2, 3)
    assert single(x) is x
