"""Measurements of a model before anything is fitted to them: by `elasticd profile` on one device, and the
bytes of its sections by each job."""

from __future__ import annotations

import math

import msgspec

from elasticd_planner.cost.model_profile import Numbers
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.value import Value, refuse


class MeasuredBytes(Value, frozen=True, kw_only=True):
    """Bytes of one section on a member of a TP group, for one micro-batch."""

    section: str  # "embed", "head", or "block" for the largest of all blocks
    share: float  # of the section that the member holds
    tokens: int  # of the micro-batch
    kept: int = 0  # [bytes] from forward to backward, parameters left out
    kept_recomputed: int = 0  # [bytes] the same where backward makes activations again
    working: int = 0  # [bytes] that both passes have at most beside `kept`

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 < self.share <= 1 or min(self.kept, self.kept_recomputed, self.working) < 0:
            refuse(f"bytes of {self.section}: tokens and share must be positive, bytes not negative: {self}")


class ModelBytes(Value, frozen=True, kw_only=True):
    """Bytes of a model's sections at some shares; `bundle_bytes`: see `ModelProfile`.
    `numbers`: of a job that trains with master weights."""

    sections: tuple[MeasuredBytes, ...]
    bundle_bytes: float = 0.0

    def of(self, section: str) -> tuple[MeasuredBytes, ...]:
        """Those of one section."""
        return tuple(each for each in self.sections if each.section == section)


class SectionSample(Value, frozen=True, kw_only=True):
    """Medians over the repeats of one section ("embed", "head", "block", or "block.K" of kind K), or of the
    experts of a block ("experts", "experts.K"), on a member that holds `share` of it in a TP group of `width`,
    for one micro-batch of `tokens` tokens.

    Seconds are of computation alone: no peer is waited for. recomputed: forward and backward where the
    activation is computed anew in backward (None: not measured). kept: bytes that stay from forward to
    backward, parameters left out; kept_recomputed the same with recomputation. noise: the median distance
    from the median, as a part of it. working: bytes that both passes have at most beside `kept` (0: not
    measured).
    """

    section: str
    width: int
    share: float
    tokens: int
    forward: float
    backward: float
    recomputed: float | None = None
    kept: int = 0
    kept_recomputed: int = 0
    working: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.width < 1 or self.tokens < 1 or not 0 < self.share <= 1:
            refuse(f"timing of {self.section}: width, tokens and share must be positive, share at most 1")
        if not 0 < self.seconds < math.inf:
            refuse(f"timing of {self.section}: {self.seconds} s is no time")

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward

    @property
    def bytes(self) -> MeasuredBytes:
        """Its bytes alone."""
        return MeasuredBytes(
            section=self.section,
            share=self.share,
            tokens=self.tokens,
            kept=self.kept,
            kept_recomputed=self.kept_recomputed,
            working=self.working,
        )


class Collective(Value, frozen=True, kw_only=True):
    """The median time of one all-reduce of `size` bytes among `width` processes of this machine."""

    width: int
    size: int
    seconds: float


class Update(Value, frozen=True, kw_only=True):
    """The median time of one AdamW step over parameters of `size` bytes, with `state` bytes of moments."""

    size: int
    state: int
    seconds: float


class Whole(Value, frozen=True, kw_only=True):
    """Forward and backward of the whole model on one device, one micro-batch of `tokens`, measured."""

    tokens: int
    seconds: float


class Samples(Value, frozen=True, kw_only=True):
    """Everything that was measured of `model`, on what, and how. Micro-batches are whole samples of
    `sample_tokens` tokens, or with `items` single items, whose rows are the tokens. `skipped` says why there is
    no `whole`. `bundle_bytes`: see `ModelProfile`."""

    model: ModelSpec
    sample_tokens: int
    device: str
    threads: int
    torch: str
    repeats: int
    timings: tuple[SectionSample, ...]
    updates: tuple[Update, ...] = ()
    collectives: tuple[Collective, ...] = ()
    whole: Whole | None = None
    skipped: str = ""
    loss: bool = False
    bundle_bytes: float = 0.0
    numbers: Numbers | None = None
    items: str = ""
    chosen: int = 0  # experts of a row, where blocks have some
    experts: int = 0  # of a block, likewise

    def of(self, section: str) -> tuple[SectionSample, ...]:
        """The timings of one section."""
        return tuple(timing for timing in self.timings if timing.section == section)

    @property
    def blocks(self) -> tuple[SectionSample, ...]:
        """One block as the mean over the model's layers in seconds, and the most of them in bytes."""
        kinds = [self.of(kind_name(self.model, kind)) for kind in range(len(self.model.kinds))]
        layers = self.model.layers
        if len(kinds) == 1:
            return kinds[0]
        parts = [layers.count(kind) / len(layers) for kind in range(len(kinds))]
        return tuple(_mean(alike, parts) for alike in zip(*kinds, strict=True))


def kind_name(model: ModelSpec, kind: int) -> str:
    """The name of a kind of block in timings."""
    return "block" if len(model.kinds) == 1 else f"block.{kind}"


def experts_name(model: ModelSpec, kind: int) -> str:
    """The name of timings of the experts of a kind of block."""
    return kind_name(model, kind).replace("block", "experts")


def _mean(alike: tuple[SectionSample, ...], parts: list[float]) -> SectionSample:
    if len({(timing.width, timing.tokens) for timing in alike}) > 1:
        refuse("samples: every kind of block must be measured at the same widths and tokens")

    def mean(values: list[float]) -> float:
        return sum(value * part for value, part in zip(values, parts, strict=True))

    again = [timing.recomputed for timing in alike if timing.recomputed is not None]
    return msgspec.structs.replace(
        alike[0],
        section="block",
        forward=mean([timing.forward for timing in alike]),
        backward=mean([timing.backward for timing in alike]),
        recomputed=mean(again) if len(again) == len(alike) else None,
        kept=max(timing.kept for timing in alike),
        kept_recomputed=max(timing.kept_recomputed for timing in alike),
        working=max(timing.working for timing in alike),
        noise=max(timing.noise for timing in alike),
    )
