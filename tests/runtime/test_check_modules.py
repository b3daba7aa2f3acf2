"""`elasticd check` of models of several modules: right rules pass under every layout, and a wrong one is named
with its module."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from elasticd.runtime.checking.__main__ import compared
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.model.tp_rules import PartialGrad
from tests.runtime.image_model import RULES, model_of
from tests.runtime.test_modules import make_recipe, sections
from tests.runtime.test_packed_modules import Measured, packed


def said(recipe: Any) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return compared(recipe, lines.append), lines


def test_every_layout_of_the_modules_is_compared_with_one_process() -> None:
    good, lines = said(make_recipe())
    assert good, lines
    named = [line for line in lines if line.startswith("ok ")]
    kinds = "apart", "same devices", "fan-in", "fan-out", "without items", "gloo", "vision TP 2, language TP"
    for words in kinds:
        assert any(words in line for line in named), words


def test_a_wrong_rule_is_named_with_its_module() -> None:
    vision, language = copy.deepcopy(sections())
    wrong = {**RULES, "blocks.*.attention_norm.weight": PartialGrad()}
    good, lines = said(replace(make_recipe(), model=model_of(vision, language, rules=wrong)))
    assert not good
    assert any(line.strip().startswith("vision: ") for line in lines), lines


def test_packed_rows_are_tried_where_the_job_packs() -> None:
    """Of chosen samples the lengths that the job knows go with them."""
    good, lines = said(packed(make_recipe(), whole=True))
    assert good, lines
    named = [line for line in lines if "packed" in line]
    assert named == [
        "ok    packed rows of whole sequences, modules apart",
        "ok    packed rows, sequences cut over 2 lanes",
    ]


def test_a_model_whose_rows_cannot_be_cut_says_so() -> None:
    """The dataset has the lengths here."""
    recipe = replace(make_recipe(), dataset=Measured(), data=DataOptions(packing=Packing(), global_tokens=64))
    vision, language = copy.deepcopy(sections())
    language[1] = Mixing(language[1])
    good, lines = said(replace(recipe, model=model_of(vision, language)))
    assert not good
    assert any("this job cannot pack its sequences: blocks.0" in line for line in lines), lines


class Mixing(nn.Module):
    """Adds the mean of all tokens, whatever sequence they are of."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out + x.mean(1, keepdim=True)
