"""The plan of examples/all_in_one.py trains as plain torch does: a vision-language model with experts.

Its encoder is on three devices beside a language model of two unlike pipelines, with TP groups of unequal
shares and unequal numbers of experts, some of them twice, and ZeRO 1 with two replicas. Samples are padded, or
packed in rows and cut over lanes.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box

import elasticd
from elasticd.models.huggingface import their_name
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.communicators import Connect, GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected
from tests.integration.test_all_in_one import DEVICES, in_one_process
from tests.integration.train_example import EXAMPLES
from tests.models.double import DoubleThroughout
from tests.planner.launch_order import deadlock, in_one_queue
from tests.runtime import gang

#: How near one process losses and weights are.
NEAR = 1e-11
STEPS, BATCH = 2, 6


@cache
def example() -> Any:
    """The script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module("all_in_one")


@cache
def described() -> elasticd.Model:
    """Once for all ranks that are threads."""
    with DoubleThroughout():
        return elasticd.from_hf(example().make_model(torch.float64), experts="experts")


def trained(
    me: str,
    plan_groups: Any,
    accelerator: Accelerator = CPU,
    connect: Connect = GlooCommunicators,
    *,
    packed: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the weights that a member has after some steps."""
    with DoubleThroughout():
        pictures = example().Pictures()
        recipe = Recipe(
            model=described(),
            loss=described().loss,
            optimizer=example().optimizer,
            dataset=pictures,
            data=example().data(pictures) if packed else elasticd.DataOptions(),
            global_batch=BATCH,
            seed=0,
            parallelism=elasticd.ParallelismOptions(zero=1, replicas=2),
            accelerator=accelerator,
            connect=connect,
        )
        layouts = Layouts(recipe.model.specs, example().make_plan(DEVICES, BATCH, packed=packed))
        engine = Engine(recipe, layouts, plan_groups, unpaced)
        engine.adopt(first_state(recipe.model, layouts, me, 0, accelerator=accelerator))
        losses = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
    held = {
        module.prefix + name: [(box, local.part(box).detach().cpu()) for box in local.boxes]
        for module in engine.modules.values()
        for name, local in module.local.parameters.items()
    }
    return losses, held


def check(results: Any) -> None:
    """All members have the losses and the weights of one process."""
    losses, weights = in_one_process(example(), STEPS, BATCH)
    seen: set[str] = set()
    for own, held in results:
        assert own == pytest.approx(losses, abs=NEAR)
        for name, parts in held.items():
            module, rest = described().graph.named(name)
            whole = weights[their_name(described(), name)].reshape(module.parameter(rest).shape)
            for box, value in parts:
                assert float((value - whole[box.slices(Box.whole(whole.shape))]).abs().max()) < NEAR, name
            seen.add(their_name(described(), name))
    assert seen == set(weights)


@pytest.mark.parametrize("packed", [False, True])
def test_unlike_devices_train_a_vision_language_model_with_experts_as_one_process(packed: bool) -> None:
    """packed: in rows, of which long samples are cut over two lanes that share the experts."""
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    described()  # before threads ask for it
    sampler, tokens = Sampler(size=960, global_batch=BATCH, seed=0), example().Pictures().tokens
    assert any(tokens(index) > example().ROW for step in range(STEPS) for index in sampler.samples(step))
    members = example().make_plan(DEVICES, BATCH, packed=packed).members
    check(run_threads(members, lambda memory: trained(memory.me, memory, packed=packed)).values())


def worker(device: str, store: Any) -> dict[str, Any]:
    """One member, on a vgpu of its own."""
    vgpu.load()
    rank = example().make_plan(DEVICES, BATCH).rank(device)
    accelerator = Accelerator(f"vgpu:{rank}")
    accelerator.use()
    made: list[StrictGroups] = []
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    with vgpu.counting(rank) as spent:
        result = trained(device, groups, accelerator, connected(made))
    return {"result": result, "launches": spent.launches, "log": made[0].log.entries}


@pytest.mark.full
@pytest.mark.slow
def test_they_do_on_a_device_that_is_not_the_cpu_under_the_rules_of_nccl() -> None:
    vgpu.needed()
    found = gang.run(__file__, "worker", example().make_plan(DEVICES, BATCH).members)
    check(each["result"] for each in found.values())
    assert min(each["launches"] for each in found.values()) > 100, "computed on the CPU"
    logs = {device: each["log"] for device, each in found.items()}
    assert deadlock(logs) is None
    assert deadlock(in_one_queue(logs)) is None
