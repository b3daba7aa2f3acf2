"""The encoder of images of a vision-language model in sections: an embedding, a block for each layer, a head.

Each section runs the model's own `get_image_features` in a shell (`sections`). The embedding ends where the
first layer is called; a block ends with its layer's output; in the head the layers give what they gave. The
outputs of other layers than the last one that the code after the layers takes (DeepStack's) pass beside the
activation, by the number of the layer: "kept5". Layers whose output nothing takes are in the head, unused.

Where an encoder is not of this form it is one block (`vision_language.HfVision`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.models.huggingface.anatomy import Anatomy, draws, hidden_of, parts
from elasticd.models.huggingface.sections import (
    HIDDEN,
    LayerCall,
    LayerOutput,
    Reached,
    Section,
    SectionEnd,
    Zeros,
    anywhere,
    bare,
    husk,
    with_forward,
)
from elasticd.runtime.model.validation import ModelError

#: The name, with a layer's number, of the output that passes beside the activation.
KEPT = "kept"
#: What an encoder gives: rows of the language model's width, and those that it adds between layers.
ROWS, DEEP = "rows", "deep"
#: What an encoder takes of an image: pixels, and of an encoder of patches how many there are in each direction.
PIXELS, GRID = "pixel_values", "image_grid_thw"
#: And which of its pixels are none of padding.
PIXEL_MASK = "pixel_attention_mask"


@dataclass(frozen=True, kw_only=True)
class EncoderAnatomy(Anatomy):
    """The parts of an encoder, by paths in the model that has `get_image_features`."""

    between: tuple[str, ...]  #: are called between layers, with what passes beside the activation
    embeddings: Mapping[str, int]  #: of `before` tables that are looked up by numbers: their widths
    kept: tuple[int, ...]  #: layers beside the last whose outputs what follows takes
    last: int  #: the last layer whose output what follows takes
    #: A norm's parameter of each layer with as many elements as a row of the activation; empty: none has.
    wide: str


class NotInBlocks(Exception):
    """An encoder is no sequence of layers, and why."""


def encoder_anatomy(base: Any, language: str, item: Mapping[str, Tensor], depth: int | None) -> EncoderAnatomy:
    """The parts of an encoder, found by watching one image.

    Args:
        base: a small copy of the model that has `get_image_features`.
        language: the path in it of its language model.
        item: an image.
        depth: layers, as the configuration says; None: it does not.

    Raises:
        NotInBlocks: it is no sequence of layers.
    """
    layers = _layers_path(base, language, depth)
    own = {
        path: part for path, part in parts(base, layers).items() if not f"{path}.".startswith(f"{language}.")
    }
    _refuse_parameters(base, layers, language)
    phases, returns, width = _watched(base, layers, own, item)
    places: dict[str, list[str]] = {n: [] for n in ("before", "between", "after", "anywhere", "unused")}
    for path, part in own.items():
        seen, trained = phases.get(path, set()), any(True for _ in part.parameters())
        if not seen:
            places["unused"] += [path] * trained
        elif not trained and not draws(part):
            places["after" if seen == {"after"} else "anywhere"].append(path)
        elif seen == {"before"}:
            places["before"].append(path)
        elif seen <= {"between", "after"}:
            places["between" if "between" in seen else "after"].append(path)
        else:
            raise NotInBlocks(f"{path} is called {' and '.join(sorted(seen))} its layers")
    taken = _taken(base, layers, item)
    return EncoderAnatomy(
        layers=layers,
        returns=returns,
        before=tuple(places["before"]),
        between=tuple(places["between"]),
        after=tuple(places["after"]),
        anywhere=tuple(places["anywhere"]),
        unused=tuple(places["unused"]),
        embeddings={
            p: x.embedding_dim for p, x in own.items() if isinstance(x, nn.Embedding) and p in places["before"]
        },
        kept=taken[:-1],
        last=taken[-1],
        wide=_wide(base.get_submodule(f"{layers}.0"), width),
    )


def _layers_path(base: Any, language: str, depth: int | None) -> str:
    """The path of the list of layers: of those that are as long, the one whose layers have the most modules."""
    candidates: list[tuple[int, str]] = []
    for path, module in base.named_modules():
        inside = any(isinstance(base.get_submodule(outer), nn.ModuleList) for outer in _outer(path))
        if f"{path}.".startswith(f"{language}.") or not isinstance(module, nn.ModuleList) or inside:
            continue
        if depth is None or len(module) == depth:
            candidates.append((len(list(module.modules())), path))
    if not candidates:
        raise NotInBlocks("it has no list of as many layers as its configuration says")
    return max(candidates)[1]


def _outer(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _refuse_parameters(base: Any, layers: str, language: str) -> None:
    """Raises NotInBlocks for a parameter of a module around the layers."""
    around = ["", *_outer(layers)]
    for path in around:
        for name, _ in base.get_submodule(path).named_parameters(recurse=False):
            raise NotInBlocks(f"{name} of {path or 'the model'} is a parameter of no module of its own")


def _watched(
    base: Any, layers: str, own: Mapping[str, nn.Module], item: Mapping[str, Tensor]
) -> tuple[dict[str, set[str]], dict[type, int], int]:
    """When the parts are called, "before", "between" or "after" the layers; what layers return; and the width
    of the activation."""
    every = list(base.get_submodule(layers).children())
    order: list[int] = []
    phases: dict[str, set[str]] = {}
    returns: dict[type, int] = {}
    inside, width = [0], [0]

    def enter(index: int, args: Any, kwargs: Any) -> None:
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, Tensor):
            raise NotInBlocks("its layers are not called with an activation")
        width[0] = hidden.shape[-1]
        order.append(index)
        inside[0] += 1

    def leave(layer: nn.Module, output: Any) -> None:
        inside[0] -= 1
        if not isinstance(output, Tensor) and not (isinstance(output, tuple) and isinstance(output[0], Tensor)):
            raise NotInBlocks(f"a layer gives a {type(output).__name__}")
        returns[type(layer)] = 0 if isinstance(output, Tensor) else len(output)

    def note(path: str) -> None:
        between = "between" if len(order) < len(every) else "after"
        phases.setdefault(path, set()).add("in" if inside[0] else between if order else "before")

    hooks = []
    for index, layer in enumerate(every):
        hooks.append(layer.register_forward_pre_hook(lambda _, a, k, i=index: enter(i, a, k), with_kwargs=True))
        hooks.append(layer.register_forward_hook(lambda layer, _, output: leave(layer, output)))
    for path, part in own.items():
        hooks += [m.register_forward_pre_hook(lambda _, __, p=path: note(p)) for m in part.modules()]
    try:
        with torch.no_grad():
            base.get_image_features(**item, return_dict=True)
    finally:
        for hook in hooks:
            hook.remove()
    if order != list(range(len(every))):
        raise NotInBlocks("its layers are not called once each, in order")
    return phases, returns, width[0]


def _wide(layer: nn.Module, width: int) -> str:
    """The name of a norm's parameter of a layer that has so many elements; empty: there is none."""
    named = (name for name, each in layer.named_parameters() if "norm" in name and each.shape == (width,))
    return next(named, "")


def _taken(base: Any, layers: str, item: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The layers whose outputs what follows takes: each gives a leaf of the autograd graph."""
    leaves: list[Tensor] = []

    def give(_: nn.Module, __: Any, output: Any) -> Any:
        first = output if isinstance(output, Tensor) else output[0]
        leaves.append(first.detach().requires_grad_())
        return leaves[-1] if isinstance(output, Tensor) else (leaves[-1], *output[1:])

    every = list(base.get_submodule(layers).children())
    hooks = [layer.register_forward_hook(give, prepend=True) for layer in every]
    try:
        output = base.get_image_features(**item, return_dict=True)
    finally:
        for hook in hooks:
            hook.remove()
    given = [
        x for x in _flat([output.pooler_output, getattr(output, "deepstack_features", None)]) if x.requires_grad
    ]
    if not given:
        raise NotInBlocks("what it gives does not depend on its layers")
    total = sum((x.sum() for x in given), torch.zeros((), dtype=given[0].dtype))
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    taken = tuple(index for index, grad in enumerate(grads) if grad is not None)
    if not taken:
        raise NotInBlocks("what it gives does not depend on its layers")
    return taken


def _flat(given: Any) -> Iterator[Tensor]:
    """The tensors in lists and tuples."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _flat(each)


class _TableZeros(Zeros):
    """Stands for a table of another section."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, numbers: Tensor, *_: Any) -> Tensor:
        """Returns zeros for each number."""
        assert self.like is not None
        return self.like.new_zeros((*numbers.shape, self.width))


class _Echo(nn.Module):
    """Stands for a module between layers that is another section's: nobody reads what it gives."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """Returns what it is given."""
        return x


class EncoderSection(Section):
    """A section of an encoder."""

    def __init__(
        self,
        base: Any,
        anatomy: EncoderAnatomy,
        held: Mapping[str, nn.Module],
        layers: Sequence[nn.Module],
        others: Mapping[str, nn.Module],
        start: str,
    ) -> None:
        """Args:
        base: the model that has `get_image_features`.
        anatomy: of it.
        held: the section's own modules, by path.
        layers: what stands at the layers' places.
        others: what stands at other places, by path.
        start: the path of `base` in the whole model, with a dot.
        """
        tables = {path: _TableZeros(width) for path, width in anatomy.embeddings.items() if path not in held}
        super().__init__(base, anatomy, held, layers, {**tables, **others})
        self.paths = {name: f"{start}{path}" for name, path in self.paths.items()}
        self._tables = tuple(tables.values())  # no submodules

    def features(self, x: Tensor | None, item: Mapping[str, Tensor]) -> Any:
        """The model's own function in the shell, to where the section ends.

        Args:
            x: the activation as the layers take it; None: the section makes it.
            item: what the function takes of an image; without pixels where there is an activation.
        """
        shell, zeros = self.bound()
        if x is not None:
            for each in (zeros, *self._tables):
                each.like = torch.zeros_like(x)
            item = {PIXELS: x.new_zeros(1), **item}
        try:
            return shell.get_image_features(**item, return_dict=True)
        except Reached as reached:
            return reached.value
        finally:
            for each in (zeros, *self._tables):
                each.like = None


class HfEncoderEmbed(EncoderSection):
    """An image to the first layer's input, [1, ...]."""

    def __init__(self, base: Any, anatomy: EncoderAnatomy, start: str) -> None:
        held = {path: base.get_submodule(path) for path in anatomy.before}
        first, *rest = _husks(base, anatomy)
        layers = [with_forward(first, SectionEnd()), *rest]
        super().__init__(base, anatomy, held | anywhere(base, anatomy), layers, {}, start)

    def forward(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the encoder on an image as `image_of` gives it.

        Returns:
            The activation, and beside it what all sections take of the image.
        """
        image = image_of(item)
        dtype = next(self.parameters()).dtype
        given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in image.items()}
        hidden = self.features(None, given)
        if not isinstance(hidden, Tensor):
            raise ModelError("the encoder's forward ended before it came to its layers")
        del given[PIXELS]
        return {HIDDEN: hidden[None], **given}


class HfEncoderBlock(EncoderSection):
    """One layer of the encoder."""

    def __init__(self, base: Any, anatomy: EncoderAnatomy, index: int, start: str) -> None:
        layer = base.get_submodule(f"{anatomy.layers}.{index}")
        layers, call = _husks(base, anatomy), LayerCall(layer, ends=True)
        layers[index] = with_forward(layer, call)
        echoes = {path: _Echo() for path in anatomy.between}
        super().__init__(base, anatomy, anywhere(base, anatomy), layers, echoes, start)
        self.layer = layer
        self.paths["layer"] = f"{start}{anatomy.layers}.{index}"
        self._mine, self._kept = call, f"{KEPT}{index}" if index in anatomy.kept else ""

    def forward(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the layer as the encoder calls it."""
        item = {name: each for name, each in x.items() if name != HIDDEN and not name.startswith(KEPT)}
        self._mine.x = x[HIDDEN][0]
        try:
            output = self.features(x[HIDDEN][0].detach(), item)
        finally:
            self._mine.x = None
        if not isinstance(output, Tensor):
            raise ModelError("the encoder's forward ended before it came to the layer of this section")
        hidden = {**x, HIDDEN: output[None]}
        return hidden | ({self._kept: output[None]} if self._kept else {})


class HfEncoderHead(EncoderSection):
    """The layers' outputs to the rows of an image."""

    ends = False

    def __init__(self, base: Any, anatomy: EncoderAnatomy, start: str) -> None:
        every = list(base.get_submodule(anatomy.layers).children())
        idle = {f"{anatomy.layers}.{i}": every[i] for i in range(anatomy.last + 1, len(every))}
        paths = (*anatomy.between, *anatomy.after, *anatomy.unused)
        held = {path: base.get_submodule(path) for path in paths} | idle | anywhere(base, anatomy)
        layers: list[nn.Module] = []
        begins: dict[str, LayerOutput] = {}
        for index, layer in enumerate(every):
            stand_in = bare(layer)
            stand_in._parameters, stand_in._buffers = {}, {}
            stand_in.forward = husk(layer, anatomy.returns.get(type(layer), 0)).forward
            if index == anatomy.last or index in anatomy.kept:
                name = HIDDEN if index == anatomy.last else f"{KEPT}{index}"
                stand_in.forward = begins[name] = LayerOutput(stand_in.forward)
            layers.append(stand_in)
        super().__init__(base, anatomy, held, layers, {}, start)
        self._begins = (begins,)  # no submodules

    def forward(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the encoder with the layers' outputs in their places.

        Returns:
            `ROWS` and `DEEP`, each [1, rows, width].
        """
        (begins,) = self._begins
        item = {name: each for name, each in x.items() if name != HIDDEN and not name.startswith(KEPT)}
        for name, begin in begins.items():
            begin.x = x[name][0]
        try:
            output = self.features(x[HIDDEN][0].detach(), item)
        finally:
            for begin in begins.values():
                begin.x = None
        return {name: each[None] for name, each in rows_of(output).items()}


def rows_of(output: Any) -> dict[str, Tensor]:
    """The output of `get_image_features`: `ROWS` [rows, width], and `DEEP` + "0", "1", ... likewise."""
    outputs = {ROWS: _rows(output.pooler_output)}
    for index, deep in enumerate(getattr(output, "deepstack_features", None) or ()):
        outputs[f"{DEEP}{index}"] = _rows(deep)
    return outputs


def _rows(features: Any) -> Tensor:
    """An encoder's output, a tensor or one for each image, as rows [rows, width]."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([each.flatten(0, -2) for each in features])


def _husks(base: Any, anatomy: EncoderAnatomy) -> list[nn.Module]:
    layers = base.get_submodule(anatomy.layers).children()
    return [husk(layer, anatomy.returns.get(type(layer), 0)) for layer in layers]


def image_of(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an image as a dataset gives it, without a dimension of 1 that a collate function put
    before theirs.

    Pixels are [images, channels, height, width], or [patches, numbers] with a grid; their mask is [images,
    height, width]; all else [images, ...].

    Raises:
        ModelError: it is no mapping with pixels.
    """
    if not isinstance(item, Mapping) or PIXELS not in item:
        raise ModelError(
            f"an image is a mapping with {PIXELS}, as the model's processor gives it: "
            "elasticd.models.huggingface.sample_of makes a sample of that"
        )
    dims = dict.fromkeys(item, 2) | {PIXELS: 2 if GRID in item else 4}
    if PIXEL_MASK in item and item[PIXEL_MASK].shape[-2:] == item[PIXELS].shape[-2:]:
        dims[PIXEL_MASK] = 3
    return {name: x.flatten(0, max(0, x.dim() - dims[name])) for name, x in item.items()}


def features_of(base: Any, item: Mapping[str, Tensor], *, by_sample: bool) -> Any:
    """The output of an encoder for one image.

    Args:
        base: the model that has `get_image_features`.
        item: as `image_of` gives it.
        by_sample: the function takes images by sample, [samples, images, ...].
    """
    given = {name: x[None] for name, x in item.items()} if by_sample else item
    return base.get_image_features(**given, return_dict=True)
