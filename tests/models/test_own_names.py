"""A job's weights go out under the names of the user's own module, and into a new one of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from elasticd_planner.spec.box import Box
from safetensors.torch import load_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import elasticd
from elasticd.checkpoints.export import export
from elasticd.checkpoints.folder import scan
from elasticd.models import next_token_loss
from elasticd.runtime.api.full_state_dict import by_own_names
from examples.tutorial import gpt_tp
from tests.models.test_module_sections import CONFIG, EXAMPLE, TP_PLAN, VOCABULARY, Nested
from tests.models.texts import Text
from tests.runtime import test_one_process

STEPS = 3
alone = test_one_process.alone


def made() -> nn.Module:
    torch.manual_seed(0)
    return Nested(dropout=0.0).double()


def described(module: nn.Module, **options: Any) -> elasticd.Model:
    return elasticd.from_module(
        module,
        blocks="transformer.h",
        example=EXAMPLE,
        inputs=lambda batch: {"idx": batch.get("inputs", batch.get("idx"))},
        tp_plan=TP_PLAN,
        **options,
    )


def trained(folder: Path) -> tuple[dict[str, dict[str, Any]], Path]:
    """A job's state dicts after some steps, and its last checkpoint."""
    job = elasticd.Job(
        model=described(made()),
        loss=next_token_loss,
        optimizer=lambda named: elasticd.average(torch.optim.AdamW(list(named)), decay=0.5),
        dataset=Text(VOCABULARY),
        global_batch=4,
        checkpointing=elasticd.CheckpointingOptions(folder=folder),
        check=False,
    )
    states: dict[str, dict[str, Any]] = {}
    for step in job.steps(STEPS):
        if step.index == STEPS - 1:
            for contents in ("value", "average", "all"):
                state = job.state_dict(contents)
                assert state is not None
                states[contents] = state
            states["sharded"] = job.state_dict(sharded=True) or {}
    (path,) = folder.glob("step-*")
    return states, path


def test_state_checkpoint_and_export_load_into_the_module_that_was_described(tmp_path: Path) -> None:
    states, path = trained(tmp_path / "run")
    for contents in ("value", "average"):
        made().load_state_dict(states[contents], strict=True)
    module = made()
    module.load_state_dict(states["value"])
    weights = module.state_dict()
    assert states["sharded"].keys() == weights.keys()
    assert not torch.equal(weights["lm_head.weight"], made().state_dict()["lm_head.weight"])

    from_checkpoint = made()
    optimizer = torch.optim.AdamW(from_checkpoint.parameters())
    state = {
        "model": from_checkpoint.state_dict(),
        "optimizer": get_optimizer_state_dict(from_checkpoint, optimizer),
    }
    dcp.load(state, checkpoint_id=str(path))
    from_checkpoint.load_state_dict(state["model"])
    assert all(torch.equal(value, weights[name]) for name, value in from_checkpoint.state_dict().items())
    moments = states["all"]["optimizer.state.transformer.wte.weight.exp_avg"]
    assert torch.equal(state["optimizer"]["state"]["transformer.wte.weight"]["exp_avg"], moments)
    assert state["optimizer"]["param_groups"][0]["params"] == [name for name, _ in module.named_parameters()]

    file = tmp_path / "out.safetensors"
    (checkpoint,) = scan(path.parent)
    export(checkpoint.path, checkpoint.manifest, file)
    exported = made()
    assert load_model(exported, str(file), strict=True) == (set(), [])
    assert all(torch.equal(value, weights[name]) for name, value in exported.state_dict().items())


def test_a_mapping_for_init_may_have_the_modules_own_names() -> None:
    weights = {name: value + 1 for name, value in made().state_dict().items()}
    model = described(made(), init=copy.deepcopy(weights))
    shape = weights["transformer.h.1.mlp.c_fc.weight"].shape
    value = model.first_value("blocks.1.mlp.c_fc.weight", Box.whole(tuple(shape)), 0)
    assert torch.equal(value, weights["transformer.h.1.mlp.c_fc.weight"])


def test_sections_of_a_model_keep_their_names_and_a_tied_head_has_its_own() -> None:
    module = gpt_tp.GPT(CONFIG)
    embed = nn.ModuleDict({"wte": module.wte, "wpe": module.wpe})
    model = elasticd.Model(embed=embed, blocks=module.h, head=module.lm_head)
    assert model.own_names["head.weight"] == model.own_names["embed.wte.weight"] == "embed.wte.weight"
    held = {"embed.wte.weight": 1, "optimizer.state.embed.wte.weight.exp_avg": 2, "average.embed.wte.weight": 3}
    assert by_own_names(held, model.own_names) == {**held, "head.weight": 1}
    assert by_own_names({**held, "blocks.0.balance_counts": 2}, model.own_names) == {**held, "head.weight": 1}
    assert by_own_names({"optimizer.state.embed.w.m.v": 4}, {"w": "embed.w"}) == {"optimizer.state.w.m.v": 4}


class Extra(Nested):
    """Whose state dict has more than parameters and buffers, and other names."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


def test_what_else_a_state_dict_has_or_renames_is_left_alone() -> None:
    module = Extra(dropout=0.0).double()
    module.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update(renamed=state.pop("lm_head.weight"))
    )
    model = described(module)
    assert model.own_names["lm_head.weight"] == "embed.transformer.wte.weight"
    assert {"renamed", "_extra_state"}.isdisjoint(model.own_names)
