"""Bytes by the shapes of parameters are those that sections have as they run: of ten published models, on the
meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile, derive
from elasticd_planner.profiling.samples import MeasuredBytes, ModelBytes
from elasticd_planner.profiling.section_bytes import with_bytes
from elasticd_planner.spec.model import ModelSpec
from torch import Tensor

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.reference import section_bytes as measuring
from tests import sizes
from tests.planner.real_models import REAL, spec_of

#: The class of each model, and what its configuration has besides sizes.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("Llama", {}),
    "Qwen2.5-7B": ("Qwen2", {}),
    "Qwen2.5-0.5B": ("Qwen2", {}),
    "Qwen3-0.6B": ("Qwen3", {}),
    "Gemma-3-1b": ("Gemma3", {"sliding_window": 512}),
    "Mistral-Nemo-12B": ("Mistral", {"sliding_window": None}),
    "OLMo-2-7B": ("Olmo2", {}),
    "SmolLM2-135M": ("Llama", {}),
    "Llama-3.1-70B": ("Llama", {}),
    "Llama-3.1-405B": ("Llama", {}),
}
#: Tokens of a sample: no more than the window of Gemma's local layers, which beyond it need a mask.
TOKENS = 512
#: Predicted over measured.
LEAST, MOST = 0.95, 1.10


class Text:
    """Samples of one length."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.zeros(TOKENS + 1, dtype=torch.int64)
        return {"inputs": ids[:-1], "targets": ids[1:]}


def of_class(name: str, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> elasticd.Model:
    """A model of transformers without values."""
    transformers = pytest.importorskip("transformers")
    kind = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    with torch.device("meta"):
        theirs = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, kind)(**config))
    return elasticd.from_hf(theirs.to(dtype))


def published(name: str, dtype: torch.dtype = torch.float32) -> elasticd.Model:
    """The model with two of its layers: its blocks are alike."""
    of, (transformers_name, besides) = REAL[name], CLASSES[name]
    return of_class(
        transformers_name,
        {
            "hidden_size": of.width,
            "num_hidden_layers": 2,
            "num_attention_heads": of.heads,
            "num_key_value_heads": of.kv_heads,
            "head_dim": of.head_width,
            "intermediate_size": of.hidden,
            "vocab_size": of.vocabulary,
            "tie_word_embeddings": of.tied,
            "max_position_embeddings": 8192,
            "pad_token_id": 0,
            **besides,
        },
        dtype,
    )


def measured(
    model: elasticd.Model, samples: int, precision: str | None = "bf16"
) -> tuple[ModelSpec, ModelBytes]:
    """What a job of this model measures, on the meta device."""
    made = Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Text(),
        global_batch=64,
        micro_batch=samples,
        parallelism=ParallelismOptions(precision=precision),
    )
    batch, _ = measuring._first_batch(made)
    return made.model.spec, measuring._measured(made, batch, Accelerator("meta"))


def ratios(profile: ModelProfile, found: ModelBytes, share: float = 1.0) -> dict[str, float]:
    """Predicted over measured, of kept and of working bytes of a block and the head."""
    of = {}
    for name in ("block", "head"):
        section: SectionProfile = getattr(profile, name)
        (each,) = [each for each in found.of(name) if each.share == share]
        units = round(share * profile.share_units)
        of[f"{name} kept"] = profile.activation_bytes(section, units) / each.kept
        of[f"{name} working"] = profile.working_bytes(section, units) / each.working
    return of


def off(of: dict[str, float]) -> dict[str, float]:
    return {name: ratio for name, ratio in of.items() if not LEAST <= ratio <= MOST}


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize("samples", sizes.beside([2, 16], [1, 2, 4, 16, 64]))
@pytest.mark.parametrize("name", list(REAL))
def test_a_published_model_has_the_bytes_that_its_shapes_say(name: str, samples: int) -> None:
    """In bfloat16 with gradients in single precision. With few tokens a matrix's gradient is the most."""
    spec, found = measured(published(name), samples)
    assert off(ratios(derive(spec, TOKENS, samples), found)) == {}
    (embed,) = [each for each in found.of("embed") if each.share == 1]
    assert derive(spec, TOKENS, samples).embed.whole_activation == pytest.approx(
        embed.kept / embed.tokens, rel=0.01
    )


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize("name", sizes.beside(["SmolLM2-135M", "OLMo-2-7B"], REAL))
def test_a_published_model_in_single_precision_has_the_bytes_that_its_shapes_say(name: str) -> None:
    spec, found = measured(published(name), 4, precision=None)
    assert off(ratios(derive(spec, TOKENS, 4), found)) == {}


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize(
    "name", sizes.beside(["Llama-3.1-8B"], ["Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-405B"])
)
@pytest.mark.parametrize("samples", [2, 16])
def test_half_a_block_has_half_of_what_is_cut(name: str, samples: int) -> None:
    spec, found = measured(published(name), samples)
    assert off(ratios(derive(spec, TOKENS, samples), found, 0.5)) == {}


@pytest.mark.parametrize("name", list(REAL))
def test_the_planner_s_real_models_have_the_bytes_of_their_classes(name: str) -> None:
    """`tests/planner/real_models` writes down the parameters; here are those of the classes."""
    ours, theirs = (derive(spec, TOKENS, 2) for spec in (spec_of(name), published(name, torch.bfloat16).spec))
    for field in ("cut_activation", "whole_activation", "cut_working", "whole_working", "matrix_working"):
        for section in ("embed", "block", "head"):
            assert getattr(getattr(ours, section), field) == getattr(getattr(theirs, section), field), field


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize("samples", [2, 16])
def test_gate_and_up_in_one_matrix_and_queries_keys_and_values_in_one_keep_as_much(samples: int) -> None:
    """Phi-3. As the larger matrix gets its gradient more is gone than counts: up to a third less is alive."""
    config = {"hidden_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 8192, "vocab_size": 32064, "pad_token_id": 0}
    spec, found = measured(of_class("Phi3", config), samples)
    of = ratios(derive(spec, TOKENS, samples), found)
    assert 1 <= of.pop("block working") <= 1.3
    assert off(of) == {}


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_masks_of_dropouts_are_kept_and_drawn(precision: str | None) -> None:
    """GPT-NeoX has LayerNorms, no gate, one matrix of queries, keys and values, and two dropouts."""
    config = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    config |= {"vocab_size": 1024, "hidden_dropout": 0.1, "attention_dropout": 0.0}
    spec, found = measured(of_class("GPTNeoX", config), 4, precision)
    profile = derive(spec, TOKENS, 4, dropouts=2)
    assert off(ratios(profile, found)) == {}
    without = derive(spec, TOKENS, 4)
    assert profile.block.whole_activation == without.block.whole_activation + 2 * 256
    assert profile.embed.whole_activation == without.embed.whole_activation + 256
    assert off(ratios(without, found)).keys() == {"block working"} | ({"block kept"} if precision else set())


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "OLMo-2-7B"])
def test_what_was_measured_with_few_tokens_holds_for_many(name: str) -> None:
    """The gradient of a matrix is no more for them."""
    spec, few = measured(published(name), 1)
    _, many = measured(published(name), 32)
    profile = with_bytes(derive(spec, TOKENS, 1), few)
    assert off(ratios(profile, few)) == {}
    assert off(ratios(profile.sized(32 * TOKENS), many)) == {}


def test_measured_bytes_that_shapes_do_not_explain_grow_with_the_tokens() -> None:
    base = derive(spec_of("SmolLM2-135M"), TOKENS, 1)
    shares = {1.0: 3, 0.5: 2}
    found = ModelBytes(
        sections=tuple(
            MeasuredBytes(section="block", share=share, tokens=TOKENS, kept=1, working=times * 10**7)
            for share, times in shares.items()
        )
    )
    block = with_bytes(base, found).block
    assert block.matrix_working == block.beside_working == 0
    for share, times in shares.items():
        assert block.working(share, 2 * TOKENS) == pytest.approx(2 * times * 10**7)
