"""Hugging Face's models, cut by their own plans, train under every layout as they do in plain torch."""

from __future__ import annotations

import copy
import warnings
from typing import Any, ClassVar

import pytest
import torch
from elasticd_planner.spec.box import Box
from torch import Tensor

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface import their_name, tiny_config
from elasticd.models.huggingface.proof import fill, prove
from elasticd.models.huggingface.sections import sections_of
from elasticd.runtime.checking.__main__ import compared
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import ModelError
from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.tp_rules import Column, PartialGrad, Row
from tests import sizes
from tests.models.families import Whole
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

transformers = pytest.importorskip("transformers")
BaseModelOutputWithPast = pytest.importorskip("transformers.modeling_outputs").BaseModelOutputWithPast

LAYERS = 4
PLANS = layouts_of(LAYERS)
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def made(name: str, tied: bool = False, **more: Any) -> Any:
    given = SIZES | {"tie_word_embeddings": tied, "head_dim": 8} | more
    config = getattr(transformers, f"{name}Config")(**given)
    return getattr(transformers, f"{name}ForCausalLM")(config)


#: Small models beside Llama and Qwen3, whose plans have words of their own, or that have no plan.
OTHERS: dict[str, Any] = {
    "Phi3": lambda: made("Phi3", pad_token_id=0),
    "Gemma2": lambda: made("Gemma2", True, query_pre_attn_scalar=8, sliding_window=4, pad_token_id=0),
    "Granite": lambda: made(
        "Granite",
        attention_multiplier=0.4,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_scaling=2.0,
        pad_token_id=0,
    ),
    "Cohere": lambda: made("Cohere", True, logit_scale=0.25, num_key_value_heads=8, use_qk_norm=True),
    "GPT2": lambda: gpt2(n_head=8),
    "GPTNeoX": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "OPT": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SIZES, ffn_dim=44, word_embed_proj_dim=24, dropout=0.0)
    ),
}


def theirs(name: str) -> str:
    """The name in `Whole` of a parameter."""
    section, _, rest = name.partition(".")
    if section == "blocks":
        return "model.model.layers." + rest.replace(".layer.", ".", 1)
    return "model.lm_head.weight" if rest.startswith("lm_head") else f"model.model.{rest}"


@pytest.mark.parametrize(
    ("kind", "tied", "name"),
    sizes.beside(
        [*(("Llama", False, name) for name in PLANS), ("Qwen3", True, "tp3 uneven beside a pipeline")],
        [(*kind, name) for kind in (("Llama", False), ("Qwen3", True)) for name in PLANS],
    ),
)
def test_trains_like_one_process(kind: str, tied: bool, name: str) -> None:
    torch.manual_seed(0)
    model = made(kind, tied).double()
    whole = Whole(copy.deepcopy(model))
    training = Training(model=elasticd.from_hf(model), loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    # Its norms and rotary tables are computed in float32, whatever the model's type.
    assert furthest(found, expected, {full: theirs(full) for full in found[1]}) < (1e-6, "")


@pytest.mark.full  # `make test` has a layout with two TP groups of each in test_families
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_train_like_one_process_under_every_layout(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = OTHERS[kind]().double()
    fill(model, 1.0)
    described = elasticd.from_hf(model)
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, Whole(copy.deepcopy(model))), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    names = {full: f"model.{their_name(described, full)}" for full in found[1]}
    assert furthest(found, expected, names) < (1e-6, "")


def test_the_sections_of_a_model_are_its_own_where_the_small_copy_has_other_sizes() -> None:
    """OPT has projections between the embedding and the layers where their widths differ."""
    given = {"vocab_size": 500, "hidden_size": 160, "ffn_dim": 200, "num_attention_heads": 5, "dropout": 0.0}
    config = transformers.OPTConfig(**given, word_embed_proj_dim=96, num_hidden_layers=3)
    model = transformers.OPTForCausalLM(config).double()
    ids = torch.arange(5, 25).view(2, 10)
    x: Any = {"inputs": ids}
    for _, section in sections_of(model, prove(model).anatomy):
        x = section(x)
    assert torch.equal(x, model(input_ids=ids).logits)


def test_the_rules_are_those_of_the_models_own_plan() -> None:
    rules = elasticd.from_hf(made("Qwen3")).rules
    assert rules["blocks.*.layer.self_attn.q_proj.*"] == Column("heads")
    assert rules["blocks.*.layer.self_attn.k_proj.*"] == Column("kv_heads")
    assert rules["blocks.*.layer.self_attn.k_norm.*"] == PartialGrad()
    assert rules["blocks.*.layer.self_attn.o_proj.*"] == Row("heads")
    assert rules["head.lm_head.*"] == Column("vocabulary", gather=True)


def test_a_model_without_storage_starts_by_its_own_init() -> None:
    with torch.device("meta"):
        model = elasticd.from_hf(made("Llama", initializer_range=0.5))
    name = "blocks.1.layer.self_attn.q_proj.weight"
    whole = model.first_value(name, Box.whole((64, 32)), seed=3)
    assert 0.4 < float(whole.std()) < 0.6
    assert torch.equal(whole[4:9], model.first_value(name, Box(start=(4, 0), stop=(9, 32)), seed=3))
    assert model.first_value("head.norm.weight", Box.whole((32,)), seed=3).tolist() == [1.0] * 32


def test_an_embedding_scale_that_no_checkpoint_has_is_there_without_storage() -> None:
    with torch.device("meta"):
        model = elasticd.from_hf(made("Gemma2", tied=True))
    (scale,) = (b for n, b in model.sections["embed"].named_buffers() if n.endswith("embed_scale"))
    assert float(scale) == pytest.approx(32**0.5)


def test_gpt2_scales_what_goes_to_the_residual_without_storage_too() -> None:
    with torch.device("meta"):
        model = elasticd.from_hf(gpt2(initializer_range=0.5))
    for name, spread in {"attn.c_proj": 0.5 / (2 * LAYERS) ** 0.5, "attn.c_attn": 0.5}.items():
        (shape,) = (p.shape for p in model.spec.section("blocks.1") if p.name == f"layer.{name}.weight")
        value = model.first_value(f"blocks.1.layer.{name}.weight", Box.whole(shape), seed=3)
        assert float(value.std()) == pytest.approx(spread, rel=0.15)


def gpt2(**more: Any) -> Any:
    sizes = {"vocab_size": 41, "n_positions": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | none | more))


def test_fused_queries_keys_and_values_of_gpt2_are_cut_in_heads() -> None:
    model = elasticd.from_hf(gpt2())
    assert model.rules["blocks.*.layer.attn.c_attn.*"] == Column("heads", parts=3)
    assert model.rules["blocks.*.layer.attn.c_proj.*"] == Row("heads")
    assert model.rules["embed.wte.weight"] == Row("vocabulary")


def test_fused_queries_keys_and_values_of_phi3_are_gathered_and_fused_gates_are_cut() -> None:
    rules = elasticd.from_hf(OTHERS["Phi3"]()).rules
    assert rules["blocks.*.layer.self_attn.qkv_proj.*"] == Column("columns_96", gather=True)
    assert rules["blocks.*.layer.self_attn.o_proj.*"] == Row("columns_64", split=True)
    assert rules["blocks.*.layer.mlp.gate_up_proj.*"] == Column("columns_44", parts=2)
    assert rules["blocks.*.layer.mlp.down_proj.*"] == Row("columns_44")


def test_dropouts_of_modules_are_keyed_by_step_sample_and_place() -> None:
    torch.manual_seed(0)
    model = gpt2(embd_pdrop=0.2, resid_pdrop=0.2).double()
    whole = Whole(copy.deepcopy(model))
    described = elasticd.from_hf(model)
    for section, sites in SITES.items():
        for ours, their in sites.items():
            owner, _, leaf = their.rpartition(".")
            setattr(whole.get_submodule(owner), leaf, Dropout(0.2, f"{section}.{ours}"))
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, whole), under(training, PLANS["tp3 uneven beside a pipeline"])
    assert found[0] == pytest.approx(expected[0], abs=1e-6)


SITES = {
    "embed": {"drop": "model.transformer.drop"},
    **{
        f"blocks.{i}": {
            f"layer.{at}": f"model.transformer.h.{i}.{at}" for at in ("attn.resid_dropout", "mlp.dropout")
        }
        for i in range(LAYERS)
    },
}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: made("Llama", attention_dropout=0.1), r"attention_dropout = 0.1 .* set it to 0"),
        (lambda: gpt2(attn_pdrop=0.1, resid_pdrop=0.1), r"^attn_pdrop = 0.1 of GPT2LMHeadModel is drawn"),
        (
            lambda: made("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            r"rope_type = 'dynamic' of LlamaForCausalLM keeps the longest sequence",
        ),
        (lambda: _checkpointing(made("Llama")), r"checkpoints its gradients: turn that off"),
        (lambda: _hooked(made("Llama")), r"model has hooks, which no stage could run"),
        (lambda: torch.nn.Linear(2, 2), r"Linear is no model of transformers"),
        (
            lambda: made("Mixtral", output_router_logits=True),
            r"output_router_logits = True of MixtralForCausalLM .*output_router_logits = False",
        ),
        (
            lambda: made("Mixtral", router_jitter_noise=0.1),
            r"^router_jitter_noise = 0.1 of MixtralForCausalLM is drawn .* set it to 0",
        ),
        (
            lambda: made("Mixtral").double(),
            r"experts of MixtralForCausalLM are in double precision.*set_experts_implementation\('eager'\)",
        ),
        (lambda: _with_base(_Drawing), r"Own gives something else for the same samples each time in training"),
        (lambda: _with_base(_Counting), r"model.passes of Own is a state that each forward pass .* changes"),
        (lambda: _Opaque(_Opaque.config_class()), r"^_Opaque has no embedding that takes one stream of tokens"),
        (lambda: _of_streams(made("Llama")), r"has no embedding that takes one stream of tokens"),
        (
            lambda: transformers.RobertaForCausalLM(_bert(transformers.RobertaConfig, is_decoder=True)),
            r"^lm_head.bias and lm_head.decoder.bias of RobertaForCausalLM are one parameter of one section",
        ),
    ],
)
def test_what_no_stage_can_do_alike_is_refused_by_name(model: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        elasticd.from_hf(model())


@pytest.mark.parametrize("name", ["Fuyu", "Git", "Blip2", "Gemma4"])
def test_a_model_that_takes_images_is_trained_with_them_or_refused(name: str) -> None:
    """Never as text alone: neither of the model, nor of its configuration."""
    config = getattr(transformers, f"{name}Config")()
    kind = getattr(
        transformers, f"{name}For{'CausalLM' if name in ('Fuyu', 'Git') else 'ConditionalGeneration'}"
    )
    with torch.device("meta"):
        model = kind(config)
    said = "takes .* beside tokens, and would be trained as text|has no vision_config|has no model inside that"
    for given in (model, config):
        with pytest.raises(ModelError, match=rf"^{name}\w+ ({said})"):
            elasticd.from_hf(given)


def test_numbers_and_dropouts_of_a_nested_configuration_are_found_and_changed() -> None:
    config = transformers.MptConfig(attn_config={"attn_pdrop": 1, "clip_qkv": 8.0})
    assert tiny_config.dropouts(config) == {"attn_config/attn_pdrop": 1}
    assert tiny_config.numbers(config)["attn_config/clip_qkv"] == 1.0
    changed = tiny_config.with_numbers(config, {"attn_config/clip_qkv": 1.0, "d_model": 64})
    assert (changed.attn_config.clip_qkv, changed.attn_config.attn_pdrop, changed.d_model) == (1.0, 1, 64)


def test_frequencies_that_depend_on_the_padding_are_warned_of() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.warns(UserWarning, match="a micro-batch is padded to more than 32 tokens"):
        elasticd.from_hf(made("Llama", rope_parameters=rope | factors))


def _bert(kind: Any, **more: Any) -> Any:
    return kind(vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **NO_DROPOUT, **more)


NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


class _Opaque(transformers.PreTrainedModel):
    """A class of which transformers does not know the embedding."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(3, 3)


def _of_streams(model: Any) -> Any:
    model.get_input_embeddings = lambda: torch.nn.ModuleList([model.model.embed_tokens])
    return model


def _checkpointing(model: Any) -> Any:
    model.model.layers[0].gradient_checkpointing = True
    return model


def _hooked(model: Any) -> Any:
    model.model.register_forward_hook(lambda *_: None)
    return model


class _Base(transformers.LlamaModel):
    """A Llama that does something of its own before each layer."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        x = tokens = self.embed_tokens(input_ids)
        tables = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x, more = self.between(x, tokens)
            x = layer(x, **{"attention_mask": None, "position_embeddings": tables} | more)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x, {}


class _Scaled(_Base):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x * self.config.layer_scaling, {}


class _Mixed(_Base):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + tokens, {}


class _Told(_Base):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x, {"position_embeddings": (tokens[..., :8], tokens[..., 8:16])}


class _Padded(_Base):
    """Hides padding, which it knows by its token."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        self.hidden = (input_ids == self.config.pad_token_id)[:, None, None, :]
        return super().forward(input_ids)

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mask = torch.zeros(later.shape, dtype=x.dtype).masked_fill(later, -1e9)
        return x, {"attention_mask": mask - 1e9 * self.hidden.to(x.dtype)}


class _Centred(_Base):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = _Centring()


class _Centring(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True)


class _Drawing(_Base):
    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + torch.rand_like(x) * self.training, {}


class _Counting(_Base):
    """Notes how often its layers were called, as routers do that move their biases by the load of experts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("passes", torch.zeros(()))

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self.passes += self.training
        return x, {}


class _Buffered(_Base):
    seen: ClassVar[list[torch.dtype]] = []

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("shift", torch.ones(()))

    def between(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self.seen.append(self.shift.dtype)
        return x, {}


def _with_base(kind: type[_Base], **more: Any) -> Any:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = kind(config)
            self.post_init()

    return Own(transformers.LlamaConfig(**SIZES, head_dim=8, **more))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: _with_base(_Mixed), r"Own changes the activation between layers 0 and 1"),
        (lambda: _with_base(_Told), r"position_embeddings of layer 0 of Own depend on the tokens"),
        (
            lambda: _with_base(_Padded, pad_token_id=40),
            r"attention_mask of layer 0 of Own depend on the tokens",
        ),
        (lambda: _with_base(_Centred), r"what Own gives for a sample depends on the others of the micro-batch"),
    ],
)
def test_what_is_lost_between_stages_is_refused_by_name(model: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        elasticd.from_hf(model())


@pytest.mark.parametrize("name", PLANS)
def test_what_a_model_does_to_the_activation_between_layers_is_trained(name: str) -> None:
    torch.manual_seed(0)
    model = _with_base(_Scaled, layer_scaling=0.5).double()
    fill(model, 1.0)
    described = elasticd.from_hf(model)
    assert "layer_scaling" in described.proved
    training = Training(model=described, loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, Whole(copy.deepcopy(model))), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    names = {full: f"model.{their_name(described, full)}" for full in found[1]}
    assert furthest(found, expected, names) < (1e-6, "")


def test_the_last_block_ends_at_the_norm_and_the_head_begins_there() -> None:
    model = _with_base(_Scaled, layer_scaling=0.5)
    anatomy = prove(model).anatomy
    assert anatomy.end == "model.norm"
    x, sections = torch.randn(2, 3, 32), sections_of(model, anatomy)
    assert torch.equal(sections.head(x), model.lm_head(model.model.norm(x)))


def test_buffers_of_the_outer_modules_go_where_a_section_goes() -> None:
    model = _with_base(_Buffered)
    block = sections_of(model, prove(model).anatomy).blocks[1]
    block.double()(torch.zeros(1, 3, 32, dtype=torch.float64))
    assert _Buffered.seen[-1] == torch.float64


def test_an_encoder_which_sees_the_padding_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"BertLMHeadModel attends to later tokens, as an encoder does"):
        elasticd.from_hf(transformers.BertLMHeadModel(_bert(transformers.BertConfig)))


def test_check_says_that_it_is_the_models_own_forward() -> None:
    lines: list[str] = []
    model = elasticd.from_hf(made("Granite", logits_scaling=4.0).double())
    recipe = Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        dataset=Text(41),
        global_batch=1,
    )
    assert compared(recipe, lines.append), lines
    assert "ok    the model's own forward: GraniteForCausalLM" in lines[1]
    assert all(name in lines[1] for name in ("logits_scaling", "residual_multiplier", "equal to the bit"))


def test_the_numbers_that_it_names_act_on_the_small_copy() -> None:
    olmo = {"clip_qkv": 200.0, "unused_scaling": 2.0, "pad_token_id": 0, "eos_token_id": 1}
    proved = elasticd.from_hf(made("Olmo", **olmo)).proved
    assert "clip_qkv" in proved
    assert "unused_scaling" not in proved


def test_making_it_draws_nothing_and_warns_of_nothing() -> None:
    model = made("Granite")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elasticd.from_hf(model)
    assert torch.equal(before, torch.get_rng_state())
