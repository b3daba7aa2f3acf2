"""Samples and batches of a vision-language model: one sample is one text with its images.

A sample is a mapping with

    input_ids        the tokens, those of images among them
    labels           as of a text model
    images           a list with an item for each image: a mapping with `pixel_values`, [1, channels, height,
                     width] or [patches, numbers], and what else the encoder takes of that image, as
                     `image_grid_thw` [1, 3]. The module "vision" reads them; a batch does not have them
    image_grid_thw, image_sizes, mm_token_type_ids, token_type_ids
                     what the model's processor gives of the sample, where the model takes it

`sample_of` makes one of what a processor gave. In a batch, rows of images are padded: [samples, images, 3]. A
packed row has none: what a model makes of them for its tokens, positions on several axes, is made of each
sample before it is cut, with an entry for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elasticd.models.huggingface.batches import IDS, HfBatches
from elasticd.models.huggingface.encoder import GRID, PIXEL_MASK, PIXELS
from elasticd.models.huggingface.vision_language import IMAGES, MODALITIES, OF_IMAGES, ROPE_POSITIONS
from elasticd.runtime.data.collate import Unlike

#: What a processor gives with a row for each image, which an image's item may have.
_ROWS = (*OF_IMAGES, PIXEL_MASK, "image_position_ids")


#: Numbers in a row of each.
_WIDTHS = {GRID: 3, "image_sizes": 2}
_MAKES = "elasticd.models.huggingface.sample_of(processor(...)) makes the sample"


def sample_of(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of a job for a vision-language model, of what a processor of transformers gave for one text.

    Args:
        encoded: `processor(text=text, images=[...], return_tensors="pt")`, or with labels, too.

    Returns:
        The same without the dimension of one sample, and with the images' tensors as a list under "images".

    Raises:
        ValueError: it has several texts, or its pixels are not those of its images.
    """
    sample: dict[str, Any] = {}
    for name, part in encoded.items():
        if not isinstance(part, Tensor):
            raise ValueError(
                f"{name} is a {type(part).__name__}: call the processor with return_tensors='pt', of one text"
            )
        if name in (PIXELS, *_ROWS):
            continue
        if part.dim() == 2 and len(part) != 1:
            raise ValueError(f"{name} has {len(part)} rows: give the processor one text at a time")
        sample[name] = part[0] if part.dim() == 2 else part
    sample |= {name: encoded[name] for name in OF_IMAGES if name in encoded}
    sample[IMAGES] = _items(encoded)
    return sample


def _items(encoded: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of each image."""
    pixels = encoded.get(PIXELS)
    if pixels is None:
        return []
    beside = {name: encoded[name] for name in _ROWS if name in encoded}
    if GRID in beside:
        sizes = beside[GRID].prod(-1).tolist()
    else:
        if pixels.dim() == 5 and len(pixels) == 1 and OF_IMAGES[1] not in beside:
            beside = {name: of_all[0] if of_all.dim() > 2 else of_all for name, of_all in beside.items()}
            pixels = pixels[0]
        sizes = [1] * len(pixels)
    wrong = [name for name, rows in beside.items() if len(rows) != len(sizes)]
    if sum(sizes) != len(pixels) or wrong:
        raise ValueError(
            f"{PIXELS} has {len(pixels)} rows, and {wrong[0] if wrong else GRID} says other images: give "
            "sample_of what the processor gave of one text and all its images"
        )
    return [
        {PIXELS: rows} | {name: of_all[index : index + 1] for name, of_all in beside.items()}
        for index, rows in enumerate(pixels.split(sizes))
    ]


@dataclass(frozen=True, kw_only=True)
class HfImageBatches(HfBatches):
    """Reads the batches of one vision-language model: a `BatchFormat`."""

    of_images: tuple[str, ...] = ()  #: of `OF_IMAGES` those that the embedding takes
    image_token: int = -1  #: the token that stands for a row of an image
    #: Tokens that stand for what is no image, by its name: "videos".
    other_marks: Mapping[str, int] = field(default_factory=dict)
    merge: int = 0  #: patches of a grid's side that are merged into one row of an image; 0: not known
    #: Of the tokens of a sample, what each stands for, and the grids of its images: the positions on all axes,
    #: [tokens, axes]; None: the model counts the tokens alone.
    rope_positions: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None

    def sample(self, sample: Any) -> Any:
        """Lists of numbers as tensors, without text and images; rows of images [images, n] as [images * n], so
        that samples of unlike numbers of images are padded."""
        if not isinstance(sample, Mapping):
            return sample
        self._check_images(sample.get(IMAGES))
        parts = super().sample({name: part for name, part in sample.items() if name != IMAGES})
        for name in self.of_images:
            rows = parts.get(name)
            if rows is not None and not (isinstance(rows, Tensor) and rows.dim() == 2):
                raise Unlike(0, f"{name} must be a tensor with a row for each image of the sample")
            parts[name] = torch.zeros(0, dtype=torch.long) if rows is None else rows.flatten().long()
        return parts

    def batch(self, batch: Any) -> Any:
        """The batch as `HfBatches` gives it, without a mask that says nothing; rows of images are
        [samples, images, n].

        Raises:
            Unlike: the model's modules cannot take what the batch says.
        """
        if isinstance(batch, Mapping):
            _refuse_pixels(batch, "batch")
        inputs = super().batch(batch)
        inputs.pop("attention_mask", None)
        inputs.pop("position_ids", None)
        ids = _ids(inputs)
        self._refuse_other_marks(ids)
        for name in self.of_images:
            rows = inputs.get(name)
            if isinstance(rows, Tensor) and _is_padded(rows, len(ids), width := _WIDTHS[name]):
                inputs[name] = rows.unflatten(1, (rows.shape[1] // width, width))
        if GRID in self.of_images and self.merge:
            self._check_grids(ids, inputs.get(GRID))
        return inputs

    def row(self, sample: Any) -> Any:
        """The parts of a sample that have an entry for each token, the positions on all axes among them.

        Raises:
            Unlike: a packed row cannot take what the sample says.
        """
        parts = self.sample(sample)
        if not isinstance(parts, Mapping):
            return parts
        _refuse_pixels(parts, "sample")
        if "position_ids" in parts:
            raise Unlike(
                0,
                f"position_ids are in the sample, and {self.model} counts the positions of tokens and images "
                "itself: leave them out",
            )
        row = self._row({name: part for name, part in parts.items() if name not in self.of_images})
        ids = next(row[name] for name in IDS if name in row)
        self._refuse_other_marks(ids[None])
        grids = parts[GRID].view(-1, 3) if GRID in self.of_images else None
        if grids is not None and self.merge:
            self._check_grids(ids[None], grids[None])
        if self.rope_positions is not None:
            stands_for = row.get(MODALITIES, (ids == self.image_token).long())
            row[ROPE_POSITIONS] = self.rope_positions(ids, stands_for, grids)
        return row

    def item_places(self, batch: Any) -> Mapping[str, Tensor]:
        """The tokens that stand for rows of images."""
        return {} if self.image_token < 0 else {IMAGES: _ids(batch) == self.image_token}

    def _refuse_other_marks(self, ids: Tensor) -> None:
        """Raises Unlike for tokens that stand for what no module of the model encodes."""
        for kind, token in self.other_marks.items():
            if bool((wrong := (ids == token).any(1)).any()):
                raise Unlike(
                    int(wrong.nonzero()[0]),
                    f"it has tokens of {kind} ({token}), which would be trained as text: elasticd encodes "
                    "images alone, so leave such samples out",
                )

    def _check_images(self, images: Any) -> None:
        """Raises Unlike for items that are no images as a processor gives them."""
        for number, image in enumerate(images if isinstance(images, Sequence | Tensor) else ()):
            if not isinstance(image, Mapping) or not isinstance(image.get(PIXELS), Tensor):
                raise Unlike(
                    0,
                    f"{IMAGES}[{number}] is a {type(image).__name__}: an image of {self.model} is a mapping "
                    f"with {PIXELS}, as its processor gives it; {_MAKES}",
                )
            if GRID in self.of_images and GRID not in image:
                raise Unlike(0, f"{IMAGES}[{number}] has no {GRID}, which the processor of {self.model} gives")

    def _check_grids(self, ids: Tensor, grids: Any) -> None:
        """Raises Unlike for a sample whose tokens of images are not as many as its grids say."""
        wanted = (ids == self.image_token).sum(1)
        if isinstance(grids, Tensor) and grids.dim() == 2 and grids.numel():
            rows = _dealt(wanted, grids.prod(-1) // self.merge**2)
        elif isinstance(grids, Tensor) and grids.dim() == 3:
            rows = grids.prod(-1).sum(1) // self.merge**2
        else:
            rows = torch.zeros_like(wanted)
        wrong = (wanted != rows).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise Unlike(
                place,
                f"it has {int(wanted[place])} tokens of images ({self.image_token}), and {GRID} says "
                f"{int(rows[place])} rows: give both as the processor gave them",
            )


def _refuse_pixels(parts: Mapping[str, Any], where: str) -> None:
    """Raises Unlike for pixels that are in no list of images."""
    for name in ("pixel_values", "pixel_values_videos"):
        if name in parts:
            raise Unlike(
                0, f"{name} is in the {where}: a sample has its images in a list under {IMAGES!r}; {_MAKES}"
            )


def _ids(batch: Mapping[str, Any]) -> Tensor:
    """The tokens of a batch, or of a sample."""
    ids: Tensor = next(batch[name] for name in IDS if name in batch)
    return ids


def _is_padded(rows: Tensor, samples: int, width: int) -> bool:
    """Returns True for rows of images that `pad` made of those of each sample, [samples, images * width]; False
    for those that a collate function joined, [images, width]. Both may have that shape: then every sample has
    one image, unless padding says that one has none."""
    if rows.dim() != 2 or len(rows) != samples or rows.shape[1] % width:
        return False
    return rows.shape[1] != width or not bool(rows.any(1).all())


def _dealt(wanted: Tensor, rows: Tensor) -> Tensor:
    """The rows of joined images by sample: each takes images until it has as many as it wants, and the last one
    takes all that are left.

    Args:
        wanted: rows of each sample [samples].
        rows: of each image [images].
    """
    ends, most = rows.cumsum(0).tolist(), len(rows)
    counts, at, before = [], 0, 0
    for place, want in enumerate(wanted.tolist()):
        start = before
        while at < most and (place == len(wanted) - 1 or before - start < want):
            before = ends[at]
            at += 1
        counts.append(before - start)
    return torch.tensor(counts)
