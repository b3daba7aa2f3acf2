"""LoRA adapters of PEFT train under every layout as in plain torch; what would not is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import StatePolicy
from torch import Tensor

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface import their_name
from elasticd.models.huggingface.proof import fill
from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.tp_rules import Column, Row, Sharded
from elasticd.runtime.model.validation import ModelError
from tests import sizes
from tests.models.families import Whole, double_throughout
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LAYERS = 4
TP3 = "tp3 uneven beside a pipeline"
PLANS = layouts_of(LAYERS)
PLANS["zero 1 in tp3"] = PLANS[TP3].replace(state=StatePolicy(zero=1, replicas=2))
PLANS["zero 2 in replicas"] = PLANS["replicas"].replace(state=StatePolicy(zero=2, replicas=1))
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
SOME = ["q_proj", "v_proj", "o_proj", "down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base(kind: str = "Qwen2", **more: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | more))
    fill(model.double(), 1.0)
    return model


def gpt2() -> Any:
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 2, "eos_token_id": 1}
    sizes_ = {"vocab_size": 41, "n_positions": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes_ | none)).double()
    fill(model, 1.0)
    return model


def mixtral() -> Any:
    model = base("Mixtral", num_local_experts=4)
    model.set_experts_implementation("eager")
    return model


def adapted(model: Any, **more: Any) -> Any:
    """With an adapter that acts: PEFT's own begins with B = 0."""
    given = {"r": 3, "lora_alpha": 4, "target_modules": SOME, "task_type": "CAUSAL_LM"} | more
    made = peft.get_peft_model(model, peft.LoraConfig(**given))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2
    return made


#: Kinds of adapters, by what is unlike in them.
KINDS: dict[str, Any] = {
    "some modules": lambda: adapted(base()),
    "all linear, rank-stabilized": lambda: adapted(base(), target_modules="all-linear", use_rslora=True),
    "all biases": lambda: adapted(base(), bias="all"),
    "biases of adapted modules": lambda: adapted(base(), bias="lora_only"),
    "biases in the adapters": lambda: adapted(
        base("Llama", attention_bias=True), target_modules=["q_proj", "v_proj", "o_proj"], lora_bias=True
    ),
    "two layers of four": lambda: adapted(base(), layers_to_transform=[1, 3]),
    "ranks by pattern": lambda: adapted(
        base(), rank_pattern={"layers.2.self_attn.q_proj": 5, "down_proj": 2}, alpha_pattern={"v_proj": 1}
    ),
    "a trained head": lambda: adapted(base(), modules_to_save=["lm_head"]),
    "a trained head and embedding, tied before": lambda: adapted(
        base(tie_word_embeddings=True), modules_to_save=["lm_head", "embed_tokens"]
    ),
    "a trained head and embedding that stay tied": lambda: adapted(
        base(tie_word_embeddings=True), modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "trained norms and projections": lambda: adapted(
        base(), target_modules=["v_proj"], modules_to_save=["input_layernorm", "q_proj", "o_proj"]
    ),
    "trained attentions": lambda: adapted(base(), target_modules=["down_proj"], modules_to_save=["self_attn"]),
    "embedding": lambda: adapted(base(tie_word_embeddings=True), target_modules=["embed_tokens", "q_proj"]),
    "head": lambda: adapted(base(), target_modules=["lm_head", "q_proj"]),
    "dora": lambda: adapted(base(), use_dora=True),
    "fused projections": lambda: adapted(base("Phi3"), target_modules="all-linear"),
    "fused and transposed projections": lambda: adapted(
        gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True
    ),
    "beside experts": lambda: adapted(mixtral()),
}


#: Biases, a whole module that is trained and tied, adapters of fused projections, and of experts.
KINDS_HERE = (
    "biases of adapted modules",
    "a trained head and embedding that stay tied",
    "fused projections",
    "beside experts",
)


@pytest.mark.parametrize(
    ("kind", "name"),
    sizes.beside(
        [
            *(("some modules", name) for name in ("tp1 to tp4 and back", "zero 2 in replicas")),
            *((kind, TP3) for kind in KINDS_HERE),
        ],
        [(kind, name) for kind in KINDS for name in PLANS],
    ),
)
def test_adapters_train_like_one_process(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    double_throughout(monkeypatch)
    model = KINDS[kind]()
    described = elasticd.from_hf(model)
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    expected = alone(training, Whole(copy.deepcopy(model.get_base_model())))
    found = under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], rel=1e-11)
    names = {full: f"model.{their_name(described, full)}" for full in found[1]}
    assert furthest(found, expected, names) < (1e-9, "")
    trained = {f"model.{n}" for n, p in model.get_base_model().named_parameters() if p.requires_grad}
    moved = {
        names[n] for n, value in found[1].items() if not torch.equal(value.flatten(), start(model, names[n]))
    }
    assert moved <= trained, "the base stays as it is"
    assert moved, "the adapters are trained"


def start(model: Any, name: str) -> Tensor:
    """The flat first value of a parameter of `Whole`."""
    return model.get_base_model().get_parameter(name.removeprefix("model.")).detach().flatten()


@pytest.mark.parametrize("name", sizes.beside([TP3], PLANS))
def test_dropouts_of_adapters_are_keyed_by_step_sample_and_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a row-parallel module the dropout's input is cut in heads of four numbers."""
    double_throughout(monkeypatch)
    model = adapted(base(), lora_dropout=0.3)
    described = elasticd.from_hf(model)
    whole = Whole(copy.deepcopy(model.get_base_model()))
    for path, module in list(whole.named_modules()):
        if path.endswith(".lora_dropout"):
            layer, rest = path.removeprefix("model.model.layers.").split(".", 1)
            module["default"] = Dropout(0.3, f"blocks.{layer}.layer.{rest}.default")  # type: ignore[operator]
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], rel=1e-11)
    names = {full: f"model.{their_name(described, full)}" for full in found[1]}
    assert furthest(found, expected, names) < (1e-9, "")


def test_an_adapter_is_cut_as_its_base_is() -> None:
    rules = elasticd.from_hf(adapted(base(), lora_dropout=0.1)).rules
    q, down = "blocks.*.layer.self_attn.q_proj", "blocks.*.layer.mlp.down_proj"
    assert rules[f"{q}.base_layer.*"] == rules[f"{q}.lora_B.*"] == Column("heads")
    assert rules[f"{down}.base_layer.*"] == rules[f"{down}.lora_A.*"] == Row("columns_44")
    assert rules[f"{down}.lora_dropout.*"] == Sharded("columns_44", dim=-1)
    assert not [pattern for pattern in rules if "q_proj.lora_A" in pattern or "down_proj.lora_B" in pattern]


def test_where_some_layers_are_adapted_each_form_has_its_rule() -> None:
    rules = elasticd.from_hf(adapted(base(), layers_to_transform=[1, 3])).rules
    q = "blocks.*.layer.self_attn.q_proj"
    assert {pattern for pattern in rules if pattern.startswith(q)} == {
        *(f"{q}.weight", f"{q}.bias", f"{q}.base_layer.*", f"{q}.lora_B.*"),
    }


def test_adapters_in_single_precision_over_a_base_in_bfloat16_keep_their_types() -> None:
    """As get_peft_model makes them of such a base."""
    model = adapted(base().bfloat16())
    described = elasticd.from_hf(model)
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    expected = alone(training, Whole(copy.deepcopy(model.get_base_model())))
    found = under(training, PLANS[TP3])
    assert found[0] == pytest.approx(expected[0], rel=2e-2)
    types = {value.dtype for name, value in found[1].items() if "lora_" in name}
    assert types == {torch.float32}
    assert found[1]["blocks.0.layer.self_attn.q_proj.base_layer.weight"].dtype == torch.bfloat16


def test_adapters_without_storage_begin_as_peft_makes_them() -> None:
    with torch.device("meta"):
        model = peft.get_peft_model(
            transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
            peft.LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"]),
        )
    described = elasticd.from_hf(model)

    def value(name: str) -> Tensor:
        return described.first_value(name, Box.whole(described.parameter(name).shape), seed=3)

    a, b = (value(f"blocks.1.layer.self_attn.q_proj.lora_{part}.default.weight") for part in "AB")
    assert not b.any()
    assert float(a.abs().max()) <= 32**-0.5 < 1.2 * float(a.abs().max())  # uniform
    assert not value("embed.embed_tokens.lora_embedding_A.default").any()
    assert 0.7 < float(value("embed.embed_tokens.lora_embedding_B.default").std()) < 1.3


def test_the_base_is_read_from_a_folder_box_by_box_and_adapters_begin_as_peft_makes_them(
    tmp_path: Path,
) -> None:
    model = base(tie_word_embeddings=True)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    settings = {"target_modules": SOME, "modules_to_save": ["lm_head"], "r": 3}
    with torch.device("meta"):
        blank = peft.get_peft_model(type(model)(model.config).double(), peft.LoraConfig(**settings))
    described = elasticd.from_hf(blank, weights=tmp_path)
    adapter = peft.get_peft_model(model, peft.LoraConfig(**settings)).get_base_model()
    for section in described.sections:
        for parameter in described.spec.section(section):
            full, whole = f"{section}.{parameter.name}", Box.whole(parameter.shape)
            half = Box(start=tuple(size // 2 for size in parameter.shape), stop=parameter.shape)
            value = described.first_value(full, whole, seed=3)
            assert torch.equal(described.first_value(full, half, seed=3), value[half.slices(whole)])
            own = adapter.get_parameter(their_name(described, full))
            if "lora_A" not in full:
                assert torch.equal(value, own.detach()), full
            else:
                assert value.abs().max() <= own.shape[1] ** -0.5 < 1.3 * value.abs().max()
    assert described.frozen_digest


def _two() -> Any:
    model = adapted(base())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def _called(method: str) -> Any:
    model = adapted(base())
    getattr(model, method)()
    return model


def _frozen() -> Any:
    model = adapted(base())
    model.requires_grad_(False)
    return model


def _off() -> Any:
    model = adapted(base())
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (_two, r"^Qwen2ForCausalLM has the adapters default, other: leave one of them"),
        (_frozen, r"^the adapter of Qwen2ForCausalLM is frozen: load it with .* is_trainable=True"),
        (
            lambda: _called("merge_adapter"),
            r"q_proj of Qwen2ForCausalLM is merged .* unmerge_adapter\(\) first",
        ),
        (_off, r"'default' of model.layers.0.self_attn.q_proj of Qwen2ForCausalLM is not active"),
        (lambda: adapted(base()).merge_and_unload(), r"^all parameters of Qwen2ForCausalLM are frozen"),
        (
            lambda: peft.get_peft_model(base(), peft.LoHaConfig(target_modules=["q_proj"])),
            r"^Qwen2ForCausalLM is adapted by LOHA: of PEFT's methods elasticd trains LoRA",
        ),
        (
            lambda: peft.get_peft_model(
                base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
            ),
            r"^Qwen2ForCausalLM is adapted by PROMPT_TUNING",
        ),
        (
            lambda: adapted(base(), trainable_token_indices=[1, 2]),
            r"^trainable_token_indices of the LoraConfig of Qwen2ForCausalLM .* leave it out",
        ),
        (lambda: adapted(base(), layer_replication=[[0, 2], [1, 4]]), r"^layer_replication of the LoraConfig"),
        (
            lambda: adapted(mixtral(), target_parameters=["mlp.experts.gate_up_proj"]),
            r"^target_parameters of the LoraConfig of MixtralForCausalLM adapts parameters",
        ),
    ],
)
def test_what_is_not_trained_exactly_is_refused_by_name(model: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        elasticd.from_hf(model())


def test_a_model_that_transformers_gave_an_adapter_is_taken_too() -> None:
    model = base()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trained = [p.name for p in elasticd.from_hf(model).spec.section("blocks.0") if p.kind == "trained"]
    assert trained == [f"layer.self_attn.q_proj.lora_{part}.default.weight" for part in "AB"]
