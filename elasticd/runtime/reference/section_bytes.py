"""The bytes that a job's sections keep and have alive, measured before its first plan by a run of each.

The embedding, a block of each kind and the head run forward and backward, whole and as one of two members of a
TP group has them, on one micro-batch of the job's first samples (of a stream, which is not read, on token
ids). They run on the meta device, where nothing is computed and a large model costs no more than a small one; a
small model runs on the CPU, and so does one that reads values (experts that take their tokens), if that takes a
moment. A model that runs on neither is counted by its shapes.

No generator of the script changes, nor any of its tensors: the sections are copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from elasticd_planner.profiling.samples import MeasuredBytes, ModelBytes
from elasticd_planner.spec.model import ModelSpec, Parameter, apportion
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.data.loader import reading
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.mixed_precision import converted
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.bundle import entering, going_back, sizes, tensors
from elasticd.runtime.model.rng import begun_at
from elasticd.runtime.reference.live_bytes import fused_attention
from elasticd.runtime.reference.parts import ProfiledPart, Values, part_of

log = logging.getLogger(__name__)

#: Kinds of blocks that are measured: the largest. Those beside them keep less, or are taken to.
MOST_KINDS = 4
#: The attribute of a tensor without values that Python reads as true or false.
_ANSWER = "elasticd_answer"
#: Multiplications in a forward pass up to which the CPU is the quicker one, and those of a second or two there.
_SMALL_WORK, _MOST_WORK = 1 << 26, 1 << 32


class _WithoutValues(TorchFunctionMode):
    """Lets sections run on the meta device as they do on a device with values in which nothing is unusual.

    Attention keeps what it keeps where there is a fused kernel: torch takes one that makes all scores there.
    Python may read whether `all` or `any` of a tensor are true: a mask has no padding, no number is infinite.
    A loss may read how many targets there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_loss = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            fused = fused_attention(*args, **(kwargs or {}))
            if fused is not None:
                return fused
        name = getattr(func, "__name__", "")
        if name in ("__bool__", "__int__", "__float__", "item") and args[0].is_meta:
            if self.in_loss:
                return {"__bool__": True, "__float__": 1.0}.get(name, 1)
            if name == "__bool__" and (answer := getattr(args[0], _ANSWER, None)) is not None:
                return answer
        out = func(*args, **(kwargs or {}))
        if name in ("all", "any") and isinstance(out, Tensor) and out.is_meta:
            setattr(out, _ANSWER, name == "all")
        return out


def section_bytes(recipe: Recipe) -> ModelBytes | None:
    """Measures the sections of a job's model.

    Args:
        recipe: of the job. Its first samples are read.

    Returns:
        Bytes of the embedding, of a block (the most of all kinds) and of the head, whole and halved where they
        can be; None: they cannot be measured here, and a line at debug level says why.
    """
    began = time.perf_counter()
    why = ""
    try:
        batch, tokens = _first_batch(recipe)
        for accelerator in _accelerators(_work(recipe.model.spec, tokens)):
            try:
                measured = _measured(recipe, batch, accelerator)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                continue
            log.debug("bytes of sections measured in %.2f s", time.perf_counter() - began)
            return measured
    except Exception as error:  # of the user's dataset or collate, which says so again where it is needed
        why = f"{type(error).__name__}: {error}"
    log.debug(
        "the bytes of sections follow from the shapes of their parameters, since they do not run: %s", why
    )
    return None


def _first_batch(recipe: Recipe) -> tuple[Any, int]:
    """A micro-batch of the first samples, on the host, and about how many tokens it has. Packed rows have no
    padding: as many copies of the first sample stand for one as fill it."""
    dataset, packing, count = recipe.dataset, recipe.data.packing, recipe.micro_batch
    if packing is not None and packing.tokens is not None:
        count = max(1, round(packing.tokens / recipe.tokens))
    with begun_at(0):
        if isinstance(dataset, Stream):
            samples = [_stand_in(round(dataset.tokens), own_loss=recipe.loss is recipe.model.loss)] * count
        elif packing is not None:
            samples = [dataset[0]] * count
        else:
            samples = [dataset[index % len(dataset)] for index in range(count)]
        batch = reading(recipe.reads, recipe.data.collate)(samples)
    return batch, round(count * recipe.tokens)


def _stand_in(tokens: int, *, own_loss: bool) -> dict[str, Tensor]:
    """A sample of token ids for a stream's, which is not read before the job starts: as transformers names them
    for a model's own loss, else as elasticd does."""
    ids = torch.zeros(max(1, tokens), dtype=torch.int64)
    return dict.fromkeys(("input_ids", "labels") if own_loss else ("inputs", "targets"), ids)


def _accelerators(work: int) -> tuple[Accelerator, ...]:
    """The devices to run sections on that take so many multiplications, in the order of trying."""
    meta = Accelerator("meta")
    if work > _MOST_WORK:
        return (meta,)
    return (CPU, meta) if work < _SMALL_WORK else (meta, CPU)


def _work(spec: ModelSpec, tokens: int) -> int:
    """Multiplications of a forward pass through the sections that are measured."""
    measured = (spec.embed, spec.head, *(spec.kinds[kind] for kind in _largest_kinds(spec)))
    return tokens * sum(map(_elements, measured))


def _elements(parameters: Sequence[Parameter]) -> int:
    return sum(torch.Size(parameter.shape).numel() for parameter in parameters)


def _largest_kinds(spec: ModelSpec) -> list[int]:
    """The kinds of blocks that are measured, in their order."""
    by_size = sorted(range(len(spec.kinds)), key=lambda kind: -_elements(spec.kinds[kind]))
    return sorted(by_size[:MOST_KINDS])


def _measured(recipe: Recipe, batch: Any, accelerator: Accelerator) -> ModelBytes:
    model, precision = recipe.model, recipe.precision
    values = Values(model, accelerator)
    batch = converted(batch, lambda x: x.to(accelerator.device))
    entered = precision.entering(batch) if precision is not None else batch
    halves = [parameter.cut for kind in model.spec.kinds for parameter in kind if parameter.cut is not None]
    units = min((model.spec.units_of(cut.units).count for cut in halves), default=1)
    measured: list[MeasuredBytes] = []
    with begun_at(0), _WithoutValues() as without_values:
        for shares in [(1,), apportion(units, (1, 1))] if units > 1 else [(1,)]:
            parts = list(_parts(recipe, shares, values, without_values))
            if not measured:
                inputs = _entering(parts, entered)
                bundle_bytes = _bundle_bytes(inputs)
            measured += map(partial(_of_part, batch=batch), parts, inputs)
    return ModelBytes(sections=_largest_blocks(measured), bundle_bytes=bundle_bytes)


def _parts(
    recipe: Recipe, shares: tuple[int, ...], values: Values, without_values: _WithoutValues
) -> Iterator[ProfiledPart]:
    """The sections of one width: embed, a block of each kind that is measured, head."""
    model, precision = recipe.model, recipe.precision

    def loss(output: Any, batch: Any) -> tuple[Tensor, float | Tensor]:
        without_values.in_loss = True
        try:
            return recipe.loss(precision.leaving(output) if precision is not None else output, batch)
        finally:
            without_values.in_loss = False

    blocks = [f"blocks.{model.spec.layers.index(kind)}" for kind in _largest_kinds(model.spec)]
    for section in ("embed", *blocks, "head"):
        label = "block" if section in blocks else section
        part = part_of(model, section, label, shares, values, loss if section == "head" else None)
        if precision is not None:
            precision.add_up(part.module.parameters())
        yield part


def _entering(parts: Sequence[ProfiledPart], batch: Any) -> list[Any]:
    """The input of each section: the batch, and then the output of the section before."""
    inputs = [batch]
    for part in parts[:-1]:
        inputs.append(entering(part.forward(inputs[-1])))
    return inputs


def _bundle_bytes(inputs: Sequence[Any]) -> float:
    """See `ModelProfile`: the output of a block, on average over the kinds that are measured."""
    outputs = inputs[2:]
    if all(isinstance(bundle, Tensor) for bundle in outputs):
        return 0.0
    both = [x for bundle in outputs for x in (*tensors(bundle), *going_back(bundle).values())]
    samples, length = sizes(inputs[1])
    return sum(x.nbytes for x in both) / 2 / len(outputs) / (samples * length)


def _of_part(part: ProfiledPart, inputs: Any, batch: Any) -> MeasuredBytes:
    block, embed = part.label == "block", part.label == "embed"
    kept_bytes = part.kept(inputs, batch)
    samples, length = sizes(part.forward(inputs) if embed else inputs)
    return MeasuredBytes(
        section=part.label,
        share=part.share,
        tokens=samples * length,
        kept=kept_bytes,
        kept_recomputed=part.kept(inputs, batch, recompute=True) if block else 0,
        working=part.working(inputs, batch, kept_bytes) if not embed else 0,
    )


def _largest_blocks(measured: Sequence[MeasuredBytes]) -> tuple[MeasuredBytes, ...]:
    """One block for each share: in each number the most of all kinds."""
    blocks = [each for each in measured if each.section == "block"]
    largest = [
        MeasuredBytes(
            section="block",
            share=share,
            tokens=blocks[0].tokens,
            kept=max(block.kept for block in blocks if block.share == share),
            kept_recomputed=max(block.kept_recomputed for block in blocks if block.share == share),
            working=max(block.working for block in blocks if block.share == share),
        )
        for share in dict.fromkeys(block.share for block in blocks)
    ]
    return (*largest, *(each for each in measured if each.section != "block"))
