"""Plans of the small model of two modules, drawn at random: devices, depths, widths, ZeRO levels, orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from elasticd_planner.spec.plan import Pipeline, Plan

from tests.runtime.image_model import BATCH, TEXT, VISION, pipeline, plan_of, stage

DEVICES = tuple(f"{node}/{local}" for node in "ab" for local in range(3))
#: Shares of the members of a TP group; those of the language model may be as many as its kv-heads.
WIDTHS = ((1,), (1,), (1, 1), (3, 1), (1, 2))
TEXT_WIDTHS = (*WIDTHS, (2, 1, 1))


def drawn_placement(seed: int, *, lanes: int = 1) -> Plan:
    """A plan of both modules for at most `DEVICES`: they share all devices, some, or none.

    Args:
        seed: of the plan.
        lanes: of a pipeline of the language model at most.
    """
    rng = random.Random(f"placement {seed}")
    few = DEVICES[: rng.randint(lanes, len(DEVICES))]
    language = _pipelines(rng, few, TEXT.layers, TEXT_WIDTHS, most=2, lanes=lanes)
    taken = [device for each in language for part in each.stages for device in part.devices]
    rest = [device for device in DEVICES if device not in taken]
    vision = _pipelines(rng, rng.choice([taken, rest or taken, DEVICES]), VISION.layers, WIDTHS, most=4)
    counts = _parts(rng, BATCH, len(language))
    while any(count < len(each.rows) for count, each in zip(counts, language, strict=True)):
        counts = _parts(rng, BATCH, len(language))
    ahead = rng.randint(1, BATCH)
    return plan_of(
        vision,
        [
            pipeline(tuple(_parts(rng, count, len(each.rows) or 1)), *each.stages)
            for count, each in zip(counts, language, strict=True)
        ],
        ahead=ahead,
        lead=rng.randint(0, min(2, ahead)),
        zero=rng.randint(0, 2),
    )


def _pipelines(
    rng: random.Random,
    devices: Sequence[str],
    layers: int,
    widths: Sequence[tuple[int, ...]],
    most: int,
    lanes: int = 1,
) -> list[Pipeline]:
    """One to `most` pipelines on some of the devices, in any sequence, the first of them of so many lanes."""
    free, pipelines = rng.sample(list(devices), len(devices)), list[Pipeline]()
    for number in range(min(rng.randint(1, most), len(free))):
        if not free:
            break
        own = min(lanes, len(free)) if not number else 1
        stages, depth = [], rng.randint(1, min(3, layers, len(free) // own))
        for at, (start, stop, later) in enumerate(_blocks(rng, layers, depth)):
            groups: list[tuple[int, ...]] = []
            for lane in range(own):
                # Each later lane and stage needs a device, too.
                widest = len(free) - sum(map(len, groups)) - (own - lane - 1) - (depth - at - 1) * own
                groups.append(rng.choice([each for each in widths if len(each) <= widest]))
            shares = [share for group in groups for share in group]
            stages.append(
                stage(
                    start,
                    stop,
                    *((free.pop(), share) for share in shares),
                    later=later,
                    recompute=rng.random() < 0.2,
                    sequence_parallel=max(map(len, groups)) > 1 and rng.random() < 0.3,
                    lanes=tuple(map(len, groups)),
                )
            )
        pipelines.append(pipeline((1,) * own if own > 1 else rng.randint(1, 3), *stages))
    return pipelines


def _blocks(rng: random.Random, layers: int, depth: int) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """Blocks of each stage: the first of them, the end, and those of its later chunks, if it is interleaved."""
    chunks = 2 if depth > 1 and layers >= 2 * depth and rng.random() < 0.4 else 1
    cuts = [0, *sorted(rng.sample(range(1, layers), depth * chunks - 1)), layers]
    spans = list(itertools.pairwise(cuts))
    return [(*spans[at], tuple(spans[at + depth :: depth])) for at in range(depth)]


def _parts(rng: random.Random, total: int, count: int) -> list[int]:
    """Whole numbers of at least one whose sum is the total."""
    cuts = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return [stop - start for start, stop in itertools.pairwise(cuts)]
