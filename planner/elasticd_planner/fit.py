"""A profile fitted to what the workers measured: seconds from clocks, bytes still from shapes.

The fit is calibrated: under the fitted profile the cost of the plan that was measured is what was measured.
What the formulas do not explain is put into the fixed overhead; what they overstate scales them down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from elasticd_planner.cluster import Cluster, Rates
from elasticd_planner.cost import after_seconds, rate_of, step_seconds
from elasticd_planner.measurement import Measurement
from elasticd_planner.plan import Plan, Stage
from elasticd_planner.profiled import ProfileCost
from elasticd_planner.profiles import ModelProfile, SectionProfile
from elasticd_planner.value import refuse

#: Steps that a fit needs.
STEPS = 10
#: Devices whose sections and all-reduces tell what all take: those of every so many pipelines, in a job of
#: more. The fit is made between two messages.
ENOUGH = 1024


def fit(
    profile: ModelProfile,
    plan: Plan,
    measurements: Iterable[Measurement],
    cluster: Cluster,
    rates: Rates | None = None,
) -> ModelProfile:
    """`profile` with the seconds of `measurements` (of `plan`'s members, at least ten steps of it; others are
    left out). `rates`: of the devices while they were measured. Raises Invalid where steps are missing."""
    rates = rates or {}
    ours = [m for m in measurements if m.plan == plan.number and m.device in plan.places and m.block_work > 0]
    steps = len({m.step for m in ours})
    if steps < STEPS:
        refuse(f"profile {profile.name}: a fit needs {STEPS} steps of plan {plan.number}, not {steps}")
    some = _sample(plan, ours)
    collectives = _collectives(profile, plan, some)
    by_token = profile.collective_token_seconds
    fitted = msgspec.structs.replace(
        profile,
        **_sections(profile, plan, some, rates),
        collective_seconds={**profile.collective_seconds, **collectives},
        recompute_factor=_recompute_factor(profile, plan, some),
        collective_token_seconds={w: each for w, each in by_token.items() if w not in collectives},
        reduction_scale=1.0,
        pipeline_scale=1.0,
        overhead_seconds=0.0,
        fitted=True,
    )
    return _calibrated(fitted, plan, ours, cluster, rates)


def remeasured(
    profile: ModelProfile, plan: Plan, measurements: Iterable[Measurement], rates: Rates | None = None
) -> ModelProfile:
    """A fitted profile whose computation takes what these measurements of `plan`'s members say, be they of few
    steps: what is known of all else stays."""
    rates = rates or {}
    ours = [m for m in measurements if m.plan == plan.number and m.device in plan.places and m.block_work > 0]
    return msgspec.structs.replace(profile, **_sections(profile, plan, ours, rates))


def _sample(plan: Plan, measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    """Those of all members of every so many pipelines: all stages and whole groups are among them."""
    every = -(-len(plan.places) // ENOUGH)
    chosen = {
        device
        for module in plan.modules
        for pipeline in module.pipelines[::every]
        for stage in pipeline.stages
        for device in stage.devices
    }
    return [m for m in measurements if m.device in chosen] if every > 1 else measurements


class _Spent(NamedTuple):
    """Seconds of a member of a group of `width` in `passes` of a section, and what for: tokens x share x rate,
    and passes x rate."""

    seconds: float
    width: int
    work: float
    passes: float


class _Seat(NamedTuple):
    """What is the same for a member in all steps of its plan: the width of its group, its part of an edge's
    work, the layers and micro-batches that it computes in a step, how many times longer it takes."""

    width: int
    part: float
    layers: int
    micro_batches: int
    rate: float

    @classmethod
    def of(cls, plan: Plan, device: str, rates: Rates) -> _Seat:
        place = plan.places[device]
        stage = plan.stage(place)
        return cls(
            width=len(stage.devices),
            part=stage.fraction(place.position),
            layers=stage.layers,
            micro_batches=plan.modules[place.module].pipelines[place.pipeline].micro_batches,
            rate=rate_of(rates, device),
        )

    def in_blocks(self, measured: Measurement) -> _Spent:
        work, passes = measured.block_work * self.rate, self.micro_batches * self.layers * self.rate
        return _Spent(measured.block_seconds, self.width, work, passes)

    def at_an_edge(self, seconds: float, tokens: int) -> _Spent:
        """Of a member of the first or last stage."""
        return _Spent(seconds, self.width, tokens * self.part * self.rate, self.micro_batches * self.rate)


def _sections(
    profile: ModelProfile, plan: Plan, measurements: Sequence[Measurement], rates: Rates
) -> dict[str, SectionProfile]:
    """The profile's sections as measured. A large job's leader asks for this between two messages: what is a
    member's is looked up once, and who has no edge says nothing of it."""
    seats = {device: _Seat.of(plan, device, rates) for device in {each.device for each in measurements}}
    blocks = [seats[m.device].in_blocks(m) for m in measurements if m.block_seconds > 0]
    first = [seats[m.device].at_an_edge(m.embed_seconds, m.tokens) for m in measurements if m.embed_seconds > 0]
    last = [seats[m.device].at_an_edge(m.head_seconds, m.tokens) for m in measurements if m.head_seconds > 0]
    return {
        "block": _section(profile.block, blocks),
        "embed": _section(profile.embed, first),
        "head": _section(profile.head, last),
    }


def _section(section: SectionProfile, spent: Sequence[_Spent]) -> SectionProfile:
    """A section whose seconds, where any were measured, are those: what was known of their fixed part and of
    the widths keeps its proportions, and all of it is scaled by the median of measured over expected."""
    known = [s for s in spent if s.work > 0]
    if not known:
        return section
    if not section.seconds > 0:
        return msgspec.structs.replace(
            section, seconds=median(s.seconds / s.work for s in known), fixed_seconds=0.0, slowdown={}
        )
    scale = median(
        s.seconds / (section.seconds * section.factor(s.width) * s.work + section.fixed_seconds * s.passes)
        for s in known
    )
    return msgspec.structs.replace(
        section, seconds=section.seconds * scale, fixed_seconds=section.fixed_seconds * scale
    )


def _recompute_factor(profile: ModelProfile, plan: Plan, measurements: Sequence[Measurement]) -> float:
    """How many times longer a block takes that makes its activations again: where any did, as measured."""
    found = []
    for measured in measurements:
        recompute = plan.stage(plan.places[measured.device]).recompute
        if measured.again_seconds > 0 and measured.block_seconds > 0 and recompute:
            found.append(measured.again_seconds / measured.block_seconds)
    if found:
        return 1 + median(found)
    again = sum(measured.again_seconds for measured in measurements)
    if profile.recomputed_part and again > 0:
        return 1 + again / sum(measured.block_seconds for measured in measurements) / profile.recomputed_part
    return profile.recompute_factor


def _collectives(profile: ModelProfile, plan: Plan, measurements: Sequence[Measurement]) -> dict[int, float]:
    """Seconds of one all-reduce by width. Of a group's members the one that waited least counts: it came
    last, so that its time is the collective's own."""
    counts = {
        stage.devices: pipeline.micro_batches * _collectives_of(profile, stage)
        for module in plan.modules
        for pipeline in module.pipelines
        for stage in pipeline.stages
        if len(stage.devices) > 1
    }
    least: dict[tuple[int, tuple[str, ...]], float] = {}
    for measured in measurements:
        if not measured.tensor_seconds > 0:
            continue
        devices = plan.stage(plan.places[measured.device]).devices
        if count := counts.get(devices, 0.0):
            key, spent = (measured.step, devices), measured.tensor_seconds / count
            least[key] = min(spent, least.get(key, spent))
    by_width: dict[int, list[float]] = defaultdict(list)
    for (_, devices), seconds in least.items():
        by_width[len(devices)].append(seconds)
    return {width: median(seconds) for width, seconds in sorted(by_width.items())}


def _collectives_of(profile: ModelProfile, stage: Stage) -> float:
    """All-reduces of one micro-batch in a stage, on average."""
    part = 1.0 if stage.recompute else profile.recomputed_part
    count = stage.layers * profile.block.collectives * (1 + 0.5 * part)  # forward's half runs once more
    if stage.start == 0:
        count += profile.embed.collectives
    if stage.chunks[-1][1] == profile.layers:
        count += profile.head.collectives
    return count


def _calibrated(
    fitted: ModelProfile, plan: Plan, measurements: Sequence[Measurement], cluster: Cluster, rates: Rates
) -> ModelProfile:
    """Reduction, overhead and scales such that the plan's predicted step is the measured one."""
    total = _by_step(((m.step, m.step_seconds) for m in measurements), max)
    if not total > 0:
        return fitted
    without = ProfileCost(msgspec.structs.replace(fitted, reduction_scale=0.0))
    pipelines = step_seconds(plan, cluster, rates, without)
    reduction = after_seconds(plan, cluster, ProfileCost(fitted)) - after_seconds(plan, cluster, without)
    scale = 1.0
    if reduction > 0:
        # Whoever waits least in the reduction came last: its time is the reduction's own.
        scale = _by_step(((m.step, m.reduce_seconds) for m in measurements), min) / reduction
    explained = pipelines + reduction * scale
    shrink = min(1.0, total / explained)
    return msgspec.structs.replace(
        fitted,
        reduction_scale=scale * shrink,
        pipeline_scale=shrink,
        overhead_seconds=max(0.0, total - explained),
    )


def _by_step(seconds: Iterable[tuple[int, float]], fold: Callable[[list[float]], float]) -> float:
    """The median over steps of what `fold` makes of one step's members."""
    steps: dict[int, list[float]] = defaultdict(list)
    for step, each in seconds:
        steps[step].append(each)
    return median(fold(values) for values in steps.values())
