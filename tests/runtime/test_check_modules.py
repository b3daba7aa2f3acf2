"""`elasticd check` of models of several modules: right rules pass under every layout, and a wrong one is named
with its module."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from elasticd.runtime.checking.__main__ import compared
from elasticd.runtime.model.tp_rules import PartialGrad
from tests.runtime.image_model import RULES, model_of
from tests.runtime.test_modules import make_recipe, sections


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
