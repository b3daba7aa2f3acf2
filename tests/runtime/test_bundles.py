"""Sections that give named tensors train like one process of plain torch, under every layout, in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import ids_of
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.api.evaluation import HeldOut, evaluate
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.validation import ModelError
from tests import sizes
from tests.runtime import gang
from tests.runtime.bundled import READS, SEED, Block, Named, Text, loss, make_recipe, reference
from tests.runtime.test_engine_parity import plan_of, stage

STEPS = 3
ONE = plan_of((8, [stage(0, 6, ("a/0", 1))]))
INTERLEAVED = plan_of(
    (5, [stage(0, 1, ("a/0", 1), later=((3, 4),)), stage(1, 3, ("a/1", 2), ("a/2", 1), later=((4, 6),))]),
    (3, [stage(0, 6, ("b/0", 1))]),
)
THREE = plan_of(
    (4, [stage(0, 2, ("a/0", 1)), stage(2, 4, ("a/1", 3), ("a/2", 1)), stage(4, 6, ("a/3", 1))]),
    micro_batch=2,
)
PLANS = {
    "one device": ONE,
    "tp 2, all samples at once": plan_of((1, [stage(0, 6, ("a/0", 1), ("a/1", 1))]), micro_batch=8),
    "two stages beside tp 2, zero 1": plan_of(
        (5, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("a/1", 1))]),
        (3, [stage(0, 6, ("b/0", 1), ("b/1", 3))]),
    ).replace(state=StatePolicy(zero=1, replicas=1)),
    "three stages, tp in the middle": THREE,
    "interleaved beside one device": INTERLEAVED,
}


def trained(device: str, plan: Plan, plan_groups: PlanGroups, recipe: Recipe) -> dict[str, Any]:
    layouts = Layouts(recipe.model.spec, plan)
    engine = Engine(recipe, layouts, plan_groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, device, SEED, recipe.master, recipe.accelerator))
    done = [engine.step(step, lambda: 0, lambda: 0) for step in range(STEPS)]
    held_out = HeldOut(dataset=_First())
    evaluated = evaluate(engine, held_out, "held out", STEPS, recipe.loss, recipe.data, "value")
    place = plan.places[device]
    return {
        "losses": [each.outcome.vote.loss for each in done],
        "tokens": [(each.measurement.tokens, each.measurement.longest) for each in done],
        "evaluated": evaluated.loss,
        "weights": {
            name: (box.start, box.stop, p.detach().cpu().double().numpy())
            for name, ((box,), p) in engine.module.local.parameters.items()
        },
        "mine": [recipe.feed.dealing(plan, step)().of(place) for step in range(STEPS)],
    }


class _First(Text):
    """Not as many samples as a step has: the last round is a partial one."""

    def __len__(self) -> int:
        return 11


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """As one of several processes, over gloo."""
    return trained(device, plan, PlanGroups("plan/1", device, "127.0.0.1", store), make_recipe())


def check(plan: Plan, results: Mapping[str, dict[str, Any]], frozen: tuple[str, ...] = ()) -> None:
    losses, weights, evaluated = reference(STEPS, frozen)
    for device, result in results.items():
        assert result["losses"] == results[plan.members[0]]["losses"], "all ranks fold the same bits"
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert result["evaluated"] == pytest.approx(evaluated, abs=1e-10)
        for name, (start, stop, value) in result["weights"].items():
            expected = weights[name][Box(start=start, stop=stop).slices(Box.whole(weights[name].shape))]
            apart = float((torch.from_numpy(value) - expected).abs().max())
            assert apart < 1e-10, f"{device} {name}: {apart}"
        for micros, (tokens, longest) in zip(result["mine"], result["tokens"], strict=True):
            lengths = [max(4 + i % 7 for i in ids_of(micro)) for micro in micros]
            counted = [len(micro) * length for micro, length in zip(micros, lengths, strict=True)]
            assert (tokens, longest) == (sum(counted), max(lengths)), "those of the hidden states"


def in_threads(plan: Plan, **changes: Any) -> dict[str, dict[str, Any]]:
    return run_threads(
        plan.members,
        lambda memory: trained(memory.me, plan, cast(PlanGroups, memory), make_recipe(**changes)),
    )


@pytest.mark.parametrize("name", PLANS)
def test_a_layout_trains_and_evaluates_like_one_process(name: str) -> None:
    check(PLANS[name], in_threads(PLANS[name]))


@pytest.mark.parametrize("plan", [ONE, THREE, INTERLEAVED])
def test_recomputation_changes_nothing(plan: Plan) -> None:
    check(plan, in_threads(plan, recompute=lambda layer: layer != 2))


#: The first stage of `THREE` has a gradient to give to none of its parameters; nor has the second one's.
NOT_TRAINED = (("embed",), ("embed", "blocks.0", "blocks.1"), ("embed", *(f"blocks.{i}" for i in range(4))))


@pytest.mark.parametrize("recompute", sizes.beside([True], [False, True]))
@pytest.mark.parametrize("frozen", NOT_TRAINED)
@pytest.mark.parametrize("plan", sizes.beside([THREE], [THREE, INTERLEAVED]))
def test_stages_without_a_trained_parameter_take_part(
    plan: Plan, frozen: tuple[str, ...], recompute: bool
) -> None:
    check(plan, in_threads(plan, frozen=frozen, recompute=lambda layer: recompute), frozen)


class Watching(Block):
    """Notes which of the tensors that it is called with require a gradient."""

    seen: ClassVar[dict[tuple[int, bool], set[str]]] = {}

    def forward(self, bundle: Named) -> Named:
        needing = {name for name, x in bundle.items() if x.requires_grad}
        self.seen[self.index, torch.is_grad_enabled()] = needing
        return super().forward(bundle)


@pytest.mark.parametrize("plan", [ONE, INTERLEAVED])
def test_only_what_was_made_with_a_gradient_has_one_also_behind_a_boundary(plan: Plan) -> None:
    Watching.seen = {}
    in_threads(plan, blocks=dict.fromkeys(range(6), Watching))
    assert Watching.seen[0, True] == {"hidden", "feature"}
    assert Watching.seen[READS, True] == {"hidden", "feature", "gate", "spare"}
    assert Watching.seen[READS + 1, True] == Watching.seen[5, True] == {"hidden", "gate", "spare"}
    Watching.seen = {}
    in_threads(plan, blocks=dict.fromkeys(range(6), Watching), recompute=lambda layer: True)
    assert Watching.seen[0, True] == {"hidden", "feature"}
    made = {"hidden", "gate", "spare", "busy"}
    assert Watching.seen[READS, True] == made | {"feature"}, "the table passed through"
    Watching.seen = {}
    in_threads(plan, blocks=dict.fromkeys(range(6), Watching), frozen=NOT_TRAINED[1])
    assert Watching.seen[0, True] == Watching.seen[1, True] == Watching.seen[2, True] == set()
    assert Watching.seen[3, True] == {"hidden"}


def test_the_loss_gets_floating_point_in_the_type_of_master_weights() -> None:
    made: set[torch.dtype] = set()

    def noting(output: Named, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        made.update(x.dtype for x in output.values())
        return loss(output, batch)

    recipe = replace(make_recipe(precision="bf16"), loss=noting)
    local = local_model(recipe.model, ONE.pipelines[0].stages[0], 0)
    assert {x.dtype for _, x in local.parameters.values()} == {torch.bfloat16}
    run_threads(["a/0"], lambda memory: trained("a/0", ONE, cast(PlanGroups, memory), recipe))
    assert made == {torch.float32}


class Detaching(Block):
    def forward(self, bundle: Named) -> Named:
        return {name: x.detach() for name, x in super().forward(bundle).items()}


class WithNone(Block):
    def forward(self, bundle: Named) -> Any:
        return {**super().forward(bundle), "cache": None}


class Integers(Block):
    def forward(self, bundle: Named) -> Named:
        return {"hidden": super().forward(bundle)["positions"]}


class Listing(Block):
    def forward(self, bundle: Named) -> Any:
        return list(super().forward(bundle).values())


class Counting(Block):
    """Changes what rides along, where autograd does not look."""

    def forward(self, bundle: Named) -> Named:
        bundle["positions"] += 1
        return super().forward(bundle)


def test_a_block_that_recomputes_may_not_change_a_tensor_in_place() -> None:
    """It would change it twice, and its gradients would be those of another pass."""
    with pytest.raises(ModelError, match=r"blocks.1 changed 'positions' in place, .*make a new tensor"):
        in_threads(ONE, blocks={1: Counting}, recompute=lambda layer: True)


@pytest.mark.parametrize(
    ("block", "frozen", "said"),
    [
        (Detaching, (), "gave no tensor that needs a gradient, though parameters of it are trained"),
        (Detaching, ("blocks.1",), "parameters before it are trained: does it detach its output?"),
        (WithNone, (), "gave 'cache', a NoneType: a bundle has tensors by their names"),
        (Integers, (), "gave no hidden states: its first floating-point tensor must be"),
        (Listing, (), "gave a list of 8: a section gives one tensor, or a mapping of named tensors"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_no_stage_could_pass_on_is_refused_by_name(
    block: type[Block], frozen: tuple[str, ...], said: str, recompute: bool
) -> None:
    with pytest.raises(ModelError, match=f"blocks.1 .*{re.escape(said)}"):
        in_threads(ONE, frozen=frozen, blocks={1: block}, recompute=lambda layer: recompute)


@pytest.mark.slow
def test_processes_train_like_one() -> None:
    plan = PLANS["interleaved beside one device"]
    check(plan, gang.run(__file__, "worker", plan.members, plan))
