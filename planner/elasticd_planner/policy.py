"""Keep the plan or replan: the saving over a horizon against the price of moving, with the reason."""

from __future__ import annotations

import math
from typing import Protocol

from elasticd_planner.value import Value, refuse


class PolicySettings(Value, frozen=True, kw_only=True):
    """horizon_steps: how long a plan is expected to last. minimum_saving: fraction of a step below which
    nothing is worth the trouble. bandwidth: bytes a second at which state moves, until it was measured.
    pause_seconds: what a switch costs besides the moving."""

    horizon_steps: int = 200
    minimum_saving: float = 0.03
    bandwidth: float = 1e8
    pause_seconds: float = 0.5

    def __post_init__(self) -> None:
        if self.horizon_steps < 1:
            refuse(f"policy: horizon_steps must be at least 1, not {self.horizon_steps}")
        if not 0 <= self.minimum_saving < 1:
            refuse(f"policy: minimum_saving is a fraction from 0 to below 1, not {self.minimum_saving}")
        if not self.bandwidth > 0 or self.pause_seconds < 0:
            refuse("policy: bandwidth must be positive and pause_seconds not negative")


class Decision(Value, frozen=True, kw_only=True):
    """Whether to replan and why; seconds saved over the horizon, and the price in seconds."""

    replan: bool
    reason: str
    saving_seconds: float = 0.0
    price_seconds: float = 0.0


class Policy(Protocol):
    """Decides whether a new plan is worth its switch."""

    def __call__(
        self,
        settings: PolicySettings,
        current_seconds: float | None,
        new_seconds: float,
        bytes_to_move: int,
        *,
        steps_left: int | None = None,
        bandwidth: float | None = None,
    ) -> Decision: ...


def decide(
    settings: PolicySettings,
    current_seconds: float | None,
    new_seconds: float,
    bytes_to_move: int,
    *,
    steps_left: int | None = None,
    bandwidth: float | None = None,
) -> Decision:
    """current_seconds: of a step under the current plan at today's rates (None: it cannot run any more).
    steps_left: of the job, where known. bandwidth: measured at the last switch, else the setting."""
    price = settings.pause_seconds + bytes_to_move / (bandwidth or settings.bandwidth)
    if current_seconds is None or math.isinf(current_seconds):
        return Decision(replan=True, reason="the current plan cannot run any more", price_seconds=price)
    saved = current_seconds - new_seconds
    steps = settings.horizon_steps if steps_left is None else min(settings.horizon_steps, steps_left)
    saving = saved * steps
    times = f"{current_seconds * 1e3:.0f} ms a step now, {new_seconds * 1e3:.0f} ms under the new plan"
    if saved <= 0 or saved < settings.minimum_saving * current_seconds:
        least = f"{settings.minimum_saving:.0%}"
        return Decision(
            replan=False,
            reason=f"{times}: less than {least} saved",
            saving_seconds=saving,
            price_seconds=price,
        )
    balance = f"{saving:.1f} s saved in {steps} steps, {price:.1f} s to move {bytes_to_move} bytes"
    return Decision(
        replan=saving > price,
        reason=f"{times}: {balance}",
        saving_seconds=saving,
        price_seconds=price,
    )
