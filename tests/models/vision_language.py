"""Small vision-language models of transformers for tests, with random weights in double precision."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from elasticd.models.huggingface.proof import fill
from elasticd.models.huggingface.small_images import small_config
from elasticd.models.huggingface.vision_language import HfModule
from elasticd.models.huggingface.vision_language_proof import Chain

#: Models with one kind of encoder or another: pixels, patches with a grid of them, and what is added between
#: layers of the language model (Qwen3-VL).
MODELS = ("Llava", "Qwen2_5_VL", "Qwen3VL", "Gemma3", "InternVL", "Qwen3_5")


def made(name: str, depth: int = 4, layers: int = 3, **more: Any) -> Any:
    """A small model of the class, with so many layers in its encoder and in its language model."""
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = small_config(kind.config_class(**more), depth, layers)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).double().train()
    fill(model, 0.5)
    return model


def rows_of(module: HfModule, image: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an encoder makes of an image: [rows, width] by name."""
    return {name: x[0] for name, x in Chain(module, image).output.items()}
