"""Hugging Face's models on packed rows: what they give for each sequence by itself, or refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import SequencePiece
from torch import Tensor

import elasticd
from elasticd import DataOptions, Packing
from elasticd.models import next_token_loss
from elasticd.models.huggingface.packed_attention import NAME, packed, packed_attention
from elasticd.models.huggingface.proof import fill, prove
from elasticd.models.huggingface.sections import Sections, sections_of
from elasticd.runtime.checking.verdict import findings
from elasticd.runtime.engine.compiled_blocks import compile_blocks
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from elasticd.runtime.reference import layouts
from elasticd.runtime.reference.trial import tried
from tests import sizes
from tests.models import families
from tests.models.test_huggingface import OTHERS, made
from tests.models.texts import Text

transformers = pytest.importorskip("transformers")

#: Models whose windows are shorter than the sequences, beside those of the other tests.
PACKABLE: dict[str, Callable[[], Any]] = {
    "Llama": lambda: made("Llama"),
    "Qwen3": lambda: made("Qwen3", True),
    "Llama, one kv-head": lambda: made("Llama", num_key_value_heads=1),
    "Mistral, windows": lambda: made("Mistral", sliding_window=3),
    "Qwen3, some windows": lambda: made(
        "Qwen3", use_sliding_window=True, sliding_window=3, max_window_layers=2
    ),
    "Gemma2, windows": lambda: made("Gemma2", True, sliding_window=3, attn_logit_softcapping=None),
    **{name: make for name, make in OTHERS.items() if name != "Gemma2"},
}


def row_of(*lengths: int) -> PackedRow:
    return PackedRow([SequencePiece.whole(i, n) for i, n in enumerate(lengths)], torch.device("cpu"))


def in_double(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = make().double()
    finally:
        torch.set_default_dtype(before)
    fill(model, 1.0)
    return model


def through(sections: Sections, ids: Tensor) -> Tensor:
    x: Any = {"inputs": ids}
    for _, section in sections:
        x = section(x)
    return x


#: Tokens of the sequences of a row. `make test` has the last three of the model with windows in some layers.
ROWS = {"7 + 1 + 5": (7, 1, 5), "9": (9,), "1": (1,), "1 + 1 + 2": (1, 1, 2)}
WINDOWS = "Qwen3, some windows"


@pytest.mark.parametrize(
    ("name", "row"),
    sizes.beside(
        [*((name, "7 + 1 + 5") for name in list(PACKABLE)[::2]), *((WINDOWS, row) for row in ROWS)],
        product(PACKABLE, ROWS),
    ),
)
def test_a_packed_row_gives_what_the_model_gives_for_its_sequences(name: str, row: str) -> None:
    lengths = ROWS[row]
    model = in_double(PACKABLE[name])
    ids = torch.randint(1, 41, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    sections, named = sections_of(model, prove(model).anatomy), dict(model.named_parameters())
    own = torch.cat([model(input_ids=each).logits for each in ids.split(lengths, dim=1)], dim=1)
    weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = torch.autograd.grad(own, list(named.values()), weights, allow_unused=True)
    with passing(row_of(*lengths)):
        logits = through(sections, ids)
        found = torch.autograd.grad(logits, list(named.values()), weights, allow_unused=True)
    # The softmax of Gemma 2's own attention is in single precision.
    near = {"Gemma2": 1e-5}.get(name.split(",")[0], 1e-10)
    assert apart(logits, own) < near
    for parameter, mine, right in zip(named, found, expected, strict=True):
        assert (mine is None) == (right is None), parameter
        if mine is not None:
            # A norm of Cohere's has its weight in single precision, and so its gradient's sum over tokens.
            single = name == "Cohere" and "norm" in parameter
            assert apart(mine, right) < (1e-6 if single else near), parameter


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest value, or of 1 where that is smaller."""
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_padded_samples_keep_the_models_own_implementation(kind: str) -> None:
    model = in_double(lambda: made("Llama"))
    model.config._attn_implementation = kind
    ids = torch.randint(1, 41, (2, 9), generator=torch.Generator().manual_seed(3))
    sections = sections_of(model, prove(model).anatomy)
    before = through(sections, ids)
    assert torch.equal(before, model(input_ids=ids).logits)
    with passing(row_of(5, 4)):
        through(sections, ids[:1])
        with pytest.raises(ValueError, match=r"positions got \(2, 9\)"):
            through(sections, ids)
    assert model.config._attn_implementation == kind
    assert torch.equal(through(sections, ids), before)


def test_an_implementation_is_put_back_where_a_forward_fails() -> None:
    """A configuration keeps the name where `packed` looks for it, and models ask for it there."""
    config = made("Llama").config
    assert config._attn_implementation == "sdpa"
    asked = []

    def fails() -> None:
        with packed([config]):
            asked.append(config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert asked == [NAME]
    assert config._attn_implementation == "sdpa"


def test_a_model_says_whether_its_sequences_can_be_packed() -> None:
    assert elasticd.from_hf(made("Llama")).unpackable == ""
    with torch.device("meta"):
        blank = elasticd.from_hf(made("Gemma2", True))
    assert blank.unpackable == (
        "samples of Gemma2ForCausalLM can be padded, not packed: blocks.0.layer.self_attn: Gemma2Attention "
        "attends with softcap, which elasticd.attention does not have"
    )


TAKES = "takes the sequences of a packed row for one"


#: What a model does that packed rows cannot have, and what is said of it.
OTHERWISE = [
    ("GraniteSWAForCausalLM", r"blocks.0.layer.self_attn: \w+ attends with s_aux, which elasticd"),
    ("GPTJForCausalLM", rf"blocks.0.layer.attn \(GPTJAttention\) {TAKES}"),
    ("BloomForCausalLM", "the forward of BloomForCausalLM takes no position_ids"),
    ("DogeForCausalLM", "DogeAttention attends with attention_mask"),
]
#: The same of further models.
ALIKE = [
    ("BambaForCausalLM", rf"blocks.0.layer.mamba \(BambaMixer\) {TAKES}"),
    ("Lfm3ForCausalLM", rf"blocks.0.layer.conv \(Lfm3ShortConv\) {TAKES}"),
    ("Qwen3_5ForCausalLM", rf"blocks.0.layer.linear_attn \(\w+\) {TAKES}"),
    ("RwkvForCausalLM", "takes no position_ids"),
]


@pytest.mark.parametrize(("kind", "said"), sizes.beside(OTHERWISE, [*OTHERWISE, *ALIKE]))
def test_what_attends_otherwise_is_named(kind: str, said: str) -> None:
    if kind not in families.classes():
        pytest.skip(f"this transformers has no {kind}")
    found = families.found(kind)
    model = families.made(found, families.small_config(found))
    unpackable = elasticd.from_hf(model).unpackable
    assert re.search(f"^samples of {kind} can be padded, not packed: .*{said}", unpackable)


def test_what_no_packed_attention_has_is_refused_by_the_names_that_layers_give_it() -> None:
    q = k = v = torch.randn(1, 2, 4, 8)
    layer = torch.nn.Identity()
    y, weights = packed_attention(layer, q, k, v, None, scaling=0.3, position_ids=q, output_attentions=False)
    assert weights is None
    assert torch.equal(y, elasticd.attention(q, k, v, scale=0.3).transpose(1, 2))
    y, _ = packed_attention(layer, q, k, v, None, sliding_window=2, is_causal=True)
    assert torch.equal(y, elasticd.attention(q, k, v, window=2).transpose(1, 2))
    with pytest.raises(ModelError, match=r"^Identity attends with position_bias and dropout = 0.1, which"):
        packed_attention(layer, q, k, v, None, dropout=0.1, position_bias=q, softcap=None)
    with pytest.raises(ModelError, match=r"^Identity attends with attention_mask, which"):
        packed_attention(layer, q, k, v, torch.ones(4, 4))


@pytest.mark.parametrize("name", ["Llama", "Qwen3, some windows"])
def test_a_step_on_packed_rows_is_one_processs_on_padded_samples_under_every_layout(name: str) -> None:
    padded = Recipe(
        model=elasticd.from_hf(in_double(PACKABLE[name])),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        dataset=Text(41),
        global_batch=1,
    )
    packing = replace(padded, data=DataOptions(length=lambda index: 5 + index % 9, packing=Packing()))
    spec = padded.model.spec
    one = tried(padded, layouts.alone(spec, 3))
    for layout in (layouts.layouts, layouts.others, layouts.sliced):
        for said, variation in layout(spec, 3).items():
            assert list(findings(padded.model, one, tried(packing, variation), outputs=False)) == [], said


@pytest.mark.full  # test_attention.py and test_packed.py compile, too
def test_compiled_blocks_take_each_row_as_it_is(traced: None) -> None:
    model = in_double(lambda: made("Qwen3", True))
    anatomy = prove(model).anatomy
    plain, compiled = sections_of(model, anatomy), sections_of(copy.deepcopy(model), anatomy)
    compile_blocks({f"blocks.{i}": block for i, block in enumerate(compiled.blocks)})
    for lengths in ((5, 4), (3, 6), (9,), (1, 1, 7), (7, 5)):
        ids = torch.randint(1, 41, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
        for row in (row_of(*lengths), None):
            with passing(row):
                torch.testing.assert_close(through(compiled, ids), through(plain, ids), rtol=0, atol=1e-12)
