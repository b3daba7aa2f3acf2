"""Modules of a user's own that redistribute tensors among the devices that run them train like one process."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

import elasticd.models.decoder as decoders
from elasticd.annotations import Annotation, devices, redistribute
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.comm.running_group import HERE
from tests import sizes
from tests.runtime import test_engine_parity

#: The devices that ran each call, of the test at hand.
SEEN: set[tuple[str, ...]] = set()


class Mixing(decoders.Block):
    """A block with more work for each token, of which every device of the TP group does that of some tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        here = devices()
        SEEN.add(here)
        whole = Annotation(groups=[here], states=[{"same": len(here)}])
        rows = Annotation(groups=[here], states=[{1: tuple(range(1, len(here) + 1))}])
        mine = redistribute(x, whole, rows)
        mine = mine + 0.1 * mine.cumsum(-1).sin()
        return redistribute(mine, rows, whole, shape=tuple(x.shape))


@pytest.mark.parametrize(
    "name", sizes.beside(["tp1 to tp3 and back"], ["tp3+tp1 beside tp2", "tp1 to tp3 and back"])
)
def test_they_train_like_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "Block", Mixing)
    monkeypatch.setattr(test_engine_parity, "described", test_engine_parity.described.__wrapped__)
    plain = test_engine_parity.reference.__wrapped__(test_engine_parity.STEPS)
    monkeypatch.setattr(test_engine_parity, "reference", lambda: plain)
    plan = test_engine_parity.PLANS[name]
    SEEN.clear()
    found = run_threads(
        plan.members, lambda memory: test_engine_parity.trained(memory.me, plan, cast(PlanGroups, memory))
    )
    test_engine_parity.check(plan, found)
    assert {stage.devices for _, _, stage in plan.walk()} == SEEN


def test_where_no_job_runs_there_is_one_device_that_has_all() -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    whole, rows = Annotation(groups=[devices()], states=[{}]), Annotation(groups=[devices()], states=[{0: 1}])
    out = redistribute(redistribute(x, whole, rows), rows, whole, shape=(2, 3))
    out.square().sum().backward()
    assert devices() == (HERE,)
    assert torch.equal(out, x)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)
