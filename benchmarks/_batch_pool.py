"""Hydraulis' pool of 64 GPUs for 32B: one layout with cut sequences against its best free choice of schemes.

The constants are those that Hydraulis' artifact ships (arXiv 2412.07894) for LLaMA 32B: of each scheme the time
of a token of a short sequence, and the longest sequence that it holds. Attention is added by the model's
dimensions, with the same efficiency under all schemes, because the artifact's terms for it are not at hand.
Hydraulis' best case is fluid: each sequence on the cheapest scheme that holds it, all GPUs busy, no fill and no
switch. Against it stands one layout, TP 2 with 4 stages, as 8 lanes: dealt as a job deals it, the exchange of
keys that attention does not hide counted, first without its fill as the other side, then with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

import numpy as np
from _results import Row, row
from elasticd_planner.batching.row_balance import pipeline_time

from elasticd.simulator.devices.packed_rows import dealt, normal, row_times
from elasticd.simulator.scenarios.corpus import Draw, Lengths, long_tail, wikipedia


class Scheme(NamedTuple):
    """What a scheme takes, and the longest sequence that it holds."""

    name: str
    milliseconds: float  # GPU-milliseconds of a token of a short sequence
    longest: int  # [tokens]


SCHEMES = (
    Scheme("TP 2, 4 stages", 0.85, 6_400),
    Scheme("TP 4", 0.95, 7_900),
    Scheme("TP 8", 1.13, 21_900),
    Scheme("TP 16", 1.64, 43_600),
)
#: A token's matrix products in units of its attention to one other: 12 times LLaMA 32B's width.
LINEAR = 12 * 6656
LONGEST, TOKENS, STEPS, SEED = 32_768, 200_000, 40, 23_700
#: Of Hydraulis over existing systems, of which all that hold 32 K tokens take TP 16 for every sequence.
PUBLISHED = (1.32, 2.66)
GOALS = {"wikipedia": 1.00, "long tail": 0.90}


def pool_rows(steps: int = STEPS) -> Iterator[Row]:
    """Hydraulis' best case is 1."""
    for name, draw in (("wikipedia", wikipedia), ("long tail", long_tail)):
        wide, fluid, filled, cut = np.mean([_step(_lengths(draw, step)) for step in range(steps)], 0).tolist()
        here = f"Hydraulis' 32B pool, {name}, its best free choice = 1"
        most = GOALS[name]
        yield row(
            f"{here}: TP 16 for all, published {PUBLISHED[0]} to {PUBLISHED[1]} over existing systems",
            wide,
            "x",
            kind="simulated",
            goal=f"{PUBLISHED[0]} to {PUBLISHED[1]}",
            met=PUBLISHED[0] <= wide <= PUBLISHED[1],
        )
        yield row(
            f"{here}: TP 2 x 4 stages as 8 lanes, {cut:.0%} of the sequences cut, exchange counted",
            fluid,
            "x",
            kind="simulated",
            goal=f"<= {most:.2f}",
            met=fluid <= most,
        )
        yield row(
            f"{here}: the same with its fill and uneven rows, which the best choice lacks",
            filled,
            "x",
            kind="simulated",
        )


def _lengths(draw: Draw, step: int) -> Lengths:
    """The sequences of a step of so many tokens."""
    drawn = np.minimum(draw(np.random.default_rng(SEED + step), 4000), LONGEST)
    return drawn[: int(np.searchsorted(np.cumsum(drawn), TOKENS))]


def _step(lengths: Lengths) -> tuple[float, float, float, float]:
    """Over Hydraulis' best choice: TP 16 for all, lanes without and with their fill; and the part that is
    cut."""
    work = lengths * (1 + lengths / LINEAR)
    of = [next(s.milliseconds for s in SCHEMES if s.longest >= length) for length in lengths.tolist()]
    best = float((work * of).sum())
    gang = normal(8, capacity=SCHEMES[0].longest, node=4, linear=LINEAR, fixed=0, stages=4)
    rows = dealt(lengths, gang)
    times = [row_times(each, gang)[0] for each in rows]
    exchanged = sum(map(np.sum, times)) / float((work * LINEAR).sum())
    one = SCHEMES[0].milliseconds / best
    fluid = float(work.sum()) * exchanged * one
    # All GPUs together: each of the 8 lanes' four stages takes its part of the longest lane's row.
    played = pipeline_time([round(float(each.max())) for each in times], gang.stages) * gang.stages
    cut = fmean(length > gang.capacity for length in lengths.tolist())
    return SCHEMES[3].milliseconds * float(work.sum()) / best, fluid, played * gang.lanes / LINEAR * one, cut
