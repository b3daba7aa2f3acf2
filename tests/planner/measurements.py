"""What `elasticd profile` would measure of the tests' model, by formulas of their own."""

from __future__ import annotations

import msgspec
from elasticd_planner.profiling.samples import Collective, Samples, SectionSample, Update, Whole
from elasticd_planner.spec.model import ModelSpec

from tests.planner.models import SPEC

TOKENS = (16, 32, 64)
WIDTHS = (1, 2, 4)

#: Fixed seconds and seconds of a token by section.
TRUTH = {"embed": (1e-4, 1e-6), "block": (1e-3, 4e-5), "head": (2e-4, 1e-5)}
SLOWDOWN = {1: 1.0, 2: 1.2, 4: 1.5}
CUT, WHOLE = 400.0, 100.0


def timing(section: str, width: int, tokens: int, *, slower: float = 1.0) -> SectionSample:
    fixed, each = TRUTH[section.partition(".")[0]]
    seconds = (fixed + each * tokens * SLOWDOWN[width] / width) * slower
    block = section.startswith("block")
    return SectionSample(
        section=section,
        width=width,
        share=1 / width,
        tokens=tokens,
        forward=0.3 * seconds,
        backward=0.7 * seconds,
        recomputed=1.4 * seconds if block else None,
        kept=round((WHOLE + CUT / width) * tokens),
        kept_recomputed=32 * tokens if block else 0,
    )


def samples(model: ModelSpec = SPEC, **changes: object) -> Samples:
    """Samples of 16 tokens; a model of two kinds has the second twice as slow as the first."""
    blocks = ["block"] if len(model.kinds) == 1 else ["block.0", "block.1"]
    slower = {"block.1": 2.0}
    made = Samples(
        model=model,
        sample_tokens=16,
        device="cpu",
        threads=1,
        torch="2.9",
        repeats=5,
        timings=tuple(
            timing(section, width, tokens, slower=slower.get(section, 1.0))
            for section in ("embed", *blocks, "head")
            for width in WIDTHS
            for tokens in TOKENS
        ),
        updates=(Update(size=100, state=200, seconds=4e-6), Update(size=50, state=100, seconds=4e-6)),
        collectives=tuple(
            Collective(width=2, size=tokens * model.width * 4, seconds=1e-3 + 1e-5 * tokens)
            for tokens in TOKENS
        ),
        whole=Whole(tokens=32, seconds=0.02),
    )
    return msgspec.structs.replace(made, **changes)
