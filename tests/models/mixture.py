"""A small mixture of experts by hand: a router, stacked experts, and one that all tokens share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elasticd
from elasticd import Column, Experts, Row, Rule, UnitsOf
from tests.models.double import DoubleThroughout

VOCABULARY, WIDTH, LAYERS, EXPERTS, CHOSEN = 41, 16, 4, 8, 2

RULES: dict[str, Rule] = {
    "blocks.*.experts.*": Experts("experts"),
    "blocks.*.shared_up.*": Column("columns"),
    "blocks.*.shared_down.*": Row("columns"),
}
#: Columns of each expert instead, of experts without a bias: every member would add it.
COLUMNS: dict[str, Rule] = {
    "blocks.*.experts.up": Column("inner", dim=2),
    "blocks.*.experts.down": Row("inner", dim=1),
    "blocks.*.shared_up.*": Column("columns"),
    "blocks.*.shared_down.*": Row("columns"),
}
UNITS = {"experts": UnitsOf(attribute="blocks.*.experts.count")}


class StackedExperts(nn.Module):
    """Experts of two matrices and a bias each."""

    def __init__(self, count: int, width: int, columns: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.randn(count, width, columns) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, columns, width) / columns**0.5)
        self.bias = nn.Parameter(torch.randn(count, width))

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in range(self.count):
            row, slot = (index == expert).nonzero(as_tuple=True)
            if len(row):
                hidden = F.silu(rows[row] @ self.up[expert]) @ self.down[expert]
                if self.bias is not None:
                    hidden = hidden + self.bias[expert]
                output = output.index_add(0, row, hidden * weights[row, slot][:, None])
        return output


class MixtureBlock(nn.Module):
    """A layer of experts beside a residual. choose: the experts of each row from the router's scores."""

    def __init__(self, choose: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = StackedExperts(EXPERTS, WIDTH, 12)
        self.shared_up, self.shared_down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self._choose = choose or (lambda scores: torch.topk(scores, CHOSEN, dim=-1).indices)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        index = self._choose(scores)
        shared: Tensor = self.shared_down(self.shared_up(rows).relu())
        return x + (shared + self.experts(rows, index, weights=scores.gather(1, index))).view_as(x)


class Tokens(nn.Module):
    """The embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        y: Tensor = self.table(batch["inputs"])
        return y


class Mixture(nn.Module):
    """The whole model."""

    def __init__(self, choose: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed, self.head = Tokens(), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(MixtureBlock(choose) for _ in range(LAYERS))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y

    def describe(self, **more: Any) -> elasticd.Model:
        """The model as elasticd trains it."""
        given = {"embed": self.embed, "blocks": list(self.blocks), "head": self.head}
        return elasticd.Model(**given | {"rules": RULES, "units": UNITS} | more)


class Margins(DoubleThroughout):
    """Notes the least difference between a score that a router chose and one that it did not."""

    least = torch.inf

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (torch.topk, Tensor.topk):
            scores, count = args[0], args[1] if len(args) > 1 else (kwargs or {})["k"]
            if count < scores.shape[-1]:
                best = scores.detach().sort(-1, descending=True).values
                gaps = best[..., count - 1] - best[..., count]
                # Groups of experts that are left out have the same score, none.
                self.least = min(self.least, *gaps[gaps != 0].flatten().tolist(), torch.inf)
        return super().__torch_function__(function, types, args, kwargs)


class BiasedBlock(MixtureBlock):
    """Its router chooses by scores and a bias."""

    def __init__(self) -> None:
        super().__init__()
        del self._choose  # a copy has a method of its own, and another block's bias where it is a function
        self.register_buffer("shift", torch.linspace(-0.02, 0.02, EXPERTS))

    def _choose(self, scores: Tensor) -> Tensor:
        return torch.topk(scores + self.shift, CHOSEN, dim=-1).indices


class Biased(Mixture):
    """A mixture of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(LAYERS))
