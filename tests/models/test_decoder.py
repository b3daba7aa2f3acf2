"""Our own decoder under layouts, as one user of the same description as any other model."""

from __future__ import annotations

import pytest
import torch
from elasticd_planner.spec.box import Box
from torch._subclasses.fake_tensor import FakeTensorMode

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.models.decoder import rotate
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


def test_positions_are_right_after_a_forward_pass_of_tensors_that_stand_for_others() -> None:
    x = torch.randn(2, 4, 9, 8)
    with FakeTensorMode():
        rotate(torch.empty(2, 4, 9, 8), 10000.0)
    torch.export.export(Rotated(), (x,), strict=False)
    angles = torch.outer(torch.arange(9.0, dtype=torch.float64), 10000.0 ** (-torch.arange(4) / 4))
    turned = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1)) * torch.polar(
        torch.ones(9, 4).double(), angles
    )
    torch.testing.assert_close(
        rotate(x, 10000.0).double(), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-5
    )


class Rotated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, 10000.0)
