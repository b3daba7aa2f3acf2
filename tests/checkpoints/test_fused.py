"""A fused parameter is saved in the shape that its module has, whatever layout it was trained under."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.model import fused_parameters
from elasticd_planner.spec.plan import Plan
from safetensors.torch import load_file

from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.export import export
from elasticd.checkpoints.folder import look
from elasticd.records import JobSpec
from elasticd.runtime.checkpoint.loader import load
from elasticd.runtime.checkpoint.staging import Staging, pieces, shares, without_planes
from elasticd.runtime.checkpoint.writer import Task, origin_of, path_of
from elasticd.runtime.engine.engine import first_state
from elasticd.runtime.model.model import Model
from examples import train_gpt2
from tests.checkpoints.support import write
from tests.runtime.test_engine_parity import plan_of, stage

CUT = plan_of((8, [stage(0, 1, ("a/0", 3), ("a/1", 1)), stage(1, 2, ("b/0", 1))]))
WHOLE = plan_of((8, [stage(0, 2, ("a/0", 1))]))


@pytest.fixture(scope="module")
def gpt() -> train_gpt2.GPT:
    torch.manual_seed(0)
    return train_gpt2.GPT(vocabulary=23, width=24, layers=2, heads=8, longest=16, dropout=0.0).double()


@pytest.fixture(scope="module")
def model(gpt: train_gpt2.GPT) -> Model:
    return train_gpt2.describe(gpt)


def saved(folder: Path, model: Model, plan: Plan) -> Path:
    layouts = Layouts(model.spec, plan)
    spec = JobSpec(
        job="job", model=model.spec, global_batch=8, micro_batch=1, samples=100, sample_tokens=7.0, seed=3
    )
    tasks = []
    for device in plan.members:
        state, mine = first_state(model, layouts, device, 3), shares(layouts)[device]
        tasks.append(
            Task(
                origin=origin_of(spec, plan, 1),
                path=path_of(folder, plan, 1),
                device=device,
                members=plan.members,
                held=Staging().copy(pieces(state, mine)),
                shapes={item: layouts.layout(item).shape for item in mine if item in state.tensors},
                fused=fused_parameters(spec.specs),
                small=without_planes(state, mine),
            )
        )
    return write(folder, tasks, LocalDisk())


@pytest.mark.parametrize("plan", [WHOLE, CUT], ids=["whole", "cut"])
def test_exports_and_torchs_own_index_have_the_shapes_of_the_modules(
    tmp_path: Path, gpt: train_gpt2.GPT, model: Model, plan: Plan
) -> None:
    assert fused_parameters(model.spec), "a model of which parameters are fused"
    path = saved(tmp_path, model, plan)
    manifest = look(path).manifest
    assert manifest is not None
    export(path, manifest, tmp_path / "out.safetensors")
    exported = load_file(tmp_path / "out.safetensors")
    plain = {name: torch.zeros_like(value) for name, value in gpt.named_parameters()}
    dcp.load({"model": plain}, checkpoint_id=path, no_dist=True)
    for name, value in gpt.named_parameters():
        assert exported[name].shape == value.shape, name
        assert torch.equal(exported[name], value), name
        assert torch.equal(plain[name], value), name
    twin = train_gpt2.GPT(vocabulary=23, width=24, layers=2, heads=8, longest=16, dropout=0.0).double()
    twin.load_state_dict(exported, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), gpt.parameters(), strict=True))


@pytest.mark.parametrize(("old", "new"), [(WHOLE, CUT), (CUT, WHOLE)], ids=["to cut", "to whole"])
def test_a_fused_parameter_is_read_back_under_another_layout(
    tmp_path: Path, model: Model, old: Plan, new: Plan
) -> None:
    path = saved(tmp_path, model, old)
    manifest = look(path).manifest
    assert manifest is not None
    layouts = Layouts(model.spec, new)
    for device in new.members:
        found = load(path, manifest, layouts.held(device))
        expected = first_state(model, layouts, device, 3)
        for item, tensor in expected.tensors.items():
            for have, want in zip(found.tensors[item].shards, tensor.shards, strict=True):
                assert have.box == want.box
                assert torch.equal(have.planes["value"], want.planes["value"]), item
