"""A pass that is made beforehand leaves nothing behind, and harms nothing where it cannot be made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.engine import warmup
from elasticd.runtime.model.model import Model

WIDTH = 8


class Passed(list[str]):
    """One for all copies of a module."""

    def __deepcopy__(self, memo: dict[int, object]) -> Passed:
        return self


class Block(nn.Module):
    """Tells of its passes; draws, and remembers in a buffer."""

    seen: Tensor

    def __init__(self, passed: Passed, fails: str = "") -> None:
        super().__init__()
        self.linear, self.passed, self.fails = nn.Linear(WIDTH, WIDTH), passed, fails
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError(self.fails)
        self.passed.append("forward")
        self.seen += 1
        out: Tensor = self.linear(x * torch.rand(()))
        out.register_hook(self._back)
        return out

    def _back(self, grad: Tensor) -> None:
        self.passed.append("backward")
        torch.rand(())  # where nothing is keyed


def model_of(make: Callable[[], nn.Module]) -> Model:
    embed, head = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 4)
    return Model(name="warm", embed=embed, blocks=[make() for _ in range(3)], head=head)


def values(model: Model) -> dict[str, Tensor]:
    names = [f"{section}.{each.name}" for section in model.sections for each in model.spec.section(section)]
    return {name: model.first_value(name, Box.whole(model.parameter(name).shape), 0) for name in names}


def test_one_block_is_passed_there_and_back_and_nothing_stays() -> None:
    passed = Passed()
    model = model_of(lambda: Block(passed))
    before, state = values(model), torch.random.get_rng_state()
    warmup.warm(model)
    assert passed == ["forward", "backward"]
    assert torch.equal(torch.random.get_rng_state(), state)
    after = values(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_block_that_fails_is_left_cold_and_a_large_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Passed()
    warmup.warm(model_of(lambda: Block(passed, fails="wants sequences of 65")))
    monkeypatch.setattr(warmup, "MOST_BYTES", 4 * WIDTH)
    warmup.warm(model_of(lambda: Block(passed)))
    assert not passed
