"""The state as plain tensors: under the plan of one device, and in the shapes that modules have."""

from __future__ import annotations

import pytest
import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import fused_parameters

from elasticd.runtime.api.full_state_dict import alone, as_modules, named
from examples.train_gpt2 import GPT, describe
from tests.runtime.test_engine_parity import CONFIG
from tests.runtime.test_evaluation import PLANS


@pytest.mark.parametrize("name", PLANS)
def test_one_device_has_all_layers(name: str) -> None:
    plan = alone(PLANS[name])
    assert plan.members == PLANS[name].members[:1]
    assert plan.stage(plan.places[plan.members[0]]).layers == CONFIG.layers
    assert plan.global_batch == PLANS[name].global_batch


def test_fused_parameters_have_the_shapes_of_their_modules() -> None:
    model = GPT(40, width=16, layers=2, heads=4)
    spec = describe(model).spec
    assert fused_parameters(spec)
    held = {}
    for section in spec.sections(0, len(spec.layers)):
        for parameter in spec.section(section):
            shape = tuple(parameter.shape)
            name = f"{section}.{parameter.name}"
            values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            held[Item(name, "value")] = LocalTensor(
                shards=(Shard(box=Box.whole(shape), planes={"value": values}),), scalars={}
            )
    found = named(as_modules(LocalState(tensors=held), fused_parameters(spec)), "value")
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, ((box, value),) in found.items():
        assert tuple(value.shape) == box.shape
        if name in own:
            assert tuple(value.shape) == own[name], name
    assert any(name in own for name in fused_parameters(spec))
