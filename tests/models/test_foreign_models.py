"""Models that are not ours train under every layout as their own modules do in plain torch, in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from elasticd.models import next_token_loss
from elasticd.runtime.model.validation import replace_dropouts
from examples import train_gpt2, train_vit
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

LAYERS = 4
PLANS = layouts_of(LAYERS)


@pytest.mark.parametrize("name", PLANS)
def test_a_gpt_with_dropout_and_a_fused_tied_body_trains_like_one_process(name: str) -> None:
    torch.manual_seed(0)
    gpt = train_gpt2.GPT(vocabulary=41, width=32, layers=LAYERS, heads=8, longest=16, dropout=0.2).double()
    whole = copy.deepcopy(gpt)
    training = Training(model=train_gpt2.describe(gpt), loss=next_token_loss, dataset=Text(41))
    for section, module in (("embed", whole.embed), *((f"blocks.{i}", b) for i, b in enumerate(whole.blocks))):
        replace_dropouts(section, module)
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in gpt.named_parameters()}) < (1e-12, "")


@pytest.mark.parametrize("name", PLANS)
def test_a_vision_transformer_trains_like_one_process(name: str) -> None:
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    vit = train_vit.ViT(width=24, layers=LAYERS, heads=6).double()
    whole = copy.deepcopy(vit)
    training = Training(
        model=train_vit.describe(vit),
        loss=train_vit.loss,
        dataset=train_vit.Digits(dtype=torch.float64),
        collate=train_vit.stack,
    )
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in vit.named_parameters()}) < (1e-12, "")
