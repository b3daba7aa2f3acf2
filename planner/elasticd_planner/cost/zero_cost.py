"""The effect of ZeRO on memory and on the time after the pipelines: the holders of optimizer state, and the
traffic.

With P pipelines every box of a parameter has P holders (one for each pipeline; a lane counts as one). Under
zero 1 its optimizer state is on r of them, so that a member keeps r / P of what its parameters ask; copies that
exceed the holders are spread evenly over all members, with the values and gradients that they are made from.
Micro-batches add up to complete gradients on each holder, which reduces them once, at the end of the step. So
zero 2 differs from zero 1 only from then until the update, when it keeps r / P of the gradients, and both cost
the same. The updated values that a holder sends to others stay beside its own until they are known to have
arrived, in the next step: r / P of the parameters. Hops are those of rings over P holders, of a P-th of what a
device holds each:

    reduction   P - 1 to bring every sum to one owner, and r - 1 to bring it to the others; an all-reduce is
                2 (P - 1)
    gathering   P - r: a holder lacks the parameters that others updated
    update      optimizer seconds of what a device owns
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.plan import StatePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero:
    """One state policy under a number of pipelines; `members`: devices that copies are spread over."""

    policy: StatePolicy
    pipelines: int
    members: int

    @property
    def replicas(self) -> int:
        """Copies of each box of state: as many as holders without ZeRO."""
        return self.policy.replicas or self.pipelines

    @property
    def part(self) -> float:
        """The fraction that a holder keeps of its parameters' state."""
        return min(1.0, self.replicas / self.pipelines)

    @property
    def extra(self) -> int:
        """Copies of the whole state that exceed the holders."""
        return max(0, self.replicas - self.pipelines)

    def held(self, model: ModelProfile, held: float) -> float:
        """Bytes of parameters, gradients and optimizer state of a member with `held` bytes of parameters."""
        part, extra = self.part, self.extra
        own = held * (1 + model.gradient_factor + part * model.optimizer_factor + (part if part < 1 else 0.0))
        # Whoever keeps state for others has all of it.
        return own + extra * model.parameter_bytes / self.members * model.state_factor if extra else own

    def carried(self, model: ModelProfile, copies: int, devices: int) -> float:
        """Bytes of each of `devices` that only carry `copies` of the model's state between them."""
        return copies * model.parameter_bytes / devices * model.state_factor

    def owned(self, model: ModelProfile, fraction: float) -> float:
        """Bytes of optimizer state that a device updates which holds this fraction of the model."""
        copies = fraction * self.part + self.extra / self.members
        return model.parameter_bytes * model.optimizer_factor * copies

    def reduction(self, model: ModelProfile, fraction: float, link: Link) -> float:
        """Seconds of the reduction of the gradients that a device holds of this fraction of the model."""
        count = self.pipelines
        piece = model.gradient_bytes * fraction / count
        hops = count - 1 + min(self.replicas, count) - 1
        seconds = hops * link.seconds(piece)
        if self.extra:
            seconds += self.extra * link.seconds(model.gradient_bytes / self.members)
        return seconds

    def gathering(self, model: ModelProfile, fraction: float, link: Link) -> float:
        """Seconds until a device has the parameters that others updated."""
        lacking = self.pipelines - min(self.replicas, self.pipelines)
        return lacking * link.seconds(model.parameter_bytes * fraction / self.pipelines)
