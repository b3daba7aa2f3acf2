"""Tensors of a TP group from one layout to another and their gradients back, against whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from elasticd_planner.spec.box import TensorLayout
from torch import Tensor

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.parallel.redistribute import Redistribution, slices, terms, whole

MEMBERS = ("a/0", "a/1", "a/2")
SHAPE = (2, 7, 12)


def layout(kind: str, group: Group, widths: Sequence[int]) -> TensorLayout:
    length = sum(widths)
    return {"whole": whole(group, length), "terms": terms(group, length), "slices": slices(group, widths)}[kind]


def parts(kind: str, values: Sequence[Tensor], dim: int, widths: Sequence[int]) -> list[Tensor]:
    """Each member's part of a tensor: of the value, the sum of all; of terms its own."""
    if kind == "terms":
        return list(values)
    total = torch.stack(list(values)).sum(0)
    return [total] * len(values) if kind == "whole" else list(total.split(list(widths), dim))


@pytest.mark.parametrize("widths", [(4, 4, 4), (7, 5, 0), (0, 1, 11), (0, 12, 0)])
@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize(
    ("source", "target", "add"),
    [
        ("whole", "whole", True),
        ("terms", "whole", False),
        ("slices", "whole", False),
        ("whole", "slices", False),
        ("slices", "whole", True),
        ("terms", "slices", False),
    ],
)
def test_parts_and_gradients_are_those_of_the_whole_tensor(
    source: str, target: str, add: bool, dim: int, widths: tuple[int, ...]
) -> None:
    shape = [2, 7, 7]
    shape[dim] = sum(widths)
    generator = torch.Generator().manual_seed(sum(widths[:2]))
    x = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in MEMBERS]
    g = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in MEMBERS]
    given, expected = parts(source, x, dim, widths), parts(target, x, dim, widths)
    # With `add` each member's gradient is its own; else all that have a value have the same gradient of it.
    coming = g if add else parts(target if target == "slices" else "whole", g, dim, widths)
    back = parts("slices" if source == "slices" else "whole", g, dim, widths)

    def worker(groups: Any) -> tuple[Tensor, Tensor]:
        group = groups.group(MEMBERS, "tensor")
        way = Redistribution(
            group, layout(source, group, widths), layout(target, group, widths), dim=dim, add=add
        )
        mine = given[group.rank].clone().requires_grad_()
        out = way(mine)
        out.backward(coming[group.rank])
        assert mine.grad is not None
        return out.detach(), mine.grad

    found = run_threads(MEMBERS, worker)
    for rank, member in enumerate(MEMBERS):
        out, grad = found[member]
        torch.testing.assert_close(out, expected[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, back[rank], rtol=0, atol=1e-12)


def test_a_parts_memory_is_its_own() -> None:
    """What a module does to its input in place must not reach the tensor before it."""

    def worker(groups: Any) -> tuple[Tensor, Tensor]:
        group = groups.group(MEMBERS, "tensor")
        term = torch.ones(SHAPE)
        Redistribution(group, terms(group), whole(group))(term).mul_(5)
        full = torch.ones(SHAPE)
        Redistribution(group, whole(group, 12), slices(group, (6, 4, 2)))(full).mul_(5)
        return term, full

    for term, full in run_threads(MEMBERS, worker).values():
        assert torch.equal(term, torch.ones(SHAPE))
        assert torch.equal(full, torch.ones(SHAPE))


def test_a_part_keeps_no_memory_of_the_whole() -> None:
    """Of one sample a slice of the tokens is contiguous where it is."""

    def worker(groups: Any) -> list[int]:
        group, x = groups.group(MEMBERS, "tensor"), torch.ones(1, 12, 2, dtype=torch.float64)
        found = []
        for widths in ((6, 4, 2), (0, 8, 4)):
            for source in (whole(group, 12), terms(group, 12)):
                part = Redistribution(group, source, slices(group, widths), dim=1)(x)
                found.append(part.untyped_storage().nbytes() // 16)
        return found

    found = run_threads(MEMBERS, worker)
    assert [found[member] for member in MEMBERS] == [[6, 6, 0, 0], [4, 4, 8, 8], [2, 2, 4, 4]]


def test_replicas_of_one_term_are_refused_since_they_would_be_added_twice() -> None:
    def worker(groups: Any) -> None:
        group = groups.group(MEMBERS, "tensor")
        values = whole(group)
        held = [
            msgspec.structs.replace(holding, partial=term)
            for holding, term in zip(values.holdings, ("s", "t", "t"), strict=True)
        ]
        with pytest.raises(ValueError, match="all_reduce over a/0, a/1, a/2 is not carried out here"):
            Redistribution(group, msgspec.structs.replace(values, holdings=tuple(held)), values)

    run_threads(MEMBERS, worker)
