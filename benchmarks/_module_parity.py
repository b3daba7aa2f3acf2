"""Rows: vision-language models of transformers train under all layouts of modules as in one process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.models.test_vision_language_jobs import Case, cut, placed
from tests.models.vision_language import MODELS
from tests.runtime.drawn_placements import drawn_placement
from tests.runtime.test_modules import PLACEMENTS, apart
from tests.runtime.test_packed_modules import PLACEMENTS as PACKED
from tests.runtime.test_packed_modules import trained_packed

#: The largest difference of a loss or a weight in double precision; and in bfloat16, in units of that of two
#: runs of one process.
APART, TIMES = 1e-12, 4.0
#: Models with encoders of every kind.
NAMES = MODELS[:5]
#: Those of them whose samples are packed: tokens of Gemma 3's images attend to later ones.
CUT = tuple(name for name in NAMES if name != "Gemma3")
#: Of AdamW in bfloat16: gradients that are zero but for rounding are not made large.
EPS = 1e-3


def cut_rows(placements: int | None = None, plans: int = 12) -> Iterator[Row]:
    """The same of the model by hand, on packed rows: sequences are cut over drawn lanes in drawn shares, under
    placements by hand and drawn ones."""
    torch.set_num_threads(1)
    worst = 0.0
    named = list(islice(PACKED.items(), placements))
    named += [(f"drawn plan {seed}", drawn_placement(seed, lanes=1 + seed % 3)) for seed in range(plans)]
    for name, plan in named:
        worst = max(worst, found := apart(trained_packed(plan)))
        print(f"cut sequences, {name}: {found:.1e}", file=sys.stderr, flush=True)
    title = f"a model by hand, cut sequences x {len(named)} placements"
    yield row(
        f"{title}: furthest loss or weight from one process's, 3 steps of AdamW, in double",
        worst,
        "",
        goal=f"<= {APART:g}",
        met=worst <= APART,
    )


def parity_rows(models: int = len(NAMES), placements: int | None = None) -> Iterator[Row]:
    """Three steps of AdamW on samples of 0 to 3 images, of which one step has no image; all placements of the
    model by hand (tests/runtime/test_modules.py), for each model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    doubles: dict[str, float] = {}
    lowered: dict[str, float] = {}
    for name in NAMES[:models]:
        case = Case(name)
        for placement in islice(PLACEMENTS, placements):
            doubles[f"{name}, {placement}"] = case.apart(placed(placement, case.layers))
            print(f"{name}, {placement}: {doubles[f'{name}, {placement}']:.1e}", file=sys.stderr, flush=True)
        runs = {p: case.in_bf16(placed(p, case.layers), EPS) for p in islice(PLACEMENTS, placements)}
        one = runs["one device"]
        noise = furthest(one, case.in_bf16(placed("one device", case.layers), EPS, within=Halves))
        lowered |= {f"{name}, {p}": furthest(one, run) / noise for p, run in runs.items()}
        worst = max(lowered[f"{name}, {p}"] for p in runs)
        print(f"{name}: bf16 {worst:.2f} of {noise:.1e}", file=sys.stderr, flush=True)
    here = f"{models} models of transformers x {len(doubles) // models} placements"
    worst = max(doubles.values())
    yield row(
        f"{here}: furthest loss or weight from one process's, 3 steps of AdamW, in double",
        worst,
        "",
        goal=f"<= {APART:g}",
        met=worst <= APART,
    )
    worst = max(lowered.values())
    yield row(
        f"{here}: the same in bf16 with masters, over two runs of one process that add in another order",
        worst,
        "",
        goal=f"<= {TIMES:g}",
        met=worst <= TIMES,
    )


def cut_model_rows(models: int = len(CUT)) -> Iterator[Row]:
    """Three steps of AdamW on packed samples of 0 to 3 images, of which long ones are cut over two lanes, a TP
    group of unequal shares and a single device, of two stages; the encoder beside them and apart."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    doubles: dict[str, float] = {}
    for name in CUT[:models]:
        case = Case(name)
        doubles[name] = case.apart(cut(case.layers))
        print(f"{name}, cut sequences: {doubles[name]:.1e}", file=sys.stderr, flush=True)
    worst = max(doubles.values())
    yield row(
        f"{len(doubles)} models of transformers, cut sequences: furthest loss or weight from one process's, in "
        "double",
        worst,
        "",
        goal=f"<= {APART:g}",
        met=worst <= APART,
    )


class Halves(TorchFunctionMode):
    """On this thread a projection adds the products of its first inputs to those of its last, rounded, as a TP
    group of two does."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is not torch.nn.functional.linear or kwargs:
            return function(*args, **(kwargs or {}))
        x, weight, *bias = args
        half = x.shape[-1] // 2
        total = function(x[..., :half], weight[:, :half]) + function(x[..., half:], weight[:, half:])
        return total if not bias or bias[0] is None else total + bias[0]


def furthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of a weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
