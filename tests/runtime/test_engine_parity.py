"""Every layout trains like plain torch in one process: same batches, same losses, same weights, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import pytest
import torch
from elasticd_planner.cost.schedule import most_alive
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.communicators import Connect, GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.comm.in_memory import unpaced as unpaced
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model
from tests import sizes
from tests.runtime import gang

CONFIG = DecoderConfig(
    vocabulary=37 + 3, width=32, layers=6, heads=8, kv_heads=2, hidden=44, dtype=torch.float64
)
STEPS, BATCH, SEED, CLIP = sizes.number(full=5, quick=3), 8, 3, 0.7


class Text:
    """Samples of unequal length, each a function of its index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 5 + index % 9
        ids = torch.randint(0, CONFIG.vocabulary, (length + 1,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


def stage(start: int, stop: int, *members: tuple[str, int], **said: Any) -> Stage:
    devices, shares = (tuple(each) for each in zip(*members, strict=True))
    return Stage(start=start, stop=stop, devices=devices, shares=shares, **said)


def plan_of(*pipelines: tuple[int | tuple[int, ...], list[Stage]], micro_batch: int = 1) -> Plan:
    """Pipelines as (micro-batches, or those of each lane; stages)."""
    rows = [count if isinstance(count, tuple) else (count,) for count, _ in pipelines]
    made = tuple(
        Pipeline(stages=tuple(stages), micro_batches=sum(own), rows=own)
        for own, (_, stages) in zip(rows, pipelines, strict=True)
    )
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=made),))
    return Plan(number=1, strategies=(strategy,), micro_batch=micro_batch, global_batch=BATCH)


PLANS = {
    "tp3+tp1 beside tp2": plan_of(
        (5, [stage(0, 4, ("a/0", 3), ("a/1", 3), ("a/2", 2)), stage(4, 6, ("b/0", 1))]),
        (3, [stage(0, 6, ("b/1", 1), ("b/2", 1))]),
    ),
    "pipelines of 2 and 3 stages": plan_of(
        (5, [stage(0, 1, ("a/0", 1)), stage(1, 6, ("a/1", 1))]),
        (3, [stage(0, 3, ("b/0", 1)), stage(3, 4, ("b/1", 1)), stage(4, 6, ("b/2", 1))]),
    ),
    "tp wider than the kv-heads, very unequal": plan_of(
        (8, [stage(0, 6, ("a/0", 4), ("a/1", 2), ("a/2", 1), ("a/3", 1))]),
    ),
    "tp1 to tp3 and back": plan_of(
        (
            4,
            [
                stage(0, 2, ("a/0", 1)),
                stage(2, 4, ("a/1", 5), ("a/2", 2), ("a/3", 1)),
                stage(4, 6, ("b/0", 1)),
            ],
        ),
        micro_batch=2,
    ),
    "interleaved and uneven beside a plain pipeline": plan_of(
        (
            5,
            [
                stage(0, 2, ("a/0", 5), ("a/1", 3), later=((3, 4),)),
                stage(2, 3, ("b/0", 1), later=((4, 6),)),
            ],
        ),
        (3, [stage(0, 4, ("c/0", 1)), stage(4, 6, ("c/1", 1))]),
    ),
    "sequence parallel, interleaved, beside a group without": plan_of(
        (
            5,
            [
                stage(0, 2, ("a/0", 5), ("a/1", 3), later=((3, 4),), sequence_parallel=True),
                stage(2, 3, ("b/0", 1), ("b/1", 1), later=((4, 6),), sequence_parallel=True, recompute=True),
            ],
        ),
        (3, [stage(0, 6, ("c/0", 1), ("c/1", 1))]),
    ),
}


@cache
def described() -> Model:
    """Once for all ranks that are threads, and all tests: engines build their parts from it, and leave it as it
    is."""
    with torch.device("meta"):
        return Decoder(CONFIG).describe()


def make_recipe(accelerator: Accelerator = CPU, connect: Connect = GlooCommunicators) -> Recipe:
    return Recipe(
        model=described(),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        dataset=Text(),
        global_batch=BATCH,
        seed=SEED,
        clip=CLIP,
        accelerator=accelerator,
        connect=connect,
    )


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """As one of several processes, over gloo."""
    return trained(device, plan, PlanGroups("plan/1", device, "127.0.0.1", store))


def trained(
    device: str,
    plan: Plan,
    plan_groups: PlanGroups,
    accelerator: Accelerator = CPU,
    connect: Connect = GlooCommunicators,
) -> dict[str, Any]:
    """What one member has after training under this plan."""
    recipe = make_recipe(accelerator, connect)
    layouts = Layouts(recipe.model.spec, plan)
    engine = Engine(recipe, layouts, plan_groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, device, SEED, accelerator=accelerator))
    done = [engine.step(step, lambda: 0, lambda: 0) for step in range(STEPS)]
    engine.settle()  # nobody ends before others have what it sent
    assert engine.module.runner is not None
    place = plan.places[device]
    pipeline = plan.pipeline(place)
    return {
        "losses": [d.outcome.vote.loss for d in done],
        "norms": [d.outcome.vote.norm for d in done],
        "weights": {
            n: (box.start, box.stop, p.detach().cpu().numpy())
            for n, ((box,), p) in engine.module.local.parameters.items()
        },
        "alive": engine.module.runner.most_alive,
        "promised": most_alive(
            len(pipeline.stages), place.stage, pipeline.micro_batches, (1,) * pipeline.chunks
        ),
    }


@cache
def reference(
    steps: int = STEPS, recipe: Recipe | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Plain torch: the whole nn.Module, torch.optim, clip_grad_norm_; one sample at a time."""
    recipe = recipe or make_recipe()
    model = Decoder(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(recipe.model.first_value(name, Box.whole(parameter.shape), SEED))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        batch = pad([Text()[i] for i in recipe.sampler.samples(step)])
        total, count = next_token_loss(model(batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


#: Unequal shares, the stages between them, interleaved chunks, two pipelines. TP groups of unlike degree are
#: tried over gloo in test_zero.py.
OVER_GLOO = ("interleaved and uneven beside a plain pipeline",)


#: test_zero.py has the other layouts in threads, too.
IN_THREADS = ("tp3+tp1 beside tp2", *OVER_GLOO, "tp1 to tp3 and back", *list(PLANS)[-1:])


@pytest.mark.parametrize("name", sizes.beside(IN_THREADS, PLANS))
def test_a_layout_trains_like_one_process(name: str) -> None:
    plan = PLANS[name]
    check(plan, run_threads(plan.members, lambda memory: trained(memory.me, plan, cast(PlanGroups, memory))))


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(OVER_GLOO, PLANS))
def test_processes_train_like_one(name: str) -> None:
    check(PLANS[name], gang.run(__file__, "worker", PLANS[name].members, PLANS[name]))


def check(plan: Plan, results: Mapping[str, dict[str, Any]]) -> None:
    losses, norms, weights = reference()
    assert max(norms) > CLIP, "clipping must be active"
    assert set(Layouts(make_recipe().model.spec, plan).names) == set(weights)
    for device, result in results.items():
        assert result["losses"] == results[plan.members[0]]["losses"], "all ranks fold the same bits"
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert result["norms"] == pytest.approx(norms, abs=1e-9)
        assert result["alive"] == result["promised"], f"{device}: live activations as 1F1B promises"
        for held in result["weights"].items():
            assert apart(weights, held) < 1e-10, f"{device} {held[0]}: {apart(weights, held)}"


def apart(weights: Mapping[str, torch.Tensor], held: tuple[str, tuple[Any, Any, Any]]) -> float:
    """The largest difference of a box of a parameter from that of one process."""
    name, (start, stop, value) = held
    expected = weights[name][Box(start=start, stop=stop).slices(Box.whole(weights[name].shape))]
    return float((torch.from_numpy(value) - expected).abs().max())
