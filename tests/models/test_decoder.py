"""Our own decoder under layouts, as one user of the same description as any other model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.spec.box import Box
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.models.decoder import Attention, initial, rotary_angles, rotate
from elasticd.runtime.engine.compiled_blocks import compile_blocks
from elasticd.runtime.parallel.packed_row import PackedRow, passing
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
        rotary_angles(torch.empty(2, 4, 9, 8), 10000.0)
    torch.export.export(Rotated(), (x,), strict=False)
    angles = torch.outer(torch.arange(9.0, dtype=torch.float64), 10000.0 ** (-torch.arange(4) / 4))
    turned = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1)) * torch.polar(
        torch.ones(9, 4).double(), angles
    )
    torch.testing.assert_close(
        Rotated()(x).double(), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-5
    )


class Rotated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, rotary_angles(x, 10000.0))


def attention_before_packing(module: Attention, x: Tensor) -> Tensor:
    """The forward of `Attention` as it was in release 0.1."""
    tokens, size = x.shape[1], module.head_size
    inverse = module.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), inverse)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def split(y: Tensor, heads: int) -> Tensor:
        return y.view(*y.shape[:2], heads, size).transpose(1, 2)

    def turned(y: Tensor) -> Tensor:
        a, b = y.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    q, k = turned(split(module.q(x), module.heads)), turned(split(module.k(x), module.kv_heads))
    v = split(module.v(x), module.kv_heads)
    k, v = (y.repeat_interleave(module.heads // module.kv_heads, dim=1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return module.o(y.transpose(1, 2).flatten(2))


def started(config: DecoderConfig) -> Decoder:
    model, generator = Decoder(config), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(name, tuple(parameter.shape), generator))
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_to_padded_samples_has_the_bits_of_release_0_1(kv_heads: int, dtype: torch.dtype) -> None:
    config = DecoderConfig(width=32, heads=8, kv_heads=kv_heads, dtype=dtype)
    module = started(config).blocks[0].attention
    x = torch.randn(3, 37, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    wanted = [x, *module.parameters()]
    weights = torch.randn(3, 37, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    for found, expected in zip(
        *(
            (y, *torch.autograd.grad(y, wanted, weights))
            for y in (module(x), attention_before_packing(module, x))
        ),
        strict=True,
    ):
        assert torch.equal(found, expected)


def packed(*lengths: int) -> tuple[PackedRow, dict[str, Tensor]]:
    """A row of sequences, and its tokens and targets [1, tokens]."""
    row = PackedRow([SequencePiece.whole(i, length) for i, length in enumerate(lengths)], torch.device("cpu"))
    ids = torch.randint(0, 41, (2, 1, row.tokens), generator=torch.Generator().manual_seed(row.tokens))
    return row, {"inputs": ids[0], "targets": ids[1]}


@pytest.mark.parametrize("lengths", [(9, 4, 1, 6), (1,), (13,), (1, 1), (1030, 3)])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_packed_row_gives_what_its_sequences_give(kv_heads: int, lengths: tuple[int, ...]) -> None:
    model = started(
        DecoderConfig(vocabulary=41, width=32, layers=2, kv_heads=kv_heads, hidden=44, dtype=torch.float64)
    )
    row, batch = packed(*lengths)
    with passing(row):
        logits = model(batch)
        total, count = next_token_loss(logits, batch)
        gradients = torch.autograd.grad(total, list(model.parameters()))
    parts = [{key: value[:, at.rows] for key, value in batch.items()} for at in row.segments]
    apart = [model(part) for part in parts]
    torch.testing.assert_close(logits, torch.cat(apart, dim=1), rtol=0, atol=1e-12)
    terms = [next_token_loss(out, part) for out, part in zip(apart, parts, strict=True)]
    assert count == sum(n for _, n in terms)
    total_apart = torch.stack([loss for loss, _ in terms]).sum()
    torch.testing.assert_close(total, total_apart, rtol=1e-14, atol=0)
    for found, expected in zip(
        gradients, torch.autograd.grad(total_apart, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.full
def test_compiled_blocks_take_each_row_as_it_is(traced: None) -> None:
    config = DecoderConfig(vocabulary=41, width=32, layers=2, hidden=44, dtype=torch.float64)
    plain, compiled = started(config), started(config)
    compile_blocks({f"blocks.{i}": block for i, block in enumerate(compiled.blocks)})
    for lengths in ((5, 4), (3, 6), (9,), (1, 1, 7), (7, 5)):
        row, batch = packed(*lengths)
        for given in (row, None):
            found = []
            for model in (plain, compiled):
                with passing(given):
                    total, _ = next_token_loss(model(batch), batch)
                    found.append((total, *torch.autograd.grad(total, list(model.parameters()))))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-12)
