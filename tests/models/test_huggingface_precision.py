"""Hugging Face's models in half precision, as they are, under layouts that cut and recompute."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import elasticd
from elasticd.models import next_token_loss
from tests import sizes
from tests.models.families import Whole
from tests.models.layouts import Training
from tests.models.precise import Course, alone, apart, under
from tests.models.test_huggingface import made, theirs
from tests.models.test_mixed_precision_matrix import LAYOUTS, NEAR, OPTIMIZERS, PRECISIONS
from tests.models.texts import Text


@pytest.mark.parametrize(
    ("kind", "tied", "precision"),
    sizes.beside(
        [("Qwen3", True, "fp16")],
        [(*kind, half) for kind in (("Llama", False), ("Qwen3", True)) for half in ("bf16", "fp16")],
    ),
)
def test_trains_like_one_process(kind: str, tied: bool, precision: str) -> None:
    torch.manual_seed(0)
    model = made(kind, tied)
    course = Course(
        training=Training(model=elasticd.from_hf(model), loss=next_token_loss, dataset=Text(41)),
        whole=Whole(copy.deepcopy(model)),
        precision=PRECISIONS[precision],
        optimizer=OPTIMIZERS["sgd"],
    )
    expected = alone(course)
    for name in ("tp1 to tp4 and back", "zero 1, twice, recomputing"):
        found = under(course, LAYOUTS[name])
        assert found.applied == expected.applied == [True, True]
        assert found.losses == pytest.approx(expected.losses, rel=NEAR[precision])
        named = replace(found, weights={theirs(full): weight for full, weight in found.weights.items()})
        assert apart(course, named, expected) < NEAR[precision]
