"""LoRA: a PEFT model after steps in three layouts, beside PEFT's own module trained in plain torch.

Both start from the same base and adapter, in double precision throughout (transformers' norms and rotary tables
are computed in single precision otherwise), with AdamW. The frozen base must be the same to the bit.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _results import Row, row
from elasticd_planner.spec.plan import Plan, StatePolicy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface import their_name
from elasticd.models.huggingface.proof import fill
from tests.models import layouts
from tests.models.families import Whole, double_throughout
from tests.models.texts import Text

LAYERS, VOCABULARY = 4, 64
STEPS, FEWEST_STEPS = 20, 3
#: The largest difference that is allowed, and the largest weights are about 1.
GOAL = 1e-10


def rows(smallest: bool) -> Iterator[Row]:
    """One row for each layout."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = FEWEST_STEPS if smallest else STEPS
    patch = pytest.MonkeyPatch()
    double_throughout(patch)
    patch.setattr(layouts, "optimizer", lambda named: torch.optim.AdamW(named, lr=1e-2))
    try:
        model = adapted()
        training = layouts.Training(
            model=elasticd.from_hf(model), loss=next_token_loss, dataset=Text(VOCABULARY), steps=steps
        )
        expected = layouts.alone(training, Whole(copy.deepcopy(model.get_base_model())))
        for name, plan in plans().items():
            yield _row(name, steps, training, plan, expected)
    finally:
        patch.undo()


def plans() -> dict[str, Plan]:
    """Layouts unlike each other in data, tensor and pipeline parallelism, and in ZeRO."""
    known = layouts.layouts_of(LAYERS)
    return {
        "3 replicas, ZeRO 2": known["replicas"].replace(state=StatePolicy(zero=2, replicas=1)),
        "TP 3 with shares 3:3:2 beside 2 stages": known["tp3 uneven beside a pipeline"],
        "3 stages, TP 1, 4 and 2": known["tp1 to tp4 and back"],
    }


def adapted() -> Any:
    """A small Qwen2 with a LoRA adapter on all linear layers, in double precision."""
    import peft
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).double()
    fill(model, 1.0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def _row(name: str, steps: int, training: layouts.Training, plan: Plan, expected: layouts.Run) -> Row:
    result = layouts.under(training, plan)
    names = {full: f"model.{their_name(training.model, full)}" for full in result[1]}
    adapters = {full: value for full, value in result[1].items() if "lora_" in full}
    frozen = result[1].keys() - adapters.keys()
    for full in frozen:
        if not torch.equal(result[1][full].flatten(), expected[1][names[full]].flatten()):
            raise AssertionError(f"the frozen {full} has changed")
    gap, _ = layouts.furthest((result[0], adapters), expected, {full: names[full] for full in adapters})
    return row(
        f"LoRA: adapters after {steps} steps, {name}, over PEFT and plain torch",
        float(f"{gap:.2g}"),
        "largest difference of a weight",
        goal=f"<= {GOAL:g}",
        met=gap <= GOAL,
    )
