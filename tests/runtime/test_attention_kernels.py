"""Attention kernels against plain attention in float64: outputs, lse and gradients of parts of the keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from elasticd.runtime.parallel import attention_kernels as kernels
from elasticd.runtime.parallel.attention_kernels import FUSED, PRODUCTS, Kernel, Visible

#: How far outputs and gradients may be off, of numbers about 1.
CLOSE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
#: Queries, keys, and which keys a query attends to.
MASKS = {
    "diagonal": (37, 37, Visible(0, causal=True)),
    "diagonal, more keys than queries": (20, 37, Visible(0, causal=True)),
    "diagonal, fewer keys": (37, 20, Visible(0, causal=True)),
    "all, because they come before": (13, 37, Visible(37, causal=True)),
    "all, whatever the order": (13, 37, Visible(-50, causal=False)),
    "the last query attends to all": (13, 37, Visible(24, causal=True)),
    "a window over the diagonal": (37, 37, Visible(0, causal=True, window=5)),
    "a window as wide as the keys": (37, 37, Visible(0, causal=True, window=37)),
    "a window of keys before": (37, 20, Visible(20, causal=True, window=11)),
    "a window that ends with the last query": (13, 37, Visible(24, causal=True, window=9)),
    "one query": (1, 1, Visible(0, causal=True)),
    "a window of one": (9, 9, Visible(0, causal=True, window=1)),
}
HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (3, 1)}


def _seen(queries: int, keys: int, visible: Visible) -> Tensor:
    """By positions alone."""
    at = torch.arange(queries).unsqueeze(1) + visible.shift
    to = torch.arange(keys).unsqueeze(0)
    seen = (to <= at) if visible.causal else torch.ones(queries, keys, dtype=torch.bool)
    return seen if visible.window is None else seen & (to > at - visible.window)


def _plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse, zero and -inf for queries that attend to nothing."""
    each = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(each, 0) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def _drawn(
    heads: tuple[int, int], queries: int, keys: int, sizes: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = [
        (heads[0], queries, sizes[0]),
        (heads[1], keys, sizes[0]),
        (heads[1], keys, sizes[1]),
        (heads[0], queries, sizes[1]),
    ]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, grad


def check(
    kernel: Kernel,
    mask: str,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """One kernel, forward and backward, from the output and lse over more keys than it is given."""
    queries, keys, visible = MASKS[mask]
    scale, close, more = 0.37, CLOSE[dtype], 6
    q, k, v, grad = _drawn(heads, queries, keys + more, sizes, dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    seen = _seen(queries, keys, visible)
    there = [x.to(device) for x in (q, k[:, :keys], v[:, :keys], grad)]
    given = [*there[:3], visible, scale]
    out, lse = kernel.forward(*given)  # type: ignore[arg-type]
    want, total = _plain(exact[0], exact[1][:, :keys], exact[2][:, :keys], seen, scale)
    assert out.shape == want.shape
    assert out.dtype == dtype
    assert lse.dtype == kernels.wide(dtype)
    torch.testing.assert_close(out.cpu().double(), want.detach(), rtol=0, atol=close)
    torch.testing.assert_close(lse.cpu().double(), total.detach(), rtol=0, atol=close)
    seen = torch.cat([seen, torch.ones(queries, more, dtype=torch.bool)], 1)  # all queries have a key now
    whole, total = _plain(*exact, seen, scale)
    whole.backward(grad.double())
    found = kernel.backward(
        there[3],
        *there[:3],
        whole.detach().to(device, dtype),
        total.detach().to(device, kernels.wide(dtype)),
        visible,
        scale,
    )
    keys_of, values_of = (x.grad[:, :keys] for x in exact[1:] if x.grad is not None)
    wanted = _queries_term(exact, grad.double(), whole, total, seen, keys, scale), keys_of, values_of
    for name, got, expected in zip("qkv", found, wanted, strict=True):
        assert got.shape == expected.shape, name
        torch.testing.assert_close(
            got.cpu().double(), expected, rtol=0, atol=3 * close, msg=lambda text, name=name: f"{name}: {text}"
        )


@torch.no_grad()
def _queries_term(
    exact: list[Tensor], grad: Tensor, whole: Tensor, total: Tensor, seen: Tensor, keys: int, scale: float
) -> Tensor:
    """What the first keys add to the gradient of the queries, by the formula of softmax."""
    q, k, v = exact
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    weights = (q @ k.transpose(-1, -2) * scale - total.unsqueeze(-1)).exp().masked_fill(~seen, 0)
    terms = weights * (grad @ v.transpose(-1, -2) - (grad * whole).sum(-1, keepdim=True)) * scale
    return terms[:, :, :keys] @ k[:, :keys]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_matrix_products_are_plain_attention(
    mask: str, heads: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_SCORES", 300)  # several blocks
    check(PRODUCTS, mask, HEADS[heads], (8, 5), dtype)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_the_fused_operator_of_the_cpu_is_plain_attention(heads: str, dtype: torch.dtype) -> None:
    """Its names in torch are private, and so is that it takes output and lse of other keys, too."""
    taken = 0
    for mask, (queries, keys, visible) in MASKS.items():
        q, k, v, _ = _drawn(HEADS[heads], queries, keys, (8, 8), dtype)
        if FUSED["cpu"].takes(q, k, v, visible):
            check(FUSED["cpu"], mask, HEADS[heads], (8, 8), dtype)
            taken += 1
    assert taken == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fused_operator_of_cuda_is_plain_attention(heads: str, dtype: torch.dtype) -> None:
    taken = 0
    for mask, (queries, keys, visible) in MASKS.items():
        q, k, v, _ = _drawn(HEADS[heads], queries, keys, (16, 16), dtype)
        if FUSED["cuda"].takes(q, k, v, visible):
            check(FUSED["cuda"], mask, HEADS[heads], (16, 16), dtype, "cuda")
            taken += 1
    assert taken == 9


@pytest.mark.parametrize("visible", [Visible(37, True), Visible(24, True), Visible(24, True, 9)])
def test_the_operators_of_cuda_have_the_arguments_that_they_are_given(visible: Visible) -> None:
    """Shapes alone, where there is no GPU: their names in torch are private."""
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 13, 16), (2, 37, 16)))
    assert FUSED["cuda"].takes(q, k, k, visible)
    out, lse = FUSED["cuda"].forward(q, k, k, visible, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    found = FUSED["cuda"].backward(out, q, k, k, out, lse, visible, 0.3)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("size", [8, 7])
def test_parts_of_the_keys_add_up_to_attention_to_all(size: int) -> None:
    """Also where some queries see nothing of a part."""
    queries, borders, scale = 50, (0, 7, 20, 50), 0.4
    q, k, v, grad = _drawn((6, 2), queries, queries, (size, size), torch.float64)
    visible = Visible(0, causal=True, window=30)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    want, total = _plain(*exact, _seen(queries, queries, visible), scale)
    want.backward(grad)
    parts = [(a, b, Visible(-a, causal=True, window=30), k[:, a:b], v[:, a:b]) for a, b in pairwise(borders)]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    for _, _, seen, keys, values in parts:
        part, part_lse = kernels.forward(q, keys, values, seen, scale)
        kernels.merge(out, lse, part, part_lse)
    torch.testing.assert_close(out, want.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, total.detach(), rtol=0, atol=1e-13)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for a, b, seen, keys, values in parts:
        terms = kernels.backward(grad, q, keys, values, out, lse, seen, scale)
        for into, term in zip((dq, dk[:, a:b], dv[:, a:b]), terms, strict=True):
            into += term
    for got, of in zip((dq, dk, dv), exact, strict=True):
        torch.testing.assert_close(got, of.grad, rtol=0, atol=1e-13)


def test_what_can_be_seen_is_as_the_positions_say() -> None:
    for queries in range(1, 5):
        for keys in range(1, 6):
            for shift in range(-6, 7):
                for window in (None, 1, 2, 4):
                    for causal in (True, False) if window is None else (True,):
                        visible = Visible(shift, causal, window)
                        seen = _seen(queries, keys, visible)
                        assert visible.any(queries, keys) == bool(seen.any())
                        assert visible.all(queries, keys) == bool(seen.all())
                        corner = torch.ones(queries, keys, dtype=torch.bool).tril()
                        if visible.diagonal(queries, keys):
                            assert bool((seen == corner).all())
                        start, stop = visible.keys(0, queries - 1, keys)
                        assert not seen[:, :start].any()
                        assert not seen[:, stop:].any()
                        hidden = visible.mask(0, queries, 0, keys, torch.device("cpu"))
                        assert bool(((~seen if hidden is not None else seen.new_zeros(())) == ~seen).all())
                        if hidden is not None:
                            assert bool((hidden == ~seen).all())
