"""Optimizers that step on a part as on the whole are taken, all others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import NotElementWise
from torch import nn

import elasticd
from elasticd.runtime.model.optimizer_check import refuse_others

NAMES = [
    ("embed.tokens.weight", 2),
    ("blocks.0.norm.weight", 1),
    ("blocks.0.conv.weight", 4),
    ("blocks.0.scale", 0),
]
Named = Iterable[tuple[str, nn.Parameter]]


def masked(named: Named) -> torch.optim.Optimizer:
    """Weight decay for matrices alone, by name and shape."""
    decayed, rest = [], []
    for name, parameter in named:
        (rest if parameter.dim() < 2 or "norm" in name else decayed).append((name, parameter))
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


TAKEN: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW(named, lr=1e-3),
    "AdamW with amsgrad": lambda named: torch.optim.AdamW(named, lr=1e-3, amsgrad=True),
    "SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "SGD with momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "SGD that does not move yet": lambda named: torch.optim.SGD(named, lr=0.0),
    "RMSprop": lambda named: torch.optim.RMSprop(named, centered=True),
    "Adagrad": lambda named: torch.optim.Adagrad(named),
    "Rprop": lambda named: torch.optim.Rprop(named),
    "groups by name": masked,
    "with an average": lambda named: elasticd.average(torch.optim.AdamW(named), 0.9),
}


class ByNorm(torch.optim.Optimizer):
    """Scales each parameter's update by its norm, as LAMB and LARS do; keeps nothing."""

    def __init__(self, named: Named) -> None:
        super().__init__(list(named), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] * parameter.norm() / (parameter.grad.norm() + 1e-9)
                    parameter.sub_(rate * parameter.grad)


def matrices(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in named if parameter.dim() == 2]


REFUSED: dict[str, tuple[Callable[[Named], torch.optim.Optimizer], str]] = {
    "Adafactor": (lambda named: torch.optim.Adafactor(named), "Adafactor keeps 'row_var'"),
    "Muon": (lambda named: torch.optim.Muon(matrices(named)), "Muon steps on a part of a parameter unlike"),
    "LBFGS": (lambda named: torch.optim.LBFGS([p for _, p in named]), "LBFGS asks for a closure"),
    "norms": (ByNorm, "ByNorm steps on a part of a parameter unlike"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_element_by_element_is_taken(name: str) -> None:
    refuse_others(TAKEN[name], NAMES)


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name_with_what_to_use_instead(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(NotElementWise, match=f"{why}.*use an element-wise optimizer such as AdamW"):
        refuse_others(make, NAMES)


def test_what_a_function_refuses_for_being_small_is_not_tried() -> None:
    def picky(named: Named) -> torch.optim.Optimizer:
        if any(parameter.numel() < 10**6 for _, parameter in named):
            raise ValueError("too small to be true")
        return torch.optim.Adafactor(named)

    refuse_others(picky, NAMES)
