"""A profile fitted to what the workers measured: seconds from clocks, bytes still from shapes.

The fit is calibrated: under the fitted profile the cost of the plan that was measured is what was measured.
What the formulas do not explain is put into the fixed overhead; what they overstate scales them down.

A large job's leader makes it between two messages. So it works on arrays of all steps and members, and what is
a group's is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from elasticd_planner.cost.model import after_seconds, step_seconds
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.packed_cost import PackedCost
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import Bools, Floats, Ints, middle
from elasticd_planner.spec.cluster import Cluster, Rates
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan, Seats, seats_of
from elasticd_planner.spec.step_measurements import COLUMNS, Step
from elasticd_planner.value import refuse

#: Steps that a fit needs.
STEPS = 10
#: Devices whose sections and all-reduces tell what all take: those of every so many pipelines, in a job of
#: more.
ENOUGH = 1024


def fit(
    profile: ModelProfile,
    plan: Plan,
    steps: Sequence[Step],
    cluster: Cluster,
    rates: Rates | None = None,
    packed: PackedSequences | None = None,
    load: ExpertLoad | None = None,
) -> ModelProfile:
    """`profile` with the seconds of `steps` (at least ten, of `plan`; others are left out). `rates`: of the
    devices while they were measured. `packed`: the sequences of a step, where they are packed in rows. `load`:
    of the experts in these steps, for whose busiest devices the others waited. Raises Invalid where steps are
    missing."""
    rates = rates or {}
    measured = _Measured.of(plan, steps, rates)
    return _calibrated(_taught(profile, plan, measured), plan, measured, cluster, rates, packed, load)


def fit_modules(
    profiles: Mapping[str, ModelProfile],
    plan: Plan,
    steps: Sequence[Step],
    cluster: Cluster,
    predicted: Callable[[Mapping[str, ModelProfile]], float],
    rates: Rates | None = None,
) -> dict[str, ModelProfile]:
    """The profiles of the modules of a plan of several, each with the seconds of its own passes.

    A step's time follows from all modules together: what they do not explain is the overhead of the module with
    the loss, and what they overstate scales all of them down.

    Args:
        profiles: by module.
        plan: that was in force.
        steps: of the plan, at least ten; others are left out.
        cluster: of which the links count.
        predicted: gives the seconds of a step of the plan by some profiles.
        rates: of the devices while they were measured.

    Returns:
        By module. One of items stays as it is where fewer than ten steps had any.

    Raises:
        Invalid: steps are missing.
    """
    fitted, total = dict(profiles), 0.0
    for module in plan.modules:
        name, view = module.module, plan.view(module.module)
        own = [step.modules[name] for step in steps if name in step.modules] if module.items else steps
        measured = _Measured.of(view, own, rates or {})
        if not module.items:
            total = _median(measured.column("step_seconds").max(axis=1)) if len(measured.table) else 0.0
        elif len(measured.table) < STEPS:
            continue
        if not module.trainable:
            measured = measured.both_ways(profiles[name].forward)
        taught = _taught(profiles[name], view, measured)
        if module.trainable:
            scale = _reduction(taught, view, measured, cluster)[1]
            taught = msgspec.structs.replace(taught, reduction_scale=scale)
        fitted[name] = taught
    explained = predicted(fitted)
    if not total > 0 or not math.isfinite(explained):
        return fitted
    loss, shrink = plan.loss_module.module, min(1.0, total / explained)
    scaled = {
        name: msgspec.structs.replace(
            profile, reduction_scale=profile.reduction_scale * shrink, pipeline_scale=shrink
        )
        if profile.fitted
        else profile
        for name, profile in fitted.items()
    }
    overhead = max(0.0, total - explained)
    return {**scaled, loss: msgspec.structs.replace(scaled[loss], overhead_seconds=overhead)}


def _taught(profile: ModelProfile, plan: Plan, measured: _Measured) -> ModelProfile:
    """The profile with the seconds of passes that were measured, and nothing besides."""
    if (count := len(measured.table)) < STEPS:
        refuse(f"profile {profile.name}: a fit needs {STEPS} steps of plan {plan.number}, not {count}")
    some = measured.sample()
    collectives = _collectives(profile, some)
    by_token = profile.collective_token_seconds
    return msgspec.structs.replace(
        profile,
        **_sections(profile, some),
        collective_seconds={**profile.collective_seconds, **collectives},
        recompute_factor=_recompute_factor(profile, some),
        collective_token_seconds={w: each for w, each in by_token.items() if w not in collectives},
        reduction_scale=1.0,
        pipeline_scale=1.0,
        overhead_seconds=0.0,
        fitted=True,
    )


def predicted_seconds(
    profile: ModelProfile,
    plan: Plan,
    cluster: Cluster,
    rates: Rates,
    packed: PackedSequences | None = None,
    load: ExpertLoad | None = None,
) -> float:
    """Seconds of a step of `plan` by `profile`, at these slowdowns. Of `cluster` only the links count.
    `packed`: the sequences of a step, where they are packed in rows; inf where the plan does not hold the
    longest one. `load`: of the experts."""
    cost = ProfileCost(profile, load=load)
    if packed is None or not plan.packed:
        return step_seconds(plan, cluster, rates, cost)
    rows = PackedCost(cost=cost, cluster=cluster, rates=rates, packed=packed, micro_batch=plan.micro_batch)
    return rows.seconds(plan)


def remeasured(
    profile: ModelProfile, plan: Plan, steps: Sequence[Step], rates: Rates | None = None
) -> ModelProfile:
    """A fitted profile whose computation takes what these steps of `plan`, of one module, say, be they few:
    what is known of all else stays."""
    measured = _Measured.of(plan, steps, rates or {})
    if not plan.module.trainable:
        measured = measured.both_ways(profile.forward)
    return msgspec.structs.replace(profile, **_sections(profile, measured))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """Some members' measurements in steps of their plan. table [steps, members, `COLUMNS`]: zeros of a member
    that measured no work in a step, as `known` says [steps, members]. Of a member: its group, its part of each
    layer, and how many times longer than a normal one it takes."""

    seats: Seats
    table: Floats
    known: Bools
    group: Ints  # [members]; and both below
    part: Floats
    rate: Floats
    #: whether the plan's micro-batches are rows, whose number follows the sequences, or items of samples
    counted: bool = False

    @classmethod
    def of(cls, plan: Plan, steps: Sequence[Step], rates: Rates) -> _Measured:
        """All members in those steps of `plan` in which any measured work."""
        steps = [step for step in steps if step.plan == plan.number]
        table = np.zeros((len(steps), len(plan.places), len(COLUMNS)))
        for found, step in zip(table, steps, strict=True):
            seat = seats_of(plan, step.devices)
            here = seat >= 0
            found[seat[here]] = step.table[here]
        known = table[:, :, COLUMNS.index("block_work")] > 0
        table[~known] = 0.0
        rate = np.ones(len(plan.places))
        if rates:
            rate[:] = [rates.get(device, 1.0) for device in plan.places]
        some, seats = known.any(axis=1), plan.seats
        if not some.all():
            table, known = table[some], known[some]
        return cls(
            seats=seats,
            table=table,
            known=known,
            group=seats.group,
            part=seats.part,
            rate=rate,
            counted=plan.packed or bool(plan.module.items),
        )

    def column(self, name: str) -> Floats:
        """One of `COLUMNS` [steps, members]."""
        found: Floats = self.table[:, :, COLUMNS.index(name)]
        return found

    @property
    def turns(self) -> Floats:
        """Micro-batches of each member in each step [steps, members]: as the plan has them; packed rows and
        items as they were."""
        told = self.column("micro_batches") * self.counted
        return np.where(told > 0, told, self.seats.micro_batches[self.group])

    def both_ways(self, forward: float) -> _Measured:
        """The seconds that forward passes would have taken with backward ones, of which they are this part."""
        table = self.table.copy()
        for name in ("block_seconds", "embed_seconds", "head_seconds"):
            table[:, :, COLUMNS.index(name)] /= forward
        table[:, :, COLUMNS.index("tensor_seconds")] *= 2  # half of the collectives are forward's
        return replace(self, table=table)

    def sample(self) -> _Measured:
        """All members of every so many lanes: all stages and whole groups are among them."""
        every = -(-len(self.group) // ENOUGH)
        if every == 1:
            return self
        chosen = np.flatnonzero(self.seats.lane[self.group] % every == 0)
        return replace(
            self,
            table=self.table[:, chosen],
            known=self.known[:, chosen],
            group=self.group[chosen],
            part=self.part[chosen],
            rate=self.rate[chosen],
        )


def _median(numbers: Floats) -> float:
    return middle(np.sort(numbers, axis=None))


def _sections(profile: ModelProfile, measured: _Measured) -> dict[str, SectionProfile]:
    """The profile's sections as measured: who has no edge says nothing of it."""
    seats, group, column = measured.seats, measured.group, measured.column
    width, turns = seats.width[group], measured.turns * measured.rate
    work = column("block_work") * measured.rate
    edge = column("tokens") * measured.part * measured.rate
    sliced = seats.sliced[group]

    def section(name: str, work: Floats, passes: Floats) -> SectionProfile:
        known: SectionProfile = getattr(profile, name)
        slowdowns = known.slowdowns(width, measured.part, sliced)
        return _section(known, column(f"{name}_seconds"), slowdowns, work, passes)

    return {
        "block": section("block", work, turns * seats.layers[group]),
        "embed": section("embed", edge, turns),
        "head": section("head", edge, turns),
    }


def _section(
    section: SectionProfile, seconds: Floats, slowdowns: Floats, work: Floats, passes: Floats
) -> SectionProfile:
    """A section whose seconds, where any were measured, are those: what was known of their fixed part and of
    the widths keeps its proportions, and all of it is scaled by the median of measured over expected.

    seconds [steps, members] were spent by members with these `slowdowns` [members] in so many `passes`
    [members] on `work` [steps, members]: tokens x share x rate, and passes x rate."""
    told = (seconds > 0) & (work > 0)
    if not told.any():
        return section
    if not section.seconds > 0:
        each = _median(seconds[told] / work[told])
        return msgspec.structs.replace(section, seconds=each, fixed_seconds=0.0, slowdown={})
    expected = section.seconds * slowdowns * work + section.fixed_seconds * passes
    scale = _median(seconds[told] / expected[told])
    return section.scaled(scale)


def _recompute_factor(profile: ModelProfile, measured: _Measured) -> float:
    """The factor by which a block takes longer that makes its activations again: where any did, as measured."""
    again, block = measured.column("again_seconds"), measured.column("block_seconds")
    found = (again > 0) & (block > 0) & measured.seats.recompute[measured.group]
    if found.any():
        return 1 + _median(again[found] / block[found])
    if profile.recomputed_part and again.sum() > 0:
        return 1 + float(again.sum() / block.sum()) / profile.recomputed_part
    return profile.recompute_factor


def _collectives(profile: ModelProfile, measured: _Measured) -> dict[int, float]:
    """Seconds of one all-reduce by width. Of a group's members the one that waited least counts: it came
    last, so that its time is the collective's own."""
    seats, group, spent = measured.seats, measured.group, measured.column("tensor_seconds")
    count = measured.turns * _collectives_of(profile, seats)[group]
    count[:, seats.width[group] == 1] = 0
    told = (spent > 0) & (count > 0)
    each = np.divide(spent, count, out=np.full_like(spent, math.inf), where=told)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    least = np.minimum.reduceat(each, starts, axis=1)  # [steps, groups]
    widths, known = seats.width[group[starts]], np.isfinite(least)
    by_width = {width: least[:, widths == width][known[:, widths == width]] for width in {*widths.tolist()}}
    return {width: _median(by_width[width]) for width in sorted(by_width) if by_width[width].size}


def _collectives_of(profile: ModelProfile, seats: Seats) -> Floats:
    """All-reduces of one micro-batch in each group [groups], on average."""
    part = np.where(seats.recompute, 1.0, profile.recomputed_part)
    # Forward's half runs once more, or what it gathered is gathered once more.
    count = seats.layers * profile.block.collectives * (1 + 0.5 * part + np.where(seats.sliced, 0.25, 0.0))
    edges = seats.first * profile.embed.collectives + seats.last * profile.head.collectives
    found: Floats = count + edges
    return found


def _calibrated(
    fitted: ModelProfile,
    plan: Plan,
    measured: _Measured,
    cluster: Cluster,
    rates: Rates,
    packed: PackedSequences | None,
    load: ExpertLoad | None,
) -> ModelProfile:
    """Reduction, overhead and scales such that the plan's predicted step is the measured one."""
    total = _median(measured.column("step_seconds").max(axis=1))
    if not total > 0:
        return fitted
    unreduced = msgspec.structs.replace(fitted, reduction_scale=0.0)
    pipelines = predicted_seconds(unreduced, plan, cluster, rates, packed, load)
    if not math.isfinite(pipelines):  # of longer sequences than it holds: it says nothing of these
        return fitted
    reduction, scale = _reduction(fitted, plan, measured, cluster)
    explained = pipelines + reduction * scale
    shrink = min(1.0, total / explained)
    return msgspec.structs.replace(
        fitted,
        reduction_scale=scale * shrink,
        pipeline_scale=shrink,
        overhead_seconds=max(0.0, total - explained),
    )


def _reduction(fitted: ModelProfile, plan: Plan, measured: _Measured, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the reduction by the links, and how many times that it took."""
    without = ProfileCost(msgspec.structs.replace(fitted, reduction_scale=0.0))
    reduction = after_seconds(plan, cluster, ProfileCost(fitted)) - after_seconds(plan, cluster, without)
    if not reduction > 0:
        return reduction, 1.0
    # Whoever waits least in the reduction came last: its time is the reduction's own.
    waited = np.where(measured.known, measured.column("reduce_seconds"), math.inf)
    return reduction, _median(waited.min(axis=1)) / reduction
