"""Small copies of vision-language models, and images for them, in the forms that their encoders take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from elasticd.models.huggingface import tiny_config
from elasticd.models.huggingface.anatomy import REMEDY
from elasticd.runtime.model.validation import ModelError

#: The tokens that stand for images, for videos, and around them, in a small copy's vocabulary.
MARKS = {
    "image_token_id": 91,
    "image_token_index": 91,
    "video_token_id": 92,
    "video_token_index": 92,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
}
#: Tokens of text are below this.
TEXT = 90
IMAGE_TOKEN = MARKS["image_token_id"]
#: Sizes of a small copy's images: pixels of an image's side, and of a patch's.
SIDE, PATCH = 8, 4
#: Fields of a vision configuration of Qwen's kind, whose encoder takes patches and a grid of them.
_GRID: Mapping[str, Any] = {
    "patch_size": PATCH,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
    "fullatt_block_indexes": [1],
    "window_size": 16,
}
#: Of these the ones that name layers.
_LAYERS = ("deepstack_visual_indexes", "fullatt_block_indexes")
#: Parts of a head that are turned by a token's time, height and width, where the configuration does not say.
_SECTION = [2, 3, 3]
#: Fields of the whole configuration.
_WHOLE: Mapping[str, Any] = {"mm_tokens_per_image": 4, "image_seq_length": 4}


def small_config(config: Any, depth: int, layers: int = 3) -> Any:
    """A small copy of the configuration of a vision-language model.

    Args:
        config: of the model.
        depth: layers of the encoder.
        layers: of the language model.
    """
    if getattr(config, "vision_config", None) is None:
        raise ModelError(f"{type(config).__name__} has no vision_config, an encoder of images: {REMEDY}")
    small = tiny_config.small(config, layers)
    text, vision = small.get_text_config(), small.vision_config
    grid = _takes_grid(vision)
    side = 2 * SIDE if hasattr(small, "spatial_merge_size") else SIDE
    known, changes = (
        tiny_config.values_of(vision),
        {"out_hidden_size": text.hidden_size, "projection_dim": text.hidden_size},
    )
    own = depth == encoder_depth(vision)
    changes |= {"depth": depth, "num_hidden_layers": depth}
    changes |= _GRID if grid else {"patch_size": PATCH, "image_size": side}
    changes = {name: value for name, value in changes.items() if not (own and name in _LAYERS)}
    changes = {name: value for name, value in changes.items() if name in known}
    if isinstance(known.get("image_size"), list | tuple) and "image_size" in changes:
        changes |= {"image_size": [side, side], "patch_size": [PATCH, PATCH]}
    small.vision_config = tiny_config.remade(vision, changes)
    for name, value in {**_WHOLE, **MARKS}.items():
        if hasattr(small, name):
            setattr(small, name, value)
    text.vocab_size = max(text.vocab_size, tiny_config.VOCABULARY)
    with suppress(Exception):  # some configurations want one
        text.pad_token_id = None
    rope = getattr(text, "rope_parameters", None)
    if grid and isinstance(rope, dict) and "rope_theta" in rope:
        rope.setdefault("mrope_section", _SECTION)
    return small


def encoder_depth(vision: Any) -> int | None:
    """The layers of an encoder, by its configuration; None: it does not say."""
    known = tiny_config.values_of(vision)
    return next(
        (known[name] for name in ("depth", "num_hidden_layers") if isinstance(known.get(name), int)), None
    )


def _takes_grid(vision: Any) -> bool:
    return "spatial_merge_size" in tiny_config.values_of(vision)


def images_of(base: Any, config: Any) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Images of unlike contents, and of unlike sizes where the encoder takes such, in double precision.

    Args:
        base: the model that has `get_image_features`.
        config: of the small copy.

    Yields:
        What the encoder takes; and what the whole model's forward takes of it beside the pixels.
    """
    taken = inspect.signature(type(base).get_image_features).parameters
    vision: Any = config.vision_config
    seeds, size = torch.Generator().manual_seed(5), getattr(vision, "image_size", SIDE)
    side = size if isinstance(size, int) else size[0]
    while True:
        for width in (4, 2):
            if "image_grid_thw" in taken:
                grid = torch.tensor([[1, 2, width]])
                frames: int = getattr(vision, "temporal_patch_size", 1)
                channels: int = getattr(vision, "in_channels", 0) or getattr(vision, "num_channels", 3)
                shape: tuple[int, ...] = (2 * width, channels * frames * PATCH**2)
                beside = {"image_grid_thw": grid}
            else:
                shape = (1, getattr(vision, "num_channels", 3), side, side)
                sized = "image_sizes" in taken and taken["image_sizes"].default is inspect.Parameter.empty
                beside = {"image_sizes": torch.tensor([[side, side]])} if sized else {}
            yield {"pixel_values": _random(shape, seeds), **beside}, beside


def _random(shape: tuple[int, ...], seeds: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=seeds, dtype=torch.float64)
