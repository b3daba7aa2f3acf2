"""Proof that the two modules of a vision-language model compute the same as the model, on a small copy.

Samples with two images, without one, with one and with three go through the model itself, and through the
sections of its modules, each cut off from the others in the autograd graph as on other devices. Logits and
gradients are compared. The encoder's parameters that no image reaches are found, too: they are frozen. The same
samples packed in one row show whether the model packs.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from elasticd_planner.spec.batch import SequencePiece
from torch import Tensor

from elasticd.models.huggingface import tiny_config
from elasticd.models.huggingface.adapters import Adapters
from elasticd.models.huggingface.anatomy import REMEDY, Anatomy, AnatomyTrace, arguments, logits_of
from elasticd.models.huggingface.encoder import EncoderAnatomy, NotInBlocks, encoder_anatomy, features_of
from elasticd.models.huggingface.proof import (
    ModelMaker,
    drawn_inside,
    fill,
    first_failure,
    module_kinds,
    on_the_side,
    shifted_by,
    takes,
)
from elasticd.models.huggingface.small_images import IMAGE_TOKEN, TEXT, encoder_depth, images_of, small_config
from elasticd.models.huggingface.vision_language import (
    IMAGES,
    LANGUAGE,
    OF_IMAGES,
    ROPE_POSITIONS,
    TOKEN_TYPES,
    VISION,
    HfModule,
    RopePositions,
    Seam,
    constants,
    image_token,
    modules_of,
    seam_of,
)
from elasticd.runtime.model import bundle as bundles
from elasticd.runtime.model.section_passes import SectionWatch, back_through, forth, separate
from elasticd.runtime.model.validation import ModelError, replace_dropouts
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from elasticd.runtime.reference.comparison import difference

log = logging.getLogger(__name__)

#: How many images the samples of a small copy have.
COUNTS = (2, 0, 1, 3)
#: Layers of the encoders of the two small copies.
DEPTHS = (3, 4)
#: How far logits and gradients may be apart. transformers' norms and rotary tables are in single precision.
NEAR = 1e-5
#: The deviation of outputs of a matrix whose inputs have one of 1.
_GAIN = 0.5


@dataclass(frozen=True, kw_only=True)
class ImageSample:
    """A sample of a small copy."""

    ids: Tensor  #: [1, tokens]
    images: tuple[dict[str, Tensor], ...]  #: what the encoder takes of each
    beside: Mapping[str, Tensor]  #: what the whole model's forward takes beside them
    by_sample: bool = False  #: see `Seam`

    def whole(self) -> dict[str, Tensor]:
        """The arguments of the complete model's forward."""
        pixels = [each["pixel_values"] for each in self.images]
        if not pixels:
            return {"input_ids": self.ids, **self.beside}
        joined = torch.cat(pixels)
        return {
            "input_ids": self.ids,
            **self.beside,
            "pixel_values": joined[None] if self.by_sample else joined,
        }


@dataclass(frozen=True, kw_only=True)
class VisionLanguageProof:
    """The findings about a vision-language model."""

    anatomy: Anatomy
    seam: Seam
    unused: frozenset[str]  #: the encoder's parameters that no image reaches, by their names in the model
    apart: float  #: the furthest logit or gradient, in units of the largest
    #: Its own loss compares a token's logits with the next token's label, or (False) its own; None: neither.
    shifts: bool | None
    model: str
    counts_from_zero: bool  #: positions 0, 1, 2, ... are those that the model takes by itself
    unpackable: str  #: why its samples cannot be packed in one row; empty: they can
    one_block: str = ""  #: why the encoder is one block; empty: it has a block for each layer

    def __str__(self) -> str:
        text = f"the model's own forward: {self.model}, as vision and language, on a small copy with 0 to 3 "
        text += f"images a sample within {self.apart:.0e}"
        places = dict.fromkeys(_LAYER.sub(r".\1.*\n", name).partition("\n")[0] for name in sorted(self.unused))
        return text + (f"; never used, and frozen: {', '.join(places)}" if places else "")


def prove_modules(model: Any, adapters: Adapters | None = None) -> VisionLanguageProof:
    """Tries the modules of a vision-language model on small copies.

    Raises:
        ModelError: they are not the model, or no small copy with images can be made.
    """
    _refuse_other_modules(model)
    kind, every = ModelMaker(type(model), adapters), [name for name, _ in model.named_parameters()]
    with on_the_side():
        copy_, (samples, seam, anatomy) = _small_with_samples(kind, model.config, DEPTHS[0])
        seam, one_block = _in_blocks(kind, model.config, copy_, (samples, seam, anatomy))
        apart, idle = compared_modules(copy_, samples, seam, anatomy)
        with torch.no_grad():
            _refuse_masks(copy_, samples)
            _refuse_others(copy_, samples, modules_of(copy_, anatomy, seam))
            whole = samples[0].whole()
            unpackable = why_unpackable(copy_, samples, seam, anatomy)
            counted = all(_counts_from_zero(copy_, sample) for sample in samples)
            shifts = shifted_by(copy_, whole, logits_of(copy_(**whole, **arguments(copy_))))
        variants = [(idle, [name for name, _ in copy_.named_parameters()])]
        copy_, (samples, _, _) = _small_with_samples(kind, model.config, DEPTHS[1])
        variants.append((_unreached(copy_, samples), [name for name, _ in copy_.named_parameters()]))
        _refuse_draws(kind, copy_.config, tiny_config.dropouts(model.config), blocks=seam.encoder is not None)
        if seam.encoder is not None:
            seam = replace(seam, encoder=_real_encoder(kind, model.config))
    # An expert that no token of so few is sent to is no parameter that nothing reaches.
    unused = {name for name in _unused_at_any_depth(variants, every) if "expert" not in name}
    return VisionLanguageProof(
        anatomy=anatomy,
        seam=seam,
        unused=frozenset(name for name in unused if not name.startswith(f"{seam.language}.")),
        apart=apart,
        shifts=shifts,
        model=kind.__name__,
        counts_from_zero=counted,
        unpackable=unpackable,
        one_block=one_block,
    )


def _refuse_other_modules(model: Any) -> None:
    """Raises ModelError for a model with other modules than its configuration makes: small copies, which are
    made of that, would say nothing of it."""
    try:
        with torch.device("meta"):
            again = type(model)(model.config)
    except Exception:
        log.debug("a model of the configuration could not be made", exc_info=True)
        return
    other = {path for path, _ in module_kinds(model) ^ module_kinds(again)}
    outermost = sorted(path for path in other if path.rpartition(".")[0] not in other)
    if outermost:
        raise ModelError(
            f"{', '.join(outermost[:3])} of {type(model).__name__} is not what its configuration makes, or is "
            "not there, so that a small copy would be another model: give the model as from_pretrained makes "
            f"it, or {REMEDY}"
        )


def _refuse_masks(model: Any, samples: list[ImageSample]) -> None:
    """Raises ModelError where logits depend on what an attention mask says: batches of a `Job` have none, and
    padding behind their samples."""
    name, take = type(model).__name__, arguments(model)
    for sample in samples:
        whole = sample.whole()
        own = logits_of(model(**whole, **take))
        try:
            masked = logits_of(model(**whole, attention_mask=torch.ones_like(sample.ids), **take))
        except Exception as error:
            raise ModelError(
                f"{name} fails with an attention_mask ({first_failure(error)}), so that it cannot be compared "
                "with the model without one"
            ) from error
        if not difference(masked, own) <= NEAR:
            raise ModelError(
                f"{name} computes something else without an attention_mask than with one of ones, and a batch "
                "of a Job has none"
            )
        padded = {
            key: torch.nn.functional.pad(part, (0, 3)) if key in ("input_ids", *TOKEN_TYPES) else part
            for key, part in whole.items()
        }
        if not difference(logits_of(model(**padded, **take))[:, : own.shape[1]], own) <= NEAR:
            raise ModelError(
                f"in {name} the tokens of a sample attend to padding behind it, unless an attention_mask says "
                "where it ends, and a batch of a Job has none"
            )


def _refuse_others(model: Any, samples: list[ImageSample], modules: Mapping[str, HfModule]) -> None:
    """Raises ModelError where a sample's logits depend on the others of its micro-batch, which a layout
    chooses: those of the modules on all samples, padded, are compared with the model's on each."""
    name, take = type(model).__name__, arguments(model)

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([each[0] for each in tensors], batch_first=True)

    beside = {
        key: padded([each.beside[key] for each in samples])
        if key in TOKEN_TYPES
        else torch.cat([each.beside[key] for each in samples if key in each.beside])
        for key in dict.fromkeys(key for each in samples for key in each.beside)
    }
    items: list[Any] = [Chain(modules[VISION], image).output for each in samples for image in each.images]
    batch = {"input_ids": padded([each.ids for each in samples]), IMAGES: joined_items(items), **beside}
    try:
        logits = Chain(modules[LANGUAGE], batch).output
    except Exception as error:
        raise ModelError(
            f"the modules of {name} fail with several samples ({first_failure(error)}): {REMEDY}"
        ) from error
    for row, sample in zip(logits, samples, strict=True):
        own = logits_of(model(**sample.whole(), **take))[0]
        if not difference(row[: len(own)], own) <= NEAR:
            raise ModelError(
                f"what {name} gives for a sample depends on the others of the micro-batch: {REMEDY}"
            )


def why_unpackable(model: Any, samples: Sequence[ImageSample], seam: Seam, anatomy: Anatomy) -> str:
    """Why a packed row does not give what the model itself gives for its samples; empty where it does."""
    modules, take = modules_of(model, anatomy, seam), arguments(model)
    refused = f"samples of {type(model).__name__} can be padded, not packed in one row"
    language = modules[LANGUAGE]
    for sample in samples:
        items = [Chain(modules[VISION], image).output for image in sample.images]
        embedded = language.embed({"input_ids": sample.ids, IMAGES: joined_items(items), **sample.beside})
        if isinstance(embedded, Mapping) and any(map(_sees_later, embedded.items())):
            return f"{refused}: tokens of an image attend to later ones, and elasticd.attention is causal"
    try:
        batch, row = row_of_samples(model, samples, seam)
        items = [Chain(modules[VISION], image).output for each in samples for image in each.images]
        with passing(row):
            logits = Chain(language, batch | {IMAGES: joined_items(items)}).output
    except ModelError as error:
        return f"{refused}: {first_failure(error)}"
    except Exception as error:
        return f"{refused}: the language model fails with a packed row ({first_failure(error)})"
    own = torch.cat([logits_of(model(**sample.whole(), **take)) for sample in samples], 1)
    if not (apart := difference(logits, own)) <= NEAR:
        return f"{refused}: the logits of a packed row are {apart:.0e} off"
    return ""


def row_of_samples(model: Any, samples: Sequence[ImageSample], seam: Seam) -> tuple[dict[str, Any], PackedRow]:
    """A batch of samples in one packed row, without what the encoder makes; and the row."""
    rope = RopePositions.of(model, seam)
    token = image_token(model.config)
    rows = []
    for sample in samples:
        row = {name: x[0] for name, x in sample.beside.items() if name in TOKEN_TYPES}
        row["input_ids"] = sample.ids[0]
        if rope is not None:
            grids = sample.beside.get(OF_IMAGES[0])
            row[ROPE_POSITIONS] = rope(sample.ids[0], (sample.ids[0] == token).long(), grids)
        rows.append(row)
    pieces = [SequencePiece.whole(place, sample.ids.shape[1]) for place, sample in enumerate(samples)]
    batch = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    return batch, PackedRow(pieces, samples[0].ids.device)


def _sees_later(entry: tuple[str, Any]) -> bool:
    """Returns True for a mask [samples, 1, tokens, tokens] under which a token attends to later ones."""
    path, mask = entry
    if path.partition("/")[0] != "attention_mask" or mask.dim() < 3:
        return False
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return bool(allowed.triu(1).any())


def _counts_from_zero(model: Any, sample: ImageSample) -> bool:
    """Returns True if a copy gives with positions 0, 1, 2, ... what it gives without positions."""
    if "position_ids" not in takes(model):
        return True
    places, whole, take = torch.arange(sample.ids.shape[1])[None], sample.whole(), arguments(model)
    try:
        given = logits_of(model(**whole, position_ids=places, **take))
    except Exception:
        return False
    return difference(given, logits_of(model(**whole, **take))) <= NEAR


def _in_blocks(
    kind: Any, config: Any, model: Any, found: tuple[list[ImageSample], Seam, Anatomy]
) -> tuple[Seam, str]:
    """The seam of a copy, with its encoder in blocks where that gives the same, and the reason why it is one
    block."""
    samples, seam, anatomy = found
    try:
        if seam.encoder is None:
            raise NotInBlocks(seam.one_block)
        compared_modules(copy.deepcopy(model), samples, seam, anatomy)
        real = _real_encoder(kind, config)
        if _around(real) != _around(seam.encoder):
            raise NotInBlocks("one with as many layers is made of other parts than a small one")
    except (ModelError, NotInBlocks) as why:
        return replace(seam, encoder=None), str(why).removesuffix(f": {REMEDY}")
    return seam, ""


def _around(encoder: EncoderAnatomy) -> tuple[object, ...]:
    """The parts that do not depend on the number of layers."""
    return encoder.layers, encoder.before, encoder.anywhere, encoder.returns


def _real_encoder(kind: Any, config: Any) -> EncoderAnatomy:
    """The anatomy of an encoder of as many layers as the model's, which says what is taken of which layer.

    Raises:
        NotInBlocks: it has none.
    """
    depth = encoder_depth(config.vision_config)
    assert depth is not None
    model = small_model(kind, config, depth)
    base, language = seam_of(model)
    inner = model.get_submodule(base)
    image, _ = next(images_of(inner, model.config))
    return encoder_anatomy(inner, language.removeprefix(f"{base}."), image, depth)


def _small_with_samples(
    kind: Any, config: Any, depth: int
) -> tuple[Any, tuple[list[ImageSample], Seam, Anatomy]]:
    try:
        model = small_model(kind, config, depth)
        return model, samples_of(model)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"no small copy of {kind.__name__} with images can be made to compare it with its modules "
            f"({first_failure(error)}): {REMEDY}"
        ) from error


def _refuse_draws(kind: Any, config: Any, dropouts: Mapping[str, float], *, blocks: bool) -> None:
    """Raises ModelError for dropouts of functions, whose masks a layout would change."""
    if dropouts and _draws(kind, config, dropouts, blocks):
        drawn = [name for name, value in dropouts.items() if _draws(kind, config, {name: value}, blocks)]
        raise ModelError(drawn_inside(kind.__name__, {name: dropouts[name] for name in drawn or dropouts}))


def _draws(kind: Any, config: Any, dropouts: Mapping[str, float], blocks: bool) -> bool:
    """Returns True if the modules draw random numbers once every nn.Dropout is a keyed one."""
    still = kind(config).to(torch.float64).eval()
    samples, seam, anatomy = samples_of(still)
    seam = seam if blocks else replace(seam, encoder=None)
    model = kind(tiny_config.with_numbers(config, dropouts)).to(torch.float64)
    modules = {
        name: replace(
            module,
            embed=replace_dropouts("embed", module.embed).train(),
            blocks=[replace_dropouts("blocks", block).train() for block in module.blocks],
            head=replace_dropouts("head", module.head).train(),
        )
        for name, module in modules_of(model, anatomy, seam).items()
    }
    before = torch.default_generator.get_state()
    with torch.no_grad():
        for sample in samples[:2]:
            items = [Chain(modules[VISION], image).output for image in sample.images]
            Chain(modules[LANGUAGE], {"input_ids": sample.ids, IMAGES: joined_items(items), **sample.beside})
    return not torch.equal(before, torch.default_generator.get_state())


def _unreached(model: Any, samples: list[ImageSample]) -> list[str]:
    """The trained parameters of a copy that no sample reaches."""
    sample = max(samples, key=lambda each: len(each.images))
    logits_of(model(**sample.whole(), **arguments(model))).sum().backward()
    return [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]


def small_model(kind: Any, config: Any, depth: int = DEPTHS[0]) -> Any:
    """A small copy with random weights, in double precision."""
    model = kind(small_config(config, depth)).to(torch.float64).train()
    fill(model, _GAIN)
    return model


def samples_of(model: Any) -> tuple[list[ImageSample], Seam, Anatomy]:
    """Samples for a small copy, where it is cut, and what its language model is made of."""
    base, language = seam_of(model)
    inner, pool = model.get_submodule(base), images_of(model.get_submodule(base), model.config)
    by_sample = takes_by_sample(inner, next(pool)[0])
    with torch.no_grad():
        output = features_of(inner, next(pool)[0], by_sample=by_sample)
    pooled = output.pooler_output
    listed = not isinstance(pooled, Tensor)
    seam = Seam(
        base=base,
        language=language,
        listed=listed,
        dims=(pooled[0] if listed else pooled).dim(),
        by_sample=by_sample,
    )
    depth = encoder_depth(model.config.vision_config)
    try:
        if depth is None:
            raise NotInBlocks("its configuration does not say how many layers it has")
        if by_sample:
            raise NotInBlocks("it takes images by sample")
        image = next(images_of(inner, model.config))[0]
        inner_anatomy = encoder_anatomy(inner, language.removeprefix(f"{base}."), image, depth)
        seam = replace(seam, encoder=inner_anatomy)
    except NotInBlocks as why:
        seam = replace(seam, one_block=str(why))
    with torch.no_grad():
        samples = [_sample(model, inner, list(islice(pool, count)), by_sample=by_sample) for count in COUNTS]
    text = samples[COUNTS.index(0)]
    anatomy = AnatomyTrace(model, text.ids, within=language, beside=text.beside).anatomy
    caught: list[dict[str, Any]] = []
    hook = model.get_submodule(language).register_forward_pre_hook(
        lambda _, args, kwargs: caught.append(constants(kwargs)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            for sample in samples:
                model(**sample.whole(), **arguments(model))
    finally:
        hook.remove()
    if any(each != caught[0] for each in caught):
        raise ModelError(
            f"the language model of {type(model).__name__} is called with other arguments for other samples, "
            f"{caught[0]} say: {REMEDY}"
        )
    return samples, replace(seam, constants=caught[0]), anatomy


def takes_by_sample(inner: Any, image: Mapping[str, Tensor]) -> bool:
    """Returns True if an encoder takes images by sample, and not one behind the other."""
    with torch.no_grad():
        try:
            features_of(inner, image, by_sample=False)
        except Exception as error:
            try:
                features_of(inner, image, by_sample=True)
            except Exception:
                raise error from None
            return True
    return False


def _sample(model: Any, inner: Any, images: list[Any], *, by_sample: bool) -> ImageSample:
    """A sample of tokens, with images at their places in it."""
    seeds = torch.Generator().manual_seed(len(images))
    ids, taken = torch.randint(2, TEXT, (1, 6), generator=seeds), []
    for item, _ in images:
        output = features_of(inner, item, by_sample=by_sample).pooler_output
        rows = output if isinstance(output, Tensor) else torch.cat(list(output))
        place = torch.full((1, rows.flatten(0, -2).shape[0]), IMAGE_TOKEN)
        ids = torch.cat((ids[:, :3], place, torch.full((1, 1), 7), ids[:, 3:]), 1)  # text between two images
        taken.append(item)
    known = {*takes(model), *takes(inner)}
    types = {name: (ids == IMAGE_TOKEN).long() for name in TOKEN_TYPES if name in known}
    joined = {
        name: torch.cat([beside[name] for _, beside in images]) for name in (images[0][1] if images else {})
    }
    return ImageSample(ids=ids, images=tuple(taken), beside=types | joined, by_sample=by_sample)


def compared_modules(
    model: Any,
    samples: list[ImageSample],
    seam: Seam,
    anatomy: Anatomy,
    modules: Mapping[str, HfModule] | None = None,
) -> tuple[float, list[str]]:
    """A copy's own forward and backward pass beside those of its modules.

    Returns:
        The furthest that a logit or a gradient is off, in units of the largest; and the parameters that nothing
        reaches, by their names in the model.

    Raises:
        ModelError: they are further apart than rounding explains.
    """
    whole, name = copy.deepcopy(model), type(model).__name__
    modules = modules or modules_of(model, anatomy, seam)
    furthest = 0.0
    for number, sample in enumerate(samples):
        own = logits_of(whole(**sample.whole(), **arguments(whole)))
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(number), dtype=own.dtype)
        (own * weights).sum().backward()
        try:
            logits = forward_and_backward(modules, sample, weights)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"the modules of {name} cannot run by themselves ({first_failure(error)}): {REMEDY}"
            ) from error
        apart = difference(logits, own.detach())
        furthest = max(furthest, apart)
        if not apart <= NEAR:
            raise ModelError(
                f"the logits of {name} with {len(sample.images)} images are {apart:.0e} off in its modules: "
                f"{REMEDY}"
            )
    unused, theirs = [], dict(whole.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    for full, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        apart = _gradient_apart(parameter.grad, theirs[full].grad, largest)
        furthest = max(furthest, apart)
        if not apart <= NEAR:
            raise ModelError(f"the gradient of {full} of {name} is {apart:.0e} off in its module: {REMEDY}")
        if theirs[full].grad is None:
            unused.append(full)
    return furthest, unused


def _gradient_apart(found: Tensor | None, own: Tensor | None, largest: float) -> float:
    """The error of a gradient, in units of its largest element; or of a thousandth of the largest of all
    gradients, where it is less: that of a bias of keys is zero but for rounding."""
    if found is None or own is None:
        return 0.0 if found is own else float("inf")
    return float((found - own).abs().max()) / max(float(own.abs().max()), largest / 1000)


def forward_and_backward(modules: Mapping[str, HfModule], sample: ImageSample, weights: Tensor) -> Tensor:
    """The logits of a sample, and the gradients of their weighted sum, section by section, each of which begins
    with new leaves of the autograd graph. The images go one by one."""
    items = [Chain(modules[VISION], image) for image in sample.images]
    entered = [bundles.entering(item.output) for item in items]
    joined = joined_items([each for each in entered if isinstance(each, Mapping)])
    language = Chain(modules[LANGUAGE], {"input_ids": sample.ids, IMAGES: joined, **sample.beside})
    language.backward(weights)
    for item, leaves in zip(items, entered, strict=True):
        item.backward(bundles.gradients(leaves))
    assert isinstance(language.output, Tensor)
    return language.output.detach()


def joined_items(items: list[Mapping[str, Tensor]]) -> dict[str, Tensor] | None:
    """The outputs of the encoder for several images as the language module takes them."""
    return {name: torch.cat([item[name][0] for item in items]) for name in items[0]} if items else None


class Chain:
    """The sections of a module on one input, one after the other."""

    def __init__(self, module: HfModule, given: Any) -> None:
        self.output: Any
        self._segments, self.output = forth(separate(dict(module)), given, _Fitting())

    def backward(self, gradients: Any) -> None:
        """The backward passes of the sections, from the gradients of the last one's output."""
        back_through(self._segments, gradients, SectionWatch())


class _Fitting(SectionWatch):
    """Refuses what cannot pass between sections."""

    def after(self, section: str, output: Any) -> None:
        """Raises ModelError where a section gave it."""
        if isinstance(output, Mapping) and (why := bundles.unfit(output)):
            raise ModelError(f"a section gave {why}")


_LAYER = re.compile(r"\.(\d+)\..*")
#: The layers of a list that have a parameter: the list's path and the parameter's in a layer, and its indices.
_Layers = dict[tuple[str, str], set[int]]


def _unused_at_any_depth(
    found: Sequence[tuple[Iterable[str], Sequence[str]]], real: Sequence[str]
) -> Iterator[str]:
    """The parameters of a model that nothing reaches.

    Args:
        found: of two copies, whose encoders are of unlike depths, the parameters that nothing reaches, and all.
        real: all parameters of the model.

    Raises:
        ModelError: the unused layers are neither all nor the same ones counted from either end.
    """
    idle, every, layers = [_layers(u) for u, _ in found], [_layers(all_) for _, all_ in found], _layers(real)
    for key in dict.fromkeys(key for each in idle for key in each):
        indices = [each.get(key, set()) for each in idle]
        counts = [len(each[key]) for each in every]
        ends = [{count - 1 - i for i in each} for count, each in zip(counts, indices, strict=True)]
        if all(len(each) == count for each, count in zip(indices, counts, strict=True)):
            chosen = layers.get(key, set())
        elif ends[0] == ends[1]:
            chosen = {len(layers[key]) - 1 - i for i in ends[0]}
        elif indices[0] == indices[1]:
            chosen = indices[0]
        else:
            raise ModelError(
                f"layers of {key[0]} are never used, and which ones depends on how many there are: {REMEDY}"
            )
        yield from (f"{key[0]}.{index}.{key[1]}" for index in chosen)
    plain = [{name for name in unused if not _LAYER.search(name)} for unused, _ in found]
    yield from plain[0] & plain[1]


def _layers(names: Iterable[str]) -> _Layers:
    layers: _Layers = {}
    for name in names:
        if match := _LAYER.search(name):
            rest = name[match.end(1) + 1 :]
            layers.setdefault((name[: match.start()], rest), set()).add(int(match[1]))
    return layers
