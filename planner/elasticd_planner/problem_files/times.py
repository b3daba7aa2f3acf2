"""A model's measured times as files have them: the entries of the shared format, to a ModelProfile and back.

`model.times`, `model.state` and `model.recompute` take the place of `tp_full`, `tp_slowdown` and `memory`:
figures are then seconds. `elasticd profile` prints the same object (`entry_of`). The keys: docs/planner.md.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from elasticd_planner.cost.model_profile import ADAMW_STATE, ExpertProfile, ModelProfile, SectionProfile
from elasticd_planner.cost.pipeline_time import FORWARD
from elasticd_planner.cost.table_cost import MIB
from elasticd_planner.value import Value, refuse

#: Whole units that shares are in where `model.units` is not given.
SHARE_UNITS = 64


def none_negative(entry: Value, *names: str) -> None:
    """Raises Invalid where one of these fields is negative or not finite."""
    for name in names:
        if not 0 <= getattr(entry, name) < math.inf:
            refuse(f"{name} {getattr(entry, name)} must not be negative")


def positive(name: str, value: float) -> None:
    """Raises Invalid for a value that is not positive and finite."""
    if not 0 < value < math.inf:
        refuse(f"{name} {value} must be positive")


def all_positive(entry: Value, *names: str) -> None:
    """Raises Invalid where one of these fields that are given is not positive and finite."""
    for name in names:
        if getattr(entry, name) is not None:
            positive(name, getattr(entry, name))


class SectionTimes(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a block, embed or head as a whole on a normal device: seconds forward and backward of a token, fixed
    seconds of a micro-batch, how much longer a part takes in a TP group of each size than that part of the
    whole, TP all-reduces of a micro-batch, and seconds of a token on every member of a TP group (norms)."""

    seconds_per_token: float = 0.0
    fixed_seconds: float = 0.0
    tp_slowdown: dict[int, float] = msgspec.field(default_factory=dict)
    collectives: int = 0
    whole_seconds_per_token: float = 0.0

    def __post_init__(self) -> None:
        none_negative(self, "seconds_per_token", "fixed_seconds", "collectives", "whole_seconds_per_token")
        for size, slowdown in self.tp_slowdown.items():
            if size < 1 or not 0 < slowdown < math.inf:
                refuse(f"tp_slowdown.{size} {slowdown} must be a positive size with a positive factor")


class CollectiveTimes(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TP all-reduce: fixed seconds, and seconds that each token of the micro-batch adds."""

    seconds: float = 0.0
    seconds_per_token: float = 0.0

    def __post_init__(self) -> None:
        none_negative(self, "seconds", "seconds_per_token")


class TimesEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the sections and of what is between and after them. `collectives` are by TP size; sizes that
    are not there are estimated from the link and `boundary_bytes` (of a token). `bundle_bytes`, where it is
    not 0, is what a token brings over a boundary of stages instead: the mean of there and back. `query_bytes`,
    where it is not 0: a token's queries of one block, whose heads together are not as wide as the
    activation. `experts`: those of blocks with some, see `ExpertProfile`."""

    block: SectionTimes
    embed: SectionTimes = SectionTimes()
    head: SectionTimes = SectionTimes()
    boundary_bytes: float = 0.0
    collectives: dict[int, CollectiveTimes] = msgspec.field(default_factory=dict)
    forward: float = FORWARD
    optimizer_seconds_per_byte: float = 0.0
    overhead_seconds: float = 0.0
    overlap: bool = False
    bundle_bytes: float = 0.0
    query_bytes: float = 0.0
    experts: ExpertProfile | None = None

    def __post_init__(self) -> None:
        if not self.block.seconds_per_token > 0:
            refuse(f"block.seconds_per_token {self.block.seconds_per_token} must be positive")
        of_bytes = ("boundary_bytes", "bundle_bytes", "query_bytes")
        none_negative(self, *of_bytes, "optimizer_seconds_per_byte", "overhead_seconds")
        if not 0 < self.forward < 1:
            refuse(f"forward {self.forward} must be between 0 and 1: its part of forward and backward")


class SectionState(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of a block's, embed's or head's parameters (cut with the shares, cut by kv-heads, held by every
    member), of the activations kept for backward for a token, and what its passes have besides at most:
    `SectionProfile` explains the working bytes."""

    cut_bytes: int = 0
    grouped_bytes: int = 0
    whole_bytes: int = 0
    cut_activation: float = 0.0
    whole_activation: float = 0.0
    cut_working: float = 0.0
    whole_working: float = 0.0
    matrix_working: float = 0.0
    beside_working: float = 0.0

    def __post_init__(self) -> None:
        none_negative(self, *(name for name in self.__struct_fields__ if name != "beside_working"))
        if not math.isfinite(self.beside_working):
            refuse(f"beside_working {self.beside_working} must be finite")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the section's parameters, all three parts."""
        return self.cut_bytes + self.grouped_bytes + self.whole_bytes


class StateEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state that devices hold. `gradient` and `optimizer` (master weights in it) are bytes per byte of
    parameter; every device needs `fixed_mib` besides, `reserve_mib` is left free."""

    block: SectionState = SectionState()
    embed: SectionState = SectionState()
    head: SectionState = SectionState()
    tied_bytes: int = 0
    gradient: float = 1.0
    optimizer: float = ADAMW_STATE
    fixed_mib: float = 0.0
    reserve_mib: float = 0.0

    def __post_init__(self) -> None:
        none_negative(self, "tied_bytes", "gradient", "optimizer", "fixed_mib", "reserve_mib")


class RecomputeEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block whose activations are made again in the backward pass: how many times longer it takes, and the
    bytes that it keeps of a token."""

    slowdown: float = 1 + FORWARD
    kept_activation: float

    def __post_init__(self) -> None:
        none_negative(self, "kept_activation")
        if not 1 <= self.slowdown < math.inf:
            refuse(f"slowdown {self.slowdown} must be at least 1")


class TimedModel(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` of the shared format with measured times. Shares are in so many whole `units`, kv-heads in
    `groups`. Without `state` memory does not bind."""

    name: str
    layers: int
    times: TimesEntry
    units: int = SHARE_UNITS
    groups: int = 0
    uneven_shares: bool = True
    state: StateEntry | None = None
    recompute: RecomputeEntry | None = None


def profile_of(model: TimedModel, tokens: float) -> ModelProfile:
    """The profile of a model with micro-batches of `tokens`. Sizes of TP groups are those that
    `times.block.tp_slowdown` names, or any."""
    times, recompute, held = model.times, model.recompute, model.state or StateEntry()

    def section(which: str) -> SectionProfile:
        spent, kept = getattr(times, which), getattr(held, which)
        return SectionProfile(
            seconds=spent.seconds_per_token,
            fixed_seconds=spent.fixed_seconds,
            slowdown=spent.tp_slowdown or times.block.tp_slowdown,
            collectives=spent.collectives,
            whole_seconds=spent.whole_seconds_per_token,
            recomputed_activation=recompute.kept_activation if recompute and which == "block" else 0.0,
            **{field: getattr(kept, field) for field in SectionState.__struct_fields__},
        )

    return ModelProfile(
        name=model.name,
        layers=model.layers,
        share_units=model.units,
        tokens=tokens,
        block=section("block"),
        embed=section("embed"),
        head=section("head"),
        uneven=model.uneven_shares,
        widths=tuple(sorted(times.block.tp_slowdown)),
        groups=model.groups,
        tied_bytes=held.tied_bytes,
        boundary_bytes=times.boundary_bytes,
        bundle_bytes=times.bundle_bytes,
        query_bytes=times.query_bytes,
        experts=times.experts,
        gradient_factor=held.gradient,
        optimizer_factor=held.optimizer,
        fixed_bytes=(held.fixed_mib + held.reserve_mib) * MIB,
        collective_seconds={w: entry.seconds for w, entry in times.collectives.items()},
        collective_token_seconds={w: entry.seconds_per_token for w, entry in times.collectives.items()},
        forward=times.forward,
        recompute_factor=recompute.slowdown if recompute else 1 + times.forward,
        optimizer_seconds=times.optimizer_seconds_per_byte,
        overlap=times.overlap,
        overhead_seconds=times.overhead_seconds,
        fitted=True,
    )


def entry_of(profile: ModelProfile) -> dict[str, Any]:
    """`model` of the shared format, as JSON values, from which `profile_of` makes this profile again. The
    scales that a running job's fit adds have no key: Invalid where they are not 1."""
    if profile.reduction_scale != 1 or profile.pipeline_scale != 1:
        refuse(f"profile {profile.name}: reduction_scale and pipeline_scale have no key in the shared format")
    widths = sorted({*profile.collective_seconds, *profile.collective_token_seconds})

    def times(section: SectionProfile) -> SectionTimes:
        return SectionTimes(
            seconds_per_token=section.seconds,
            fixed_seconds=section.fixed_seconds,
            tp_slowdown=section.slowdown or dict.fromkeys(list(profile.block.slowdown)[:1], 1.0),
            collectives=section.collectives,
            whole_seconds_per_token=section.whole_seconds,
        )

    def state(section: SectionProfile) -> SectionState:
        return SectionState(**{name: getattr(section, name) for name in SectionState.__struct_fields__})

    entries: dict[str, Any] = {
        "name": profile.name,
        "layers": profile.layers,
        "units": profile.share_units,
        "groups": profile.groups,
        "uneven_shares": profile.uneven,
        "times": TimesEntry(
            block=times(profile.block),
            embed=times(profile.embed),
            head=times(profile.head),
            boundary_bytes=profile.boundary_bytes,
            bundle_bytes=profile.bundle_bytes,
            query_bytes=profile.query_bytes,
            experts=profile.experts,
            collectives={w: _collective(profile, w) for w in widths},
            forward=profile.forward,
            optimizer_seconds_per_byte=profile.optimizer_seconds,
            overhead_seconds=profile.overhead_seconds,
            overlap=profile.overlap,
        ),
        "state": StateEntry(
            block=state(profile.block),
            embed=state(profile.embed),
            head=state(profile.head),
            tied_bytes=profile.tied_bytes,
            gradient=profile.gradient_factor,
            optimizer=profile.optimizer_factor,
            fixed_mib=profile.fixed_bytes / MIB,
        ),
        "recompute": RecomputeEntry(
            slowdown=profile.recompute_factor, kept_activation=profile.block.recomputed_activation
        ),
    }
    found = dict(msgspec.to_builtins(entries, str_keys=True))
    for name in ("bundle_bytes", "query_bytes", "experts"):
        if not getattr(profile, name):
            del found["times"][name]  # a key that releases before 0.2 refuse
    for section in ("block", "embed", "head"):
        if not found["times"][section]["whole_seconds_per_token"]:
            del found["times"][section]["whole_seconds_per_token"]  # likewise
        state_entry = found["state"][section]
        for names in (("cut_working", "whole_working"), ("matrix_working", "beside_working")):
            if not any(state_entry[name] for name in names):
                for name in names:
                    del state_entry[name]  # likewise
    return found


def _collective(profile: ModelProfile, width: int) -> CollectiveTimes:
    """The times of collectives: where nothing is known by token, all of it grows with the tokens, as
    `ModelProfile.sized` has it."""
    seconds = profile.collective_seconds.get(width, 0.0)
    each = profile.collective_token_seconds.get(width)
    if each is None:
        return CollectiveTimes(seconds_per_token=seconds / profile.tokens)
    return CollectiveTimes(seconds=seconds, seconds_per_token=each)
