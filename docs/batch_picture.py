"""A picture of one step's rows, as `packed_batch_plan` deals them: SVG for docs/batches.md.

A line for each lane, time to the right. Each box is what a lane has of a sequence, as wide as the time that it
takes; those that several lanes share have a colour and a letter. docs/draw.py writes it; it is the same text on
every machine.
"""

from __future__ import annotations

import string
from collections import Counter

from elasticd_planner.batching.batch_summary import summary_of
from elasticd_planner.batching.fold import cost
from elasticd_planner.batching.packed_batch import CutOptions, packed_batch_plan
from elasticd_planner.spec.batch import BatchLengths, BatchPlan
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from layout_pictures import COLOURS

LANES, NODE = 8, 4
#: 64ths of a normal lane's time: lane 5 takes 1.75 times as long.
SLOWDOWN = (64, 64, 64, 64, 64, 112, 64, 64)
CAPACITY, LINEAR = 8192, 12 * 4096
#: Of the sequences of a step; most of a drawn corpus of web pages are as short.
LENGTHS = (
    *(29_900, 13_400, 9_100, 6_600, 5_200, 4_900, 4_100, 3_700, 3_300, 3_100, 2_900, 2_600, 2_400, 2_200),
    *(1_900 - 23 * i for i in range(24)),
    *(1_200 - 27 * i for i in range(36)),
)
LEFT, LANE, GAP, WIDTH = 96, 26, 6, 800


def batch() -> tuple[Plan, BatchPlan]:
    """The step of the picture."""
    devices = tuple(f"n{lane // NODE}/{lane % NODE}" for lane in range(LANES))
    stage = Stage(start=0, stop=1, devices=devices, shares=(1,) * LANES, lanes=(1,) * LANES)
    count = len(LENGTHS)
    rows = tuple(count // LANES + (lane < count % LANES) for lane in range(LANES))
    pipeline = Pipeline(stages=(stage,), micro_batches=count, rows=rows)
    modules = (ModulePlan(module="model", pipelines=(pipeline,)),)
    plan = Plan(number=1, strategies=(Strategy(modules=modules),), micro_batch=1, global_batch=count)
    lengths = BatchLengths(tokens=LENGTHS, linear=LINEAR)
    return plan, packed_batch_plan(
        plan, 0, range(count), lengths, CAPACITY, cut=CutOptions(fixed=1000 * LINEAR), slowdown=SLOWDOWN
    )


def numbers() -> str:
    """The step in words."""
    found = summary_of(*batch(), LINEAR, SLOWDOWN)
    return (
        f"{found.sequences} sequences of {found.tokens:,} tokens on {LANES} lanes of {CAPACITY:,} tokens a "
        f"row, in {found.rows} rows; {found.cut} of them are cut, over {found.widest} lanes at most. The "
        f"busiest lane works {found.imbalance:.3f} times as long as if all work were divided evenly by speed.\n"
    )


def picture() -> str:
    """The SVG."""
    _, dealt = batch()
    (rows,) = dealt.pipelines
    pieces = [piece.sample for row in rows for lane in row.lanes for piece in lane]
    shared = [sample for sample, count in Counter(pieces).items() if count > 1]
    times = [
        [
            [(p.sample, cost(p.tokens, p.length, LINEAR) * SLOWDOWN[lane]) for p in row.lanes[lane]]
            for row in rows
            if row.lanes[lane]
        ]
        for lane in range(LANES)
    ]
    longest = max(sum(time for row in lane for _, time in row) for lane in times)
    scale = (WIDTH - LEFT - 8) / longest
    height = LANES * (LANE + GAP) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for lane, own in enumerate(times):
        y = 8 + lane * (LANE + GAP)
        slow = f", {SLOWDOWN[lane] / 64:g}x" if SLOWDOWN[lane] != 64 else ""
        name = f"n{lane // NODE}/{lane % NODE}{slow}"
        parts.append(
            f'<text x="8" y="{y + 17}" font-size="12" text-anchor="start" fill="#000000">{name}</text>'
        )
        done = 0
        for row in own:
            for number, (sample, time) in enumerate(row):
                x, width = LEFT + done * scale, time * scale
                done += time
                at = shared.index(sample) if sample in shared else -1
                fill = COLOURS[at % len(COLOURS)] if at >= 0 else ("#d9d9d9", "#c4c4c4")[number % 2]
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{fill}"/>')
                if at >= 0 and width > 12:
                    letter = string.ascii_uppercase[at % 26]
                    middle = x + width / 2
                    parts.append(
                        f'<text x="{middle:.1f}" y="{y + 17}" font-size="12" fill="#ffffff" '
                        f'text-anchor="middle">{letter}</text>'
                    )
            x = LEFT + done * scale
            parts.append(f'<rect x="{x - 1:.1f}" y="{y - 3}" width="2" height="{LANE + 6}" fill="#000000"/>')
    return "\n".join([*parts, "</svg>\n"])
