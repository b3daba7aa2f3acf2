"""The bytes of activations that sections keep and have alive, by the shapes of their parameters.

Nothing is run. Each operation counts with what it keeps for its backward pass:

  matrices  A matrix keeps its input. What a cut matrix gives or takes on its cut side is kept, too: queries,
            keys and values by attention, a hidden layer by its activation function.
  gates     Of three matrices of one unit (gate, up, down) silu(gate) is kept besides, for its product with up.
            Gate and up may be one matrix.
  norms     A norm computes in single precision: it keeps its input in that, and the normalised input. A block
            that has more norms of the activation than parts, around each part or behind it (Gemma, OLMo 2),
            applies their weights in single precision, too; other blocks (Llama) go back to the model's type
            before that. A norm with a bias is a LayerNorm, one kernel that keeps its input alone.
  dropouts  A mask has one byte an element, and is drawn as integers of eight.
  head      Its loss takes logits in single precision, keeps their log-softmax, and has two gradients of them
            beside the logits. A head gathers its logits: every member of a TP group has all of them.

Both passes have most alive beside those at one of two moments: with many tokens as a hidden layer, a norm
behind a part or a dropout is passed, with few as the largest matrix gets its gradient, which is made in the
model's type and then cast to single precision. Not counted, some percent at most: the statistics of norms and
of attention, the tables of rotary embedding; and attention's masks, of a window of tokens or of padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elasticd_planner.spec.model import ModelSpec, Parameter, item_size
from elasticd_planner.value import refuse

#: Bytes of a number of single precision, of a token's id, and of an element of a dropout's mask.
_SINGLE, _ID, _MASK = 4, 8, 1
#: Bytes of an element while a dropout draws its mask: three integers.
_DRAWN_BYTES = 24


@dataclass(frozen=True, kw_only=True)
class ShapeBytes:
    """Bytes of activations of a section; the names are those of `SectionProfile`, where they are explained."""

    cut_activation: float = 0.0
    whole_activation: float = 0.0
    cut_working: float = 0.0
    whole_working: float = 0.0
    matrix_working: float = 0.0
    beside_working: float = 0.0


@dataclass(frozen=True)
class _Norm:
    """A norm: the elements of a token that it is over, whether they are cut, and whether it is a LayerNorm."""

    elements: int
    cut: bool
    layer_norm: bool


@dataclass(frozen=True, kw_only=True)
class ShapeTraffic:
    """Bytes of a token that the operations of a block beside its matrices read and write, forward and backward:
    `cut` over a TP group, and `whole` for each member."""

    cut: float = 0.0
    whole: float = 0.0


def embed_bytes(spec: ModelSpec, dropouts: int = 0) -> ShapeBytes:
    """Of the embedding: a token's id, and the mask of a model that has dropouts. The block behind keeps what
    the embedding gives."""
    return ShapeBytes(whole_activation=_ID + bool(dropouts) * _MASK * spec.width)


def block_bytes(spec: ModelSpec, kind: Sequence[Parameter], dropouts: int = 0) -> ShapeBytes:
    """Of a block of this kind.

    Args:
        spec: the model.
        kind: the block's parameters.
        dropouts: how many times a block drops elements of its activation.
    """
    if dropouts < 0:
        refuse(f"dropouts {dropouts} must not be negative")
    size, width = item_size(spec.dtype), spec.width
    norms = [*_norms(spec, kind)]
    of_activation = [norm for norm in norms if norm.elements == width and not norm.cut]
    apart = len(of_activation) > spec.collectives
    whole = size * width * spec.collectives + dropouts * _MASK * width
    if not of_activation or (size < _SINGLE and not any(norm.layer_norm for norm in of_activation)):
        whole += size * width  # the block's input, beside its copy in single precision
    whole += sum(_kept_by(norm, size, apart) for norm in norms if not norm.cut)
    cut = sum(_kept_by(norm, size, apart) for norm in norms if norm.cut)
    hidden = gradients = 0
    for name, sides in _sides(spec, kind).items():
        gated = _gated(sides)
        kept = size * (sum(sides) + _besides(sides))
        cut, whole = (cut + kept, whole) if name else (cut, whole + kept)
        layer = min(sides) if gated else max(sides)
        hidden, gradients = max(hidden, size * layer), max(gradients, size * (1 + gated) * layer)
    # The gradient of the block's output, and of what a dropout left of it.
    first = size * width + bool(dropouts) * (size - _MASK) * width
    behind = first + bool(dropouts) * _DRAWN_BYTES * width
    # Where nothing is cast a matrix's input and the gradient of that are there as the matrix gets its own.
    uncast = hidden
    if apart:  # the norm behind the last part goes first, and then keeps nothing any more
        first -= 2 * _SINGLE * width
        behind = max(behind, (size + 4 * _SINGLE) * width)
        uncast += size * width
    return ShapeBytes(
        cut_activation=cut,
        whole_activation=whole,
        cut_working=max(0, first + gradients - behind),
        whole_working=behind,
        matrix_working=_gradient(kind, size),
        beside_working=first + (uncast if size >= _SINGLE else 0),
    )


def block_traffic(spec: ModelSpec, kind: Sequence[Parameter], dropouts: int = 0) -> ShapeTraffic:
    """The bytes that a device's memory moves for a token in a block of this kind, in an operation each that
    reads and writes its elements once:

      norm      forward reads and writes; backward reads the gradient and the input, and writes; once more both
                for the weight's gradient: 7
      addition  around each part: forward reads two and writes, backward adds gradients likewise: 6
      dropout   forward in the addition, but for its mask; backward reads, reads the mask and writes: 2, and two
                masks
      hidden    an activation function reads and writes; backward reads two and writes: 5; a gate's product with
                up reads two and writes, and backward does so twice: 9 more

    Not counted: matrices, whose time is that of their operations; biases; rotary embedding; attention, whose
    kernels keep no matrix of tokens by tokens; experts stacked in one tensor, of which shapes do not say how
    many a row goes through.
    """
    size, width = item_size(spec.dtype), spec.width
    norms = [*_norms(spec, kind)]
    whole = sum(7 * size * norm.elements for norm in norms if not norm.cut)
    whole += 6 * size * width * spec.collectives + dropouts * (2 * size + 2 * _MASK) * width
    cut = sum(7 * size * norm.elements for norm in norms if norm.cut)
    of_each_row = [parameter for parameter in kind if not parameter.experts and len(parameter.shape) <= 2]
    for name, sides in _sides(spec, of_each_row).items():
        gated = _gated(sides)
        if not gated and (len(sides) != 2 or sides[0] != sides[1]):
            continue  # of attention
        moved = size * (14 if gated else 5) * min(sides)
        cut, whole = (cut + moved, whole) if name else (cut, whole + moved)
    return ShapeTraffic(cut=cut, whole=whole)


def head_bytes(spec: ModelSpec) -> ShapeBytes:
    """Of the head with its loss."""
    size, width = item_size(spec.dtype), spec.width
    norms = [*_norms(spec, spec.head)]
    apart = any(
        sum(norm.elements == width for norm in _norms(spec, kind)) > spec.collectives for kind in spec.kinds
    )
    logits = max((side for sides in _sides(spec, spec.head).values() for side in sides), default=0)
    in_single = max(size, _SINGLE)
    kept = size * width + _ID * bool(logits) + in_single * logits + sum(_kept_by(n, size, apart) for n in norms)
    if norms and size < _SINGLE and not any(norm.layer_norm for norm in norms):
        kept += size * width
    # As the matrix gets its gradient the log-softmax is gone; the logits are there, and until it is cast the
    # gradients of the logits and of the matrix's input.
    beside = (size - in_single) * logits if size < _SINGLE else size * (logits + width)
    return ShapeBytes(
        whole_activation=kept,
        whole_working=(size + 2 * in_single) * logits,
        matrix_working=_gradient(spec.head, size),
        beside_working=beside,
    )


def _gradient(parameters: Iterable[Parameter], size: int) -> float:
    """Bytes of the gradient of the largest matrix that is trained: in the model's type, and in single precision
    where that is another."""
    elements = max((math.prod(p.shape) for p in _matrices(parameters) if p.kind == "trained"), default=0)
    return elements * (size + _SINGLE if size < _SINGLE else size)


def _kept_by(norm: _Norm, size: int, apart: bool) -> int:
    """Bytes that a norm keeps of a token."""
    if norm.layer_norm:
        return norm.elements * size
    return norm.elements * (_SINGLE + (_SINGLE if apart else size) if size < _SINGLE else 2 * size)


def _matrices(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    return (p for p in parameters if len(p.shape) > 1 and p.kind != "buffer")


def _side(parameter: Parameter, width: int) -> int:
    """The kept dimension of a matrix: the cut one, of all parts, else the one that is not the activation's."""
    if parameter.cut is not None:
        parts = 1 if parameter.fused is None else parameter.shape[parameter.fused]
        return parameter.shape[parameter.cut.dim] * parts
    rows, columns = parameter.shape[-2:]
    return rows if columns == width else columns


def _sides(spec: ModelSpec, parameters: Sequence[Parameter]) -> dict[str, list[int]]:
    """The sides of matrices by the units that cut them, with those that follow them; "": of whole matrices. A
    matrix whose units are its own, of queries, keys and values, belongs to the one behind."""
    sides: dict[str, list[int]] = {}
    for parameter in _matrices(parameters):
        kind = ""
        if parameter.cut is not None:
            kind = spec.units_of(parameter.cut.units).follows or parameter.cut.units
        sides.setdefault(kind, []).append(_side(parameter, spec.width))
    single = [kind for kind, held in sides.items() if kind and len(held) == 1]
    if len(single) == 2:
        first, second = single
        sides[first] += sides.pop(second)
    return sides


def _gated(sides: Sequence[int]) -> bool:
    """Returns True for a gated unit's matrices: gate, up and down, or gate and up in one and down."""
    ordered = sorted(sides)
    return (len(ordered) == 3 and ordered[0] == ordered[2]) or (
        len(ordered) == 2 and ordered[1] == 2 * ordered[0]
    )


def _besides(sides: Sequence[int]) -> int:
    """Elements of a token that operations between these matrices keep: of a gate its activation; where queries,
    keys and values are one matrix, the rotated queries and keys beside all three."""
    least, most = min(sides), max(sides)
    if _gated(sides):
        return least
    return least + (most - least) // 2 if len(sides) == 2 and most > least else 0


def _norms(spec: ModelSpec, parameters: Sequence[Parameter]) -> Iterator[_Norm]:
    """The norms among parameters: vectors that are no bias. Two of one length that is not the activation's are
    over the heads of queries and those of keys."""
    names = {p.name for p in parameters}
    norms = [p for p in parameters if len(p.shape) == 1 and p.kind != "buffer" and not p.name.endswith("bias")]
    short = [p for p in norms if p.cut is None and p.shape[0] != spec.width]
    pair = [p for p in short if sum(other.shape == p.shape for other in short) == 2][:2]
    columns = [p for p in _matrices(parameters) if p.cut is None or p.cut.dim == 0]
    over = {norm.name: matrix for norm, matrix in zip(pair, columns, strict=False)}
    for norm in norms:
        held = over.get(norm.name, norm)
        elements, is_cut = (held if held.shape[0] % norm.shape[0] == 0 else norm).shape[0], held.cut is not None
        yield _Norm(elements, is_cut, f"{norm.name.rpartition('.')[0]}.bias" in names)
