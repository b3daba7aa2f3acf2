"""What modules ask of a packed row: attention of each sequence by itself, and positions in it."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.spec.batch import SequencePiece
from torch import Tensor, nn

import elasticd
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.engine.compiled_blocks import compile_blocks
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from tests.compiling import graphs


def row_of(*lengths: int) -> PackedRow:
    """A row of whole sequences."""
    return PackedRow([SequencePiece.whole(i, length) for i, length in enumerate(lengths)], CPU.device)


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention by its formula, of one sequence: a softmax of all products, those left out being -inf."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    products = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance < window
    return products.masked_fill(~seen, -math.inf).softmax(-1) @ v


def random(heads: int, kv_heads: int, tokens: int, size: int, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [
        (1, heads, tokens, size),
        (1, kv_heads, tokens, size),
        (1, kv_heads, tokens, more.pop("values", size)),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(**more) for shape in shapes]
    q, k, v = (x.requires_grad_() for x in made)
    return q, k, v


@pytest.mark.parametrize("lengths", [(5, 3, 8), (1, 1, 6), (9,), (1,), (2, 7, 1, 4), (3, 3, 3), (4, 2, 2, 4)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "values"), [(4, 4, 8, 8), (6, 2, 5, 5), (3, 1, 7, 3)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 3}, {"window": 1}, {"window": 99}, {"scale": 0.3}]
)
def test_each_sequence_of_a_row_is_attended_to_by_itself(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, values: int, options: dict[str, Any]
) -> None:
    given = random(heads, kv_heads, sum(lengths), size, values=values)
    with passing(row_of(*lengths)):
        found = elasticd.attention(*given, **options)
    apart = zip(*(x.split(lengths, dim=2) for x in given), strict=True)
    expected = torch.cat([by_hand(*each, **options) for each in apart], dim=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    for mine, right in zip(
        torch.autograd.grad(found, given, weights), torch.autograd.grad(expected, given, weights), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 4}, {"scale": 2.0}])
def test_padded_samples_are_attended_to_as_torch_does(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(3, heads, 11, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = torch.cat(
        [by_hand(*each, **options) for each in zip(*(x.split(1) for x in (q, k, v)), strict=True)]
    )
    torch.testing.assert_close(elasticd.attention(q, k, v, **options), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_bits_of_its_sequences_in_every_type(dtype: torch.dtype) -> None:
    given = random(4, 1, 12, 8, dtype=dtype)
    with passing(row_of(7, 5)):
        found = elasticd.attention(*given)
    apart = zip(*(x.split((7, 5), dim=2) for x in given), strict=True)
    assert torch.equal(found, torch.cat([elasticd.attention(*each) for each in apart], dim=2))


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ((12,), [(1, 12)]),
        ((5, 7), [(1, 5), (1, 7)]),
        ((3, 1, 8), [(1, 3), (1, 1), (1, 8)]),
        ((4, 4, 4), [(3, 4)]),
        ((2, 5, 5), [(1, 2), (2, 5)]),
    ],
)
def test_a_kernel_runs_once_for_sequences_of_one_length_and_nothing_is_copied_for_it(
    lengths: tuple[int, ...], runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Tensor, ...]] = []
    plain = F.scaled_dot_product_attention

    def noted(*given: Tensor, **options: Any) -> Tensor:
        called.append(given)
        return plain(*given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    given = random(4, 4, 12, 8)
    with passing(row_of(*lengths)):
        found = elasticd.attention(*given)
    assert [(q.shape[0], q.shape[2]) for q, *_ in called] == runs
    assert all(
        part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        for parts in called
        for part, whole in zip(parts, given, strict=True)
    )
    assert (found.grad_fn.name() == "CatBackward0") == (len(runs) > 1)  # type: ignore[union-attr]
    assert len(runs) > 1 or found._base is not None or len(lengths) == 1


def test_positions_begin_anew_in_each_sequence() -> None:
    ids = torch.zeros(1, 7, dtype=torch.long)
    assert elasticd.positions(ids).tolist() == [0, 1, 2, 3, 4, 5, 6]
    with passing(row_of(3, 1, 3)):
        assert elasticd.positions(ids).tolist() == [0, 1, 2, 0, 0, 1, 2]
        assert elasticd.positions(torch.zeros(1, 7, 4)).tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert elasticd.positions(torch.zeros(5, 2)).tolist() == [0, 1]


def test_another_thread_has_no_part_in_the_row() -> None:
    found: list[Tensor] = []
    with passing(row_of(2, 2)):
        thread = threading.Thread(target=lambda: found.append(elasticd.positions(torch.zeros(1, 4))))
        thread.start()
        thread.join()
    assert found[0].tolist() == [0, 1, 2, 3]


def shaped(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (
            shaped((1, 4, 8), (1, 4, 8), (1, 4, 8)),
            {},
            r"takes .* \[samples, heads, tokens, head size\], not \(1, 4,",
        ),
        (
            shaped((1, 4, 6, 8), (1, 3, 6, 8), (1, 3, 6, 8)),
            {},
            "4 heads and 3 kv-heads: heads must be",
        ),
        (shaped((1, 4, 6, 8), (1, 0, 6, 8), (1, 0, 6, 8)), {}, "4 heads and 0 kv-heads"),
        (
            shaped((1, 4, 6, 8), (1, 4, 9, 8), (1, 4, 9, 8)),
            {},
            "of each sequence to itself: .* same ",
        ),
        (shaped((1, 6, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8)), {}, r"Then transpose\(1, 2\)"),
        (shaped((1, 4, 6, 8), (1, 4, 6, 7), (1, 4, 6, 7)), {}, "queries as wide as keys"),
        (shaped((1, 4, 6, 8), (1, 4, 6, 8), (1, 2, 6, 8)), {}, "as many keys as values"),
        (shaped(*[(1, 4, 6, 8)] * 3), {"window": 3, "causal": False}, "window of a causal attention alone"),
        (shaped(*[(1, 4, 6, 8)] * 3), {"window": 0}, "a window of 0 tokens"),
    ],
)
def test_what_no_attention_is_of_is_refused(given: list[Tensor], options: dict[str, Any], said: str) -> None:
    for row in (None, row_of(6)):
        with passing(row), pytest.raises(ValueError, match=said):
            elasticd.attention(*given, **options)


def test_tokens_that_are_not_the_rows_are_refused() -> None:
    with passing(row_of(4, 2)):
        with pytest.raises(ValueError, match=r"queries \(1, 4, 5, 8\), and the packed row is \[1, heads, 6,"):
            elasticd.attention(*shaped(*[(1, 4, 5, 8)] * 3))
        with pytest.raises(ValueError, match=r"got queries \(2, 4, 6, 8\)"):
            elasticd.attention(*shaped(*[(2, 4, 6, 8)] * 3))
        with pytest.raises(ValueError, match=r"positions got \(1, 5\), and the packed row is \[1, 6, ...\]"):
            elasticd.positions(torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"takes a tensor \[samples, tokens, ...\], not \(5,\)"):
        elasticd.positions(torch.zeros(5))


# -- inside of graphs -----------------------------------------------------------------------------------------


class Positioned(nn.Module):
    """A block that asks for positions and attention, with grouped heads and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 4 * 3 + 2 * 2 * 3, dtype=torch.float64)
        self.out = nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sin(0.3 * elasticd.positions(x))[None, :, None]
        q, k, v = self.qkv(x).split((12, 6, 6), -1)
        q, k, v = (y.unflatten(-1, (-1, 3)).transpose(1, 2) for y in (q, k, v))
        y = elasticd.attention(q, k, v, window=4)
        return torch.tanh(self.out(y.transpose(1, 2).flatten(2))) + x


@pytest.mark.full
def test_a_compiled_block_takes_the_borders_and_positions_of_each_row(traced: None) -> None:
    """Rows of as many tokens and other borders, and padded samples between them."""
    torch.manual_seed(0)
    plain = Positioned()
    block = Positioned()
    block.load_state_dict(plain.state_dict())
    compile_blocks({"blocks.0": block})
    rows = [
        None,
        row_of(5, 4),
        row_of(3, 6),
        row_of(9),
        None,
        row_of(1, 1, 7),
        row_of(2, 2, 2, 3),
        row_of(4, 8),
    ]
    for round in range(2):
        before = graphs()
        for row in rows:
            x = torch.randn(1, 9 if row is None else row.tokens, 12, dtype=torch.float64)
            outputs = []
            for module in (plain, block):
                entered = x.clone().requires_grad_()
                with passing(row):
                    out = module(entered)
                    outputs.append(
                        (out, *torch.autograd.grad(out.square().sum(), [entered, *module.parameters()]))
                    )
            for one, other in zip(*outputs, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
        assert (graphs() > before) == (round == 0)  # no row makes a graph of its own
