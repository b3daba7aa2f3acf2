"""The parity matrix: layouts by precision by optimizer, each against plain torch in one process.

Each case takes one of three models in turn, so that all layouts, precisions and optimizers meet, and each
model meets each of these. How far the updates of all steps may be apart, over their size, is
`NEAR`; docs/training.md states it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from itertools import product

import pytest
import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import nn

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.engine.mixed_precision import LossScale, Precision
from elasticd.runtime.model.validation import replace_dropouts
from examples import train_gpt2, train_vit
from tests import sizes
from tests.models.layouts import SEED, Training, layouts_of
from tests.models.precise import Course, Optimizer, Trained, alone, apart, under
from tests.models.test_recompute import again_in
from tests.models.texts import Text

LAYERS = 4
PLAIN = layouts_of(LAYERS)
LAYOUTS: dict[str, Plan] = {
    **PLAIN,
    "zero 1, twice, recomputing": again_in(PLAIN["tp3 uneven beside a pipeline"]).replace(
        state=StatePolicy(zero=1, replicas=2)
    ),
    "zero 2": PLAIN["tp3 uneven beside a pipeline"].replace(state=StatePolicy(zero=2, replicas=1)),
    "zero 2 on 7 ranks, carried": PLAIN["tp1 to tp4 and back"].replace(
        state=StatePolicy(zero=2, replicas=2), carriers=("c/0",)
    ),
}

PRECISIONS = {
    "fp32": None,
    "fp32 under fp64": Precision(compute=torch.float32, master=torch.float64),
    "bf16": Precision(compute=torch.bfloat16),
    "fp16": Precision(compute=torch.float16, scale=LossScale(first=16.0)),
}

#: A layout adds in another order, and rounds to 24, 24, 8 and 11 bits.
NEAR = {"fp32": 1e-5, "fp32 under fp64": 1e-5, "bf16": 0.05, "fp16": 0.005}


#: Where a gradient is about zero, an adaptive optimizer makes a whole update of its rounding; not so with this.
EPS = 1e-2


def two_groups(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    matrices: list[tuple[str, nn.Parameter]] = []
    vectors: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:  # by name: a fused bias has a dimension for its parts
        (vectors if "norm" in name or name.endswith("bias") else matrices).append((name, parameter))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=EPS)


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
    "adamw": two_groups,
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-3, momentum=0.5, eps=EPS),
}


def gpt() -> tuple[Training, nn.Module]:
    made = train_gpt2.GPT(vocabulary=41, width=32, layers=LAYERS, heads=8, longest=16, dropout=0.2)
    whole = copy.deepcopy(made)
    for section, module in (("embed", whole.embed), *((f"blocks.{i}", b) for i, b in enumerate(whole.blocks))):
        replace_dropouts(section, module)
    return Training(model=train_gpt2.describe(made), loss=next_token_loss, dataset=Text(41)), whole


def decoder() -> tuple[Training, nn.Module]:
    """TP 4 is wider than its kv-heads."""
    config = DecoderConfig(vocabulary=41, width=32, layers=LAYERS, heads=8, kv_heads=2, hidden=44)
    with torch.device("meta"):
        training = Training(model=Decoder(config).describe(), loss=next_token_loss, dataset=Text(41))
    whole = Decoder(config)
    with torch.no_grad():
        for full, parameter in whole.named_parameters():
            parameter.copy_(training.model.first_value(full, Box.whole(parameter.shape), SEED))
    return training, whole


def vit() -> tuple[Training, nn.Module]:
    made = train_vit.ViT(width=24, layers=LAYERS, heads=6)
    training = Training(
        model=train_vit.describe(made),
        loss=train_vit.loss,
        dataset=train_vit.Digits(dtype=torch.float32),
        collate=train_vit.stack,
    )
    return training, copy.deepcopy(made)


MODELS = {"gpt": gpt, "decoder": decoder, "vit": vit}


@cache
def course(model: str, precision: str, optimizer: str) -> tuple[Course, Trained]:
    if model == "vit":
        pytest.importorskip("sklearn")
    torch.manual_seed(0)
    training, whole = MODELS[model]()
    made = Course(
        training=training, whole=whole, precision=PRECISIONS[precision], optimizer=OPTIMIZERS[optimizer]
    )
    return made, alone(made)


CASES = [
    (tuple(MODELS)[(i + j + k) % len(MODELS)], layout, precision, optimizer)
    for (i, layout), (j, precision), (k, optimizer) in product(
        *map(enumerate, (LAYOUTS, PRECISIONS, OPTIMIZERS))
    )
]


#: Each pair of a model, a layout, a precision and an optimizer that is among the cases is among these.
EACH_PAIR = [
    case
    for case, (i, j, k) in zip(
        CASES, product(range(len(LAYOUTS)), range(len(PRECISIONS)), range(len(OPTIMIZERS))), strict=True
    )
    if k == (i + j + 2 * (i // 3) + j // 2) % len(OPTIMIZERS)
]


#: Each model, layout, precision and optimizer is in one of these at least.
SOME = EACH_PAIR[::3]
assert [len(set(each)) for each in zip(*SOME, strict=True)] == [
    3,
    len(LAYOUTS),
    len(PRECISIONS),
    len(OPTIMIZERS),
]


@pytest.mark.parametrize(("model", "layout", "precision", "optimizer"), sizes.beside(SOME, CASES))
def test_trains_like_one_process(model: str, layout: str, precision: str, optimizer: str) -> None:
    made, expected = course(model, precision, optimizer)
    found = under(made, LAYOUTS[layout])
    assert found.applied == expected.applied == [True] * made.training.steps
    assert found.losses == pytest.approx(expected.losses, rel=NEAR[precision])
    assert apart(made, found, expected) < NEAR[precision]
