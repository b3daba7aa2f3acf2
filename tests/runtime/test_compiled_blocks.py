"""Blocks under torch.compile train as they do without it, and are compiled before a plan is ready."""

from __future__ import annotations

import copy
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, run_threads
from elasticd.runtime.engine import compiled_blocks
from elasticd.runtime.engine.compiled_blocks import (
    BlockCalls,
    _compile,
    compile_ahead,
    compile_blocks,
    compile_now,
)
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout, dropped, fused, kept
from elasticd.runtime.model.tp_rules import Column, Row, UnitsOf
from elasticd.runtime.parallel import redistribute
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from tests import sizes
from tests.compiling import breaks, graphs
from tests.integration.train_experts import BALANCE
from tests.models import mixture
from tests.runtime.test_engine_parity import plan_of, stage, unpaced

CONFIG = DecoderConfig(vocabulary=40, width=16, layers=4, heads=8, kv_heads=2, hidden=22, dtype=torch.float64)
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ is not installed: torch.compile cannot make code for CPUs"
)


class Text:
    """Samples of one length, each a function of its index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, CONFIG.vocabulary, (8,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def recipe_of(*, compile: bool, layers: int = CONFIG.layers) -> Recipe:
    with torch.device("meta"):
        model = Decoder(replace(CONFIG, layers=layers)).describe()
    return Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        dataset=Text(),
        global_batch=8,
        seed=3,
        clip=0.7,
        parallelism=ParallelismOptions(compile=compile),
    )


def trained(plan: Plan, *, compile: bool) -> tuple[list[float | None], dict[str, dict[str, Tensor]]]:
    """The norms of two steps' gradients, and the weights of each device after them."""

    def worker(memory: MemoryPlanGroups) -> tuple[list[float | None], dict[str, Tensor]]:
        recipe = recipe_of(compile=compile)  # whose reader is one rank's
        layouts = Layouts(recipe.model.spec, plan)
        engine = Engine(recipe, layouts, cast(PlanGroups, memory), unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, recipe.seed))
        norms = [engine.step(step, lambda: 0).outcome.vote.norm for step in range(2)]
        engine.settle()
        return norms, {name: p.detach() for name, (_, p) in engine.module.local.parameters.items()}

    found = run_threads(plan.members, worker)
    return next(iter(found.values()))[0], {device: weights for device, (_, weights) in found.items()}


def test_under_unequal_shares_and_with_recomputation_and_nothing_is_compiled_once_training_has_begun(
    traced: None,
) -> None:
    plan = plan_of(
        (8, [stage(0, 2, ("a/0", 5), ("a/1", 3), recompute=True), stage(2, 4, ("b/0", 1))]),
    )
    norms, weights = trained(plan, compile=False)
    recipe = recipe_of(compile=True)
    before = graphs(), breaks()
    for device in plan.members:
        compile_ahead(recipe, plan, device)()
    ahead = graphs(), breaks()
    # One graph for each width, with and without an autograd graph where blocks recompute; none is broken.
    assert (ahead[0] - before[0], ahead[1] - before[1]) == (5, 0)
    compiled_norms, compiled = trained(plan, compile=True)
    assert (graphs(), breaks()) == ahead
    assert compiled_norms == pytest.approx(norms, abs=1e-12)
    for device, named in weights.items():
        for name, value in named.items():
            torch.testing.assert_close(compiled[device][name], value, rtol=0, atol=1e-12)


@pytest.mark.full
def test_blocks_whose_experts_lanes_share_are_compiled_as_they_will_be_called(traced: None) -> None:
    """Compiling ahead communicates with nobody: neither with the TP group nor with other lanes. Blocks that are
    cut alike have one graph, also where a module that is cut in rows has a bias."""
    held = ((0, 1, 5, 7), (0, 2, 6), (3, 4, 6))
    shared = stage(0, mixture.LAYERS, ("a/0", 2), ("a/1", 1), ("b/0", 1), lanes=(2, 1))
    plan = plan_of(((5, 3), [msgspec.structs.replace(shared, experts=(held,) * mixture.LAYERS)]))
    torch.manual_seed(0)
    whole = mixture.Biased().double()
    recipe = replace(recipe_of(compile=True), model=copy.deepcopy(whole).describe(), balance=BALANCE)
    before = graphs(), breaks()
    for device in plan.members:
        compile_ahead(recipe, plan, device)()
    ahead = graphs()
    assert ahead > before[0]

    def trained_by(recipe: Recipe) -> list[tuple[float | None, float | None]]:
        def worker(memory: MemoryPlanGroups) -> list[tuple[float | None, float | None]]:
            layouts = Layouts(recipe.model.spec, plan)
            engine = Engine(replace(recipe), layouts, cast(PlanGroups, memory), unpaced)
            engine.adopt(first_state(recipe.model, layouts, memory.me, recipe.seed))
            votes = [engine.step(step, lambda: 0).outcome.vote for step in range(2)]
            engine.settle()
            return [(vote.norm, vote.balance) for vote in votes]

        return run_threads(plan.members, worker)["a/0"]

    compiled = trained_by(recipe)
    assert graphs() == ahead
    model = copy.deepcopy(whole).describe()
    eager = trained_by(replace(recipe_of(compile=False), model=model, balance=BALANCE))
    for found, expected in zip(compiled, eager, strict=True):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
def test_packed_rows_are_compiled_beforehand_as_padded_samples_are(traced: None) -> None:
    """By a row of one sequence. The first rows of training make no graph, whatever their borders."""
    plan = plan_of((8, [stage(0, 4, ("a/0", 1))]))
    recipe = recipe_of(compile=True)
    local = local_model(recipe.model, plan.stage(plan.places["a/0"]), 0, only=("blocks.0",))
    for _, parameter in local.parameters.values():
        parameter.data = torch.randn(parameter.shape, dtype=parameter.dtype)
    calls = BlockCalls()
    compile_blocks(local.modules)

    def passed(*lengths: int) -> None:
        row = PackedRow([SequencePiece.whole(i, n) for i, n in enumerate(lengths)], torch.device("cpu"))
        x = torch.randn(1, row.tokens, 16, dtype=torch.float64, requires_grad=True)
        with passing(row):
            calls.note(True, x)
            local.modules["blocks.0"](x).sum().backward()

    passed(4, 3)
    passed(2, 6)
    assert [call.packed for call in calls.seen] == [True, True]
    torch.compiler.reset()
    compile_now(recipe, plan, "a/0", calls.seen)
    made = graphs()
    for lengths in ((7,), (3, 6), (1, 1, 9), (5, 5)):
        passed(*lengths)
    assert graphs() == made


class Block(nn.Module):
    """Fused projections, and a dropout that is called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.heads, self.drop = 4, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y = self.drop(torch.tanh(q) * k + v)
        return x + self.drop(self.out(y))


def dropping() -> Model:
    embed, head = (nn.Embedding(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64))
    return Model(
        name="dropping",
        embed=embed,
        blocks=[Block() for _ in range(2)],
        head=head,
        rules={"blocks.*.qkv.*": Column("heads", parts=3), "blocks.*.out.*": Row("heads")},
        units={"heads": UnitsOf(attribute="blocks.*.heads")},
    )


def test_dropouts_and_fused_parameters_are_those_of_eager_blocks(traced: None) -> None:
    model = dropping()

    def passes(compile: bool) -> list[Tensor]:
        local = local_model(model, stage(0, 2, ("a/0", 1)), 0)
        for name, ((box,), parameter) in local.parameters.items():
            parameter.data.copy_(model.first_value(name, box, 0))
        if compile:
            compile_blocks(local.modules)
        found = []
        for step in range(3):
            local.drawing.begin(0, step)
            local.drawing.samples = [4, 7 + step]
            x = torch.linspace(-1, 1, 2 * 5 * 8, dtype=torch.float64).view(2, 5, 8).requires_grad_()
            y = local.passes["blocks.1"](local.passes["blocks.0"](x))
            y.square().sum().backward()
            found += [y.detach(), cast(Tensor, x.grad)]
        return found + [
            cast(Tensor, parameter.grad)
            for _, parameter in local.parameters.values()
            if parameter.grad is not None
        ]

    before = graphs()
    compiled, eager = passes(compile=True), passes(compile=False)
    assert graphs() > before
    assert len({float(y.sum()) for y in eager[:6:2]}) == 3, "each step drops others"
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_graphs_that_no_code_can_be_made_of_run_eagerly_and_one_line_has_the_remedy(
    compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch._dynamo

    def fails(*_: Any) -> None:
        raise RuntimeError("no working C++ compiler\nand more")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: fails)
    monkeypatch.setattr(compiled_blocks, "_said", [])
    plan = plan_of((8, [stage(0, 4, ("a/0", 5), ("a/1", 3))]))
    norms, _ = trained(plan, compile=False)
    with caplog.at_level(logging.WARNING):
        for device in plan.members:
            compile_ahead(recipe_of(compile=True), plan, device)()
        ahead = graphs(), breaks()
        assert trained(plan, compile=True)[0] == pytest.approx(norms, abs=1e-12)
    assert (graphs(), breaks()) == ahead
    (line,) = [record.getMessage() for record in caplog.records if "torch.compile" in record.getMessage()]
    assert "no working C++ compiler" in line
    assert "install g++" in line
    assert "leave compile out" in line


def test_a_few_shapes_of_each_mode_are_remembered() -> None:
    calls = BlockCalls()
    for length in (5, 5, 6, 7, 8, 9):
        calls.note(True, torch.zeros(2, length, 3))
    with torch.no_grad():
        calls.note(False, {"hidden": torch.zeros(1, 4, 3), "mask": torch.zeros(4, dtype=torch.int64)})
    assert [call.tensors[0][1] for call in calls.seen] == [(2, 5, 3), (2, 6, 3), (2, 7, 3), (1, 4, 3)]
    assert [name for name, *_ in calls.seen[-1].tensors] == ["hidden", "mask"]
    assert not calls.seen[-1].grad


def test_a_pass_is_looked_at_if_it_begins_unlike_earlier_ones_until_its_mode_has_enough() -> None:
    calls = BlockCalls()
    passes = [torch.zeros(2, length, 3) for length in (5, 5, 6, 7, 8)]
    wanted = []
    for x in passes:
        wanted.append(calls.wants(True, x))
        calls.note(True, x)
    assert wanted == [True, False, True, True, False]
    with torch.no_grad():
        assert calls.wants(False, passes[0])


class Lengthening(Text):
    """Samples of two lengths, by step."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(8 if index < 32 else 11) % 7 + index % 3
        return {"inputs": ids[:-1], "targets": ids[1:]}


@pytest.mark.parametrize("recompute", sizes.beside((False,), (False, True)))
def test_nothing_of_ours_runs_around_a_compiled_block(recompute: bool, traced: None) -> None:
    """Once calls of each shape were noted: between torch's call of the block's module and its graph."""
    plan = plan_of((8, [stage(0, 4, ("a/0", 1), recompute=recompute)]))
    recipe = replace(recipe_of(compile=True), dataset=Lengthening())
    layouts = Layouts(recipe.model.spec, plan)
    groups = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0"))
    engine = Engine(recipe, layouts, groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, "a/0", recipe.seed))
    for step in range(3):
        engine.step(step, lambda: 0)
    assert engine.module.runner is not None
    shapes = {call.tensors[0][1][1] for call in engine.module.runner.calls.seen}
    assert shapes == {7, 10}, "both lengths were noted"
    blocks = {
        id(module) for section, module in engine.module.local.modules.items() if section.startswith("blocks.")
    }
    graphs_before, inside, passes, ours = graphs(), 0, 0, set()
    written = {code for code in _compile.__code__.co_consts if isinstance(code, CodeType)}

    def looked(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside, passes
        code = frame.f_code
        if code.co_name == "_call_impl" and id(frame.f_locals["self"]) in blocks:
            inside += {"call": 1, "return": -1}.get(event, 0)
            passes += event == "call"
        elif inside and event == "call" and "elasticd" in Path(code.co_filename).parts:
            compiled = code.co_name == "traced" and code not in written  # the compiler keeps the name
            ours.update(() if compiled else {code.co_qualname})

    sys.setprofile(looked)
    try:
        engine.step(3, lambda: 0)
    finally:
        sys.setprofile(None)
    assert passes == 8 * 4 * (1 + recompute)
    assert ours == set()
    assert graphs() == graphs_before


class Tripled:
    """Stands for the sum of three members' gradients."""

    nothing, length = False, -1

    def __call__(self, grad: Tensor) -> Tensor:
        return grad * 3


def test_a_tensor_that_entered_before_a_graph_break_has_its_gradient_summed_when_it_is_used_after_it(
    compiler: None,
) -> None:
    redistribute.into_graphs()
    group: Any = SimpleNamespace(members=("a/0", "a/1", "a/2"), me="a/0", rank=0, size=3)
    way: Any = redistribute.Redistribution(
        group, redistribute.whole(group), redistribute.whole(group), add=True
    )
    way.backward = Tripled()

    def block(x: Tensor) -> Tensor:
        y = x.sin().flatten(0, 1)
        entered = way(y)
        first = entered * 2
        torch._dynamo.graph_break()
        return first + entered * 5 + y

    x = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.compile(block, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos() * (3 * (2 + 5) + 1))


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ValueError, match='compile must be True, False, "chunks" or "graphs", not \'inductor\''):
        ParallelismOptions(compile=cast(bool, "inductor"))


@needs_a_compiler
@pytest.mark.full
def test_a_dropouts_one_kernel_has_the_masks_of_the_many(compiler: None) -> None:
    """By inductor's code for CPUs."""
    keys, p = [2**62 + 11, -(2**63), 77], 0.3
    x = torch.randn(3, 5, 17)
    found = fused()(x, torch.tensor(keys), [3, 0], round(p * 2**24), 1 / (1 - p))
    assert torch.equal(found != 0, kept(keys, (5, 17), (3, 0), p, torch.device("cpu")))
    assert torch.equal(found, dropped(x, torch.tensor(keys), [3, 0], round(p * 2**24), 1 / (1 - p)))
    assert Dropout(p).training


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("layers", sizes.beside((), (4,)))
def test_code_for_processors_trains_alike(layers: int, compiler: None) -> None:
    """By inductor's code for CPUs, TP 2 over unequal shares."""
    plan = plan_of((8, [stage(0, layers, ("a/0", 5), ("a/1", 3))]))
    norms, weights = trained(plan, compile=False)
    recipe = recipe_of(compile=True)
    for device in plan.members:  # ranks that are threads cannot compile beside each other
        compile_ahead(recipe, plan, device)()
    compiled_norms, compiled = trained(plan, compile=True)
    assert not compiled_blocks._said
    assert compiled_norms == pytest.approx(norms, abs=1e-10)
    for device, named in weights.items():
        for name, value in named.items():
            torch.testing.assert_close(compiled[device][name], value, rtol=0, atol=1e-10)
