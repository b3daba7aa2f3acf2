"""Our own decoder under layouts, as one user of the same description as any other model."""

from __future__ import annotations

import pytest
import torch
from elasticd_planner.spec.box import Box

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from tests.models.layouts import SEED, Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

CONFIG = DecoderConfig(vocabulary=41, width=32, layers=4, heads=8, kv_heads=2, hidden=44, dtype=torch.float64)
PLANS = layouts_of(CONFIG.layers)


@pytest.mark.parametrize("name", PLANS)
def test_trains_like_one_process(name: str) -> None:
    with torch.device("meta"):
        training = Training(model=Decoder(CONFIG).describe(), loss=next_token_loss, dataset=Text(41))
    whole = Decoder(CONFIG)
    with torch.no_grad():
        for full, parameter in whole.named_parameters():
            parameter.copy_(training.model.first_value(full, Box.whole(parameter.shape), SEED))
    names = {full: full for full, _ in whole.named_parameters()}
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, names) < (1e-12, "")
