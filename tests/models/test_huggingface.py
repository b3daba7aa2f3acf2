"""Hugging Face's models, cut by their own plans, train under every layout as they do in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from elasticd_planner.boxes import Box
from torch import nn

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.model import ModelError
from elasticd.runtime.rules import Add, Column, Row
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

transformers = pytest.importorskip("transformers")

LAYERS = 4
PLANS = layouts_of(LAYERS)
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def made(name: str, tied: bool = False, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES, tie_word_embeddings=tied, head_dim=8, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


class Whole(nn.Module):
    """The model as it is, called as transformers wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch["inputs"]).logits
        return logits


def theirs(name: str) -> str:
    """The name in `Whole` of a parameter."""
    section, _, rest = name.partition(".")
    if section == "blocks":
        return "model.model.layers." + rest.replace(".layer.", ".", 1)
    return "model.lm_head.weight" if rest.startswith("lm_head") else f"model.model.{rest}"


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("kind", "tied"), [("Llama", False), ("Qwen3", True)])
def test_trains_like_one_process(kind: str, tied: bool, name: str) -> None:
    torch.manual_seed(0)
    model = made(kind, tied).double()
    whole = Whole(copy.deepcopy(model))
    training = Training(model=elasticd.Model.from_hf(model), loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    # Its norms and rotary tables are computed in float32, whatever the model's type.
    assert furthest(found, expected, {full: theirs(full) for full in found[1]}) < (1e-6, "")


def test_the_rules_are_those_of_the_models_own_plan() -> None:
    rules = elasticd.Model.from_hf(made("Qwen3")).rules
    assert rules["blocks.*.layer.self_attn.q_proj.*"] == Column("heads")
    assert rules["blocks.*.layer.self_attn.k_proj.*"] == Column("kv_heads")
    assert rules["blocks.*.layer.self_attn.k_norm.*"] == Add()
    assert rules["blocks.*.layer.self_attn.o_proj.*"] == Row("heads")
    assert rules["head.lm_head.*"] == Column("vocabulary", gather=True)


def test_a_model_without_storage_starts_by_its_own_init() -> None:
    with torch.device("meta"):
        model = elasticd.Model.from_hf(made("Llama", initializer_range=0.5))
    name = "blocks.1.layer.self_attn.q_proj.weight"
    whole = model.first_value(name, Box.whole((64, 32)), seed=3)
    assert 0.4 < float(whole.std()) < 0.6
    assert torch.equal(whole[4:9], model.first_value(name, Box(start=(4, 0), stop=(9, 32)), seed=3))
    assert model.first_value("head.norm.weight", Box.whole((32,)), seed=3).tolist() == [1.0] * 32


def test_attention_dropout_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"attention_dropout = 0.1 .* set it to 0"):
        elasticd.Model.from_hf(made("Llama", attention_dropout=0.1))
