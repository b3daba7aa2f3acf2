"""Checkpoints of a job with adapters have what is trained; the base is the script's, and must be the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import fused_parameters
from elasticd_planner.spec.plan import Plan
from torch import Tensor

import elasticd
from elasticd.checkpoints import folder as folders
from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.manifest import differences
from elasticd.models import next_token_loss
from elasticd.records import JobSpec
from elasticd.runtime.checkpoint.loader import FrozenValues, NoCheckpoint, Types, load, start_from
from elasticd.runtime.checkpoint.staging import Staging, pieces, shares, without_planes
from elasticd.runtime.checkpoint.writer import Task, origin_of, path_of
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.model.model import Model
from tests.checkpoints.support import write
from tests.models.families import Whole, double_throughout
from tests.models.layouts import SEED, Training, alone, plan_of, stage
from tests.models.texts import Text
from tests.runtime.test_pipeline_stage_interleaved import moved

pytest.importorskip("peft")

from tests.models.test_adapters import LAYERS, PLANS, TP3, adapted, base

ONE = plan_of((8, [stage(0, LAYERS, ("a/0", 1))]))


States = dict[str, LocalState]


def trained(
    training: Training, plan: Plan, first: int, last: int, states: States
) -> tuple[list[float], States]:
    """Steps [first, last) under a plan, from what each member holds; without states from the first values."""

    def worker(memory: MemoryPlanGroups) -> tuple[list[float], LocalState]:
        recipe = training.recipe()
        layouts = Layouts(recipe.model.spec, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(states.get(memory.me) or first_state(recipe.model, layouts, memory.me, SEED))
        losses = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(first, last)]
        engine.settle()
        return losses, engine.state()

    results = run_threads(plan.members, worker)
    return results[plan.members[0]][0], {name: state for name, (_, state) in results.items()}


def saved(folder: Path, model: Model, plan: Plan = PLANS[TP3], states: States | None = None) -> Path:
    """A checkpoint, written by the members of a plan: of the first state, unless they hold another."""
    layouts = Layouts(model.spec, plan)
    spec = JobSpec(
        job="job", model=model.spec, global_batch=8, micro_batch=1, samples=100, sample_tokens=7.0, seed=SEED
    )
    tasks = []
    for device in layouts.plan.members:
        state = states[device] if states is not None else first_state(model, layouts, device, SEED)
        mine = shares(layouts, frozenset(model.spec.frozen))[device]
        tasks.append(
            Task(
                origin=origin_of(spec, layouts.plan, 1),
                path=path_of(folder, layouts.plan, 1),
                device=device,
                members=layouts.plan.members,
                held=Staging().copy(pieces(state, mine)),
                shapes={item: layouts.layout(item).shape for item in mine if item in state.tensors},
                fused=fused_parameters(spec.specs),
                small=without_planes(state, mine),
                pretrained=model.pretrained.describe() if model.pretrained is not None else "",
                frozen=model.frozen_digest,
            )
        )
    return write(folder, tasks, LocalDisk())


def loaded(path: Path, model: Model) -> dict[str, Tensor]:
    """The values that one device goes on from."""
    layouts = Layouts(model.spec, ONE)
    group = MemoryPlanGroups(MemoryWorld(), "a/0").group(("a/0",), "everyone")
    frozen = FrozenValues(
        digest=model.frozen_digest, value=lambda name, box: model.first_value(name, box, SEED)
    )
    state = start_from(
        path.parent, [path.name], Types(layouts=layouts, master=None), group, frozen=frozen
    ).state
    return {item.name: tensor.shards[0].planes["value"] for item, tensor in state.tensors.items()}


def test_a_checkpoint_has_the_adapters_alone_and_is_gone_on_from_with_the_scripts_base(tmp_path: Path) -> None:
    model = elasticd.from_hf(adapted(base()))
    path = saved(tmp_path, model)
    manifest = folders.look(path).manifest
    assert manifest is not None
    assert set(manifest.tensors["value"]) == {
        f"{section}.{p.name}"
        for section in model.sections
        for p in model.spec.section(section)
        if p.kind == "trained"
    }
    assert differences(manifest, model.spec) == ""
    values = loaded(path, model)
    for name, value in values.items():
        assert torch.equal(value, model.first_value(name, Box.whole(value.shape), SEED)), name
    assert set(values) == {item.name for item in Layouts(model.spec, ONE).items}


def test_another_base_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, elasticd.from_hf(adapted(base())))
    other = base()
    other.model.norm.weight.data += 1.0
    with pytest.raises(NoCheckpoint, match=r"leaves out the frozen parameters.*load the same base model"):
        loaded(path, elasticd.from_hf(adapted(other)))


def test_other_first_adapters_over_the_same_base_go_on(tmp_path: Path) -> None:
    """The script that resumes may draw its adapters otherwise: they are in the checkpoint."""
    model = elasticd.from_hf(adapted(base()))
    path = saved(tmp_path, model)
    again = adapted(base())
    for name, parameter in again.named_parameters():
        if "lora_" in name:
            parameter.data.zero_()
    values = loaded(path, elasticd.from_hf(again))
    name = "blocks.0.layer.self_attn.q_proj.lora_B.default.weight"
    assert torch.equal(values[name], model.first_value(name, Box.whole(values[name].shape), SEED))


def test_adapters_go_on_through_a_switch_and_a_checkpoint_in_other_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the optimizer's momentum: two steps, a move of state, one step, a checkpoint, two steps."""
    double_throughout(monkeypatch)
    model = adapted(base())
    described = elasticd.from_hf(model)
    training = Training(model=described, loss=next_token_loss, dataset=Text(41), steps=5)
    expected = alone(training, Whole(copy.deepcopy(model.get_base_model())))
    before, after, last = PLANS[TP3], PLANS["tp1 to tp4 and back"], PLANS["zero 2 in replicas"]
    layouts = [Layouts(described.spec, plan) for plan in (before, after, last)]
    losses, states = trained(training, before, 0, 2, {})
    states = moved(layouts[0], layouts[1], states)
    more, states = trained(training, after, 2, 3, states)
    path = saved(tmp_path, described, after, states)
    frozen = FrozenValues(
        digest=described.frozen_digest, value=lambda name, box: described.first_value(name, box, SEED)
    )
    manifest = folders.look(path).manifest
    assert manifest is not None
    held = {device: layouts[2].held(device) for device in last.members}
    states = {device: load(path, manifest, boxes, frozen=frozen) for device, boxes in held.items()}
    rest, _ = trained(training, last, 3, 5, states)
    assert [*losses, *more, *rest] == pytest.approx(expected[0], rel=1e-11)


def test_a_model_without_adapters_leaves_nothing_out() -> None:
    model = base()
    model.model.embed_tokens.requires_grad_(False)
    described = elasticd.from_hf(model)
    assert described.spec.frozen == ("embed.embed_tokens.weight",)
    assert described.frozen_digest == ""
