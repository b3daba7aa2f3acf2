"""The cost that a model's profile gives: seconds and bytes of a TP group, of a stage and of what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from elasticd_planner.cost.group_bound import Paces, by_slowest, by_speed
from elasticd_planner.cost.model import GroupCost
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.pipeline_time import Schedule, Timing
from elasticd_planner.cost.zero_cost import Zero
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, fractions_in
from elasticd_planner.spec.model import apportion
from elasticd_planner.spec.plan import Plan, Stage, StatePolicy

PLAIN = StatePolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class _MemberBytes:
    """Bytes of one member of a TP group, a micro-batch in flight having `kept` ones."""

    held: float  # parameters of a block
    held_embed: float
    held_head: float
    held_twice: float  # of a head's parameters those that its embedding has in the same stage
    kept: float  # activations of a block
    kept_embed: float
    kept_head: float
    working: float  # beside those, in a block
    working_head: float
    gathered: float  # tokens that are gathered for a cut module, with sequence parallelism


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """The experts of a lane as a plan places them. fractions: of the experts' rows [blocks, devices].
    more_bytes: of parameters of a block that each device has beyond its share, in the mean of the blocks."""

    fractions: Floats
    more_bytes: tuple[float, ...]

    @classmethod
    def of(cls, lane: Stage, load: ExpertLoad) -> _Placed:
        more = [0.0] * len(lane.devices)
        blocks = blocks_of(lane)
        for block in blocks:
            if lane.experts_of(block) and block in load.rows:
                count = len(load.rows[block])
                for place, own in enumerate(lane.experts_of(block)):
                    more[place] += load.expert_bytes * (len(own) - count * lane.fraction(place))
        return cls(
            fractions=np.array(fractions_in(lane, load)),
            more_bytes=tuple(each / len(blocks) for each in more),
        )


@dataclass(frozen=True, slots=True)
class ProfileCost:
    """The cost that a `ModelProfile` gives under one setting. recompute: whether blocks make their activations
    again. With ZeRO (`state`) memory depends on the number of `pipelines`, and what replicas ask of others on
    the number of `members`. near: the link that the
    measured collectives went over (None: they are what any link takes). sequence_parallel: whether TP groups
    have slices of the tokens between cut modules; hopeful: at no cost of time, as bounds have it where
    stages may leave it out. cut: whether sequences may be cut over lanes, so that blocks that make their
    activations again keep what attention gave, see `_attention`. load: of the experts, as long as whose busiest
    device a block takes; None: experts are as even as shares."""

    profile: ModelProfile
    state: StatePolicy = PLAIN
    recompute: bool = False
    pipelines: int = 1
    members: int = 1
    near: Link | None = None
    sequence_parallel: bool = False
    hopeful: bool = False
    cut: bool = False
    load: ExpertLoad | None = None
    _timing: Timing | None = None  # in place of the schedule's own
    _placed: _Placed | None = None
    _members: dict[tuple[tuple[int, ...], int], _MemberBytes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # by shares and position

    def for_stage(self, stage: Stage) -> ProfileCost:
        """The same cost for stages that do as this one does."""
        same = (stage.recompute, stage.sequence_parallel) == (self.recompute, self.sequence_parallel)
        placed = _Placed.of(stage, self.load) if self.load is not None and len(stage.devices) > 1 else None
        if same and placed is self._placed is None:
            return self
        return replace(
            self, recompute=stage.recompute, sequence_parallel=stage.sequence_parallel, _placed=placed
        )

    def beside_shares(self, stage: Stage) -> tuple[object, ...]:
        """The values that the cost of a stage's group depends on besides rates, shares, link and what it makes
        again."""
        if self.load is None or len(stage.devices) == 1:
            return ()
        return stage.chunks, stage.experts, stage.splits, stage.slowdowns

    def sized(self, tokens: float) -> ProfileCost:
        """The same cost of micro-batches of so many tokens."""
        return replace(self, profile=self.profile.sized(tokens))

    def under(self, plan: Plan) -> ProfileCost:
        """The same cost under a plan's state policy. What it costs after its pipelines follows from its stages:
        those hide least of their reduction that do not recompute."""
        recompute = all(stage.recompute for _, _, stage in plan.walk())
        if not plan.state.zero and not self.state.zero:
            return self if recompute == self.recompute else replace(self, recompute=recompute)
        return replace(
            self,
            state=plan.state,
            recompute=recompute,
            pipelines=len(plan.by_lane),
            members=len(plan.members),
        )

    def group(self, rates: Sequence[float], shares: Sequence[int], link: Link) -> GroupCost:
        """Seconds of one micro-batch on a TP group: the slowest member's computation, and the collectives."""
        model, total, width = self.profile, sum(shares), len(shares)
        wait = self.collective(width, link)

        def seconds(section: SectionProfile, again: float = 1.0, once_more: float = 1.0) -> float:
            fixed, divided = self._parts(section, width)
            each = dense = divided / total
            if section is model.block and self._placed is not None and self.load is not None:
                dense *= 1 - self.load.part
            spent = max(rate * (fixed + dense * share) for share, rate in zip(shares, rates, strict=True))
            if dense < each and self._placed is not None:
                # Of each block the busiest device: the others wait for it where the experts end.
                busiest = (self._placed.fractions * np.array(rates)).max(1).mean()
                spent += (each - dense) * total * float(busiest)
            return (spent * again + section.collectives * wait * once_more) * model.pipeline_scale

        return GroupCost(
            block=seconds(model.block, self._again, self._waits),
            embed=seconds(model.embed),
            head=seconds(model.head),
            forward=model.forward / self._again,
        )

    def _parts(self, section: SectionProfile, width: int) -> tuple[float, float]:
        """Seconds of a micro-batch in a section on normal devices, without collectives: those of every member
        of a group of this width, and those that its members share."""
        model = self.profile
        fixed, divided = section.fixed_seconds, model.tokens * section.seconds * section.factor(width)
        whole = model.tokens * section.whole_seconds
        return (fixed, divided + whole) if self.sequence_parallel else (fixed + whole, divided)

    @property
    def _again(self) -> float:
        """The factor by which a block's computation takes longer, on average."""
        return 1 + self._part * (self.profile.recompute_factor - 1)

    @property
    def _waits(self) -> float:
        """The same for its collectives: half of them are forward's, which runs once more. (A factor of 1 is
        what bounds hope for: stages that do not make anything again.) With sequence parallelism the backward
        pass gathers once more what forward gathered, a quarter of them."""
        gathered = 0.25 if self.sequence_parallel and not self.hopeful else 0.0
        return (1 + 0.5 * self._part if self._again > 1 else 1.0) + gathered

    @property
    def _part(self) -> float:
        """The part of the blocks that make their activations again."""
        return 1.0 if self.recompute else self.profile.recomputed_part

    def collective(self, width: int, link: Link) -> float:
        """One all-reduce of a micro-batch's activation in a group: measured (over a slower link longer by what
        the links say), else a ring's 2 (w - 1) hops."""
        model = self.profile
        if width == 1:
            return 0.0
        ring = self._ring(width, link)
        fixed = model.collective_seconds.get(width)
        each = model.collective_token_seconds.get(width)
        if fixed is None and each is None:
            return ring
        known = (fixed or 0.0) + (each or 0.0) * model.tokens
        if self.near is None or link == self.near:
            return known
        near = self._ring(width, self.near)  # 0 where neither bytes nor a latency are given
        return known * max(1.0, ring / near) if near else max(known, ring)

    def _ring(self, width: int, link: Link) -> float:
        size = self.profile.boundary_bytes * self.profile.tokens
        return 2 * (width - 1) * link.seconds(size / width)

    def boundary(self, link: Link) -> float:
        """Seconds that one micro-batch spends between two stages, there and back."""
        size = (self.profile.bundle_bytes or self.profile.boundary_bytes) * self.profile.tokens
        return 2 * link.seconds(size) * self.profile.pipeline_scale

    @property
    def timing(self) -> Timing:
        """Seconds are those of the schedule itself."""
        return self._timing or Schedule(hidden=self.profile.forward / self._again)

    def timed(self, timing: Timing) -> ProfileCost:
        """The same cost with another timing."""
        return replace(self, _timing=timing)

    def memory(
        self, layers: int, shares: Sequence[int], position: int, *, first: bool, last: bool, in_flight: int
    ) -> float:
        """Parameters, gradients and optimizer state (`zero.Zero` says how much of them), activations kept for
        backward, what passes have besides, with sequence parallelism the tokens that are gathered for a cut
        module. Passes have most in a block (with recomputation its activations, but for its input), or in the
        head: its activations are of one micro-batch, whose backward pass begins at once, and are gone before
        that of a block. A tied head beside its embedding shares its parameters."""
        key = tuple(shares), position
        if key not in self._members:
            self._members[key] = self._member(*key)
        member, twice = self._members[key], first and last
        more = self._placed.more_bytes[position] if self._placed is not None else 0.0
        held, kept, working = layers * (member.held + more), layers * member.kept, member.working
        if last:
            in_head = member.working_head + (member.kept_head if in_flight else 0.0)
            held, working = held + member.held_head, max(working, in_head)
        if first:
            held, kept = held + member.held_embed, kept + member.kept_embed
        state = self.zero.held(self.profile, held - member.held_twice if twice else held)
        return state + kept * in_flight + working + member.gathered + self.profile.fixed_bytes

    def _member(self, shares: tuple[int, ...], position: int) -> _MemberBytes:
        model, shares = self.profile, to_units(shares, self.profile.share_units)
        units, aligned = shares[position], model.aligned(shares)
        each = model.activation_bytes(model.block, units, sliced=self.sequence_parallel)
        again = model.block.recomputed_activation * model.tokens
        gathered = 0.0
        part = units / model.share_units
        if self.sequence_parallel:
            again *= part
            gathered = model.boundary_bytes * model.tokens * (len(shares) > 1)
        working = model.working_bytes(model.block, units, sliced=self.sequence_parallel)
        working += max(0.0, each - again) if self._part else 0.0
        if self.cut:
            again += self._attention * part
        return _MemberBytes(
            held=model.held_bytes(model.block, units, aligned),
            held_embed=model.held_bytes(model.embed, units, aligned),
            held_head=model.held_bytes(model.head, units, aligned),
            held_twice=model.tied_bytes * (part if model.embed.cut_bytes else 1.0),
            kept=each + self._part * (again - each),
            kept_embed=model.activation_bytes(model.embed, units),
            kept_head=model.activation_bytes(model.head, units),
            working=working,
            working_head=model.working_bytes(model.head, units),
            gathered=gathered,
        )

    @property
    def _attention(self) -> float:
        """Bytes of what attention to other lanes' keys gave, all heads of one block: it is not computed again,
        because keys are exchanged once. The output of each token; where heads are divided its output, queries,
        keys and values once more. Outputs are as wide as queries, all heads together."""
        model = self.profile
        groups = model.groups / model.share_units if model.groups else 1.0
        return (model.query_bytes or model.boundary_bytes) * model.tokens * (3 + 2 * groups)

    @property
    def zero(self) -> Zero:
        """The effect of the state policy on memory and time."""
        return Zero(policy=self.state, pipelines=self.pipelines, members=self.members)

    def carried(self, copies: int, devices: int) -> float:
        """Bytes that each of `devices` needs which carry so many copies of the state between them."""
        return self.zero.carried(self.profile, copies, devices) + self.profile.fixed_bytes

    def after(self, pipelines: int, fewest: int, link: Link, depth: int | None = None) -> float:
        """Reduction, update and gathering by a device of the smallest pipeline, which holds a part of the model
        on average (pieces of different stages are reduced side by side). `depth`: stages of that pipeline,
        for what the last backward pass hides; without it no less than that can be is said."""
        model = self.profile
        zero = Zero(policy=self.state, pipelines=pipelines, members=max(self.members, pipelines * fewest))
        reduction = zero.reduction(model, 1 / fewest, link)
        exposed = self._exposed(reduction, fewest, depth) if model.overlap else reduction
        gathered = zero.gathering(model, 1 / fewest, link)
        update = model.optimizer_seconds * zero.owned(model, 1 / fewest)
        return model.reduction_scale * (exposed + gathered) + update + model.overhead_seconds

    def _exposed(self, reduction: float, fewest: int, depth: int | None) -> float:
        """The rest of a stage's reduction after its last backward pass, which takes b over n layers: the first
        layer's gradients are there last, the others are on their way by then."""
        model = self.profile
        if depth is None:
            return reduction / model.layers
        layers = max(1.0, model.layers / depth)
        work = model.tokens * model.block.seconds * model.layers / fewest
        work += model.tokens * model.block.whole_seconds * layers
        backward = work * (self._again - model.forward) * model.pipeline_scale
        return max(reduction / layers, reduction - backward * (1 - 1 / layers))

    def bound(self, rates: Sequence[float], micro_batches: int) -> float:
        """All work over all speed: a group with shares x finishes a layer no sooner than 1 / sum(1 / rate),
        and in a step no stage is busy for longer than the step (harmonic mean, no communication)."""
        speed = sum(1 / rate for rate in rates)
        model, widths = self.profile, self.widths(len(rates)) or (1,)
        work = model.layers * self._least(model.block, widths) * self._again
        work += self._least(model.embed, widths) + self._least(model.head, widths)
        return micro_batches * work * model.pipeline_scale / speed + model.overhead_seconds

    def _least(self, section: SectionProfile, widths: Sequence[int]) -> float:
        """Seconds of all members together, on normal devices, of the width that wastes least."""
        parts = ((width, *self._parts(section, width)) for width in widths)
        return min(width * fixed + divided for width, fixed, divided in parts)

    def widths(self, most: int) -> tuple[int, ...]:
        """The sizes that a TP group may have, up to `most`: those of the profile, else all that units allow."""
        most = min(most, self.profile.share_units)
        listed = self.profile.widths or tuple(range(1, most + 1))
        return tuple(width for width in listed if width <= most)

    def equal(self) -> ProfileCost:
        """The same cost with equal shares alone."""
        if not self.profile.uneven:
            return self
        return replace(self, profile=msgspec.structs.replace(self.profile, uneven=False))

    def shares(self, rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """Shares worth trying for members of these rates, in share units: equal ones first."""
        options = share_options(rates, self.profile.share_units)
        return options if self.profile.uneven else options[:1]

    @property
    def exact_shares(self) -> bool:
        """True if no other shares than those of `shares` make a group faster."""
        return not self.profile.uneven

    def paces(self, rates: Sequence[float], link: Link) -> Paces:
        """On a group of width w a block with s shared seconds, f of every member and waits r takes
        at least (s + w f) / Y + r, Y = sum(1 / rate): so 1 / block <= Y / (s + w f + r Y), and Y is at least
        that of the slowest members. Equal shares: the slowest member's time."""
        model, speeds = self.profile, sorted(1 / rate for rate in rates)
        block, again, scale = model.block, self._again, model.pipeline_scale
        waits = {
            width: block.collectives * self.collective(width, link) * self._waits * scale
            for width in self.widths(len(rates))
        }
        parts = {width: self._parts(block, width) for width in waits}
        alone = {
            width: (divided + width * fixed) * (again * scale) for width, (fixed, divided) in parts.items()
        }
        if not model.uneven:
            return by_slowest(
                rates, tuple(waits), lambda width, rate: rate * alone[width] / width + waits[width]
            )
        return by_speed(rates, {w: 1 / (alone[w] + wait * sum(speeds[:w])) for w, wait in waits.items()})


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
