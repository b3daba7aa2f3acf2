"""The cost that a model's profile gives: seconds and bytes of a TP group, of a stage and of what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_planner.bound import Paces, by_speed
from elasticd_planner.cluster import Link
from elasticd_planner.cost import CostModel, GroupCost, memory_by_device, rate_of, step_seconds
from elasticd_planner.plan import Plan, Prediction
from elasticd_planner.problem import Problem
from elasticd_planner.profiles import ModelProfile, SectionProfile
from elasticd_planner.rules import apportion


@dataclass(frozen=True, slots=True)
class ProfileCost:
    """The cost that a `ModelProfile` gives."""

    profile: ModelProfile

    def group(self, rates: Sequence[float], shares: Sequence[int], link: Link) -> GroupCost:
        total = sum(shares)
        slowest = max(share * rate for share, rate in zip(shares, rates, strict=True)) / total
        wait = self.collective(len(shares), link)

        def seconds(section: SectionProfile) -> float:
            spent = model.tokens * section.seconds * slowest + section.collectives * wait
            return spent * model.pipeline_scale

        model = self.profile
        return GroupCost(block=seconds(model.block), embed=seconds(model.embed), head=seconds(model.head))

    def collective(self, width: int, link: Link) -> float:
        """One all-reduce of a micro-batch's activation in a group: measured, else a ring's 2 (w - 1) hops."""
        if width == 1:
            return 0.0
        known = self.profile.collective_seconds.get(width)
        if known is not None:
            return known
        size = self.profile.boundary_bytes * self.profile.tokens
        return 2 * (width - 1) * link.seconds(size / width)

    def boundary(self, link: Link) -> float:
        size = self.profile.boundary_bytes * self.profile.tokens
        return 2 * link.seconds(size) * self.profile.pipeline_scale

    def memory(
        self, layers: int, shares: Sequence[int], position: int, *, first: bool, last: bool, in_flight: int
    ) -> float:
        """State of the blocks, of embed and head where they are, and the activations kept for backward. A
        tied head beside its embedding shares its parameters."""
        model, shares = self.profile, to_units(shares, self.profile.share_units)
        units, aligned = shares[position], model.aligned(shares)
        state = layers * model.state_bytes(model.block, units, aligned)
        kept = layers * model.activation_bytes(model.block, units)
        for section, here in ((model.embed, first), (model.head, last)):
            if here:
                state += model.state_bytes(section, units, aligned)
                kept += model.activation_bytes(section, units)
        if first and last:
            part = units / model.share_units if model.embed.cut_bytes else 1.0
            state -= model.tied_bytes * part * model.state_factor
        return state + kept * in_flight

    def after(self, pipelines: int, fewest: int, link: Link) -> float:
        """A ring over one holder in each pipeline, 2 (P - 1) hops of a P-th of the bytes that a device of the
        smallest pipeline holds on average (pieces of different stages are reduced side by side)."""
        held = self.profile.gradient_bytes / fewest
        ring = 2 * (pipelines - 1) * link.seconds(held / pipelines)
        return self.profile.reduction_scale * ring + self.profile.overhead_seconds

    def bound(self, rates: Sequence[float], micro_batches: int) -> float:
        """All work over all speed: a group with shares x finishes a layer no sooner than 1 / sum(1 / rate),
        and in a step no stage is busy for longer than the step (harmonic mean, no communication)."""
        model = self.profile
        speed = sum(1 / rate for rate in rates)
        work = model.layers * model.block.seconds + model.embed.seconds + model.head.seconds
        total = micro_batches * model.tokens * work * model.pipeline_scale
        return total / speed + model.overhead_seconds

    def widths(self, most: int) -> tuple[int, ...]:
        return tuple(range(1, min(most, self.profile.share_units) + 1))

    def shares(self, rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        return share_options(rates, self.profile.share_units)

    @property
    def exact_shares(self) -> bool:
        return False

    def paces(self, rates: Sequence[float], link: Link) -> Paces:
        """A block takes s / Y + r on a group of speed Y = sum(1 / rate) at best, r being its collectives: so
        1 / block <= Y / (s + r Y), and Y is at least that of the slowest members."""
        model, speeds = self.profile, sorted(1 / rate for rate in rates)
        alone = model.tokens * model.block.seconds * model.pipeline_scale
        paces = {}
        for width in self.widths(len(rates)):
            wait = model.block.collectives * self.collective(width, link) * model.pipeline_scale
            paces[width] = 1 / (alone + wait * sum(speeds[:width]))
        return by_speed(rates, paces)


def share_options(rates: Sequence[float], units: int) -> tuple[tuple[int, ...], ...]:
    """Shares worth trying for members of these rates: equal, and by inverse rate, in whole units."""
    equal = apportion(units, (1,) * len(rates))
    if len(set(rates)) == 1:
        return (equal,)
    # Integer weights with six digits: rates are rounded far coarser than that.
    inverse = apportion(units, tuple(max(1, round(1e6 / rate)) for rate in rates))
    return (equal, inverse) if inverse != equal else (equal,)


def to_units(shares: Sequence[int], units: int) -> tuple[int, ...]:
    """Shares as whole units that sum to `units`; the planner's own are already."""
    return tuple(shares) if sum(shares) == units else apportion(units, tuple(shares))


def predict(plan: Plan, problem: Problem, cost: CostModel | None = None) -> Prediction:
    """What the planner expects of a plan of this problem: step time, the bound, memory by device."""
    cost = cost or ProfileCost(problem.profile)
    usable = [rate_of(problem.rates, device.name) for device in problem.cluster.devices]
    micro_batches = problem.global_batch // problem.micro_batch
    return Prediction(
        step_seconds=step_seconds(plan, problem.cluster, problem.rates, cost),
        bound_seconds=cost.bound([rate for rate in usable if math.isfinite(rate)], micro_batches),
        memory=memory_by_device(plan, cost),
    )
