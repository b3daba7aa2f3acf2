"""Exponential moving average (EMA) of the parameters, kept in the optimizer's state beside the moments.

So it needs no rules of its own: it moves with every switch, is sharded like the moments, survives faults and is
in checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.model.optimizer_check import AVERAGE as AVERAGE

#: The name of the parameters themselves.
VALUE = "value"


class MeasureError(RuntimeError):
    """The loss or a measure of an evaluation raised on a member: all raise this, with one text. On that member
    the measure's own exception is the cause."""


#: What an evaluation raises on all members alike, after the same round.
ALIKE = (SampleError, LedgerError, MeasureError)


def average(optimizer: torch.optim.Optimizer, decay: float) -> torch.optim.Optimizer:
    """Makes an optimizer keep a moving average of its parameters.

    After each step average = decay x average + (1 - decay) x parameter; the first average is the parameter
    after the first step.

        optimizer=lambda named: elasticd.average(torch.optim.AdamW(named, lr=1e-3), decay=0.999)

    Args:
        optimizer: the optimizer.
        decay: at least 0 and below 1.

    Returns:
        The same optimizer.

    Raises:
        ValueError: `decay` is out of its range.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"average: decay must be at least 0 and below 1, not {decay}")

    steps = _OuterSteps()

    def keep(made: torch.optim.Optimizer, *_: Any) -> None:
        if not steps.ends():
            return
        with torch.no_grad():
            for parameter in (each for group in made.param_groups for each in group["params"]):
                state = made.state.get(parameter, {})
                if AVERAGE in state:
                    state[AVERAGE].lerp_(parameter.detach(), 1 - decay)
                elif parameter.grad is not None:  # optimizers begin where there is no state at all
                    made.state[parameter][AVERAGE] = parameter.detach().clone()

    optimizer.register_step_pre_hook(steps.begins)
    optimizer.register_step_post_hook(keep)
    optimizer.averages = True  # type: ignore[attr-defined]
    return optimizer


class _OuterSteps:
    """Finds the calls of an optimizer's hooks that belong to its outermost `step`.

    torch also calls them for `super().step()`, if that class has been used by itself. Calls are distinguished
    by their frame and not counted, because a step that raises calls no hook at its end.
    """

    def __init__(self) -> None:
        self._outer: FrameType | None = None

    def begins(self, *_: Any) -> None:
        """The hook before a step."""
        frame: FrameType | None = sys._getframe(1)
        if self._outer is None or not _within(frame, self._outer):
            self._outer = frame

    def ends(self) -> bool:
        """Returns True if the hook that calls this was called at the end of the outermost step."""
        if sys._getframe(2) is not self._outer:
            return False
        self._outer = None
        return True


def _within(frame: FrameType | None, outer: FrameType) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


@contextmanager
def averaged(engine: Engine, weights: str) -> Iterator[None]:
    """Inside, the model computes with the average of its parameters. All members of the plan call it together.

    If a fault ends it, parameters are restored on the devices that keep their state; under ZeRO the engine is
    stale until the other devices have received them.

    Raises:
        ValueError: the optimizer keeps no average.
    """
    if weights == VALUE:
        yield
        return
    if weights != AVERAGE:
        raise ValueError(f"weights must be {VALUE!r} or {AVERAGE!r}, not {weights!r}")
    refuse_without_average(engine)
    engine.delivered()
    engine.copied()
    if engine.plan.state.zero:
        engine.health.send_parameters()
    swapped: list[tuple[nn.Parameter, Tensor]] = []
    together = True
    try:
        for pair in _pairs(engine):
            _exchange(*pair)
            swapped.append(pair)
        for module in engine.modules.values():
            module.zero.round()
            module.zero.all_gather_params()
        yield
    except BaseException as error:
        together = isinstance(error, ALIKE)
        raise
    finally:
        for pair in swapped:
            _exchange(*pair)
        for module in engine.modules.values():
            module.zero.round()
            if together:
                module.zero.all_gather_params()
        if together:
            engine.settle()  # the other members have received them: this rank may end next
            engine.health.receive_parameters()


def refuse_without_average(engine: Engine) -> None:
    """Raises ValueError where the optimizer keeps no average."""
    if not getattr(engine.optimizer, "averages", False):
        raise ValueError(
            "there is no average: let the optimizer's function return elasticd.average(optimizer, decay)"
        )


def _pairs(engine: Engine) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that this device owns, with their averages. One that was never stepped on has none."""
    kept = ((part.parameter, engine.optimizer.state.get(part.parameter, {})) for part in engine.owned)
    return [(parameter, state[AVERAGE]) for parameter, state in kept if AVERAGE in state and parameter.numel()]


def _exchange(parameter: nn.Parameter, kept: Tensor) -> None:
    """Swaps a parameter with its average, bit by bit: a second call restores both. Where there is no memory for
    it, nothing is changed."""
    with torch.no_grad():
        aside = parameter.detach().clone()
        parameter.copy_(kept)
        kept.copy_(aside)
