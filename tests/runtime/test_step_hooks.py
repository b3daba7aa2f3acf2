"""torch calls an optimizer's hooks twice where its `step` calls that of a class that was used before: what
hangs on a step counts each step once nevertheless."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elasticd
from elasticd.runtime.api.watch import StepWatch
from elasticd.wire.rendezvous import Lap


class Plain(torch.optim.SGD):
    """As users write them: a step of its own, and then that of torch's class."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class Failing(Plain):
    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise RuntimeError("no")


def parameter() -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.full((3,), 8.0))
    found.grad = torch.ones(3)
    return found


@pytest.fixture(autouse=True)
def sgd_was_used() -> None:
    """torch hooks a class's step when the first optimizer of that class is made."""
    torch.optim.SGD([parameter()], lr=0.1)


def test_torch_calls_the_hooks_of_such_an_optimizer_twice() -> None:
    made, calls = Plain([parameter()], lr=1.0), list[str]()
    made.register_step_post_hook(lambda *_: calls.append("after"))
    made.step()
    assert calls == ["after"] * 2, "if torch's own hooks count once now, what is done against it can go"


def test_an_average_takes_each_step_once() -> None:
    weight = parameter()
    made = elasticd.average(Plain([weight], lr=1.0), decay=0.5)
    expected = None
    for value in (7.0, 6.0, 5.0):
        made.step()
        expected = value if expected is None else 0.5 * expected + 0.5 * value
        assert made.state[weight]["average"].tolist() == [expected] * 3


def test_an_average_goes_on_after_a_step_that_failed() -> None:
    weight = parameter()
    made = Failing([weight], lr=1.0)
    elasticd.average(made, decay=0.5)
    made.step()
    made.fails = True
    with pytest.raises(RuntimeError, match="no"):
        made.step()
    made.fails = False
    before = made.state[weight]["average"].clone()
    made.step()
    assert made.state[weight]["average"].tolist() == (0.5 * before + 0.5 * weight.detach()).tolist()


def test_a_watched_step_is_reported_once() -> None:
    laps: list[Lap] = []
    weight = parameter()
    made, watch = Plain([weight], lr=1.0), StepWatch(laps.append)
    try:
        for _ in range(4):
            weight.grad = None
            (weight * 2).sum().backward()
            made.step()
    finally:
        watch.close()
    # the first step is that of which only the end was seen
    assert [lap.step for lap in laps] == [1, 2, 3]
