"""A running mean of the parameters (EMA), kept as a plane of the optimizer's own state.

So it moves with a switch, is cut and sharded like the moments, survives faults and is in checkpoints, without a
rule of its own.
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

#: The plane's name.
AVERAGE = "average"
VALUE = "value"


def average(optimizer: torch.optim.Optimizer, decay: float) -> torch.optim.Optimizer:
    """Lets `optimizer` keep, after each of its steps, average = decay x average + (1 - decay) x parameter for
    every parameter, beginning with its values after the first step. Gives the same optimizer back:

        optimizer=lambda named: elasticd.average(torch.optim.AdamW(named, lr=1e-3), decay=0.999)
    """
    if not 0 <= decay < 1:
        raise ValueError(f"average: decay must be at least 0 and below 1, not {decay}")

    steps = _WholeSteps()

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


class _WholeSteps:
    """Which call of an optimizer's hooks belongs to its whole step: torch calls them for `super().step()` as
    well where that class has been used by itself. Calls are told apart by the frame that makes them, and not
    counted: a step that raised calls no hook at its end."""

    def __init__(self) -> None:
        self._whole: FrameType | None = None

    def begins(self, *_: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        if self._whole is None or not _within(frame, self._whole):
            self._whole = frame

    def ends(self) -> bool:
        """Whether the hook that asks was called at the end of the whole step."""
        if sys._getframe(2) is not self._whole:
            return False
        self._whole = None
        return True


def _within(frame: FrameType | None, whole: FrameType) -> bool:
    while frame is not None and frame is not whole:
        frame = frame.f_back
    return frame is not None


@contextmanager
def averaged(engine: Engine, weights: str) -> Iterator[None]:
    """The model computes with the parameters' average inside; called by all members of the plan alike.

    Should it end by a fault, parameters are what they were where their state is kept; under ZeRO the others
    come from there (the engine is `stale` until then). Raises ValueError where no average is kept.
    """
    if weights == VALUE:
        yield
        return
    if weights != AVERAGE:
        raise ValueError(f"weights must be {VALUE!r} or {AVERAGE!r}, not {weights!r}")
    if not getattr(engine.optimizer, "averages", False):
        raise ValueError(
            "there is no average: let the optimizer's function return elasticd.average(optimizer, decay)"
        )
    pairs = _pairs(engine)
    engine.stale = engine.plan.state.zero > 0
    _exchange(pairs)
    engine.round()
    together = True
    try:
        engine.return_values()
        yield
    except BaseException as error:
        together = isinstance(error, SampleError | LedgerError)
        raise
    finally:
        _exchange(pairs)
        engine.round()
        if together:
            engine.return_values()
            engine.settle()  # the others have them: this rank may end next
            engine.stale = False


def _pairs(engine: Engine) -> list[tuple[nn.Parameter, Tensor]]:
    """What was never stepped on is its own average."""
    kept = ((part.parameter, engine.optimizer.state.get(part.parameter, {})) for part in engine.owned)
    return [(parameter, state[AVERAGE]) for parameter, state in kept if AVERAGE in state and parameter.numel()]


def _exchange(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Bit by bit, so that a second time gives back what was."""
    with torch.no_grad():
        for parameter, kept in pairs:
            aside = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(aside)
