"""Models of several modules: their orders without deadlock, the time to make one, and the time that one takes;
their plans beside the best of an enumeration, and beside published layouts.

make bench NAME=modules                              # the drawn plans take most of it
make bench NAME=modules ARGS='--only order played'   # parts; the results keep the others as they are
make bench NAME=modules ARGS='--only plans --problems 0 20'  # some problems; those enumerated before count, too
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from _frame import PLANNER, PRODUCT, TRAINING, Part, module_rows, parser, run
from _module_disjoint import disjoint_rows
from _module_exactness import border_rows, exact_rows
from _module_parity import cut_model_rows, cut_rows, parity_rows
from _module_plans import plan_rows, planning_rows
from _module_published import published_rows
from _module_switch import switch_rows
from _results import Row, row
from _step_before import instruction_rows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.module_order import module_order

from tests.planner import played_modules
from tests.planner.drawn_modules import ModuleStep, drawn_step, logs
from tests.planner.launch_order import deadlock, in_one_queue
from tests.planner.test_module_order import check, check_ahead

#: The last commit whose engine had one module alone.
BEFORE = "c691c547"
#: Drawn plans.
PLANS = 10_000
#: (stages, micro-batches, ahead) of 2,048 passes, and the most milliseconds that their order may take.
STEPS, MOST_MILLISECONDS = ((8, 64, 1), (8, 64, 4), (8, 64, 64)), 20.0
#: (stages, micro-batches) of a pipeline that is played.
SHAPES = ((4, 8), (8, 16), (8, 64))
#: Blocks of the language model whose first stage has the encoder.
LAYERS = 32


def deadlock_rows(plans: int = PLANS) -> Iterator[Row]:
    """TP groups of unlike widths, lanes that cross pipelines, interleaved stages, modules on the same devices,
    on some, or on others, slow stages, micro-batches without items; sums in the order."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        count = sum(pool.imap_unordered(free, range(plans), chunksize=20))
    title = "drawn plans of 2 or 3 modules whose order is complete and without deadlock in one queue"
    yield row(title, count, "", goal=f"{plans:,}", met=count == plans)


def free(seed: int) -> bool:
    """Whether the order of a drawn plan has every pass behind what it needs, and can be carried out."""
    step = drawn_step(seed)
    order = step.order()
    try:
        check(step, order)
        check_ahead(step, order)
    except AssertionError as error:
        print(f"plan {seed}: {error}", file=sys.stderr)
        return False
    found = deadlock(in_one_queue(logs(step, order)))
    if found is not None:
        print(f"plan {seed}: {found}", file=sys.stderr)
    return found is None


def order_rows(times: int = 15) -> Iterator[Row]:
    """Of the processor, the least of some tries: 1,024 passes of a pipeline, and as many of eight encoders."""
    slowest = 0.0
    for depth, micro_batches, ahead in STEPS:
        step = played_modules.colocated(depth, micro_batches, ahead=ahead, lead=1)
        tries = [_milliseconds(step) for _ in range(times)]
        slowest = max(slowest, min(tries))
    title = "order of 2,048 passes of two modules and their messages, slowest of 3 steps"
    met = slowest <= MOST_MILLISECONDS
    yield row(title, slowest, "ms", goal=f"<= {MOST_MILLISECONDS:g}", met=met)


def _milliseconds(step: ModuleStep) -> float:
    gc.collect()
    gc.disable()  # as timeit does
    try:
        start = time.process_time()
        module_order(step.plan, step.batches, passes)
        return (time.process_time() - start) * 1e3
    finally:
        gc.enable()


def played_rows(shapes: int = len(SHAPES)) -> Iterator[Row]:
    """A pipeline of equal stages with an encoder on each of its devices, all of which take as long as a stage;
    the best of three leads, and times as predicted."""
    for depth, micro_batches in SHAPES[:shapes]:
        here = f"{depth} stages, {micro_batches} micro-batches"
        every = played_modules.best_lead(played_modules.colocated(depth, micro_batches, ahead=micro_batches))
        three = played_modules.three_phases(every)
        yield _over(f"{here}: ahead all over three phases", three, every, 1.06)
        first = played_modules.best_lead(played_modules.colocated(depth, micro_batches, ahead=1))
        yield _over(f"{here}: ahead 1 over three phases", three, first, 1.0)
        kept = played_modules.most_kept(first)
        title = f"{here}: ahead 1, outputs of items that a device keeps; three phases keep {micro_batches}"
        yield row(title, kept, "", kind="simulated", goal=f"<= {depth + 1}", met=kept <= depth + 1)
        inside = played_modules.in_first_stage(every, LAYERS)
        yield _over(f"{here}: ahead all over the encoder in stage 0, rebalanced", inside, every, 1.0)
        queue = min(
            played_modules.microseconds(played_modules.with_lead(every, lead), one_queue=True)
            for lead in (0, 1, 2)
        )
        yield row(
            f"{here}: ahead all, in one queue over messages beside the passes",
            queue / played_modules.microseconds(every),
            "",
            kind="simulated",
            goal="<= 1.05",
            met=queue <= 1.05 * played_modules.microseconds(every),
        )
        work = played_modules.language_alone(every)
        ours = played_modules.microseconds(every)
        yield row(f"{here}: ahead all over the language model alone", ours / work, "", kind="simulated")


def _over(title: str, microseconds: float, step: ModuleStep, goal: float) -> Row:
    ratio = microseconds / played_modules.microseconds(step)
    return row(title, ratio, "", kind="simulated", goal=f">= {goal:.2f}", met=ratio >= goal)


def uneven_rows(draws: int = 40) -> Iterator[Row]:
    """Two pipelines of four stages; half of the samples without images, 1 to 8 in others."""
    for title, slow in (("no device is slow", ()), ("one device 3 x slow", (64,) * 5 + (192,) + (64,) * 2)):
        busiest, over = [], []
        for seed in range(draws):
            rng = random.Random(seed)
            images = [rng.choice([0, rng.randint(1, 8)]) for _ in range(64)]
            images[0] += not any(images)
            make = partial(played_modules.colocated, 4, 32, pipelines=2, encoder=0.5, images=images, slow=slow)
            step = played_modules.best_lead(make(ahead=32))
            loads = played_modules.encoder_loads(step)
            busiest.append(max(loads) * 8 / sum(loads))
            over.append(played_modules.three_phases(step) / played_modules.microseconds(step))
        title = f"half of the samples without images, {title}"
        middle = statistics.median(busiest)
        yield row(
            f"{title}: busiest encoder device over the mean, median of {draws} steps",
            middle,
            "",
            kind="simulated",
            goal="<= 1.05",
            met=middle <= 1.05,
            noise=(max(busiest) - min(busiest)) / middle,
        )
        middle = statistics.median(over)
        yield row(
            f"{title}: ahead all over three phases, median of {draws} steps",
            middle,
            "",
            kind="simulated",
            goal=">= 1.00",
            met=middle >= 1.0,
            noise=(max(over) - min(over)) / middle,
        )


def step_rows(layers: int = 4) -> Iterator[Row]:
    """A job of one module now, and at the last commit whose engine had one module alone."""
    yield from instruction_rows(BEFORE, layers, 4)


PARTS = {
    "deadlocks": Part(deadlock_rows, PLANNER, {"plans": 20}),
    "order": Part(order_rows, PLANNER, {"times": 1}),
    "played": Part(played_rows, PLANNER, {"shapes": 1}),
    "uneven": Part(uneven_rows, PLANNER, {"draws": 2}),
    "plans": Part(plan_rows, PLANNER, {"first": 2, "stop": 3, "path": None}),
    "published": Part(published_rows, PLANNER, {"rows": 1}),
    "disjoint": Part(disjoint_rows, PLANNER, {"cells": 1}),
    "planning": Part(planning_rows, PLANNER, {"sizes": 1}),
    "emulated": Part(module_rows("_module_emulated"), TRAINING, {"smallest": True}),
    "step": Part(step_rows, TRAINING, {"layers": 1}),
    "strict": Part(exact_rows, TRAINING, {"plans": 1}),
    "borders": Part(border_rows, TRAINING, {"plans": 2}),
    "switch": Part(switch_rows, PRODUCT, {"runs": 1, "switches": 1}),
    "cut": Part(cut_rows, TRAINING, {"placements": 1, "plans": 1}),
    "parity": Part(parity_rows, TRAINING, {"models": 1, "placements": 2}),
    "cut_models": Part(cut_model_rows, TRAINING, {"models": 1}),
}

if __name__ == "__main__":
    options = parser(__doc__, PARTS)
    problems = "of the part `plans` these problems are enumerated anew (default: all); 0 0: none"
    options.add_argument("--problems", nargs=2, type=int, metavar=("FIRST", "STOP"), help=problems)
    arguments = options.parse_args()
    if arguments.problems:
        first, stop = arguments.problems
        some = partial(plan_rows, first=first, stop=stop)
        PARTS["plans"] = Part(some, PLANNER, PARTS["plans"].smallest)
    sys.exit(run("modules", __doc__, PARTS, arguments))
