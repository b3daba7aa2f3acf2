"""Hugging Face's models train with sequences that are cut over lanes as one device does with whole ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface.proof import fill
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.prefetch import SamplePrefetcher
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.parallel import context_parallel
from tests import sizes
from tests.models.layouts import Training, furthest, under
from tests.models.test_huggingface import LAYERS, OTHERS, made
from tests.models.texts import Text
from tests.runtime.test_cut_sequences import Cutting
from tests.runtime.test_engine_parity import plan_of, stage
from tests.runtime.test_packed import length

pytest.importorskip("transformers")

ALONE = plan_of((8, [stage(0, LAYERS, ("a/0", 1))]))
#: Lanes of one device, of three heads beside one, and of equal halves; in two stages.
PLAN = plan_of(
    (
        (4, 2, 2),
        [
            stage(0, 2, ("a/0", 1), ("b/0", 3), ("b/1", 1), ("c/0", 1), ("c/1", 1), lanes=(1, 2, 2)),
            stage(2, LAYERS, ("a/1", 5), ("a/2", 3), ("b/2", 1), ("c/2", 1), lanes=(2, 1, 1)),
        ],
    ),
)
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: made("Llama"),
    "Qwen3": lambda: made("Qwen3", True),
    "Llama, one kv-head": lambda: made("Llama", num_key_value_heads=1),
    "Mistral, windows": lambda: made("Mistral", sliding_window=4),
    "Qwen3, some windows": lambda: made(
        "Qwen3", use_sliding_window=True, sliding_window=3, max_window_layers=2
    ),
    "Phi3": OTHERS["Phi3"],
    "Granite": OTHERS["Granite"],
    "GPT2": OTHERS["GPT2"],
    "OPT": OTHERS["OPT"],
}


class Halves(Cutting):
    """Cuts sequences in equal parts."""

    shares = (1,)


@dataclass(frozen=True, kw_only=True)
class Cut(Training):
    """The same training of drawn cuts."""

    cutting: type[Cutting] = Cutting

    def recipe(self) -> Recipe:
        recipe = replace(super().recipe(), data=DataOptions(length=length, packing=Packing()))
        source = self.cutting(recipe.sampler, SamplePrefetcher(recipe.dataset, 0), length, 1)
        return replace(recipe, source=source)


@pytest.mark.parametrize("name", sizes.beside(["Llama, one kv-head", "Qwen3, some windows", "GPT2"], MODELS))
def test_cut_sequences_train_as_whole_ones(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    fill(model, 1.0)
    given: dict[str, Any] = {"model": elasticd.from_hf(model), "loss": next_token_loss, "dataset": Text(41)}
    expected, found = under(Training(**given), ALONE), under(Cut(**given), PLAN)
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    # Norms and rotary tables are computed in float32, whatever the model's type.
    assert furthest(found, expected, {full: full for full in found[1]}) < (1e-6, "")


#: Two lanes that divide heads.
TWO = plan_of(((4, 4), [stage(0, LAYERS, ("a/0", 1), ("a/1", 1), lanes=(1, 1))]))


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_lanes_that_divide_heads_train_as_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    class Counted(context_parallel.HeadsForward):
        def begin(self, *row: torch.Tensor) -> None:
            passes.append(1)
            super().begin(*row)

    monkeypatch.setattr(context_parallel, "HeadsForward", Counted)
    torch.manual_seed(0)
    model = made(name, num_key_value_heads=8).double()
    fill(model, 1.0)
    given: dict[str, Any] = {"model": elasticd.from_hf(model), "loss": next_token_loss, "dataset": Text(41)}
    expected, found = under(Training(**given), ALONE), under(Cut(**given, cutting=Halves), TWO)
    assert len(passes) >= LAYERS
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert furthest(found, expected, {full: full for full in found[1]}) < (1e-6, "")
