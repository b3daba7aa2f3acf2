"""The two modules of a vision-language model train in TP groups as they do in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elasticd
from elasticd.models.huggingface.split import VisionLanguage, split_model
from elasticd.models.huggingface.vision_language import IMAGES, HfModule, parameters_of
from elasticd.models.huggingface.vision_language_proof import samples_of
from elasticd.runtime.model.tp_rules import Column, PartialGrad, Row
from tests import sizes
from tests.models.double import DoubleThroughout
from tests.models.layouts import Training, alone, furthest, plan_of, stage, under

transformers = pytest.importorskip("transformers")
vision_language = pytest.importorskip("tests.models.vision_language")

MODELS = (
    "Llava",
    "Gemma3",
    "Qwen2_5_VL",
    "Qwen2VL",
    "Qwen3VL",
    "InternVL",
    "Mistral3",
    "Glm4v",
    "GlmOcr",
    "Exaone4_5_",
)
UNEVEN = (("a/0", 2), ("a/1", 1))


def described(module: HfModule) -> elasticd.Model:
    """A module as a model by itself."""
    return elasticd.Model(
        embed=module.embed,
        blocks=module.blocks,
        head=module.head,
        width=module.width,
        rules=module.rules,
        units=module.units,
    )


class Whole(nn.Module):
    """The sections of a module on one device, one after the other."""

    def __init__(self, module: HfModule) -> None:
        super().__init__()
        self.sections = nn.ModuleList([section for _, section in module])

    def forward(self, batch: Any) -> Any:
        for section in self.sections:
            batch = section(batch)
        return batch


def apart(module: HfModule, plan: Any, dataset: Any, loss: Any, collate: Any) -> tuple[float, str]:
    """How far a weight is from one process's after two steps, in double precision throughout."""
    whole = Whole(copy.deepcopy(module))
    training = Training(model=described(module), loss=loss, dataset=dataset, collate=collate)
    with DoubleThroughout():
        expected = alone(training, whole)
    found = under(training, plan, within=DoubleThroughout)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    return furthest(found, expected, names_in(module, found[1], "sections"))


def names_in(module: HfModule, names: Iterable[str], start: str) -> dict[str, str]:
    """The names in `Whole` of a module's parameters."""
    order = [name for name, _ in module]
    made = {}
    for full in names:
        section = next(name for name in order if full.startswith(f"{name}."))
        made[full] = f"{start}.{order.index(section)}{full.removeprefix(section)}"
    return made


class Images:
    """Images in the form that a model's encoder takes, each by its index."""

    def __init__(self, model: Any) -> None:
        self._like = samples_of(model)[0][3].images[0]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seeds = torch.Generator().manual_seed(index)
        return {
            name: torch.randn(x.shape, generator=seeds, dtype=x.dtype) if x.is_floating_point() else x
            for name, x in self._like.items()
        }


def joined(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


def squares(output: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    total = sum((each.square().sum() for each in output.values()), torch.zeros((), dtype=torch.float64))
    return total * 1e-3, output["rows"].shape[-2]


@pytest.mark.parametrize("name", sizes.beside(MODELS[1:5:2], MODELS))
def test_the_encoder_trains_in_stages_and_tp_groups_as_in_one_process(name: str) -> None:
    model = vision_language.made(name, depth=3)
    images, module = Images(model), split_model(model).modules["vision"]
    assert any(isinstance(rule, Column) for rule in module.rules.values())
    plan = plan_of((8, [stage(0, 1, *UNEVEN), stage(1, len(module.blocks), ("b/0", 1), ("b/1", 1))]))
    assert apart(module, plan, images, squares, joined) < (1e-12, "")


class Samples:
    """Tokens with an image's rows among them, of all the sizes that a small copy's samples have."""

    def __init__(self, model: Any, split: VisionLanguage) -> None:
        self._samples = [self._with_rows(split, each) for each in samples_of(model)[0][1:3]]

    @staticmethod
    def _with_rows(split: VisionLanguage, sample: Any) -> dict[str, Any]:
        made = {"input_ids": sample.ids, **sample.beside}
        with torch.no_grad():
            items = [vision_language.rows_of(split.modules["vision"], image) for image in sample.images]
        return made | ({IMAGES: joined(items)} if items else {})

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._samples[index % 2]


class EachAlone(nn.Module):
    """The sections on the samples of a batch one by one, as micro-batches of one."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, batch: list[Any]) -> list[Tensor]:
        return [self.whole(sample) for sample in batch]


def one_or_all(samples: Sequence[Any]) -> Any:
    """A micro-batch of one sample is the sample; one process takes all of them one by one."""
    return samples[0] if len(samples) == 1 else list(samples)


def logits_squared(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, list) else [output]
    return sum((x.square().sum() for x in logits), torch.zeros((), dtype=torch.float64)) * 1e-3, len(logits)


@pytest.mark.parametrize("name", sizes.beside(MODELS[3:5], MODELS))
def test_the_language_model_trains_in_stages_and_tp_groups_as_in_one_process(name: str) -> None:
    """Half of the samples have an image: DeepStack's rows and positions pass between the stages."""
    model = vision_language.made(name, depth=2)
    split = split_model(model)
    module = split.modules["language"]
    layers = len(module.blocks)
    plan = plan_of((8, [stage(0, 1, *UNEVEN), stage(1, layers, ("b/0", 1), ("b/1", 1), ("b/2", 2))]))
    assert trained_apart(module, plan, Samples(model, split)) < (1e-12, "")


def trained_apart(module: HfModule, plan: Any, dataset: Any) -> tuple[float, str]:
    whole = EachAlone(Whole(copy.deepcopy(module)))
    training = Training(model=described(module), loss=logits_squared, dataset=dataset, collate=one_or_all)
    with DoubleThroughout():
        expected = alone(training, whole)
    found = under(training, plan, within=DoubleThroughout)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    return furthest(found, expected, names_in(module, found[1], "whole.sections"))


def test_qwens_plan_is_qwen3_vls_and_norms_of_heads_have_partial_gradients() -> None:
    rules = split_model(vision_language.made("Qwen3VL", depth=2)).modules["language"].rules
    layer = "blocks.*.layer.self_attn"
    assert rules[f"{layer}.q_proj.*"] == rules[f"{layer}.k_proj.*"] == Column("heads")
    assert rules[f"{layer}.o_proj.*"] == Row("heads")
    assert rules[f"{layer}.q_norm.weight"] == rules[f"{layer}.k_norm.weight"] == PartialGrad()
    assert rules["head.lm_head.*"] == Column("vocabulary", gather=True)


def test_fused_queries_keys_and_values_of_qwens_encoder_are_cut_in_heads() -> None:
    module = split_model(vision_language.made("Qwen2_5_VL", depth=2)).modules["vision"]
    assert module.rules["blocks.*.layer.attn.qkv.*"] == Column("heads", parts=3)
    assert module.rules["blocks.*.layer.attn.proj.*"] == Row("heads")


def test_adapters_of_the_language_model_are_cut_as_their_bases() -> None:
    """The base, encoder included, is frozen; the language model trains in a TP group as in one process."""
    peft = pytest.importorskip("peft")
    model = vision_language.made("Qwen3VL", depth=2)
    targets = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q_proj|v_proj|o_proj|down_proj)"
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    split = split_model(adapted.double())
    module, layer = split.modules["language"], "blocks.*.layer"
    assert module.rules[f"{layer}.self_attn.q_proj.lora_B.*"] == Column("heads")
    assert (
        module.rules[f"{layer}.mlp.down_proj.lora_A.*"] == module.rules[f"{layer}.mlp.down_proj.base_layer.*"]
    )
    assert {name for name, p in parameters_of(split.modules) if p.requires_grad} == {
        name for name, _ in parameters_of(split.modules) if "lora_" in name
    }
    plan = plan_of((8, [stage(0, len(module.blocks), *UNEVEN)]))
    with torch.no_grad():
        dataset = Samples(adapted.get_base_model(), split)
    assert trained_apart(module, plan, dataset) < (1e-12, "")
