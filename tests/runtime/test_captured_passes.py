"""Passes captured as graphs: a recorder stands in for CUDA's, whose replay is the captured function once more.

What it cannot show is the device's part: that all kernels of a pass can be captured, and that a replay writes
where the capture did. `tests/accelerators/test_gpu.py` has that for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.models import next_token_loss
from elasticd.models.decoder import Block
from elasticd.runtime import accelerator
from elasticd.runtime.accelerator import CPU, Accelerator, Event
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld
from elasticd.runtime.engine import captured_passes, pass_watch, pipeline_stage
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.pass_watch import FIRST
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.telemetry.comm_timer import Stopwatch
from elasticd.runtime.telemetry.step_times import CAPTURED, Telemetry
from tests.runtime import gang
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import CONFIG, Text, make_recipe, plan_of, stage

ALONE = plan_of((8, [stage(0, 6, ("a/0", 1))]))
#: An interleaved pipeline, whose devices sum gradients with the one that has all of the model.
PIPES = plan_of(
    (
        5,
        [stage(0, 1, ("a/0", 1), later=((3, 4),)), stage(1, 3, ("b/0", 1), later=((4, 6),))],
    ),
    (3, [stage(0, 6, ("c/0", 1))]),
)
STEPS = 7


class Recorder:
    """In the place of CUDA graphs. A capture changes no gradient, and a replay writes where the capture did.

    Forward and backward passes of a place follow each other in turns, since they share its memory.
    """

    def __init__(self, device: Accelerator = CPU) -> None:
        self.parameters: list[nn.Parameter] = []
        self.captures = self.replays = 0
        self.places: Counter[Hashable] = Counter()  # captures by place
        self.under_way: set[Hashable] = set()  # places whose backward pass has still to come
        self.most = 0  # of them at once
        self._device = device

    def capture(self, launch: Callable[[], Any], place: Hashable) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        self.places[place] += 1
        forward = self.places[place] % 2 == 1
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        made = launch()
        for parameter, gradient in zip(self.parameters, before, strict=True):
            if parameter.grad is not None and gradient is not None:
                parameter.grad.copy_(gradient)
        held = [each for each in made if isinstance(each, Tensor)]
        for each in held:
            each.data.fill_(-1)

        def replay() -> None:
            self.replays += 1
            assert (place in self.under_way) != forward
            self.under_way ^= {place}
            self.most = max(self.most, len(self.under_way))
            for to, value in zip(held, (x for x in launch() if isinstance(x, Tensor)), strict=True):
                to.data.copy_(value)

        return replay, made

    def event(self) -> Event:
        return self._device.event()

    def release(self) -> None:
        self.places.clear()


def counting_loss(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The loss as it is on an accelerator: the count of its targets is a tensor."""
    total, _ = next_token_loss(logits, batch)
    return total, (batch["targets"] >= 0).sum()


def recipe_of(device: Accelerator = CPU, **fields: Any) -> Recipe:
    return replace(make_recipe(device), **{"dataset": ThreeLengths(), "loss": counting_loss, **fields})


class ThreeLengths(Text):
    """Samples of three lengths."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index - index % 9 + index % 3)


def recording(patch: pytest.MonkeyPatch, device: str = "cpu") -> tuple[Recorder, Accelerator]:
    kind = device.partition(":")[0]
    recorder, known = Recorder(Accelerator(device)), accelerator.KINDS.get(kind, accelerator._OTHER)
    patch.setitem(accelerator.KINDS, kind, replace(known, graphs=lambda: recorder))
    patch.setattr(pipeline_stage, "compile_blocks", lambda modules: None)  # it is another matter
    return recorder, Accelerator(device)


def trained(
    recipe: Recipe,
    recorder: Recorder | None,
    between: Callable[[int, Engine], None] = lambda step, engine: None,
) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_on(cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), recipe, ALONE)
    if recorder is not None:
        recorder.parameters = [p for _, p in engine.module.local.parameters.values()]
    losses: list[float] = []
    for step in range(STEPS):
        between(step, engine)
        losses.append(engine.step(step, lambda: 0).outcome.vote.loss)
    return losses, {name: p.detach().clone() for name, (_, p) in engine.module.local.parameters.items()}


def compared(
    patch: pytest.MonkeyPatch,
    recipe: Recipe,
    between: Callable[[int, Engine], None] = lambda step, engine: None,
) -> Recorder:
    """Trains eagerly and captured. Asserts that losses and weights are the same to the bit."""
    expected, weights = trained(recipe, None, between)
    recorder, device = recording(patch)
    graphs = replace(recipe, parallelism=ParallelismOptions(compile="graphs"), accelerator=device)
    losses, same = trained(graphs, recorder, between)
    assert losses == expected
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    return recorder


def test_captured_passes_train_as_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = compared(monkeypatch, recipe_of())
    assert recorder.captures == 2 * 3, "of each length a forward and a backward pass"
    assert recorder.replays == (STEPS - FIRST) * 2 * 8, "all passes of later steps"
    assert recorder.most == 1


def test_passes_of_more_shapes_than_are_captured_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = compared(monkeypatch, recipe_of(dataset=Text()))
    assert recorder.captures == 2 * 4
    assert 0 < recorder.replays < (STEPS - FIRST) * 2 * 8


def test_a_frozen_parameter_and_lost_memory_have_passes_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(step: int, engine: Engine) -> None:
        if step == 4:
            engine.module.local.parameters["blocks.0.attention.q.weight"][1].requires_grad_(False)
        if step == 6:
            assert engine.module.runner is not None
            engine.module.runner.release()

    recorder = compared(monkeypatch, recipe_of(), between)
    assert recorder.captures > 2 * 3


def test_what_only_other_shapes_reach_is_left_alone_in_a_step_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parameter without a gradient is skipped by the optimizer: zeros would decay it, and move it on."""
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) if x.shape[1] > 6 else x)
    early = {index for step in range(FIRST + 2) for index in recipe_of().sampler.samples(step)}

    class LongAtFirst(Text):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            long = index in early and index % 2 == 0
            tokens = torch.arange(index, index + (10 if long else 5) + 1) % CONFIG.vocabulary
            return {"inputs": tokens[:-1], "targets": tokens[1:]}

    recorder = compared(monkeypatch, recipe_of(dataset=LongAtFirst()))
    assert recorder.captures == 2 * 2
    assert recorder.replays == (STEPS - FIRST) * 2 * 8


def test_the_mode_of_a_module_inside_a_section_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) * (1 + self.attention.training))

    def between(step: int, engine: Engine) -> None:
        if step == FIRST + 2:
            for module in engine.module.local.modules.values():
                for part in module.modules():
                    part.training = part.training and not hasattr(part, "q")

    recorder = compared(monkeypatch, recipe_of(), between)
    assert recorder.captures > 2 * 3


def test_a_chunk_that_several_tensors_enter_is_not_captured() -> None:
    chunk = captured_passes.ChunkPasses(graphs=(), loss=None, precision=None)
    with pytest.raises(captured_passes.CannotCapture, match="the stage before is several tensors"):
        chunk.forth(captured_passes.Entered((), {"hidden": torch.ones(1), "mask": torch.ones(1)}))


def noisy_loss(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    total, count = counting_loss(logits, batch)
    return total * (1 + torch.rand(())), count


def test_a_loss_that_draws_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = compared(monkeypatch, recipe_of(loss=noisy_loss))
    assert recorder.captures == 0


def test_a_block_that_draws_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) * (1 + 0.1 * torch.rand(())))
    assert compared(monkeypatch, recipe_of()).captures == 0


def test_draws_that_begin_after_a_capture_are_noticed_in_the_next_step_that_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, noise = Block.forward, [0.0]

    def noisy(self: Block, x: Tensor) -> Tensor:
        return forward(self, x) * (1 + noise[0] * torch.rand(())) if noise[0] else forward(self, x)

    def between(step: int, engine: Engine) -> None:
        noise[0] = 0.1 * (step >= 5)

    monkeypatch.setattr(Block, "forward", noisy)
    monkeypatch.setattr(pass_watch, "_SELDOM", 6)
    assert compared(monkeypatch, recipe_of(), between).replays == (5 - FIRST) * 2 * 8


def test_passes_go_on_eagerly_where_a_capture_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the midst of it: some parameters have other gradients then."""

    def failing(self: Recorder, launch: Callable[[], Any], place: Hashable) -> Any:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, torch.nan)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorder, "capture", failing)
    recorder = compared(monkeypatch, recipe_of())
    assert recorder.replays == 0
    lines = [each.getMessage() for each in caplog.records if "not captured" in each.getMessage()]
    assert lines == [
        "passes are not captured as CUDA graphs, and run eagerly: "
        "operation not permitted when stream is capturing"
    ]


def test_the_scale_of_a_loss_is_that_of_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, device = recording(monkeypatch)
    recipe = recipe_of(device, parallelism=ParallelismOptions(compile="graphs"))
    engine = engine_on(cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), recipe, ALONE)
    module, parameters = engine.module, [p for _, p in engine.module.local.parameters.values()]
    recorder.parameters, gradients = parameters, {}
    for step, scale in enumerate([1.0] * FIRST + [1.0, 4.0, 0.5]):
        module.begin(0)
        module.run(engine._batches.of(0), None, scale)
        gradients[step] = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
    assert recorder.replays == 3 * 2 * 8
    for step, scale in ((FIRST, 1.0), (FIRST + 1, 4.0), (FIRST + 2, 0.5)):
        assert all(map(torch.equal, gradients[step], [first * scale for first in gradients[0]]))


def member(device: str, store: Any, plan: Plan, captures: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        recorder, here = recording(patch)
        patch.setattr(captured_passes, "_AT_ONCE", 100)
        options = ParallelismOptions(compile="graphs" if captures else False)
        recipe = recipe_of(here, parallelism=options)
        engine = engine_on(PlanGroups("plan/1", device, "127.0.0.1", store), recipe, plan)
        recorder.parameters = [p for _, p in engine.module.local.parameters.values()]
        losses = [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
    weights = {name: p.detach().numpy() for name, (_, p) in engine.module.local.parameters.items()}
    assert engine.module.runner is not None
    most = engine.module.runner.most_alive
    return {
        "losses": losses,
        "weights": weights,
        "replays": recorder.replays,
        "most": (recorder.most, most),
        "under way": len(recorder.under_way),
    }


@pytest.mark.slow
def test_pipelines_train_from_captured_passes_as_from_eager_ones() -> None:
    mine = gang.run(str(Path(__file__)), "member", PIPES.members, PIPES, True)
    expected = gang.run(str(Path(__file__)), "member", PIPES.members, PIPES, False)
    for device, passes in (("a/0", 2 * 5), ("b/0", 2 * 5), ("c/0", 3)):
        assert mine[device]["losses"] == expected[device]["losses"]
        weights = expected[device]["weights"]
        assert all((mine[device]["weights"][name] == weights[name]).all() for name in weights)
        assert mine[device]["replays"] == (STEPS - FIRST) * 2 * passes, "all passes of later steps"
        most, alive = mine[device]["most"]
        assert most == alive, "a slot for each micro-batch that is under way"
        assert mine[device]["under way"] == 0
    assert mine["a/0"]["most"] > mine["c/0"]["most"]


@pytest.mark.parametrize(
    ("plan", "options", "reason"),
    [
        (plan_of((8, [stage(0, 6, ("a/0", 1), ("b/0", 1))])), {}, "members of its TP group or lanes"),
        (ALONE, {"recompute": lambda layer: layer == 2}, "its blocks recompute"),
    ],
)
def test_a_plan_whose_passes_are_not_captured_says_so(
    plan: Plan,
    options: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, device = recording(monkeypatch)
    recipe = replace(make_recipe(device), parallelism=ParallelismOptions(compile="graphs", **options))
    with caplog.at_level("INFO"):
        engine_on(cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), recipe, plan)
    assert f"passes of this device are no CUDA graphs: {reason}" in caplog.text


def test_captured_passes_need_cuda() -> None:
    ParallelismOptions(compile="chunks").refuse_device(CPU)
    with pytest.raises(
        ValueError, match=r'compile="graphs" .* this worker computes on cpu: give .*compile=True'
    ):
        ParallelismOptions(compile="graphs").refuse_device(CPU)


def test_seconds_of_captured_passes_are_parted_as_those_of_eager_ones() -> None:
    telemetry = Telemetry("a/0", Stopwatch())
    for kind, seconds in (("embed", 1.0), ("forward", 2.0), ("head", 1.0), ("backward", 4.0)):
        telemetry._compute[kind] = seconds
    telemetry.finish(1, 0)
    telemetry.begin()
    telemetry._compute[CAPTURED] = 4.0
    measured = telemetry.finish(1, 1)
    assert (measured.embed_seconds, measured.head_seconds) == (0.5, 0.5)
    assert (measured.forward_seconds, measured.backward_seconds, measured.block_seconds) == (1.0, 2.0, 3.0)
