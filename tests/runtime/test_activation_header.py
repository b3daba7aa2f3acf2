"""The header of an activation says all that the receiver must know, and refuses what cannot pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticd.runtime.engine.activation_header import empty_header, pack_header, unpack_header
from elasticd.runtime.model.bundle import DIMS, FLOATING, NAME, OTHERS, TENSORS, Bundle

NAMES = st.text(min_size=1, max_size=NAME).filter(lambda name: len(name.encode()) <= NAME)
IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)


@st.composite
def drawn(draw: st.DrawFn) -> Tensor:
    """A tensor of any type and shape that passes, without its memory."""
    dtype = draw(st.sampled_from((*FLOATING, *OTHERS)))
    floats = dtype in FLOATING
    shape = draw(st.lists(st.integers(0, 2**15 - 1), min_size=2 * floats, max_size=DIMS))
    return torch.empty((), dtype=dtype).expand(shape).requires_grad_(floats and draw(st.booleans()))


@st.composite
def bundles(draw: st.DrawFn) -> dict[str, Tensor]:
    """Up to as many tensors as pass, one of them of floating point."""
    others = draw(st.dictionaries(NAMES, drawn(), max_size=TENSORS - 1))
    hidden = torch.empty(2, 3, dtype=draw(st.sampled_from(FLOATING)))
    return dict(
        draw(st.permutations(list((others | {"a name of a tensor that has 40 bytes, so": hidden}).items())))
    )


def received(bundle: Bundle, ids: list[int], own: torch.dtype) -> tuple[object, tuple[int, ...]]:
    """A header as it comes: in a tensor with room for any, whose other words are anything."""
    header, room = pack_header(bundle, ids, own), empty_header(len(ids)).fill_(-1)
    room[: len(header)] = header
    return unpack_header(room, len(ids), own)


@given(bundle=bundles(), ids=IDS, own=st.sampled_from(FLOATING))
def test_a_header_carries_names_types_shapes_needs_and_ids(
    bundle: dict[str, Tensor], ids: list[int], own: torch.dtype
) -> None:
    parts, came = received(bundle, ids, own)
    assert isinstance(parts, dict)
    assert list(parts) == list(bundle), "in order"
    assert parts == {name: (x.dtype, tuple(x.shape), x.requires_grad) for name, x in bundle.items()}
    assert came == tuple(ids)


@given(ids=IDS, own=st.sampled_from(FLOATING), dtype=st.sampled_from(FLOATING), dims=st.integers(0, DIMS))
def test_a_header_carries_type_shape_and_ids(
    ids: list[int], own: torch.dtype, dtype: torch.dtype, dims: int
) -> None:
    shape = (2, 7, 16, 3)[:dims]
    assert received(torch.empty(shape, dtype=dtype), ids, own) == ((dtype, shape, True), tuple(ids))


def test_ranks_of_the_release_before_read_the_header_of_a_model_of_one_type() -> None:
    """They know the count of dimensions, four sizes, and the ids."""
    header = pack_header(torch.empty(2, 7, 16, dtype=torch.bfloat16), (5, 9), torch.bfloat16)
    assert header.tolist() == [3, 2, 7, 16, 0, 5, 9]


X = torch.ones(1, 2, 3)


@pytest.mark.parametrize(
    ("bundle", "said"),
    [
        (torch.empty(1, 1, 1, 1, 1), "a tensor of 5 dimensions: at most 4 pass"),
        (torch.ones(1, 2, dtype=torch.int64), r"a tensor of torch\.int64: types that pass .* are float64"),
        ({"x": X, "y": X.to(torch.complex64)}, "'y', a tensor of torch.complex64: types that pass"),
        ({"x": X, "y": torch.empty(1, 1, 1, 1, 1)}, "'y', a tensor of 5 dimensions"),
        ({f"x{i}": X for i in range(17)}, "17 tensors: at most 16 pass"),
        ({"x": X, "ä" * 21: X}, "a tensor named 'äää.*': a name has at most 40 bytes"),
        ({"x": torch.ones(3), "y": X}, r"no hidden states: .* must be \[samples, tokens, ...\]"),
        ({"ids": torch.ones(1, 2, dtype=torch.int64)}, "no hidden states"),
        ({"x": X, "y": 3}, "'y', a int: a bundle has tensors by their names"),
        ({0: X}, "0, a Tensor: a bundle has tensors by their names"),
        ({}, "no tensor at all"),
    ],
)
def test_what_cannot_pass_between_stages_is_refused(bundle: Bundle, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pack_header(bundle, (5,), torch.float32)
