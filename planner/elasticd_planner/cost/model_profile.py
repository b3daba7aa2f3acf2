"""The model's profile: seconds and bytes of each section by tokens and share, all that the cost reads.

`derive` makes one from the model's shapes alone, before anything was measured; `fit` replaces its seconds by
measured ones. Bytes of parameters always come from the shapes, those of activations where none were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from elasticd_planner.cost.pipeline_time import FORWARD
from elasticd_planner.cost.shape_bytes import (
    ShapeBytes,
    block_bytes,
    block_traffic,
    embed_bytes,
    head_bytes,
)
from elasticd_planner.numeric import Bools, Floats, Ints
from elasticd_planner.spec.model import ModelSpec, Parameter, item_size
from elasticd_planner.value import Value, refuse

#: Floating point operations per second of a normal device, where nothing is known: about those of a thread of a
#: server's processor, which reaches 7e10 in torch's products of 1,024 x 1,024 matrices of single precision.
GUESSED_FLOPS = 5e10

#: Bytes of optimizer state per byte of parameter: AdamW's two moments.
ADAMW_STATE = 2.0

#: The fields of a section that say what its passes have at most beside the kept activations.
WORKING = ("cut_working", "whole_working", "matrix_working", "beside_working")


class SectionProfile(Value, frozen=True, kw_only=True):
    """One whole section (embed, one block, head): what a member with all of its shares would spend and hold.

    seconds: forward and backward of one token on a normal device; fixed_seconds: of one micro-batch. A member
    with the part s of a group of width w takes rate x (fixed_seconds + tokens x (seconds x s x slowdown[w] +
    whole_seconds)) besides collectives (TP all-reduces of one micro-batch, forward and backward): `slowdown`
    says how much longer a part takes than that part of the whole, and `whole_seconds` is of a token on every
    member, since TP does not divide norms and additions; with sequence parallelism each has them for its part.

    The bytes of parameters come in three parts: `cut_bytes` scale with the member's share; `grouped_bytes`
    (kv projections) with the groups of units that its share touches; `whole_bytes` every member holds. The
    activation bytes are those kept from forward to backward for one token, cut and whole; of a block that
    makes them again only `recomputed_activation`, whole. The working bytes are what its two passes have at most
    beside those, at one of two moments. With many tokens it is `cut_working` and `whole_working` of each:
    gradients of activations, and of the head all that its loss makes of the logits. With few it is the gradient
    of the largest matrix, `matrix_working`, which is cut and the same for any number of tokens, and
    `beside_working` of each token, whole; that is negative where more of what was kept is gone by then.
    """

    seconds: float = 0.0
    fixed_seconds: float = 0.0
    slowdown: dict[int, float] = msgspec.field(default_factory=dict)
    cut_bytes: int = 0
    grouped_bytes: int = 0
    whole_bytes: int = 0
    cut_activation: float = 0.0
    whole_activation: float = 0.0
    recomputed_activation: float = 0.0
    cut_working: float = 0.0
    whole_working: float = 0.0
    collectives: int = 0
    matrix_working: float = 0.0
    beside_working: float = 0.0
    whole_seconds: float = 0.0

    def __post_init__(self) -> None:
        others = ("slowdown", "beside_working")
        numbers = (getattr(self, name) for name in self.__struct_fields__ if name not in others)
        if any(not 0 <= number < math.inf for number in numbers) or not math.isfinite(self.beside_working):
            refuse(f"section profile: seconds, bytes and counts must be finite and not negative, not {self}")
        if any(width < 1 or not 0 < factor < math.inf for width, factor in self.slowdown.items()):
            refuse(f"section profile: slowdown must be positive by positive widths, not {self.slowdown}")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the section's parameters, all three parts."""
        return self.cut_bytes + self.grouped_bytes + self.whole_bytes

    def scaled(self, factor: float) -> SectionProfile:
        """The section on a device that takes so many times as long for it."""
        return msgspec.structs.replace(
            self,
            seconds=self.seconds * factor,
            fixed_seconds=self.fixed_seconds * factor,
            whole_seconds=self.whole_seconds * factor,
        )

    def working(self, part: float, tokens: float, others: float = 1.0) -> float:
        """Working bytes of a member that has this part of the section, in a micro-batch of so many tokens, of
        which it has the part `others` of what is whole."""
        many = (self.cut_working * part + self.whole_working * others) * tokens
        return max(many, self.matrix_working * part + self.beside_working * others * tokens)

    def factor(self, width: int) -> float:
        """`slowdown` of a width: between known ones interpolated, beyond them the last; 1 if none is known."""
        if width in self.slowdown or not self.slowdown:
            return self.slowdown.get(width, 1.0)
        known = sorted(self.slowdown.items())
        return float(np.interp(width, [w for w, _ in known], [factor for _, factor in known]))

    def factors(self, widths: Ints) -> Floats:
        """The same for many widths."""
        found = {width: self.factor(width) for width in {*widths.tolist()}}
        return np.array([found[width] for width in widths.tolist()])

    def slowdowns(self, widths: Ints, parts: Floats, sliced: Bools) -> Floats:
        """The seconds of a token as a multiple of `seconds` of its part, for members of groups of these widths,
        with these parts, which have slices of the tokens or not."""
        if not self.whole_seconds:
            return self.factors(widths)
        return self.factors(widths) + self.whole_seconds / self.seconds / np.where(sliced, 1.0, parts)


class ExpertProfile(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of a block, measured where each has as many rows as any other."""

    part: float  # the seconds of a token in them over those in a mean block, with experts or without
    chosen: int  # experts of a row
    count: int  # of all experts

    def __post_init__(self) -> None:
        if not 0 <= self.part < 1:
            refuse(f"experts: part {self.part} must be from 0 to less than 1: of the seconds of a mean block")
        if not 1 <= self.chosen <= self.count:
            refuse(f"experts: chosen {self.chosen} must be from 1 to the count, {self.count}")


class ModelProfile(Value, frozen=True, kw_only=True):
    """The costs of a model. Blocks count as alike: where their kinds differ, `block` is their mean in seconds
    and the largest of them in bytes.

    share_units: the integer shares of a TP group sum to it, so that shares are what the members hold.
    uneven: whether members of a group may have unequal shares. widths: sizes that a TP group may have (empty:
    any). groups: kv-heads, which follow the shares (0: none). tokens: of one micro-batch. tied_bytes:
    parameter bytes of the head that are the embedding's (counted in both). boundary_bytes: one token's
    activation between blocks. bundle_bytes: where sections give named tensors, what a token brings over a
    boundary of stages, all of them, the mean of there and back (0: one activation). query_bytes: a token's
    queries of one block, all heads together, where they are not as wide as the activation (0). gradient_factor,
    optimizer_factor: bytes of gradients, and of optimizer state and master weights, per byte of parameter.
    fixed_bytes: what every device needs besides.

    collective_seconds: measured seconds of one TP all-reduce by width of the group, over the fastest link
    inside a node; collective_token_seconds: what each token of a micro-batch adds to it. Other widths are
    estimated from the link. forward: its part of forward and backward. recompute_factor: how many times
    longer a block takes that makes its activations again. recomputed_part: the part of all blocks that do so
    under every plan, taken to be spread evenly. optimizer_seconds: per byte of optimizer state
    that a device updates. overlap: whether gradients are reduced while the last micro-batch still goes
    backward. reduction_scale: measured time of the gradients' reduction over the links' estimate;
    pipeline_scale: the same for the pipelines. overhead_seconds: fixed part of a step.
    """

    name: str
    layers: int
    share_units: int
    tokens: float
    block: SectionProfile
    embed: SectionProfile = SectionProfile()
    head: SectionProfile = SectionProfile()
    uneven: bool = True
    widths: tuple[int, ...] = ()
    groups: int = 0
    tied_bytes: int = 0
    boundary_bytes: float = 0.0
    gradient_factor: float = 1.0
    optimizer_factor: float = ADAMW_STATE
    fixed_bytes: float = 0.0
    collective_seconds: dict[int, float] = msgspec.field(default_factory=dict)
    collective_token_seconds: dict[int, float] = msgspec.field(default_factory=dict)
    forward: float = FORWARD
    recompute_factor: float = 1 + FORWARD
    recomputed_part: float = 0.0
    optimizer_seconds: float = 0.0
    overlap: bool = False
    reduction_scale: float = 1.0
    pipeline_scale: float = 1.0
    overhead_seconds: float = 0.0
    fitted: bool = False
    bundle_bytes: float = 0.0
    query_bytes: float = 0.0
    experts: ExpertProfile | None = None  # of blocks with some (None: not measured)

    def __post_init__(self) -> None:
        if self.layers < 1 or self.share_units < 1 or not self.tokens > 0:
            refuse(f"profile {self.name}: layers, share_units and tokens must be positive")
        if not self.block.seconds > 0:
            refuse(f"profile {self.name}: a block must take more than {self.block.seconds} s a token")
        if self.groups < 0 or self.groups > self.share_units:
            refuse(f"profile {self.name}: {self.groups} groups cannot follow {self.share_units} share units")
        if not 0 < self.forward < 1 or not 1 <= self.recompute_factor < math.inf:
            refuse(
                f"profile {self.name}: forward {self.forward} must be between 0 and 1, and "
                f"recompute_factor {self.recompute_factor} at least 1"
            )
        if not 0 <= self.recomputed_part <= 1:
            refuse(f"profile {self.name}: recomputed_part {self.recomputed_part} must be between 0 and 1")
        bytes_and_seconds = (
            *(self.gradient_factor, self.optimizer_factor, self.fixed_bytes, self.optimizer_seconds),
            *(self.bundle_bytes, self.query_bytes),
            *self.collective_seconds.values(),
            *self.collective_token_seconds.values(),
        )
        if any(not 0 <= number < math.inf for number in bytes_and_seconds):
            refuse(f"profile {self.name}: bytes and seconds must be finite and not negative")

    @property
    def state_factor(self) -> float:
        """Bytes of parameters, gradients and optimizer state per byte of parameter."""
        return 1.0 + self.gradient_factor + self.optimizer_factor

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of the whole model, tied ones once."""
        sections = self.layers * self.block.parameter_bytes
        return sections + self.embed.parameter_bytes + self.head.parameter_bytes - self.tied_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the whole model, tied parameters once."""
        return round(self.parameter_bytes * self.gradient_factor)

    def sized(self, tokens: float) -> ModelProfile:
        """The same model with micro-batches of so many tokens. A measured collective of which nothing is known
        by token grows with them."""
        scale = tokens / self.tokens
        known = self.collective_token_seconds
        collectives = {w: s if w in known else s * scale for w, s in self.collective_seconds.items()}
        return msgspec.structs.replace(self, tokens=tokens, collective_seconds=collectives)

    def aligned(self, shares: tuple[int, ...]) -> bool:
        """Returns True if no cut of a TP group with these share units runs through a group of units (a
        kv-head)."""
        return not self.groups or all(share * self.groups % self.share_units == 0 for share in shares)

    def held_bytes(self, section: SectionProfile, units: int, aligned: bool) -> float:
        """Bytes of parameters that a member with `units` share units holds of a section; where the cuts are
        not aligned, with as many groups as the units can touch at most."""
        held = section.cut_bytes * units / self.share_units + section.whole_bytes
        if self.groups:
            per = self.share_units / self.groups
            touched = units / per if aligned else min(self.groups, math.floor((units - 2) / per) + 2)
            held += section.grouped_bytes * touched / self.groups
        return held

    def activation_bytes(self, section: SectionProfile, units: int, *, sliced: bool = False) -> float:
        """Bytes that one micro-batch in flight keeps on a member with `units` share units of a section;
        `sliced`: what is whole otherwise is of the member's share of the tokens."""
        part = units / self.share_units
        kept = section.cut_activation * part + section.whole_activation * (part if sliced else 1.0)
        return kept * self.tokens

    def working_bytes(self, section: SectionProfile, units: int, *, sliced: bool = False) -> float:
        """Bytes that the passes of one micro-batch have at most beside those; arguments as there."""
        part = units / self.share_units
        return section.working(part, self.tokens, part if sliced else 1.0)


def derive(
    spec: ModelSpec,
    sample_tokens: float,
    micro_batch: int,
    flops: float = GUESSED_FLOPS,
    *,
    memory_bandwidth: float = 0.0,
    dropouts: int = 0,
) -> ModelProfile:
    """A profile from shapes alone. `sample_tokens`: tokens of one sample; `flops` [1/s] and `memory_bandwidth`
    [bytes/s]: of a normal device; `dropouts`: how many times a block drops elements of its activation.

    Seconds per token are 6 x elements of matrices / flops (two operations per element forward, four
    backward; Kaplan et al. 2020, section 2.1); looking up an embedding costs nothing, a vector (a norm)
    counts as one matrix column. Attention adds 6 x 2 x width x tokens / 2 for a causal mask. With a memory
    bandwidth (0: not known) a block also takes the seconds of the bytes that its other operations move
    (`shape_bytes.block_traffic`), so that `flops` are those of matrices alone: narrow models wait longer for
    memory. `shape_bytes` says what activations weigh.
    """
    if not 0 <= memory_bandwidth < math.inf:
        refuse(f"profile: memory_bandwidth {memory_bandwidth} must be bytes a second, as 2e12; 0 where unknown")
    if not flops > 0 or not sample_tokens > 0 or micro_batch < 1:
        refuse("profile: flops, sample_tokens and micro_batch must be positive")
    size = item_size(spec.dtype)
    blocks = [_block(spec, kind, flops, memory_bandwidth, sample_tokens, dropouts) for kind in spec.kinds]
    used = [blocks[kind] for kind in spec.layers]
    mean = sum(block.seconds for block in used) / len(used)
    mean_whole = sum(block.whole_seconds for block in used) / len(used)
    largest = {
        name: max(getattr(block, name) for block in used)
        for name in SectionProfile.__struct_fields__
        if name not in ("seconds", "whole_seconds", "fixed_seconds", "slowdown")
    }
    leads = _cutting(spec)
    coarsest = min(leads.values(), default=1)
    followers = [units.count for units in spec.units if units.follows in leads]
    aliases = {alias: owner for alias, owner in spec.ties if alias.startswith("head.")}
    return ModelProfile(
        name=spec.name,
        layers=len(spec.layers),
        share_units=coarsest,
        tokens=sample_tokens * micro_batch,
        block=SectionProfile(seconds=mean, whole_seconds=mean_whole, **largest),
        embed=_edge(spec, spec.embed, 0.0, embed_bytes(spec, dropouts)),
        head=_edge(spec, spec.head, 6 * _matrix_elements(spec.head) / flops, head_bytes(spec)),
        groups=min(*followers, coarsest) if followers else 0,
        tied_bytes=sum(parameter_bytes(p) for p in spec.head if f"head.{p.name}" in aliases),
        boundary_bytes=spec.width * size,
        query_bytes=queries if (queries := _queries(spec) * size) != spec.width * size else 0.0,
    )


def _queries(spec: ModelSpec) -> int:
    """Elements of a token's queries, all heads of the widest block together: those of the first matrix in units
    that kv-heads follow; the activation's width where there is none."""
    led = {units.follows for units in spec.units if units.follows is not None}
    firsts = (
        next((p.shape[p.cut.dim] for p in kind if p.cut is not None and p.cut.units in led), spec.width)
        for kind in spec.kinds
    )
    return max(firsts)


def parameter_bytes(parameter: Parameter) -> int:
    """Bytes of one whole parameter."""
    return math.prod(parameter.shape) * item_size(parameter.dtype)


def _cutting(spec: ModelSpec) -> dict[str, int]:
    """The leading kinds of units that cut parameters of blocks, by count."""
    kinds = {p.cut.units for kind in spec.kinds for p in kind if p.cut is not None}
    leads = {spec.units_of(kind).follows or kind for kind in kinds}
    return {kind: spec.units_of(kind).count for kind in sorted(leads)}


def _matrix_elements(parameters: Iterable[Parameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _parts(spec: ModelSpec, parameters: Iterable[Parameter]) -> dict[str, Any]:
    """Parameter bytes of a section: cut, grouped and whole."""
    parts = {"cut_bytes": 0, "grouped_bytes": 0, "whole_bytes": 0}
    for parameter in parameters:
        if parameter.cut is None:
            part = "whole_bytes"
        elif spec.units_of(parameter.cut.units).follows is None:
            part = "cut_bytes"
        else:
            part = "grouped_bytes"
        parts[part] += parameter_bytes(parameter)
    return parts


def _block(
    spec: ModelSpec,
    kind: tuple[Parameter, ...],
    flops: float,
    memory_bandwidth: float,
    sample_tokens: float,
    dropouts: int,
) -> SectionProfile:
    """A block of this kind. Backward makes as many all-reduces as forward."""
    operations = 6 * (_matrix_elements(kind) + spec.width * sample_tokens)
    traffic = block_traffic(spec, kind, dropouts)
    by_byte = 1 / memory_bandwidth if memory_bandwidth else 0.0
    return SectionProfile(
        seconds=operations / flops + traffic.cut * by_byte,
        whole_seconds=traffic.whole * by_byte,
        recomputed_activation=spec.width * item_size(spec.dtype),
        collectives=2 * spec.collectives,
        **asdict(block_bytes(spec, kind, dropouts)),
        **_parts(spec, kind),
    )


def _edge(
    spec: ModelSpec, parameters: tuple[Parameter, ...], seconds: float, activations: ShapeBytes
) -> SectionProfile:
    """Embed or head: a cut one needs one all-reduce of the activation (embed's forward, head's backward)."""
    return SectionProfile(
        seconds=seconds,
        collectives=int(any(p.cut is not None for p in parameters)),
        **asdict(activations),
        **_parts(spec, parameters),
    )


class Numbers(Value, frozen=True, kw_only=True):
    """Types of numbers as torch names them: of master weights and the optimizer's moments, and of gradients.
    Parameters and activations are of the types in the model's spec, `compute` for nearly all of them."""

    compute: str
    master: str = "float32"
    gradients: str = "float32"

    def __post_init__(self) -> None:
        if item_size(self.master) < item_size(self.compute):
            refuse(f"numbers: master weights of {self.master} are no finer than {self.compute}")


def with_room(profile: ModelProfile, factor: float) -> ModelProfile:
    """The profile with so many times the room for what a token's activations keep."""

    def fuller(section: SectionProfile) -> SectionProfile:
        return msgspec.structs.replace(
            section,
            cut_activation=section.cut_activation * factor,
            whole_activation=section.whole_activation * factor,
            recomputed_activation=section.recomputed_activation * factor,
            cut_working=section.cut_working * factor,
            whole_working=section.whole_working * factor,
            beside_working=section.beside_working * factor,
        )

    return msgspec.structs.replace(
        profile, block=fuller(profile.block), embed=fuller(profile.embed), head=fuller(profile.head)
    )


def suited(profile: ModelProfile, numbers: Numbers | None, recomputed_part: float = 0.0) -> ModelProfile:
    """The profile of a model in `compute` (its spec's types), whose state is of these numbers (None: all is of
    the parameters' own type) and of whose blocks this part makes its activations again by the user's word. A
    measured profile may be of these numbers already."""
    profile = msgspec.structs.replace(profile, recomputed_part=recomputed_part)
    if numbers is None:
        return profile
    gradient = item_size(numbers.gradients) / item_size(numbers.compute)
    if profile.gradient_factor == gradient != 1:
        return profile
    wider = item_size(numbers.master) / item_size(numbers.compute)
    return msgspec.structs.replace(
        profile,
        gradient_factor=gradient,
        optimizer_factor=(1 + profile.optimizer_factor) * wider,
    )
