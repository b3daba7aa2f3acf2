"""The policy: whether a new plan's saving over its horizon is worth the price of the switch, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from elasticd_planner.policy.stability import PayoffHorizon
from elasticd_planner.value import Value, refuse

#: The most that settings may say: steps, chunks of layers in a stage, and lanes of a pipeline.
MOST_STEPS, MOST_CHUNKS, MOST_LANES = 1_000_000_000, 64, 1024
#: The most replicas of a block's experts that settings may say.
MOST_REPLICAS = 1024


class PolicySettings(Value, frozen=True, kw_only=True):
    """When a new plan is worth its switch."""

    # [steps] How long a plan is expected to last. A switch must pay within this many steps, or within fewer
    # for a device whose speed changes often.
    horizon_steps: int = 200
    # [fraction] A plan that saves less of a step's time than this is not worth a switch.
    minimum_saving: float = 0.03
    # [bytes/s] How fast state moves in a switch, until a switch was measured.
    bandwidth: float = 1e8
    # [seconds] What a switch costs besides moving state, until a switch was measured.
    pause_seconds: float = 0.5
    # Running plans are not replaced by better ones. Faults and drains are still answered by new plans.
    paused: bool = False
    # [chunks] How many chunks of layers a pipeline stage may have at most (interleaved 1F1B). 1: plain 1F1B.
    interleave: int = 1
    # [lanes] How many lanes a pipeline may have at most: pipelines of equal borders are joined, in jobs that
    # pack where a step is shorter so. 1: none are. 0: as many as there are, in jobs whose sequences may be cut
    # over lanes; in others none.
    lanes: int = 0
    # Whether experts are placed by the load that was measured ("load"), or stay divided by shares ("fixed").
    experts: Literal["load", "fixed"] = "load"
    # [experts] How many copies of a block's experts a TP group may have besides the first of each. -1: one less
    # than it has devices.
    expert_replicas: int = -1

    def __post_init__(self) -> None:
        if not 1 <= self.horizon_steps <= MOST_STEPS:
            refuse(f"policy: horizon_steps must be from 1 to {MOST_STEPS:,}")
        if not 1 <= self.interleave <= MOST_CHUNKS:
            refuse(f"policy: interleave must be from 1 (plain stages) to {MOST_CHUNKS}")
        if not 0 <= self.lanes <= MOST_LANES:
            refuse(f"policy: lanes must be from 1 (pipelines of one lane) to {MOST_LANES}, or 0")
        if not -1 <= self.expert_replicas <= MOST_REPLICAS:
            refuse(f"policy: expert_replicas must be from 0 to {MOST_REPLICAS}, or -1")
        if not 0 <= self.minimum_saving < 1:
            refuse(f"policy: minimum_saving is a fraction from 0 to below 1, not {self.minimum_saving}")
        if not 1 <= self.bandwidth < math.inf or not 0 <= self.pause_seconds < math.inf:
            refuse("policy: bandwidth must be at least 1 and pause_seconds not negative, and both finite")


class Decision(Value, frozen=True, kw_only=True):
    """The decision to switch to a new plan or not, with the reason."""

    replan: bool
    reason: str
    saving_seconds: float = 0.0  # over the horizon
    price_seconds: float = 0.0  # of the switch
    again_in: int | None = None  # steps after which the answer changes if nothing else does; None: it stays


class Moved(Value, frozen=True, kw_only=True):
    """The cost of a switch."""

    number: int  # of the plan
    bytes_lacking: int  # bytes of state that its members lacked, over all members
    pause_seconds: float  # the longest pause of a member's step loop


class Price(Value, frozen=True, kw_only=True):
    """The price of a switch as a line through its bytes."""

    pause_seconds: float  # whatever moves
    bandwidth: float  # bytes a second

    def seconds(self, bytes_to_move: int) -> float:
        """Seconds of a switch that moves so many bytes."""
        return self.pause_seconds + bytes_to_move / self.bandwidth


def measured_price(settings: PolicySettings, switches: Sequence[Moved]) -> Price:
    """The price that explains the last switches: a least-squares line through (bytes, pause).

    If the switches do not determine a line (there was one, all moved the same bytes, or the line is
    impossible), the bandwidth is that of the settings, or more if a switch was faster, and the pause is the
    mean of what remains.
    """
    found = [s for s in switches if s.pause_seconds > 0]
    if not found:
        return Price(pause_seconds=settings.pause_seconds, bandwidth=settings.bandwidth)
    count = len(found)
    mean_bytes = sum(s.bytes_lacking for s in found) / count
    mean_pause = sum(s.pause_seconds for s in found) / count
    spread = sum((s.bytes_lacking - mean_bytes) ** 2 for s in found)
    if spread > 0:
        rise = sum((s.bytes_lacking - mean_bytes) * (s.pause_seconds - mean_pause) for s in found)
        fixed = mean_pause - rise / spread * mean_bytes
        if rise > 0 and fixed >= 0:
            return Price(pause_seconds=fixed, bandwidth=spread / rise)
    bandwidth = max(settings.bandwidth, *(s.bytes_lacking / s.pause_seconds for s in found))
    fixed = sum(s.pause_seconds - s.bytes_lacking / bandwidth for s in found) / count
    return Price(pause_seconds=max(0.0, fixed), bandwidth=bandwidth)


def decide(
    settings: PolicySettings,
    current_seconds: float | None,
    new_seconds: float,
    bytes_to_move: int,
    *,
    steps_left: int | None = None,
    price: Price | None = None,
    payoff: PayoffHorizon | None = None,
) -> Decision:
    """Compares the saving of a new plan over its horizon with the price of the switch.

    Args:
        current_seconds: of a step under the current plan at today's slowdowns; None: it cannot run any more.
        new_seconds: of a step under the new plan.
        bytes_to_move: bytes of state that the new plan's members lack.
        steps_left: of the job, where known.
        price: as measured, else that of the settings.
        payoff: how long the new plan may last, else the horizon of the settings.
    """
    price = price or measured_price(settings, ())
    payoff = payoff or PayoffHorizon(steps=settings.horizon_steps)
    cost = price.seconds(bytes_to_move)
    if current_seconds is None or math.isinf(current_seconds):
        return Decision(replan=True, reason="the current plan cannot run any more", price_seconds=cost)
    saved = current_seconds - new_seconds
    most = settings.horizon_steps if steps_left is None else min(settings.horizon_steps, steps_left)
    steps = min(payoff.steps, most)
    saving = saved * steps
    times = f"{current_seconds * 1e3:.0f} ms a step now, {new_seconds * 1e3:.0f} ms under the new plan"
    reason = f"{times}: {saving:.1f} s saved in {steps} steps, {cost:.1f} s to move {bytes_to_move} bytes"
    again_in = None
    if saved <= 0 or saved < settings.minimum_saving * current_seconds:
        reason = f"{times}: less than {settings.minimum_saving:.0%} saved"
        replan = False
    else:
        replan = saving > cost and not payoff.wait
        if not replan and saved * most > cost:
            pays = 0 if saving > cost else math.floor(cost / saved) + 1 - payoff.age
            again_in = max(1, payoff.wait, pays)
            lasts = payoff.age + again_in
            reason = f"{payoff.history}; a switch pays once this lasts {lasts} steps ({reason})"
    return Decision(replan=replan, reason=reason, saving_seconds=saving, price_seconds=cost, again_in=again_in)
