"""A step has no work of the host's that training does not need: calls are counted."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from elasticd_planner.spec.plan import Plan
from torch import nn

from elasticd.models import Decoder
from elasticd.models.decoder import Block, initial
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, run_threads
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model import rng
from elasticd.runtime.model.model import Model
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import CONFIG, make_recipe, plan_of, stage

ALONE = plan_of((8, [stage(0, 6, ("a/0", 1))]))
SECTIONS = 8  # of the model: embedding, six blocks, head


def untied() -> Recipe:
    """Of a model whose head has a weight of its own."""
    with torch.device("meta"):
        decoder, tied = Decoder(CONFIG), Decoder(CONFIG).describe()
        decoder.head.output.weight = nn.Parameter(torch.empty_like(decoder.embed.tokens.weight))
    model = Model(
        name="untied",
        embed=decoder.embed,
        blocks=list(decoder.blocks),
        head=decoder.head,
        width=CONFIG.width,
        init=initial,
        rules=tied.rules,
        units=tied.units,
    )
    return replace(make_recipe(), model=model)


def test_nothing_of_ours_is_hooked_to_a_section_of_a_device_that_shares_none() -> None:
    memory = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0"))
    engine = engine_on(memory, make_recipe(), ALONE)
    for step in range(4):
        engine.step(step, lambda: 0)
    tables = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    for section, module in engine.module.local.modules.items():
        assert not any(getattr(module, table) for table in tables), section


def seeds_of_the_host(plan: Plan, steps: int = 4) -> list[list[int]]:
    """Of each step how often Python's and NumPy's generators were seeded, by rank."""

    def worker(memory: MemoryPlanGroups) -> list[int]:
        engine = engine_on(memory, make_recipe(), plan)
        counts: list[int] = []
        for step in range(steps):
            before = calls[threading.get_ident()]
            engine.step(step, lambda: 0)
            counts.append(calls[threading.get_ident()] - before)
        return counts

    calls, seed_host = Counter[int](), rng.seed_host

    def counted(seed: int) -> None:
        calls[threading.get_ident()] += 1
        seed_host(seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "seed_host", counted)
        counts = run_threads(plan.members, worker)
    return [counts[device] for device in plan.members]


def test_the_hosts_generators_are_not_seeded_for_sections_that_draw_nothing_from_them() -> None:
    *_, steady = seeds_of_the_host(ALONE)[0]
    assert steady == 1, "once a step, so that a few words say whether somebody drew"
    plan = plan_of((8, [stage(0, 6, ("a/0", 1), ("a/1", 1))]))
    for _, *steady in seeds_of_the_host(plan):
        assert min(steady) >= 8 * SECTIONS, "a pass that communicates cannot be repeated"


def test_no_generator_is_seeded_for_sections_that_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    for name in ("seed_all", "seed_torch"):
        seed = getattr(rng, name)
        monkeypatch.setattr(rng, name, lambda *args, seed=seed: (seeds.append(args[0]), seed(*args)))
    engine = engine_on(cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), make_recipe(), ALONE)
    for step in range(5):
        seeds.clear()
        engine.step(step, lambda: 0)
    assert len(seeds) == 1 + 8 * 2, "of a step, and of each micro-batch the backward passes of two graphs"


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random], ids=["torch", "python"])
@pytest.mark.parametrize("where", ["block", "loss"])
def test_what_draws_late_draws_as_if_it_had_all_seeds_always(
    where: str, draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, or the loss, draw in some passes of the later steps, and each mask is another one."""
    rate, forward, recipe = [0.0], Block.forward, make_recipe()

    def masked(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + rate[0] * draw() if rate[0] else 1)

    if where == "block":
        monkeypatch.setattr(Block, "forward", lambda self, x: masked(forward(self, x)))
    else:
        whole = recipe.loss
        recipe = replace(recipe, loss=lambda output, batch: whole(masked(output), batch))

    def trained() -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = engine_on(cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), recipe, ALONE)
        losses = []
        for step in range(7):
            rate[0] = 0.5 if step in (4, 6) else 0.0
            losses.append(engine.step(step, lambda: 0).outcome.vote.loss)
        weights = {name: p.detach() for name, (_, p) in engine.module.local.parameters.items()}
        return losses, weights

    script = torch.random.get_rng_state(), random.getstate()
    losses, weights = trained()
    assert torch.equal(script[0], torch.random.get_rng_state())
    assert script[1] == random.getstate()
    monkeypatch.setattr(rng.ModelRng, "may_leave_seeds_out", False)
    monkeypatch.setattr(rng, "_WATCHED", 1_000)
    expected, same = trained()
    assert losses == expected
    assert all(torch.equal(weights[name], same[name]) for name in same)


def backward_calls(recipe: Recipe, plan: Plan, steps: int = 4) -> list[list[int]]:
    """Of each step the calls of torch.autograd.backward, by rank."""

    def worker(memory: MemoryPlanGroups) -> list[int]:
        engine = engine_on(memory, recipe, plan)
        assert engine.module.runner is not None
        counts: list[int] = []
        for step in range(steps):
            before = calls[threading.get_ident()]
            engine.step(step, lambda: 0)
            counts.append(calls[threading.get_ident()] - before)
        return counts

    calls, backward = Counter[int](), torch.autograd.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        calls[threading.get_ident()] += 1
        backward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", counted)
        counts = run_threads(plan.members, worker)
    return [counts[device] for device in plan.members]


def test_a_micro_batch_is_one_backward_call_on_a_device_alone() -> None:
    ((_, *steady),) = backward_calls(untied(), ALONE)
    assert steady == [8] * 3


def test_the_last_micro_batch_is_cut_into_sections_where_gradients_are_summed_with_others() -> None:
    plan = plan_of((5, [stage(0, 6, ("a/0", 1))]), (3, [stage(0, 6, ("b/0", 1))]))
    (_, *mine), (_, *theirs) = backward_calls(untied(), plan)
    assert (mine, theirs) == ([5 - 1 + SECTIONS] * 3, [3 - 1 + SECTIONS] * 3)


def test_stages_of_a_pipeline_alone_on_their_parameters_make_one_backward_call_each() -> None:
    plan = plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("b/0", 1))]))
    for _, *steady in backward_calls(untied(), plan):
        assert steady == [8] * 3


def test_blocks_that_recompute_are_one_backward_call_each() -> None:
    recipe = untied()
    some = replace(recipe.parallelism, recompute=lambda layer: layer in (1, 4))
    ((_, *steady),) = backward_calls(replace(recipe, parallelism=some), ALONE)
    assert steady == [8 * 5] * 3, "embedding and block 0, block 1, blocks 2 and 3, block 4, block 5 and head"


def test_a_tied_parameter_adds_its_terms_one_after_the_other() -> None:
    """As by sections: a graph with both uses would add them to each other first, and round otherwise."""
    ((_, *steady),) = backward_calls(make_recipe(), ALONE)
    assert steady == [8 * 2] * 3


class Stirred(torch.autograd.Function):
    """Its backward pass draws by Python's generator at a rate."""

    rate = 0.0

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + Stirred.rate * random.random() if Stirred.rate else 1)


def test_backward_passes_that_draw_late_by_the_hosts_generators_are_keyed_after_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: Stirred.apply(forward(self, x)))
    seeds: list[int] = []
    seed_host = rng.seed_host
    monkeypatch.setattr(rng, "seed_host", lambda seed: (seeds.append(seed), seed_host(seed)))

    def trained() -> tuple[list[int], dict[str, torch.Tensor]]:
        engine = engine_on(cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), make_recipe(), ALONE)
        counts = []
        for step in range(6):
            monkeypatch.setattr(Stirred, "rate", 0.5 if step >= 4 else 0.0)
            seeds.clear()
            engine.step(step, lambda: 0)
            counts.append(len(seeds))
        return counts, {name: p.detach() for name, (_, p) in engine.module.local.parameters.items()}

    random.seed(1)
    (*_, steady, first, later), weights = trained()
    assert steady == 1
    assert 8 < first <= later, "each backward pass after the first one that drew"
    random.seed(2)
    _, same = trained()
    assert all(torch.equal(weights[name], same[name]) for name in same), "the script's generator is not asked"
