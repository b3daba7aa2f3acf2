"""ZeRO with replicas trains like one process of plain torch, whoever keeps the state, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import nn

from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.runtime import gang
from tests.runtime.test_engine_parity import (
    CLIP,
    CONFIG,
    PLANS,
    SEED,
    Text,
    make_recipe,
    plan_of,
    stage,
    unpaced,
)

STEPS = sizes.number(full=4, quick=3)

#: Several trainings follow each other in the same processes.
pytestmark = pytest.mark.timeout(900)

POLICIES = {
    "zero 1, r = 1": StatePolicy(zero=1, replicas=1),
    "zero 1, r = 2": StatePolicy(zero=1, replicas=2),
    "zero 1, r = all": StatePolicy(zero=1, replicas=99),
    "zero 2, r = 1": StatePolicy(zero=2, replicas=1),
    "zero 2, r = 2": StatePolicy(zero=2, replicas=2),
}

#: Besides the layouts of plain parity: one pipeline alone, and four pipelines of unequal speed.
LAYOUTS: dict[str, Plan] = {
    **PLANS,
    "one pipeline over two nodes": plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("b/0", 2), ("b/1", 1))])),
    "four pipelines, unequal": plan_of(
        (1, [stage(0, 6, ("a/0", 1))]),
        (3, [stage(0, 6, ("a/1", 1))]),
        (2, [stage(0, 2, ("b/0", 1)), stage(2, 6, ("b/1", 1))]),
        (2, [stage(0, 6, ("c/0", 1), ("c/1", 3))]),
    ),
}

#: One pipeline on one node, and devices of others that only carry replicas.
CARRIED = plan_of((8, [stage(0, 6, ("a/0", 1), ("a/1", 1))])).replace(
    state=POLICIES["zero 1, r = 2"], carriers=("b/0", "b/1", "c/0")
)


def two_groups(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Named groups, of which torch allows none to be empty: the norms are of one dimension."""
    pairs = list(named)
    return torch.optim.AdamW(
        [
            {"params": [(name, p) for name, p in pairs if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(name, p) for name, p in pairs if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def decoder(frozen: bool) -> Decoder:
    """With `frozen` the tied embedding and a block are not trained."""
    model = Decoder(CONFIG)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(("embed.", "blocks.1.")))
    return model


def recipe(frozen: bool = False) -> Recipe:
    plain = make_recipe()
    with torch.device("meta"):
        model = decoder(frozen).describe()
    return Recipe(
        model=model,
        loss=plain.loss,
        optimizer=two_groups,
        dataset=plain.dataset,
        global_batch=plain.global_batch,
        seed=plain.seed,
        clip=CLIP,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    )


def worker(device: str, store: Any, plans: Sequence[Plan], frozen: bool = False) -> list[dict[str, Any]]:
    """As one of several processes, over gloo; each plan has groups of its own."""
    return [
        train(device, PlanGroups(f"plan/{i}", device, "127.0.0.1", store), plan, frozen)
        for i, plan in enumerate(plans)
    ]


def in_threads(plan: Plan, frozen: bool = False) -> dict[str, dict[str, Any]]:
    """What each member has, all of them threads of this process."""
    return dict(
        run_threads(plan.members, lambda memory: train(memory.me, cast(PlanGroups, memory), plan, frozen))
    )


def train(device: str, plan_groups: PlanGroups, plan: Plan, frozen: bool) -> dict[str, Any]:
    made = recipe(frozen)
    layouts = Layouts(made.model.spec, plan)
    engine = Engine(made, layouts, plan_groups, unpaced)
    engine.adopt(first_state(made.model, layouts, device, SEED))
    done = [engine.step(step, lambda: 0, lambda: 0) for step in range(STEPS)]
    engine.settle()
    state = engine.state()
    gradients = {n: p.grad is not None for n, (_, p) in engine.module.local.parameters.items()}
    return {
        "losses": [d.outcome.vote.loss for d in done],
        "norms": [d.outcome.vote.norm for d in done],
        "held": {
            (item.name, item.role): [
                (
                    shard.box.start,
                    shard.box.stop,
                    {k: p.detach().cpu().numpy() for k, p in shard.planes.items()},
                )
                for shard in tensor.shards
            ]
            for item, tensor in state.tensors.items()
        },
        "gradients left": any(gradients.values()),
        "most bytes": engine.module.reducer.most_bytes,
        "gradient bytes": sum(p.numel() * p.element_size() for _, p in engine.module.local.parameters.values()),
        "owned bytes": sum(part.parameter.numel() * 8 for part in engine.owned),
    }


@cache
def reference(frozen: bool) -> tuple[list[float], list[float], dict[str, dict[str, torch.Tensor]]]:
    """Plain torch: the whole nn.Module, the same groups and scheduler, clip_grad_norm_."""
    made = recipe(frozen)
    model = decoder(frozen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made.model.first_value(name, Box.whole(parameter.shape), SEED))
    optimizer = made.optimizer(model.named_parameters())
    assert made.scheduler is not None
    scheduler = made.scheduler(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        batch = pad([Text()[i] for i in made.sampler.samples(step)])
        total, count = next_token_loss(model(batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        scheduler.step()
        losses.append(float(total.detach()) / count)
    whole = {name: {"value": p.detach(), **optimizer.state[p]} for name, p in model.named_parameters()}
    return losses, norms, whole


def check(plan: Plan, results: dict[str, Any], *, frozen: bool = False, since: int = 0) -> None:
    """`since`: the first step of which norms were kept."""
    losses, norms, whole = reference(frozen)
    assert frozen or max(norms) > CLIP, "clipping must be active"
    layouts = Layouts(recipe(frozen).model.spec, plan)
    kept: dict[tuple[str, str], dict[bytes, int]] = {}
    for device, result in results.items():
        assert result["losses"] == results[plan.members[0]]["losses"], "all ranks fold the same bits"
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert result["norms"] == pytest.approx(norms[since:], abs=1e-9)
        assert not result["gradients left"]
        assert set(result["held"]) == {(item.name, item.role) for item in layouts.held(device)}
        for (name, role), shards in result["held"].items():
            assert [Box(start=a, stop=b) for a, b, _ in shards] == list(layouts.boxes(Item(name, role), device))
            for start, stop, planes in shards:
                box = Box(start=start, stop=stop)
                for key, found in planes.items():
                    expected = whole[name][key][box.slices(Box.whole(whole[name][key].shape))]
                    worst = float((torch.from_numpy(found) - expected).abs().max())
                    assert worst < 1e-10, f"{device} {role} {name} {key}: {worst}"
    check_replicas(layouts, results, kept)


def check_replicas(layouts: Layouts, results: dict[str, Any], kept: dict[Any, Any]) -> None:
    """Whoever holds an element, of the value or of a moment, has the same bits."""
    for device, result in results.items():
        for (name, role), shards in result["held"].items():
            shape = layouts.parameter(name).shape
            for start, stop, planes in shards:
                where = Box(start=start, stop=stop).slices(Box.whole(shape))
                for key, found in planes.items():
                    seen, values = kept.setdefault(
                        (name, role, key), (np.zeros(shape, dtype=bool), np.zeros(shape))
                    )
                    both = seen[where]
                    assert (values[where][both] == found[both]).all(), (device, name, role, key)
                    seen[where], values[where] = True, found
    assert all(seen.all() for seen, _ in kept.values())


CASES = [(layout, policy) for layout in LAYOUTS for policy in POLICIES]
#: Each policy once, under the layouts that differ most in who holds what.
ONE_OF_EACH = [
    ("tp3+tp1 beside tp2", "zero 1, r = 1"),
    ("tp wider than the kv-heads, very unequal", "zero 1, r = all"),
    ("interleaved and uneven beside a plain pipeline", "zero 2, r = 2"),
    ("sequence parallel, interleaved, beside a group without", "zero 2, r = 1"),
    ("four pipelines, unequal", "zero 1, r = 2"),
]


@pytest.mark.parametrize(("layout", "policy"), sizes.beside(ONE_OF_EACH[::2], CASES))
def test_every_policy_trains_like_one_process(layout: str, policy: str) -> None:
    plan = LAYOUTS[layout].replace(state=POLICIES[policy])
    check(plan, in_threads(plan))


@pytest.mark.slow
@pytest.mark.parametrize("layout", sizes.beside(["tp3+tp1 beside tp2"], LAYOUTS))
def test_processes_train_like_one_under_every_policy(layout: str) -> None:
    """Over gloo, one after another in the same processes."""
    policies = sizes.every(list(POLICIES.values()), 5, 1)
    plans = [LAYOUTS[layout].replace(state=policy) for policy in policies]
    results = gang.run(__file__, "worker", plans[0].members, plans, seconds=400)
    for index, plan in enumerate(plans):
        check(plan, {device: result[index] for device, result in results.items()})


def test_replicas_live_on_devices_that_compute_nothing() -> None:
    for plan in (CARRIED, CARRIED.replace(state=StatePolicy(zero=2, replicas=3))):
        results = in_threads(plan)
        check(plan, results)
        assert not any(name for name, role in results["b/0"]["held"] if role == "buffer")
        assert results["b/0"]["held"]


def test_frozen_parameters_stay_and_have_no_state() -> None:
    """Also where a replica is all that another node has of them."""
    split = plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("b/0", 2), ("b/1", 1))]))
    check(split, in_threads(split, frozen=True), frozen=True)
    less = split.replace(state=POLICIES["zero 2, r = 1"])
    check(less, in_threads(less, frozen=True), frozen=True)
    twice = split.replace(state=POLICIES["zero 1, r = 2"])
    results = in_threads(twice, frozen=True)
    check(twice, results, frozen=True)
    held = results["b/0"]["held"]
    assert ("blocks.1.attention.q.weight", "value") in {*held, *results["b/1"]["held"]}
    assert not any(role == "state" and name.startswith("blocks.1.") for name, role in held)


@pytest.mark.full
@pytest.mark.slow
def test_processes_carry_replicas_and_leave_frozen_parameters_as_they_are() -> None:
    results = gang.run(__file__, "worker", CARRIED.members, [CARRIED], seconds=400)
    check(CARRIED, {device: result for device, (result,) in results.items()})
    split = plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("b/0", 2), ("b/1", 1))]))
    twice = split.replace(state=POLICIES["zero 1, r = 2"])
    results = gang.run(__file__, "worker", twice.members, [twice], True, seconds=400)
    check(twice, {device: result for device, (result,) in results.items()}, frozen=True)


def test_zero_two_lets_gradients_go_as_they_are_reduced() -> None:
    """Under zero 1 gradients and one buffer are held at once; under zero 2 no more than that, and after the
    reduction only what is owned."""
    plan = plan_of(*((2, [stage(0, 6, (f"n{i}/0", 1))]) for i in range(4)))
    for result in in_threads(plan.replace(state=StatePolicy(zero=2, replicas=1))).values():
        whole = result["gradient bytes"]
        assert result["owned bytes"] < 0.3 * whole
        assert whole < result["most bytes"] <= 2 * whole


def test_a_fused_optimizer_steps_as_another_on_parts_of_parameters() -> None:
    """torch's fused kernel for CPUs takes a part's memory for one without gaps."""
    policy = StatePolicy(zero=1, replicas=1)
    pipelines = (4, [stage(0, 6, ("a/0", 5), ("a/1", 3))]), (4, [stage(0, 6, ("b/0", 1))])
    plan, gaps = plan_of(*pipelines).replace(state=policy), list[bool]()

    def weights(fused: bool) -> dict[str, dict[str, torch.Tensor]]:
        def worker(memory: Any) -> dict[str, torch.Tensor]:
            made = replace(recipe(), optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, fused=fused))
            layouts = Layouts(made.model.spec, plan)
            engine = Engine(made, layouts, memory, unpaced)
            engine.adopt(first_state(made.model, layouts, memory.me, SEED))
            gaps.extend(not part.parameter.is_contiguous() for part in engine.owned)
            for step in range(2):
                engine.step(step, lambda: 0)
            engine.settle()
            return {name: value.detach() for name, (_, value) in engine.module.local.parameters.items()}

        return run_threads(plan.members, worker)

    others = weights(fused=False)
    assert any(gaps)
    for device, named in weights(fused=True).items():
        for name, value in named.items():
            torch.testing.assert_close(value, others[device][name], rtol=0, atol=1e-12)
