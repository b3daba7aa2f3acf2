"""An emulated device with experts is paced by the rows that go to them."""

from __future__ import annotations

from typing import Any

import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.expert_load import expert_part

from elasticd.models import next_token_loss
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.engine.engine import Engine, first_state
from tests.models.layouts import Training, plan_of, stage
from tests.models.mixture import CHOSEN, EXPERTS, LAYERS, VOCABULARY, Mixture
from tests.models.test_experts import only_first


class Fixed:
    """Samples of equal length."""

    tokens = 6

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(self.tokens + 1)) % VOCABULARY
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Shares:
    """Notes the shares that a device is paced by."""

    emulates = True

    def __init__(self) -> None:
        self.noted: list[tuple[str, float]] = []

    def __call__(
        self, kind: str, tokens: int, share: float, start: float, communicated: float, squares: float = 0.0
    ) -> float:
        self.noted.append((kind, share))
        return start


def test_an_emulated_device_takes_as_long_as_the_rows_that_go_to_its_experts() -> None:
    """All rows go to the first two experts, which the first of two devices has."""
    whole = Mixture(only_first).double()
    model = whole.describe()
    group = stage(0, LAYERS, ("a/0", 3), ("a/1", 1))
    layouts = Layouts(model.spec, plan_of((8, [group])))

    def shares(memory: Any) -> list[tuple[str, float]]:
        pace = Shares()
        training = Training(model=model, loss=next_token_loss, dataset=Fixed())
        engine = Engine(training.recipe(), layouts, memory, pace)
        engine.adopt(first_state(model, layouts, memory.me, 3))
        engine.step(0, lambda: 0, lambda: 0)
        return pace.noted

    found = run_threads(layouts.plan.members, shares)
    part = expert_part(model.spec, Fixed.tokens, CHOSEN, EXPERTS)
    assert 0.1 < part < 0.9
    expected = {"a/0": 0.75 + part * (1 - 0.75), "a/1": 0.25 - part * 0.25}
    for device, noted in found.items():
        assert {kind for kind, _ in noted} == {"forward", "backward"}
        assert {round(share, 9) for _, share in noted} == {round(expected[device], 9)}
