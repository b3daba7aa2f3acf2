"""Tensors between any layouts of any devices, and their gradients back, against whole tensors in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from elasticd_planner.layout.resolve import dual
from elasticd_planner.spec.box import Box, TensorLayout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticd.annotations import Annotation, redistribute
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from tests.planner.drawn_annotations import drawn_annotation
from tests.runtime import gang
from tests.sizes import examples

SEEDS = st.integers(0, 2**32 - 1)
DEVICES = tuple(f"n{node}/{index}" for node in range(2) for index in range(4))
#: By term of a sum; None: the value.
Values = Mapping[str | None, Tensor]


def drawn(layout: TensorLayout, seed: int) -> Values:
    """A whole tensor for each term."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    terms = dict.fromkeys(holding.partial for holding in layout.holdings)
    return {term: torch.randn(layout.shape, generator=generator, dtype=torch.float64) for term in terms}


def total(layout: TensorLayout, values: Values) -> Tensor:
    """The value: of each element the sum of the terms that some device holds."""
    whole = Box.whole(layout.shape)
    found = {term: torch.zeros(layout.shape, dtype=torch.float64) for term in values}
    for holding in layout.holdings:
        where = holding.box.slices(whole)
        found[holding.partial][where] = values[holding.partial][where]
    return torch.stack([*found.values()]).sum(0)


def part(layout: TensorLayout, device: str, values: Values) -> Tensor:
    """What a device holds."""
    for holding in layout.holdings:
        if holding.device == device:
            return values[holding.partial][holding.box.slices(Box.whole(layout.shape))].clone()
    return torch.zeros(0, dtype=torch.float64)


def moved(
    a: Annotation,
    b: Annotation,
    shape: Sequence[int],
    given: Mapping[str, Tensor],
    coming: Mapping[str, Tensor],
    *,
    add: bool,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each device what it got, and the gradient of what it gave."""

    def worker(groups: Any) -> tuple[Tensor, Tensor]:
        group = groups.group(DEVICES, "tensor")
        for _ in range(2):  # what is kept of the first time serves the second
            x = given[group.me].clone().requires_grad_()
            out = redistribute(x, a, b, group, shape, add=add)
            out.backward(coming[group.me])
        assert x.grad is not None
        return out.detach(), x.grad

    return run_threads(DEVICES, worker)


@settings(max_examples=examples(60))
@given(SEEDS, st.booleans())
def test_values_and_gradients_are_those_of_the_whole_tensor(seed: int, add: bool) -> None:
    draw = random.Random(seed)
    shape = draw.choice([(24,), (16, 17), (16, 16, 18)])
    a, b = (drawn_annotation(draw, shape, devices=DEVICES, terms=terms) for terms in (True, False))
    source, target = a.layout(shape), b.layout(shape)
    x = drawn(source, seed)
    gradients = dual(target, add=add)
    g = drawn(gradients, seed + 1)
    given_x = {device: part(source, device, x) for device in DEVICES}
    coming = {device: part(gradients, device, g) for device in DEVICES}
    found = moved(a, b, shape, given_x, coming, add=add)
    value, gradient = total(source, x), total(gradients, g)
    for device in DEVICES:
        out, grad = found[device]
        torch.testing.assert_close(out, part(target, device, {None: value}), rtol=0, atol=1e-12)
        expected = part(dual(source), device, {None: gradient})
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


@settings(max_examples=examples(40))
@given(SEEDS)
def test_targets_of_terms_add_up_to_the_value(seed: int) -> None:
    draw = random.Random(seed)
    shape = (16, 17)
    a, b = (drawn_annotation(draw, shape, devices=DEVICES) for _ in range(2))
    source, target = a.layout(shape), b.layout(shape)
    x = drawn(source, seed)
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**31))
    given_x = {device: part(source, device, x) for device in DEVICES}
    coming = {device: part(dual(target), device, {None: g}) for device in DEVICES}
    found = moved(a, b, shape, given_x, coming, add=False)
    terms = dict.fromkeys(holding.partial for holding in target.holdings)
    got: Values = {term: torch.zeros(shape, dtype=torch.float64) for term in terms}
    for holding in target.holdings:
        got[holding.partial][holding.box.slices(Box.whole(shape))] = found[holding.device][0]
    torch.testing.assert_close(total(target, got), total(source, x), rtol=0, atol=1e-12)
    for holding in source.holdings:
        expected = g[holding.box.slices(Box.whole(shape))]
        torch.testing.assert_close(found[holding.device][1], expected, rtol=0, atol=1e-12)


# -- in a module ---------------------------------------------------------------------------------------------

ROWS = Annotation(
    groups=[("n0/0", "n0/1", "n0/2"), ("n1/0", "n1/1")], states=[{0: 3}, {0: 2}], across={0: (3, 2)}
)
COLUMNS = Annotation(groups=[("n0/0", "n0/1", "n0/2", "n1/0", "n1/1")], states=[{1: (2, 1, 1, 1, 2)}])


class Transposing(nn.Module):
    """Rows by a first weight, columns by a second: each device computes with its own part of both."""

    def __init__(self, group: Any, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.group, self.first, self.second = group, nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.first).tanh()
        columns = redistribute(hidden, ROWS, COLUMNS, self.group, (10, 14))
        return columns.cumsum(0) * self.second


def test_a_module_of_ones_own_trains_as_one_device_does() -> None:
    """From rows of a batch to columns of its features over 3 and 2 devices: what sequence and head parallelism
    exchange."""
    members = COLUMNS.devices
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, first, second = normal(10, 6), normal(6, 14), normal(14)
    one, two, data = (t.clone().requires_grad_() for t in (first, second, x))
    ((data @ one).tanh().cumsum(0) * two).square().sum().backward()
    rows, columns = ROWS.layout((10, 6)), COLUMNS.layout((10, 14))

    def worker(groups: Any) -> tuple[Tensor, Tensor, Tensor]:
        group = groups.group(members, "tensor")
        mine = x[rows.of(group.me)[0].slices(Box.whole((10, 6)))].clone().requires_grad_()
        _, there = columns.of(group.me)[0].slices(Box.whole((10, 14)))
        module = Transposing(group, first, second[there].clone())
        module(mine).square().sum().backward()
        return module.first.grad, module.second.grad, mine.grad  # type: ignore[return-value]

    found = run_threads(members, worker)
    torch.testing.assert_close(sum(f[0] for f in found.values()), one.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([found[m][1] for m in members]), two.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([found[m][2] for m in members]), data.grad, rtol=0, atol=1e-12)


def test_what_is_whole_needs_no_shape_and_has_memory_of_its_own() -> None:
    whole = Annotation(groups=[DEVICES], states=[{"same": 8}])
    terms = Annotation(groups=[DEVICES], states=[{"sum": 8}])

    def worker(groups: Any) -> tuple[Tensor, Tensor]:
        group = groups.group(DEVICES, "tensor")
        x = torch.ones(3, 2, dtype=torch.float64)
        same = redistribute(x, whole, whole, group)
        same.mul_(5)
        return x, redistribute(x, terms, whole, group)

    for x, total_ in run_threads(DEVICES, worker).values():
        assert torch.equal(x, torch.ones(3, 2, dtype=torch.float64))
        assert torch.equal(total_, torch.full((3, 2), 8.0, dtype=torch.float64))


# -- over gloo -----------------------------------------------------------------------------------------------

FOUR = ("n0/0", "n0/1", "n1/0", "n1/1")
#: Collectives of all and of some, messages, sums of which one is sent on; small and large.
OVER_GLOO = [
    (Annotation(groups=[FOUR], states=[{"sum": 4}]), Annotation(groups=[FOUR], states=[{0: 4}])),
    (Annotation(groups=[FOUR[:2], FOUR[2:]], states=[{0: (3, 1)}, {0: 2}], across="sum"), None),
    (Annotation(groups=[FOUR[:2]], states=[{0: 2}]), Annotation(groups=[FOUR[2:]], states=[{1: 2}])),
    (Annotation(groups=[FOUR[:3]], states=[{"sum": 3}]), Annotation(groups=[FOUR[2:]], states=[{"same": 2}])),
    (Annotation(groups=[FOUR], states=[{0: 2, "same": 2}]), Annotation(groups=[FOUR], states=[{1: 4}])),
]


def over_gloo(name: str, store: Any) -> list[str]:
    """What differs from the whole tensor, of values and of gradients."""
    group = PlanGroups("plan/1", name, "127.0.0.1", store).group(FOUR, "tensor")
    wrong: list[str] = []
    for number, (a, to) in enumerate(OVER_GLOO * 3):
        shape = ((24, 16), (240, 160))[number % 2]
        b = to or a.replace(across="same")
        source, target = a.layout(shape), b.layout(shape)
        x, g = drawn(source, number), drawn(dual(target), number + 1)
        mine = part(source, name, x).requires_grad_()
        out = redistribute(mine, a, b, group, shape)
        out.backward(part(dual(target), name, g))
        expected = part(target, name, {None: total(source, x)})
        gradient = part(dual(source), name, {None: total(dual(target), g)})
        wrong += [] if torch.allclose(out, expected, rtol=0, atol=1e-12) else [f"value {number}"]
        wrong += [] if torch.allclose(mine.grad, gradient, rtol=0, atol=1e-12) else [f"gradient {number}"]  # type: ignore[arg-type]
    kept = len(group._sent)
    group.all_reduce(torch.zeros(1))  # a process that ends takes along what others have not received yet
    return wrong if kept < 8 else [*wrong, f"{kept} messages are kept"]


@pytest.mark.slow
def test_over_gloo_values_and_gradients_are_the_same_and_messages_are_let_go() -> None:
    assert gang.run(__file__, "over_gloo", FOUR) == {name: [] for name in FOUR}


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "rows", "shape", "said"),
    [
        (ROWS, 2, None, "give shape=, the shape of the whole tensor"),
        (ROWS, 3, (10, 14), r"n0/0 gave a tensor of shape \[3, 14\], and its part of the layout has \[2, 14\]"),
        (ROWS, 2, (3, 14), "dimension 0 has 2 elements there, too few for 3 parts"),
        (
            ROWS.replace(groups=[("n0/0", "n0/1", "n9/9"), ("n1/0", "n1/1")]),
            2,
            (10, 14),
            "n9/9 is not in the group",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    a: Annotation, rows: int, shape: tuple[int, ...] | None, said: str
) -> None:
    """Nobody else is there, so that whatever is sent would be waited for in vain."""

    def worker(groups: Any) -> None:
        with pytest.raises(ValueError, match=said):
            redistribute(torch.zeros(rows, 14), a, COLUMNS, groups.group(COLUMNS.devices, "tensor"), shape)

    run_threads(("n0/0",), worker)


# -- what the devices do not agree on ------------------------------------------------------------------------

ONE = Annotation(groups=[FOUR[:1]], states=[{}])
ALL = Annotation(groups=[FOUR], states=[{"same": 4}])


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"dtype": torch.float32}, r"(?s)torch.float64 on n0/0.*torch.float32 on n0/1.*dtype=torch.float64"),
        ({"needs": False}, "requires a gradient on n0/0, and on n0/1 it does not"),
        ({"add": True}, r"n0/0 and n0/1 call it with unlike layouts, shapes or add="),
        ({"shape": (3, 5)}, r"n0/0 and n0/1 call it with unlike layouts, shapes or add="),
        ({"to": Annotation(groups=[FOUR], states=[{0: 4}])}, "n0/0 and n0/1 call it with unlike layouts"),
    ],
)
def test_devices_that_do_not_agree_are_refused_on_all_of_them(odd: dict[str, Any], said: str) -> None:
    """A wrong type of an empty tensor would be read as another one without a word."""

    def worker(groups: Any) -> None:
        mine = odd if groups.me == "n0/1" else {}
        shape = mine.get("shape", (4, 4))
        x = torch.ones(shape if groups.me == "n0/0" else (0,), dtype=mine.get("dtype", torch.float64))
        x.requires_grad_(mine.get("needs", True))
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                redistribute(
                    x,
                    ONE,
                    mine.get("to", ALL),
                    groups.group(FOUR, "tensor"),
                    shape,
                    add=mine.get("add", False),
                )

    run_threads(FOUR, worker)


def test_without_gradients_it_does_not_matter_where_they_are_required() -> None:
    def worker(groups: Any) -> Tensor:
        group = groups.group(FOUR, "tensor")
        x = torch.ones(4) if groups.me == "n0/0" else torch.empty(0)
        with torch.no_grad():
            return redistribute(x.requires_grad_(groups.me == "n0/0"), ONE, ALL, group, (4,))

    assert all(torch.equal(found, torch.ones(4)) for found in run_threads(FOUR, worker).values())


def test_types_that_gloo_does_not_gather_are_refused_before_anything_is_sent() -> None:
    def worker(groups: Any) -> None:
        with pytest.raises(ValueError, match=r"(?s)torch.int16.*float64, .*bool"):
            redistribute(torch.ones(4, dtype=torch.int16), ALL, ALL, groups.group(FOUR, "tensor"))

    run_threads(("n0/0",), worker)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """Autograd does not see the communication of a backward pass: a gradient through it would be wrong."""

    def worker(groups: Any) -> None:
        group = groups.group(FOUR, "tensor")
        x = torch.full((1,), 2.0, dtype=torch.float64, requires_grad=True)
        out = redistribute(x, Annotation(groups=[FOUR], states=[{0: 4}]), ALL, group, (4,), add=True)
        (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()

    run_threads(FOUR, worker)
