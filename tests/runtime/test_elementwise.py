"""Optimizers that step on a part as on the whole, and go on from their saved state, are taken; all others are
refused by name, and schedulers too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_migration.local_state import NotElementWise
from torch import nn
from torch.optim import lr_scheduler as schedules

import elasticd
from elasticd.runtime.model.optimizer_check import MakeScheduler, NotCarried, refuse_others, refuse_unsaved
from elasticd.runtime.model.parameter_groups import MakeOptimizer, ParameterGroups

PARAMETERS = {
    "embed.tokens.weight": torch.empty(1000, 64, device="meta"),
    "blocks.0.norm.weight": torch.empty(64, device="meta"),
    "blocks.0.conv.weight": torch.empty(8, 8, 3, 3, device="meta"),
    "blocks.0.scale": torch.empty((), device="meta"),
}
Named = Iterable[tuple[str, nn.Parameter]]


def groups(make: MakeOptimizer) -> ParameterGroups:
    return ParameterGroups.of(make, PARAMETERS)


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
    refuse_others(TAKEN[name], groups(TAKEN[name]))
    refuse_unsaved(TAKEN[name], None, groups(TAKEN[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name_with_what_to_use_instead(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(NotElementWise, match=f"{why}.*use an element-wise optimizer such as AdamW"):
        refuse_others(make, groups(make))


def test_what_a_function_refuses_for_being_small_is_not_tried() -> None:
    def picky(named: Named) -> torch.optim.Optimizer:
        if any(0 < parameter.numel() < 64 for name, parameter in named if name.startswith("embed")):
            raise ValueError("too small to be true")
        return torch.optim.Adafactor(named)

    refuse_others(picky, groups(picky))
    refuse_unsaved(picky, None, groups(picky))


class Warmup:
    """A schedule as an object; with a configuration that is one, too, no text stands for it."""

    def __init__(self, config: object) -> None:
        self.config = config

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / 3)


class Forgetful(schedules.LRScheduler):
    """Counts for itself, and saves nothing."""

    calls = 0

    def get_lr(self) -> list[float]:
        self.calls += 1
        return [group["lr"] / self.calls for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {}


class Aside(torch.optim.SGD):
    """Keeps a count beside its state, and steps by it."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * self.count
        super().step()


SCHEDULERS: dict[str, MakeScheduler] = {
    "NumPy's milestones": lambda made: schedules.MultiStepLR(
        made, (np.array([0.3, 0.6]) * 8).astype(int).tolist()
    ),
    "milestones as NumPy's integers": lambda made: schedules.MultiStepLR(made, list(np.array([2, 4]))),
    "NumPy's period": lambda made: schedules.CosineAnnealingLR(made, T_max=np.int64(8)),  # type: ignore[arg-type]
    "an object of NumPy's numbers": lambda made: schedules.LambdaLR(made, Warmup(np.float32(0.5))),
    "an object with a table": lambda made: schedules.LambdaLR(made, Warmup(np.linspace(0, 1, 8))),
    "one step": lambda made: schedules.OneCycleLR(made, 0.1, total_steps=1),
    "what the script makes later": lambda made: schedules.LambdaLR(made, lambda step: step / job.total),  # type: ignore[name-defined]  # noqa: F821
}


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_whose_state_can_be_written_are_taken(name: str) -> None:
    refuse_unsaved(adamw, SCHEDULERS[name], groups(adamw))


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda made: schedules.ReduceLROnPlateau(made), NotCarried, r"ReduceLROnPlateau.step\(\) asks for a"),
        (lambda made: schedules.LambdaLR(made, Warmup(object())), NotElementWise, r"\['config'\]: a object"),
        (Forgetful, NotCarried, "Forgetful gives another learning rate once its state was saved"),
    ],
)
def test_schedulers_that_cannot_go_on_from_their_state_are_refused(
    make: MakeScheduler, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        refuse_unsaved(adamw, make, groups(adamw))


def test_an_optimizer_that_counts_beside_its_state_is_refused() -> None:
    def aside(named: Named) -> torch.optim.Optimizer:
        return Aside(named, lr=0.1)

    with pytest.raises(NotCarried, match="Aside goes on otherwise once its state was saved and loaded"):
        refuse_unsaved(aside, None, groups(aside))
