"""Consecutive blocks as one graph of torch.compile: they train as eager blocks do, and go one by one where they
cannot be one graph."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, run_threads
from elasticd.runtime.engine import compiled_blocks
from elasticd.runtime.engine.compiled_blocks import CompiledRun, _have_one_memory, compile_ahead, compile_blocks
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.pipeline_stage import StageRunner
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.stage_chunks import BlockRun, autograd_graphs, block_runs
from elasticd.runtime.model.local_model import LocalModel, local_model
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import Column, Row, UnitsOf
from tests.compiling import breaks, graphs
from tests.runtime.test_compiled_blocks import Lengthening, recipe_of
from tests.runtime.test_engine_parity import plan_of, stage, unpaced

Compile = Literal["chunks"] | bool
#: Blocks of a run, of which torch traces each.
LAYERS = 2
ONE = plan_of((8, [stage(0, LAYERS, ("a/0", 1))]))


def chunked(compile: Compile = "chunks", layers: int = LAYERS, **changes: Any) -> Recipe:
    recipe = recipe_of(compile=False, layers=layers)
    return replace(recipe, parallelism=ParallelismOptions(compile=compile), **changes)


def engine_of(recipe: Recipe, plan: Plan, memory: MemoryPlanGroups | None = None) -> Engine:
    memory = memory or MemoryPlanGroups(MemoryWorld(), plan.members[0])
    layouts = Layouts(recipe.model.spec, plan)
    engine = Engine(recipe, layouts, cast(PlanGroups, memory), unpaced)
    engine.adopt(first_state(recipe.model, layouts, memory.me, recipe.seed))
    return engine


def trained(
    plan: Plan, recipe_of: Callable[[], Recipe], steps: int = 3
) -> tuple[list[float], dict[str, dict[str, Tensor]], dict[str, list[bool]]]:
    """The losses of some steps, the weights of each device after them, and by device which of its runs of
    blocks are called one by one."""

    def worker(memory: MemoryPlanGroups) -> tuple[list[float], dict[str, Tensor], list[bool]]:
        engine = engine_of(recipe_of(), plan, memory)
        losses = [engine.step(step, lambda: 0).outcome.vote.loss for step in range(steps)]
        engine.settle()
        weights = {name: p.detach() for name, (_, p) in engine.module.local.parameters.items()}
        return losses, weights, [run.by_block for run in runs_of(engine)]

    found = run_threads(plan.members, worker)
    losses = next(iter(found.values()))[0]
    return losses, {d: w for d, (_, w, _) in found.items()}, {d: b for d, (_, _, b) in found.items()}


def runs_of(engine: Engine) -> list[CompiledRun]:
    assert engine.module.runner is not None
    parts = [part for chunk in engine.module.runner._chunks for graph in chunk.graphs for part in graph]
    return [part.passed for part in parts if isinstance(part.passed, CompiledRun)]


def check_alike(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    for device, named in one.items():
        for name, value in named.items():
            torch.testing.assert_close(other[device][name], value, rtol=0, atol=1e-12)


PLANS = {
    "one device": (ONE, 1),
    "TP over unequal shares, and the rest behind it": (
        plan_of((8, [stage(0, LAYERS, ("a/0", 5), ("a/1", 3)), stage(LAYERS, 2 * LAYERS, ("b/0", 1))])),
        3,
    ),
    "two pipelines, whose sums wait for sections": (
        plan_of((4, [stage(0, LAYERS, ("a/0", 1))]), (4, [stage(0, LAYERS, ("b/0", 1))])),
        1,
    ),
    "TP over unequal shares beside one device, and sums that wait for sections": (
        plan_of((4, [stage(0, LAYERS, ("a/0", 5), ("a/1", 3))]), (4, [stage(0, LAYERS, ("b/0", 1))])),
        3,
    ),
}
#: What all the others have: graphs of three widths, and gradients that are reduced.
ALL = "TP over unequal shares beside one device, and sums that wait for sections"


@pytest.mark.parametrize(
    ("plan", "widths"),
    [pytest.param(*case, marks=[pytest.mark.full] * (name != ALL), id=name) for name, case in PLANS.items()],
)
def test_a_run_trains_as_eager_blocks_do_and_is_compiled_before_training(
    plan: Plan, widths: int, traced: None
) -> None:
    layers = max(stage.stop for stage in plan.pipelines[0].stages)
    losses, weights, _ = trained(plan, lambda: chunked(compile=False, layers=layers))
    before = graphs(), breaks()
    for device in plan.members:
        compile_ahead(chunked(layers=layers), plan, device)()
    ahead = graphs(), breaks()
    # Of each width one graph of a block and one of a run, and none is broken.
    assert (ahead[0] - before[0], ahead[1] - before[1]) == (2 * widths, 0)
    compiled_losses, compiled, by_block = trained(plan, lambda: chunked(layers=layers))
    assert (graphs(), breaks()) == ahead, "the graphs of the copies are those of training"
    assert compiled_losses == pytest.approx(losses, abs=1e-12)
    check_alike(weights, compiled)
    assert not any(any(each) for each in by_block.values())


def passes_of(plan: Plan, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, steps: int = 1) -> list[int]:
    """How often the first device calls a run of blocks, in each step."""
    calls = 0
    called = CompiledRun._pass

    def counted(self: CompiledRun, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return called(self, *args)

    monkeypatch.setattr(CompiledRun, "_pass", counted)
    found: list[int] = []
    eager = replace(recipe, parallelism=ParallelismOptions())

    def worker(memory: MemoryPlanGroups) -> None:
        engine = engine_of(recipe if memory.me == plan.members[0] else eager, plan, memory)
        for step in range(steps):
            before = calls
            engine.step(step, lambda: 0)
            if memory.me == plan.members[0]:
                found.append(calls - before)
        engine.settle()

    run_threads(plan.members, worker)
    return found


def test_blocks_go_one_by_one_where_somebody_waits_for_one(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass of a plan is by section; sums of gradients begin in the last one of each step."""
    assert passes_of(ONE, monkeypatch, chunked(), 2) == [7, 8]
    two = plan_of((4, [stage(0, 4, ("a/0", 1))]), (4, [stage(0, 4, ("b/0", 1))]))  # of several sums
    assert passes_of(two, monkeypatch, chunked(layers=4), 2) == [2, 3]
    recompute = ParallelismOptions(compile="chunks", recompute=lambda layer: layer > 0)
    three = plan_of((8, [stage(0, 3, ("a/0", 1))]))  # two blocks of which are made again
    assert passes_of(three, monkeypatch, replace(chunked(layers=3), parallelism=recompute), 2) == [0, 0]
    monkeypatch.setattr(StageRunner, "_separate", lambda *_, **__: True)  # as on an emulated device
    assert passes_of(ONE, monkeypatch, chunked(), 2) == [0, 0]


def test_an_evaluation_calls_blocks_one_by_one(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(chunked(), ONE)
    engine.step(0, lambda: 0)
    made, (run,) = graphs(), runs_of(engine)
    monkeypatch.setattr(CompiledRun, "__call__", lambda *_: pytest.fail("one graph more would be made"))
    assert engine.module.runner is not None
    micro_batches = engine._batch(1).of(ONE.places["a/0"])
    engine.module.runner.prepare(micro_batches)
    passed = engine.module.runner.forward(
        micro_batches, engine.module.runner._loader, engine.module.runner.loss
    )
    assert float(passed.count) > 0
    assert graphs() == made + 1, "of a block without gradients"
    assert not run.by_block


def test_a_new_length_makes_one_graph_for_all_and_a_switch_back_makes_none(traced: None) -> None:
    def losses(compile: Compile) -> list[float]:
        return trained(ONE, lambda: chunked(compile, dataset=Lengthening()), 6)[0]

    eager, before = losses(False), graphs()
    assert losses("chunks") == pytest.approx(eager, abs=1e-12)
    assert graphs() - before == 3, "a block's of the first pass, and a run's of that length and of all"
    made = graphs()
    assert losses("chunks") == pytest.approx(eager, abs=1e-12)
    assert graphs() == made, "another engine, as after a switch back"


class Cut(nn.Module):
    """Fused projections, a dropout, and what a test adds."""

    def __init__(self, added: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.heads, self.drop, self.added = 4, nn.Dropout(0.3), added

    def forward(self, bundle: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = self.qkv(bundle["hidden"]).chunk(3, -1)
        y = self.added(self.drop(torch.tanh(q) * k + v))
        bundle["hidden"] = bundle["hidden"] + self.out(y)
        return bundle


class Copying(Cut):
    """Gives a mapping of its own."""

    def forward(self, bundle: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().forward(dict(bundle))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 8, dtype=torch.float64)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": self.tokens(batch["inputs"]), "ids": batch["inputs"]}


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 40, dtype=torch.float64)

    def forward(self, bundle: dict[str, Tensor]) -> Tensor:
        return cast(Tensor, self.output(bundle["hidden"]))


def bundled(added: Callable[[Tensor], Tensor], block: type[Cut] = Cut, layers: int = LAYERS) -> Model:
    """The same values in each call: ranks that are threads share torch's generator, and so it is not used."""
    embed, blocks, head = Named(), [block(added) for _ in range(layers)], Leaving()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for section in (embed, *blocks, head) for p in section.parameters()):
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return Model(
        name="cut",
        embed=embed,
        blocks=blocks,
        head=head,
        rules={"blocks.*.qkv.*": Column("heads", parts=3), "blocks.*.out.*": Row("heads")},
        units={"heads": UnitsOf(attribute="blocks.*.heads")},
    )


def unchanged(x: Tensor) -> Tensor:
    return x


def drawing(x: Tensor) -> Tensor:
    return F.dropout(x, 0.25)


def drawing_by_python(x: Tensor) -> Tensor:
    return x * random.uniform(0.5, 1.5)


def breaking(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_may_change_the_mapping_that_it_is_called_with(recompute: bool) -> None:
    parallelism = ParallelismOptions(recompute=recompute)

    def weights(block: type[Cut]) -> dict[str, dict[str, Tensor]]:
        recipe = chunked(model=bundled(unchanged, block))
        return trained(ONE, lambda: replace(recipe, parallelism=parallelism))[1]

    check_alike(weights(Copying), weights(Cut))


@pytest.mark.parametrize(
    ("added", "reason", "devices"),
    [
        (unchanged, "", 1),
        pytest.param(unchanged, "", 2, marks=pytest.mark.full),
        (drawing, "draws random numbers, which are keyed by the block", 1),
        (drawing_by_python, "draws random numbers, which are keyed by the block", 1),
        (breaking, "graph_break", 1),
    ],
    ids=[
        "dropouts and fused parameters of a bundle",
        "the same in a TP group",
        "a draw without a key",
        "one of Python's",
        "a break",
    ],
)
def test_what_cannot_be_one_graph_is_called_one_by_one_and_draws_the_same(
    added: Callable[[Tensor], Tensor],
    reason: str,
    devices: int,
    traced: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = plan_of((8, [stage(0, LAYERS, *[(f"a/{i}", 1) for i in range(devices)])]))
    eager, weights, _ = trained(plan, lambda: chunked(False, model=bundled(added)))
    for device in plan.members:  # ranks that are threads cannot compile beside each other
        compile_ahead(chunked(model=bundled(added)), plan, device)()
    with caplog.at_level(logging.INFO):
        losses, compiled, by_block = trained(plan, lambda: chunked(model=bundled(added)))
    assert losses == pytest.approx(eager, abs=1e-12)
    check_alike(weights, compiled)
    assert by_block == {device: [bool(reason)] for device in plan.members}
    lines = [record.getMessage() for record in caplog.records if "one by one" in record.getMessage()]
    assert len(lines) == devices * bool(reason)
    assert all(line.startswith("blocks.0 to blocks.1") and reason in line for line in lines)


def run_of(added: Callable[[Tensor], Tensor]) -> tuple[LocalModel, CompiledRun]:
    local = local_model(bundled(added), stage(0, LAYERS, ("a/0", 1)), 0, only=("blocks.0", "blocks.1"))
    for _, parameter in local.parameters.values():
        parameter.data.fill_(0.1)
    compile_blocks(local.modules)
    local.drawing.samples = range(2)
    return local, CompiledRun(local, ("blocks.0", "blocks.1"))


def test_a_draw_that_begins_later_is_seen_in_the_graph(traced: None) -> None:
    """The graph that is made anew has it, and no block has run then."""
    rate = [0.0]

    def sometimes(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if rate[0] else x

    local, run = run_of(sometimes)
    entered = {"hidden": torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)}
    run(dict(entered))
    assert not run.by_block
    rate[0] = 0.5
    with local.drawing.kept():
        out = cast("dict[str, Tensor]", run(dict(entered)))
        again: Any = dict(entered)
        for passed in local.passes.values():
            again = passed(again)
    assert run.by_block
    assert torch.equal(out["hidden"], again["hidden"])


def test_a_graph_of_too_many_operations_is_not_made(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "_OPERATIONS", 10)
    _, run = run_of(unchanged)
    run({"hidden": torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)})
    assert run.by_block


def test_the_parameters_of_a_copy_take_the_memory_of_the_largest(traced: None) -> None:
    local = local_model(bundled(unchanged), stage(0, LAYERS, ("a/0", 1)), 0)
    parameters = [parameter for _, parameter in local.parameters.values()]
    shapes = [parameter.shape for parameter in parameters]
    _have_one_memory(parameters)
    assert [parameter.shape for parameter in parameters] == shapes
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    assert parameters[0].untyped_storage().nbytes() == max(p.numel() for p in parameters) * 8


def test_nothing_of_ours_runs_between_the_blocks_of_a_run(traced: None) -> None:
    """Torch calls the run's module once for a micro-batch, and then its graph."""
    engine = engine_of(chunked(), ONE)
    for step in range(3):
        engine.step(step, lambda: 0)
    (run,) = runs_of(engine)
    made, inside, passes, ours = graphs(), 0, 0, set()

    def looked(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside, passes
        code = frame.f_code
        if code.co_name == "_call_impl" and isinstance(frame.f_locals["self"], BlockRun):
            inside += {"call": 1, "return": -1}.get(event, 0)
            passes += event == "call"
        elif inside and event == "call" and "elasticd" in Path(code.co_filename).parts:
            compiled = code.co_name == "forward" and code is not BlockRun.forward.__code__
            ours.update(() if compiled else {code.co_qualname})

    sys.setprofile(looked)
    try:
        engine.step(3, lambda: 0)
    finally:
        sys.setprofile(None)
    assert passes == 8
    assert ours == set()
    assert graphs() == made
    assert not run.by_block


def test_the_blocks_of_an_autograd_graph_are_a_run() -> None:
    model = bundled(unchanged, layers=4)
    sections = ["embed", *(f"blocks.{layer}" for layer in range(4)), "head"]
    (graph,) = autograd_graphs(model, sections, ())
    assert block_runs(graph) == [("embed",), tuple(sections[1:-1]), ("head",)]
    parted = autograd_graphs(model, sections, ["blocks.1"])
    assert parted == [["embed", "blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3", "head"]]
    assert BlockRun([nn.Identity()])(torch.ones(1)).item() == 1
