"""Which modules of a model take the sequences of a packed row for one: found by trying, and named.

Short sequences pass through the model twice: packed in one row, and each by itself. A module that was given the
same for each token, and gave something else, is named; the innermost one, and the first. So are a loss that is
no sum over tokens, and samples that have parts without an entry for each token.

Sections are made and tried one after the other, with random values in place of the model's, so that a gate or a
scale that begins at zero hides nothing. Of blocks of a large model that are alike one is tried.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn

from elasticd.codec.safe_text import shortened
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.model.local_model import LocalModel, local_model
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.packed_row import PackedRow, passing

log = logging.getLogger(__name__)

#: (output of the head, batch) -> sum over targets, how many they are. As in `elasticd.Job`.
Loss = Callable[[Any, Any], tuple[Tensor, float | Tensor]]

#: Tokens of the sequences that are tried.
LENGTHS = (6, 3, 5)
#: Relative differences that rounding explains, by the type that is computed in. What mixes sequences differs by
#: more: parameters are random.
NEAR = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
#: Parameters from which on a section is tried in single precision, and blocks that are alike are tried once.
_LARGE = 1 << 24
#: Random numbers of a parameter that has more elements: a prime, so that its rows differ.
_NUMBERS = 4194301

_REMEDY = (
    "modules must call elasticd.attention(q, k, v) in place of F.scaled_dot_product_attention, and "
    "elasticd.positions(x) in place of torch.arange, and else act on each token by itself"
)


def _warn(why: str) -> None:
    log.warning("whether sequences can be packed was not tried: %s", why)


def packable(
    model: Model,
    loss: Loss,
    samples: Sequence[Any],
    collate: Callable[[Sequence[Any]], Any] | None = None,
    untried: Callable[[str], None] = _warn,
    taken: Sequence[Mapping[str, TakenRows]] = (),
) -> list[str]:
    """The obstacles that keep the sequences of a model from being packed.

    Args:
        model: of the job.
        loss: of the job.
        samples: a few of its dataset, three say. Their last tokens are tried; of the first one those that take
            rows of its items, if there are some.
        collate: makes batches of samples that are no tensors by themselves: what it makes of each sample alone
            is tried. None: samples are tensors.
        untried: called with the reason where that cannot be tried here.
        taken: of a module that takes what others make of items: of each sample by key what it takes of them.

    Returns:
        A line for each finding, with the name of the module and the remedy. Empty: sequences can be packed.
    """
    if model.unpackable:
        return [model.unpackable]
    try:
        wanted = [samples[i % len(samples)] for i in range(len(LENGTHS))]
        wanted = wanted if collate is None else [_of_batch(collate([sample])) for sample in wanted]
        wanted = wanted if model.reads is None else list(map(model.reads.row, wanted))
        of_items = [taken[i % len(samples)] if taken else {} for i in range(len(LENGTHS))]
        spans = [
            _span(sample, length, of.values() if not place else ())
            for place, (sample, length, of) in enumerate(zip(wanted, LENGTHS, of_items, strict=True))
        ]
        pieces = [_part(sample, *span) for sample, span in zip(wanted, spans, strict=True)]
        rows = [
            {key: each.within(*span) for key, each in of.items()}
            for of, span in zip(of_items, spans, strict=True)
        ]
        given = RowAndSequences(
            tuple(map(_length, pieces)), _row_of(pieces), [_row_of([piece]) for piece in pieces]
        )
        entered = given.with_rows(rows) if taken else given
    except (_Unfit, KeyError, RuntimeError, TypeError, ValueError) as error:
        unfit = isinstance(error, _Unfit)
        return [str(error) if unfit else f"samples make no packed row: {type(error).__name__}: {error}"]
    why_not = ""
    for wide in (True, False):  # some modules compute in the type that they were made in alone
        for training in (True, False):
            try:
                return _tried(model, loss, given, entered, wide=wide, training=training)
            except _Drew:  # what drops elements draws other masks for other shapes
                continue
            except _Untried as why:
                why_not = str(why)
                break
    untried(why_not)
    return []


class _Unfit(ValueError):
    """Samples that make no row."""


class _Drew(Exception):
    """A section drew random numbers."""


class _Untried(Exception):
    """Not even one sequence by itself can be passed here: a kernel of another device, say."""


@dataclass(frozen=True)
class RowAndSequences:
    """The arguments of a section, or its result."""

    lengths: tuple[int, ...]  #: [tokens] of the sequences
    together: Any  #: all in one row
    apart: Sequence[Any]  #: each by itself

    def with_rows(self, rows: Sequence[Mapping[str, Any]]) -> RowAndSequences:
        """The same with the rows of items that each sequence takes, by key."""
        every = {key: _one_behind_the_other([of[key] for of in rows]) for key in rows[0]}
        apart = [{**sequence, **of} for sequence, of in zip(self.apart, rows, strict=True)]
        return RowAndSequences(self.lengths, {**self.together, **every}, apart)


@dataclass(frozen=True)
class TakenRows:
    """The rows that a sample takes of what another module makes of its items."""

    mask: Tensor  #: [tokens] True of each that takes one
    rows: Any  #: those of all of its items, [rows, ...], or named tensors of that shape

    def within(self, start: int, stop: int) -> Any:
        """Those of the tokens [start, stop); None: they take none."""
        ends = [int(self.mask[:at].sum()) for at in (start, stop)]
        return _each(self.rows, lambda x: x[slice(*ends)]) if ends[0] < ends[1] else None


def _one_behind_the_other(rows: Sequence[Any]) -> Any:
    """The rows of several sequences; None: there are none."""
    there = [each for each in rows if each is not None]
    if not there or isinstance(there[0], Tensor):
        return torch.cat(there) if there else None
    return {name: torch.cat([each[name] for each in there]) for name in there[0]}


# -- one model ------------------------------------------------------------------------------------------------


def _tried(
    model: Model, loss: Loss, batch: RowAndSequences, given: RowAndSequences, *, wide: bool, training: bool
) -> list[str]:
    """The findings of a trial. given: what the embedding is called with."""
    dtype = torch.float64
    for section in _sections_to_try(model):
        made = _section(model, section, wide=wide, training=training)
        module = made.modules[section]
        dtype = next((p.dtype for p in module.parameters()), dtype)
        outcome = mixing(section, module, _in_type(given, dtype), made.passes[section])
        if made.drawing.drew and training:
            raise _Drew
        if isinstance(outcome, str):
            return [f"{outcome}. To be packed, {_REMEDY}"]
        given = outcome
    return list(_loss_findings(loss, given, _in_type(batch, dtype), NEAR.get(dtype, 1e-2)))


def _sections_to_try(model: Model) -> Iterator[str]:
    """The embedding, the blocks, the head; of a large model a block of each kind."""
    yield "embed"
    sizes = [sum(math.prod(p.shape) for p in model.spec.section(f"blocks.{i}")) for i in range(model.layers)]
    seen: set[object] = set()
    for layer in range(model.layers):
        kind = _kind(model, f"blocks.{layer}") if sum(sizes) > _LARGE else layer
        if kind not in seen:
            seen.add(kind)
            yield f"blocks.{layer}"
    yield "head"


def _kind(model: Model, section: str) -> object:
    """Equal for blocks that compute alike, as far as their modules' classes and settings say. What only counts
    the layers does not."""
    plain = (bool, int, float, str, tuple, torch.dtype, FunctionType)
    counts = ("idx", "index", "layer_id", "site")
    settings = [
        (path, type(each), sorted((k, str(v)) for k, v in vars(each).items() if isinstance(v, plain)))
        for path, each in model.sections[section].named_modules()
    ]
    kept = [
        (path, kind, [(name, value) for name, value in named if not any(word in name for word in counts)])
        for path, kind, named in settings
    ]
    return str(kept), str(model.spec.section(section))


def _section(model: Model, section: str, *, wide: bool, training: bool) -> LocalModel:
    """A section with random parameters, without dropout. wide: it computes in double precision, or in single
    where it is large; else as it was made."""
    stage = Stage(start=0, stop=model.layers, devices=("alone/0",), shares=(1,))
    made = local_model(model, stage, 0, CPU, only=(section,))
    made.drawing.drew = set()
    module = made.modules[section].train(training)
    large = sum(p.numel() for _, p in made.parameters.values()) > _LARGE
    dtype = torch.float32 if large else torch.float64
    for full, buffer in made.buffers.items():
        try:
            buffer.copy_(model.first_value(full, Box.whole(tuple(buffer.shape)), 0))
        except ModelError:  # it has none
            buffer.zero_()
    for place, (full, (_, parameter)) in enumerate(made.parameters.items()):
        of = dtype if wide else parameter.dtype
        parameter.data = _random(full, tuple(parameter.shape), place, of, looked_up=section == "embed")
    for buffer in module.buffers():
        if wide and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
    for each in module.modules():
        if isinstance(each, Dropout):
            each.p = 0.0
        elif isinstance(each, nn.MultiheadAttention):
            each.dropout = 0.0
    return made


def _random(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, *, looked_up: bool) -> Tensor:
    """Random values: matrices keep the size of what they are multiplied with, vectors are around what norms and
    biases begin with. Large ones repeat a few numbers; looked_up: it is a view of them, in no more memory."""
    count, generator = math.prod(shape), torch.Generator().manual_seed(seed)
    if len(shape) < 2:
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        return (1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise).to(dtype)
    scale = max(1, math.prod(shape[1:])) ** -0.5
    numbers = (torch.randn(min(count, _NUMBERS), generator=generator) * scale).to(dtype)
    if count <= _NUMBERS:
        return numbers.view(shape)
    if looked_up:  # rows begin at other places of the same numbers
        step = max(1, (_NUMBERS - shape[-1]) // math.prod(shape[:-1]))
        strides = [step * math.prod(shape[dim + 1 : -1]) for dim in range(len(shape) - 1)]
        numbers = torch.cat([numbers] * (1 + (step * math.prod(shape[:-1]) + shape[-1]) // _NUMBERS))
        return numbers.as_strided(shape, (*strides, 1))
    made = torch.empty(count, dtype=dtype)
    for first in range(0, count, _NUMBERS):
        part = made[first : first + _NUMBERS]
        part.copy_(numbers[: len(part)])
    return made.view(shape)


def _loss_findings(loss: Loss, outputs: RowAndSequences, batch: RowAndSequences, near: float) -> Iterator[str]:
    name = getattr(loss, "__qualname__", type(loss).__name__)
    with torch.no_grad():
        try:
            apart = [loss(out, part) for out, part in zip(outputs.apart, batch.apart, strict=True)]
        except Exception as error:
            raise _Untried(f"the loss {name}: {type(error).__name__}: {_first_line(error)}") from error
        try:
            with passing(_row(batch.lengths)):
                total, count = loss(outputs.together, batch.together)
        except Exception as error:
            yield f"the loss {name} fails with a packed row: {type(error).__name__}: {_first_line(error)}"
            return
    terms = [float(term) for term, counted in apart if float(counted)]
    if not terms:
        log.warning(
            "whether the loss %s is a sum over tokens was not tried: the last tokens have no target", name
        )
    if float(count) != sum(float(counted) for _, counted in apart):
        said = " + ".join(f"{float(counted):g}" for _, counted in apart)
        yield (
            f"the loss {name} counts {float(count):g} targets in a packed row, and {said} in its sequences: it "
            "must give a sum over tokens, and how many were added. (If it shifts targets, the dataset must.)"
        )
    elif terms and abs(float(total) - sum(terms)) > near * max(map(abs, (*terms, float(total)))):
        said = " + ".join(f"{term:.6g}" for term in terms)
        yield (
            f"the loss {name} is no sum over tokens: of a packed row it is {float(total):.6g}, and {said} of "
            "its sequences. Sum over tokens (reduction='sum'), and give how many were added"
        )


# -- one section ----------------------------------------------------------------------------------------------


@dataclass
class _Calls:
    """The calls of a section's modules in one pass, in the order in which they end."""

    ended: list[tuple[str, int]] = field(default_factory=list)  #: module, and its how-manieth call
    given: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    gave: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)


def mixing(
    section: str, module: nn.Module, given: RowAndSequences, passed: Callable[..., Any] | None = None
) -> RowAndSequences | str:
    """Passes a row of sequences through a section, and each sequence by itself.

    Args:
        section: its name.
        module: with values.
        passed: its call, with draws keyed; None: its own.
        given: what it is called with.

    Returns:
        What it gives; or what is wrong with it, with the name of the innermost module.
    """
    near = NEAR.get(next((p.dtype for p in module.parameters()), torch.float64), 1e-2)
    calls: list[_Calls] = []
    outputs = []
    for row, entered in [(None, each) for each in given.apart] + [(_row(given.lengths), given.together)]:
        seen = _Calls()
        try:
            with passing(row), torch.no_grad():
                outputs.append(_watched(section, module, passed or module, entered, seen))
        except Exception as error:
            where, said = (
                seen.inside[-1] if seen.inside else section,
                f"{type(error).__name__}: {_first_line(error)}",
            )
            if row is None:
                raise _Untried(f"{where}: {said}") from error
            if isinstance(error, ModelError):
                return f"{where}: {error}"
            return f"{where} fails with a packed row: {said}"
        calls.append(seen)
    *apart, together = calls
    for call in together.ended:
        if all(call in each.gave for each in apart):
            parts = [each.given[call] for each in apart], [each.gave[call] for each in apart]
            entered_alike = _alike(together.given[call], parts[0], given.lengths, near)
            if entered_alike and not _alike(together.gave[call], parts[1], given.lengths, near):
                return _said(call[0], _module_at(section, module, call[0]), together, given.lengths)
    *parts_out, whole = outputs
    by_token = (_by_token(x, parts, given.lengths) for x, parts in _matched(whole, parts_out))
    if section != "head" and not all(by_token):  # of the head's the loss will tell
        shapes = [tuple(x.shape) for x in _tensors(whole)]
        return f"{section} gives {shapes} of a packed row, not an entry for each token [1, tokens, ...]"
    return RowAndSequences(given.lengths, whole, parts_out)


def _watched(section: str, module: nn.Module, passed: Callable[..., Any], entered: Any, seen: _Calls) -> Any:
    """A pass, noted by hooks on all modules."""
    hooks: list[Any] = []
    for path, each in module.named_modules(prefix=section):
        hooks.append(each.register_forward_pre_hook(partial(_enters, seen, path), with_kwargs=True))
        hooks.append(each.register_forward_hook(partial(_leaves, seen, path)))
    try:
        return passed(entered)
    finally:
        for hook in hooks:
            hook.remove()


def _enters(seen: _Calls, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen.inside.append(path)
    seen.count[path] += 1
    seen.given[path, seen.count[path]] = [x.detach().clone() for x in _tensors((args, kwargs))]


def _leaves(seen: _Calls, path: str, _: nn.Module, args: object, output: Any) -> None:
    seen.inside.pop()
    call = path, seen.count[path]
    seen.ended.append(call)
    seen.gave[call] = [x.detach().clone() for x in _tensors(output)]


def _module_at(section: str, module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path.removeprefix(section).removeprefix("."))


def _said(path: str, module: nn.Module, calls: _Calls, lengths: Sequence[int]) -> str:
    """A finding about a module; about the embedding of positions in it, where that has those of the row."""
    places = list(range(sum(lengths)))
    for (inner, _), given in calls.given.items():
        whole_numbers = len(given) == 1 and not given[0].is_floating_point()
        if inner.startswith(f"{path}.") and whole_numbers and given[0].flatten().tolist() == places:
            return f"{inner} takes the places of tokens in the packed row for their positions"
    return (
        f"{path} ({type(module).__name__}) takes the sequences of a packed row for one: what it gives for a "
        "token depends on the others"
    )


# -- tensors of tokens ----------------------------------------------------------------------------------------


def _alike(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], lengths: Sequence[int], near: float
) -> bool:
    """Returns True if tensors of a row are those of its sequences, as far as they have tokens."""
    if any(len(part) != len(whole) for part in parts):
        return True  # modules that are called otherwise cannot be compared
    for place, x in enumerate(whole):
        found = (_joined(x, [part[place] for part in parts], lengths, more) for more in range(_PADDED))
        both = next((pair for pair in found if pair is not None), None)
        if both is not None and _apart(*both) > near:
            return False
    return True


def _matched(whole: Any, parts: Sequence[Any]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    listed = [list(_tensors(part)) for part in parts]
    for place, x in enumerate(_tensors(whole)):
        yield x, [each[place] for each in listed if place < len(each)]


def _joined(
    whole: Tensor, parts: Sequence[Tensor], lengths: Sequence[int], more: int = 0
) -> tuple[Tensor, Tensor] | None:
    """A tensor of a row, and those of its sequences one after the other, along their tokens; None: they have no
    dimension of tokens. more: elements after the last token, which padding made; they are left out."""
    if len(parts) != len(lengths) or any(part.dim() != whole.dim() for part in parts):
        return None
    for dim in _dims(whole.dim()):
        tokens = [part.shape[dim] - more for part in parts]
        others = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in (whole, *parts)}
        if tokens == list(lengths) and whole.shape[dim] - more == sum(lengths) and len(others) == 1:
            cut = [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)]
            return whole.narrow(dim, 0, sum(lengths)), torch.cat(cut, dim)
    return None


#: The most elements that a module adds to the tokens: a convolution's padding.
_PADDED = 8


def _by_token(whole: Tensor, parts: Sequence[Tensor], lengths: Sequence[int]) -> bool:
    """Returns True if a tensor has an entry for each token; or the same for all sequences, as a table has."""
    if _joined(whole, parts, lengths) is not None:
        return True
    return all(part.shape == whole.shape and bool(torch.equal(part, whole)) for part in parts)


def _dims(count: int) -> Iterator[int]:
    """The dimensions that may be those of tokens: first the dimension where they usually are."""
    yield from sorted(range(count), key=lambda dim: dim != 1)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest finite value."""
    if not expected.numel():
        return 0.0
    a, b = found.double(), expected.double()
    gap = float(torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf).max())
    size = float(b.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    return gap / size if size else gap


def _tensors(of: Any) -> Iterator[Tensor]:
    """The tensors in what a module takes or gives."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, Mapping):
        yield from _tensors(tuple(of.values()))
    elif isinstance(of, tuple | list):
        for part in of:
            yield from _tensors(part)


def _in_type(given: RowAndSequences, dtype: torch.dtype) -> RowAndSequences:
    apart = [_cast(part, dtype) for part in given.apart]
    return RowAndSequences(given.lengths, _cast(given.together, dtype), apart)


def _cast(of: Any, dtype: torch.dtype) -> Any:
    return _each(of, lambda x: x.to(dtype) if x.is_floating_point() else x)


def _each(of: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(of, Tensor):
        return change(of)
    if isinstance(of, Mapping):
        return {key: _each(part, change) for key, part in of.items()}
    if isinstance(of, tuple):
        parts = [_each(part, change) for part in of]
        return type(of)(*parts) if hasattr(of, "_fields") else tuple(parts)
    return of


# -- samples --------------------------------------------------------------------------------------------------


def _row(lengths: Iterable[int]) -> PackedRow:
    return PackedRow([SequencePiece.whole(i, length) for i, length in enumerate(lengths)], CPU.device)


#: Parts of a sample that are counts of it, not of its tokens.
_COUNTS = ("modalities",)


def _span(sample: Any, most: int, taken: Iterable[TakenRows] = ()) -> tuple[int, int]:
    """The tokens [start, stop) of a sample that are tried: the last ones, which have targets, if any have; or
    around the first that takes a row of an item."""
    length = _length(sample)
    if not length:
        raise _Unfit("samples have no tensor with an entry for each token, so that none can be packed")
    first = min((int(each.mask.nonzero()[0]) for each in taken if each.mask.any()), default=length)
    start = max(0, min(length - most, first - most // 2))
    return start, min(length, start + most)


def _part(sample: Any, start: int, stop: int) -> Any:
    """Some tokens of a sample, whose parts have one entry for each."""
    length = _length(sample)

    def cut(part: Any, key: str) -> Any:
        if isinstance(part, Mapping):
            return {name: cut(inner, str(name)) for name, inner in part.items() if name not in _COUNTS}
        if isinstance(part, tuple):
            parts = [cut(inner, f"{key}.{place}" if key else str(place)) for place, inner in enumerate(part)]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        if not isinstance(part, Tensor | np.ndarray) or not part.ndim or len(part) != length:
            shape = (
                f"shape {tuple(part.shape)}" if isinstance(part, Tensor | np.ndarray) else type(part).__name__
            )
            raise _Unfit(
                f"{key or 'a sample'} has no entry for each of its sample's {length} tokens ({shape}), so that "
                "samples cannot be packed"
            )
        return torch.as_tensor(part)[start:stop]

    return cut(sample, "")


def _of_batch(batch: Any) -> Any:
    """The one sample of a batch: each tensor [1, ...] without its first dimension."""
    return _each(batch, lambda x: x[0] if x.dim() and len(x) == 1 else x)


def _length(sample: Any) -> int:
    """[tokens] of a sample: of its first tensor; 0 where it has none."""
    if isinstance(sample, Tensor | np.ndarray):
        return len(sample) if sample.ndim else 0
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else ()
    return next((found for part in parts if (found := _length(part))), 0)


def _row_of(samples: Sequence[Any]) -> Any:
    """Samples one after the other: tensors [1, tokens, ...]."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: _row_of([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        parts = [_row_of(part) for part in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return torch.cat(list(samples))[None]


def _first_line(error: BaseException) -> str:
    return shortened((str(error).splitlines() or [""])[0], 200)
