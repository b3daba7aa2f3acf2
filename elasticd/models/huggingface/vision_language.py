"""A vision-language model of transformers as two modules: "vision" runs on images, "language" on samples.

The seam is transformers' own: the forward of such a model takes what its encoder gave, `mm_encoder_outputs`.

    vision           `get_image_features` of one image, in a shell of the model without its language model
    language.embed   the whole model's forward with what the vision module gave, up to the call of its language
                     model, whose arguments are the activation and what rides beside it, by path:
                     "position_ids", "attention_mask/full_attention", "deepstack_visual_embeds/0"
    language.blocks  the language model's forward with these arguments, from one layer's call to the next one's
    language.head    the whole model's forward on text, with the activation at its final norm

In a packed row the model is given the positions of tokens, as it counts them of each sample by itself
(`RopePositions`), and makes no mask of its own: where it would need one, samples are not packed (`proof`).

So each section is the model's own code. `vision_language_proof` compares them with the model on a small copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.models.huggingface.anatomy import REMEDY, Anatomy
from elasticd.models.huggingface.batches import IDS
from elasticd.models.huggingface.encoder import (
    DEEP,
    ROWS,
    EncoderAnatomy,
    HfEncoderBlock,
    HfEncoderEmbed,
    HfEncoderHead,
    features_of,
    image_of,
    rows_of,
)
from elasticd.models.huggingface.sections import (
    HIDDEN,
    HfBlock,
    HfHead,
    Reached,
    Section,
    bare,
    husks_of,
)
from elasticd.runtime.model.tp_rules import Rule, UnitsOf
from elasticd.runtime.model.validation import ModelError

#: The items that the vision module runs on, and the key of a batch that has its outputs.
IMAGES = "images"
#: What the model that has an encoder calls its language model.
_LANGUAGES = ("language_model", "text_model")
#: The names of the two modules.
VISION, LANGUAGE = "vision", "language"
#: An argument of a forward that says of each token what it is: 1 of an image, 0 of text.
MODALITIES = "mm_token_type_ids"
#: The positions of each token of a sample on all axes [tokens, axes], of a model that has several.
ROPE_POSITIONS = "rope_positions"
#: Arguments with a number for each token; what another one says is a processor's own.
TOKEN_TYPES = (MODALITIES, "token_type_ids")
#: Arguments of a forward that have a row for each image of a batch, not for each sample.
OF_IMAGES = ("image_grid_thw", "image_sizes")
#: What a batch may have for the whole model's forward beside these.
_BESIDE = ("attention_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Seam:
    """The paths at which a vision-language model is cut, and the form of its encoder's output."""

    base: str  #: the model that takes the encoder's output and calls the language model: "model"
    language: str  #: its language model: "model.language_model"
    listed: bool  #: `pooler_output` is a list with a tensor for each image, not one tensor
    dims: int  #: dimensions of such a tensor
    by_sample: bool = False  #: the encoder takes images by sample: `pixel_values` [samples, images, ...]
    #: What its encoder is made of, by paths in `base`; None: it is one block.
    encoder: EncoderAnatomy | None = None
    one_block: str = ""  #: why it is one block
    #: What the language model is called with that is no tensor, by name.
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HfModule:
    """One module of a model of several, with what `elasticd.Module` takes."""

    embed: nn.Module
    blocks: list[nn.Module]
    head: nn.Module
    width: int  #: elements of the activation for each row or token
    items: str = ""  #: what it runs on; empty: samples
    takes: Mapping[str, str] = field(default_factory=dict)  #: a batch's key: the module that gives it
    rules: Mapping[str, Rule] = field(default_factory=dict)
    units: Mapping[str, UnitsOf] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield "embed", self.embed
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block
        yield "head", self.head


def seam_of(model: Any) -> tuple[str, str]:
    """The paths of the model that takes an encoder's output, and of its language model.

    Raises:
        ModelError: the model has no such seam.
    """
    for path, module in model.named_modules():
        for name in _LANGUAGES:
            if path and _has_seam(module) and isinstance(getattr(module, name, None), nn.Module):
                return path, f"{path}.{name}"
    raise ModelError(
        f"{type(model).__name__} has no model inside that takes its encoder's output (mm_encoder_outputs) and "
        f"calls a {' or a '.join(_LANGUAGES)}: {REMEDY}"
    )


class HfImage(nn.Module):
    """An image as the user's dataset gives it, a mapping of tensors: `pixel_values` and what else
    `get_image_features` takes. The embedding of an encoder that is one block."""

    def forward(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of the item: see `image_of`."""
        return image_of(item)


class HfVision(nn.Module):
    """`get_image_features` of one image, with all modules of the model but its language model."""

    def __init__(self, model: Any, seam: Seam) -> None:
        super().__init__()
        base = model.get_submodule(seam.base)
        shell = bare(base)
        shell._parameters, shell._buffers = {}, {}
        self.paths: dict[str, str] = {}
        self._bound: list[tuple[dict[str, Any], str, dict[str, Any]]] = []  # in the shell; in this module
        for name, child in base._modules.items():
            if child is None or seam.language == f"{seam.base}.{name}":
                shell._modules[name] = None
                continue
            self.add_module(name, child)
            self._bound.append((shell._modules, name, self._modules))
        for name, parameter in base._parameters.items():
            self.register_parameter(name, parameter)
            self._bound.append((shell._parameters, name, self._parameters))
        for name, buffer in base._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in base._non_persistent_buffers_set)
            self._bound.append((shell._buffers, name, self._buffers))
        self.paths = {name: f"{seam.base}.{name}" for *_, name, _ in self._bound}
        self._shell, self._by_sample = (shell,), seam.by_sample  # no submodule

    def forward(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the model's encoder on one image.

        Args:
            item: `pixel_values`, in any floating type, and what else `get_image_features` takes.

        Returns:
            `ROWS` [rows, width], and `DEEP` + "0", "1", ... likewise, for what is added between layers.
        """
        (shell,) = self._shell
        for there, name, here in self._bound:  # a child or a parameter may have been replaced
            there[name] = here[name]
        shell.training = self.training
        dtype = next(self.parameters()).dtype
        given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in item.items()}
        return rows_of(features_of(shell, given, by_sample=self._by_sample))


class HfRows(nn.Module):
    """The end of the vision module: its last block's output, as the output of one item."""

    def forward(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the rows of an image, each tensor [1, rows, width]."""
        return {name: x[None] for name, x in rows.items()}


class _Catch:
    """The forward of the language model in the embedding's shell: its arguments, by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached(dict(zip(self._names, args, strict=False)) | kwargs)


class HfLanguageEmbed(Section):
    """The tokens of a batch and the rows of its images to what the language model is called with."""

    def __init__(self, model: Any, anatomy: Anatomy, seam: Seam) -> None:
        held = {path: model.get_submodule(path) for path in anatomy.before}
        super().__init__(model, anatomy, held, husks_of(model, anatomy))
        self._seam = seam
        language: Any = model.get_submodule(seam.language)
        self._shell.get_submodule(seam.language).forward = _Catch(_parameters(language)[1:])
        taken = {*_parameters(model), *_parameters(model.get_submodule(seam.base))}
        self._token_types, self._of_images = beside_tokens(model, seam)
        known = {*IDS, *_BESIDE, *self._token_types, *self._of_images, "labels", "return_dict", "kwargs"}
        self._lost = frozenset(taken - known)
        self._image_token = image_token(model.config)

    def forward(self, batch: Mapping[str, Any]) -> Tensor | dict[str, Tensor]:
        """Runs the model's forward up to the call of its language model.

        Args:
            batch: tokens [samples, tokens]; under `IMAGES` the rows that the vision module gave for the images
                of the samples in order, [rows, width] or by name, or None; and what the model's processor gives
                beside the pixels, as `image_grid_thw`. Of a packed row, [1, tokens], the rows are those of its
                tokens in their order, and `ROPE_POSITIONS` stand for grids.

        Returns:
            The activation [samples, tokens, width], alone or as `HIDDEN` among other named tensors.
        """
        ids, images = batch[next((name for name in IDS if name in batch), IDS[0])], batch.get(IMAGES)
        for name in self._lost & batch.keys():
            raise ModelError(
                f"{name}, which the forward of {type(self._shell).__name__} takes, reaches no section: leave "
                f"it out, and give images under {IMAGES!r}"
            )
        beside = {name: batch[name] for name in _BESIDE if isinstance(batch.get(name), Tensor)}
        beside |= {name: batch[name] for name in self._token_types if name in batch}
        if MODALITIES in self._token_types:
            beside.setdefault(MODALITIES, (ids == self._image_token).to(ids.dtype))
        if ROPE_POSITIONS in batch:
            beside["position_ids"] = batch[ROPE_POSITIONS].movedim(-1, 0)
        for name in self._of_images:
            if isinstance(batch.get(name), Tensor) and len(rows := _of_images(batch[name])):
                beside[name] = rows
        outputs = {} if images is None else {"mm_encoder_outputs": {"image": self._encoded(images)}}
        caught = self.run(ids, None, beside | outputs)
        hidden = caught.pop("inputs_embeds", None)
        if not isinstance(hidden, Tensor):
            raise ModelError(f"the language model of {type(self._shell).__name__} is called without embeddings")
        others = dict(flat(caught))
        return {HIDDEN: hidden, **others} if others else hidden

    def _encoded(self, images: Tensor | Mapping[str, Tensor]) -> Any:
        """The vision module's output as the model's own function gives it."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        named = {ROWS: images} if isinstance(images, Tensor) else images
        rows = {name: x.flatten(0, -2) for name, x in named.items()}
        pooled: Any = rows[ROWS][None] if self._seam.dims == 3 else rows[ROWS]
        output: Any = BaseModelOutputWithPooling(pooler_output=pooled)
        if self._seam.listed:
            output.pooler_output = [pooled]
        if deep := [[rows[name]] for name in rows if name.startswith(DEEP)]:  # in their order
            output.deepstack_features = deep
        return output


class RopePositions:
    """The positions of a sample's tokens on several axes, by the model's own function (M-RoPE)."""

    def __init__(self, model: Any, seam: Seam) -> None:
        base = bare(model.get_submodule(seam.base))  # the function asks its configuration alone
        base._parameters, base._buffers = {}, {}
        self._base = base

    @classmethod
    def of(cls, model: Any, seam: Seam) -> RopePositions | None:
        """Those of a model; None where it counts tokens alone."""
        return cls(model, seam) if hasattr(model.get_submodule(seam.base), "get_rope_index") else None

    def __call__(self, ids: Tensor, stands_for: Tensor, grids: Tensor | None) -> Tensor:
        """The positions of a sample by itself.

        Args:
            ids: of its tokens [tokens].
            stands_for: 1 of a token of an image, 0 of text [tokens].
            grids: of its images [images, 3].

        Returns:
            [tokens, axes], int64.
        """
        places, _ = self._base.get_rope_index(
            ids[None],
            mm_token_type_ids=stands_for[None],
            image_grid_thw=grids if grids is not None and len(grids) else None,
        )
        positions: Tensor = places[:, 0].movedim(0, -1).long().contiguous()
        return positions


def beside_tokens(model: Any, seam: Seam) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of tensors that a model takes beside tokens and pixels: those with a number for each token, and
    those with a row for each image."""
    taken = {*_parameters(model), *_parameters(model.get_submodule(seam.base))}
    return (
        tuple(name for name in TOKEN_TYPES if name in taken),
        tuple(name for name in OF_IMAGES if name in taken),
    )


def image_token(config: Any) -> int:
    """The token that stands for a row of an image; -1: the configuration does not say."""
    names = ("image_token_id", "image_token_index")
    return next((token for name in names if isinstance(token := getattr(config, name, None), int)), -1)


def other_marks(config: Any) -> dict[str, int]:
    """The tokens that stand for videos and for sound, by the names of these."""
    names = {
        "videos": ("video_token_id", "video_token_index"),
        "sound": ("audio_token_id", "audio_token_index"),
    }
    marks = {
        kind: next((t for n in listed if isinstance(t := getattr(config, n, None), int)), None)
        for kind, listed in names.items()
    }
    own = image_token(config)
    return {kind: token for kind, token in marks.items() if token is not None and token != own}


def takes_images(model: Any) -> bool:
    """Returns True if a model of transformers takes its encoder's output for images: it is split in modules."""
    return any(map(_has_seam, model.modules()))


def _has_seam(module: Any) -> bool:
    return "mm_encoder_outputs" in _parameters(module) and hasattr(module, "get_image_features")


def _of_images(given: Tensor) -> Tensor:
    """Rows of images [images, ...]: padded ones of samples [samples, images, ...] are joined."""
    if given.dim() < 3:
        return given
    rows = given.flatten(0, 1)
    return rows[rows.any(-1)]


class HfLanguageBlock(HfBlock):
    """A layer of the language model, called with the arguments that the embedding caught."""

    def __init__(self, language: Any, anatomy: Anatomy, index: int, seam: Seam) -> None:
        super().__init__(language, anatomy, husks_of(language, anatomy), index)
        self._arguments = {**self._arguments, **seam.constants}
        self.paths = {name: f"{seam.language}.{path}" for name, path in self.paths.items()}

    def _called(self, shell: nn.Module, ids: Tensor | None, beside: Mapping[str, Any]) -> Any:
        return super()._called(shell, ids, nested(beside))


class HfLanguageHead(HfHead):
    """The whole model's forward on text, with the activation at the final norm: the logits."""

    def __init__(self, model: Any, anatomy: Anatomy) -> None:
        super().__init__(model, anatomy, husks_of(model, anatomy))
        self._token_types = tuple(name for name in TOKEN_TYPES if name in _parameters(model))

    def _called(self, shell: nn.Module, ids: Tensor | None, beside: Mapping[str, Any]) -> Any:
        assert ids is not None
        text = {name: torch.zeros_like(ids) for name in self._token_types}
        return super()._called(shell, ids, text)  # what rides beside the activation is the language model's


def language_anatomy(anatomy: Anatomy, seam: Seam) -> Anatomy:
    """The anatomy of the language model by itself, of that of the whole model."""
    start = f"{seam.language}."

    def inside(paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(path.removeprefix(start) for path in paths if path.startswith(start))

    return Anatomy(
        layers=anatomy.layers.removeprefix(start),
        before=inside(anatomy.before),
        after=inside(anatomy.after),
        anywhere=inside(anatomy.anywhere),
        unused=inside(anatomy.unused),
        returns=anatomy.returns,
        end=anatomy.end.removeprefix(start) if anatomy.end.startswith(start) else "",
    )


def modules_of(model: Any, anatomy: Anatomy, seam: Seam) -> dict[str, HfModule]:
    """The modules of a vision-language model, which share its modules; without rules."""
    language, inner = model.get_submodule(seam.language), language_anatomy(anatomy, seam)
    if not inner.end:
        raise ModelError(
            f"the language model of {type(model).__name__} ends at no norm that is called with the activation: "
            f"{REMEDY}"
        )
    layers = len(language.get_submodule(inner.layers))
    return {
        VISION: _encoder(model, seam),
        LANGUAGE: HfModule(
            embed=HfLanguageEmbed(model, anatomy, seam),
            blocks=[HfLanguageBlock(language, inner, index, seam) for index in range(layers)],
            head=HfLanguageHead(model, anatomy),
            width=model.config.get_text_config().hidden_size,
            takes={IMAGES: VISION},
        ),
    }


def _encoder(model: Any, seam: Seam) -> HfModule:
    """The encoder in blocks, or as one."""
    base, encoder, start = model.get_submodule(seam.base), seam.encoder, f"{seam.base}."
    width = model.config.get_text_config().hidden_size
    if encoder is None:
        return HfModule(
            embed=HfImage(), blocks=[HfVision(model, seam)], head=HfRows(), width=width, items=IMAGES
        )
    if encoder.wide:
        width = base.get_submodule(f"{encoder.layers}.0").get_parameter(encoder.wide).numel()
    else:
        width = getattr(model.config.vision_config, "hidden_size", width)
    return HfModule(
        embed=HfEncoderEmbed(base, encoder, start),
        blocks=[HfEncoderBlock(base, encoder, index, start) for index in range(encoder.last + 1)],
        head=HfEncoderHead(base, encoder, start),
        width=width,
        items=IMAGES,
    )


def freeze(named: Sequence[tuple[str, nn.Parameter]], frozen: Iterable[str]) -> None:
    """Freezes parameters by `requires_grad_(False)`, those of the model that the modules were made of.

    Args:
        named: parameters by full name.
        frozen: full names, "vision.blocks.0.visual.merger.mlp.0.weight", or patterns, "vision.*".

    Raises:
        ModelError: a pattern names no parameter.
    """
    starts = dict.fromkeys(name.partition(".")[0] for name, _ in named)
    for pattern in [frozen] if isinstance(frozen, str) else frozen:
        hit = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not hit:
            raise ModelError(
                f"frozen = {pattern!r} names no parameter: names begin with "
                f"{' or '.join(f'{start}.' for start in starts)}, as {named[0][0]}"
            )
        for parameter in hit:
            parameter.requires_grad_(False)


def parameters_of(modules: Mapping[str, HfModule]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of modules by full name, "language.blocks.3.layer.mlp.up_proj.weight"; a shared one has
    several names."""
    for name, module in modules.items():
        for section, part in module:
            for leaf, parameter in part.named_parameters(remove_duplicate=False):
                yield f"{name}.{section}.{leaf}", parameter


def flat(arguments: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors among arguments, in lists and mappings, too, by path: "attention_mask/full_attention"."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield f"{path}{name}", value
        elif isinstance(value, Mapping):
            yield from flat(value, f"{path}{name}/")
        elif isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            yield from flat({str(index): each for index, each in enumerate(value)}, f"{path}{name}/")


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tensors by path."""
    tree: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *outer, last = path.split("/")
        into = tree
        for name in outer:
            into = into.setdefault(name, _Named())
        into[last] = tensor
    return {name: _listed(value) for name, value in tree.items()}


class _Named(dict[str, Any]):
    """Arguments by name, of which some were None, as the mask of a kind of layer that needs none."""

    def __missing__(self, name: str) -> None:
        return None


def _listed(value: Any) -> Any:
    """A mapping whose keys count from 0 as a list."""
    if not isinstance(value, dict):
        return value
    values = _Named({name: _listed(each) for name, each in value.items()})
    return list(values.values()) if list(values) == [str(i) for i in range(len(values))] else values


def constants(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are no tensors and hold none; those that are None are left out."""
    known = {path.partition("/")[0] for path, _ in flat(arguments)}
    return {name: value for name, value in arguments.items() if name not in known and value is not None}


def _parameters(module: Any) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)
