"""A model's profile from samples: seconds and kept bytes as measured, parameters' bytes from the shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd_planner.cost.model_profile import ExpertProfile, ModelProfile, SectionProfile, derive, suited
from elasticd_planner.profiling.regression import SectionFit, line, regress
from elasticd_planner.profiling.samples import Samples, SectionSample, experts_name, kind_name
from elasticd_planner.profiling.section_bytes import section_with_bytes
from elasticd_planner.spec.expert_load import MOST_OF_EXPERTS
from elasticd_planner.value import Value, refuse

#: The part of its fixed time that the tokens of the longest pass of a block must take at least.
LEAST_GROWTH = 1e-3


class MeasuredProfile(Value, frozen=True, kw_only=True):
    """The profile, for micro-batches of one sample, and the fit of each section (kinds of block each by itself
    where there are several, then "block", their mean; experts beside their block). predicted: seconds that the
    fit expects of what `Samples.whole` measured (None: nothing to compare with)."""

    profile: ModelProfile
    fits: tuple[SectionFit, ...]
    predicted: float | None = None


def measured_profile(samples: Samples) -> MeasuredProfile:
    """Fits all that was measured. Raises Invalid where that is too little: a section that is missing, fewer
    than two token counts (of a module of items one will do), or a block whose times do not grow with tokens at
    all."""
    spec = samples.model
    base = derive(spec, samples.sample_tokens, 1)
    names = [kind_name(spec, kind) for kind in range(len(spec.kinds))]
    one_size = bool(samples.items)  # items may all be alike
    embed, *kinds, head = (regress(samples.of(name), one_size=one_size) for name in ("embed", *names, "head"))
    block = kinds[0] if len(kinds) == 1 else regress(samples.blocks, one_size=one_size)
    found = block.coefficients
    longest = max(timing.tokens * timing.share for timing in samples.blocks)
    if not found.per_token * longest > LEAST_GROWTH * found.fixed:
        if samples.items:  # whose sizes are given: small ones may all take the same time
            block = _growing(block, LEAST_GROWTH * found.fixed / longest)
        else:
            refuse(f"{spec.name}: a block's times do not grow with tokens; measure more tokens or more repeats")
    widths = sorted({collective.width for collective in samples.collectives})
    among = {width: [c for c in samples.collectives if c.width == width] for width in widths}
    lines = {width: line([(c.size / base.boundary_bytes, c.seconds) for c in among[width]]) for width in widths}
    experts = [_experts(samples, kind, one_size=one_size) for kind in range(len(kinds))]
    update = max(samples.updates, key=lambda update: update.state, default=None)
    profile = msgspec.structs.replace(
        base,
        block=_section(base.block, block, samples.blocks),
        embed=_section(base.embed, embed, samples.of("embed")),
        head=_section(base.head, head, samples.of("head")),
        collective_seconds={width: found[0] for width, found in lines.items()},
        collective_token_seconds={width: found[1] for width, found in lines.items()},
        bundle_bytes=samples.bundle_bytes,
        experts=_expert_profile(samples, block, experts),
        forward=block.forward,
        recompute_factor=block.recompute if block.recompute is not None else 1 + block.forward,
        optimizer_seconds=update.seconds / update.state if update is not None and update.state else 0.0,
    )
    listed = [fit for kind, own in zip(kinds, experts, strict=True) for fit in (kind, own) if fit is not None]
    fits = (embed, *listed, *(() if len(kinds) == 1 else (block,)), head)
    profile = suited(profile, samples.numbers)
    return MeasuredProfile(profile=profile, fits=fits, predicted=_predicted(samples, embed, block, head))


def _experts(samples: Samples, kind: int, *, one_size: bool) -> SectionFit | None:
    """The fit of the experts of a kind of block; None: it has none."""
    timings = samples.of(experts_name(samples.model, kind))
    return regress(timings, one_size=one_size) if timings else None


def _expert_profile(
    samples: Samples, block: SectionFit, experts: Sequence[SectionFit | None]
) -> ExpertProfile | None:
    """The experts by their seconds by token over those of a mean block, of the kind in which they are most."""
    each = block.coefficients.per_token
    parts = [own.coefficients.per_token / each for own in experts if own is not None]
    if not parts:
        return None
    part = min(max(parts), MOST_OF_EXPERTS)
    return ExpertProfile(part=part, chosen=samples.chosen, count=samples.experts)


def _growing(fit: SectionFit, per_token: float) -> SectionFit:
    """A fit whose times grow with tokens, as a profile's must."""
    coefficients = msgspec.structs.replace(fit.coefficients, per_token=per_token)
    return msgspec.structs.replace(fit, coefficients=coefficients)


def _section(base: SectionProfile, fit: SectionFit, timings: Sequence[SectionSample]) -> SectionProfile:
    """Seconds of the fit, and the bytes of a token: at each width the most of all token counts."""
    return msgspec.structs.replace(
        section_with_bytes(base, [timing.bytes for timing in timings]),
        seconds=fit.coefficients.per_token,
        fixed_seconds=fit.coefficients.fixed,
        slowdown=fit.coefficients.slowdown,
    )


def _predicted(samples: Samples, embed: SectionFit, block: SectionFit, head: SectionFit) -> float | None:
    whole = samples.whole
    if whole is None or 1 not in block.coefficients.slowdown:
        return None
    each = [fit.coefficients.seconds(1, 1.0, whole.tokens) for fit in (embed, block, head)]
    return each[0] + len(samples.model.layers) * each[1] + each[2]
