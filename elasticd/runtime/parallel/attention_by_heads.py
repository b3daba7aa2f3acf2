"""Attention by heads: sequences of several lanes of which each device computes all tokens and some heads.

Queries, keys and values of all tokens come in one exchange, and outputs go back in another; in the backward
pass so do the gradients of the output, and those of queries, keys and values
(`elasticd_planner.batching.heads_exchange`). What came is kept for the backward pass, in the place of what this
device has of these sequences; also by a block that recomputes its activations, whose second forward pass
exchanges nothing.

Each of the four exchanges is one launch with all other devices. In a pass they precede the rounds of keys, in
one order on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from elasticd_planner.batching.context_members import ContextMember, ContextMembers, ContextPart
from elasticd_planner.batching.heads_exchange import HeadsMessages, HeadsSequence, kv_range
from torch import Tensor

from elasticd.runtime.parallel import attention_kernels as kernels
from elasticd.runtime.parallel.attention_kernels import Visible
from elasticd.runtime.parallel.packed_row import Segment


class Launching(Protocol):
    """Messages to and from other devices: see `ContextParallel`."""

    def launch(
        self, number: int, sends: Sequence[tuple[str, Tensor]], takes: Sequence[tuple[str, Tensor]]
    ) -> Any:
        """Launches messages, all side by side."""

    def finish(self, work: Any, received: Sequence[str], proves: int) -> None:
        """Waits for them."""


#: Numbers of the messages of one pass: what is computed by heads, keys, what goes back by heads, and gradients
#: of keys. A device that sends one has all messages of the passes before; what goes back follows what came.
NUMBERS = 4
HEADS_IN, KEYS, HEADS_OUT, TERMS = range(NUMBERS)


class OfHeads(NamedTuple):
    """One sequence as attention by heads takes it: [heads, all its tokens, size]."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class HeadsLayer:
    """The computation of sequences by heads in layers of one shape, on one device."""

    def __init__(
        self,
        members: ContextMembers,
        device: str,
        sequences: Sequence[HeadsSequence],
        messages: Sequence[HeadsMessages],
        segments: Sequence[tuple[int, Segment]],
        *,
        repeated: bool,
        causal: bool,
        window: int | None,
    ) -> None:
        """
        Args:
            members: the devices of the stage.
            device: this one.
            sequences: what it computes of each.
            messages: what it exchanges.
            segments: what it has of the sequences, with the number of each.
            repeated: whether it has keys for each of its heads, because its heads and kv-heads do not divide.
            causal, window: of the attention.
        """
        self._me, self._each = members.members[members.index[device]], members.each
        self.sequences, self.messages, self._segments = tuple(sequences), tuple(messages), tuple(segments)
        self._firsts = {each.sequence: each.first for each in sequences}
        self.kv = {each.sequence: kv_range(members, (each.first, each.last)) for each in sequences}
        self._repeated, self.visible = repeated, Visible(0, causal, window)

    def reads(self, each: HeadsSequence) -> list[int] | None:
        """Which of its kv-heads each head reads; None: as many heads read each, one after the other."""
        first, last = self.kv[each.sequence]
        if (each.first, each.last) == (first * self._each, last * self._each):
            return None
        return [head // self._each - first for head in range(each.first, each.last)]

    def first(self, sequence: int, *, keys: bool) -> int:
        """The first of the query heads, or of the kv-heads, that it computes with."""
        return self.kv[sequence][0] if keys else self._firsts[sequence]

    def heads(self, each: HeadsSequence, *, keys: bool) -> tuple[int, int]:
        """The query heads, or the kv-heads, that it computes with."""
        return self.kv[each.sequence] if keys else (each.first, each.last)

    def own(self, each: HeadsSequence, *, keys: bool) -> Iterator[ContextPart]:
        """The queries, or the keys, of a sequence that are here in both layouts."""
        (first, last), has = self.heads(each, keys=keys), self._me.kv_heads if keys else self._me.heads
        first, last = max(first, has[0]), min(last, has[1])
        if first < last:
            for number, segment in self._segments:
                if number == each.sequence:
                    yield ContextPart(number, segment.start, segment.stop, first, last)

    def here(self, part: ContextPart, *, keys: bool) -> Iterator[tuple[_Heads, slice, slice]]:
        """The places of a part in tensors of the row: heads, rows, and their tokens among those of the part."""
        heads: _Heads = slice(part.first - self._me.heads[0], part.last - self._me.heads[0])
        if keys:
            heads = kv_heads_here(self._me, self._each, part, repeated=self._repeated)
        for number, segment in self._segments:
            start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
            if number == part.sequence and start < stop:
                first = segment.first + start - segment.start
                yield heads, slice(first, first + stop - start), slice(start - part.start, stop - part.start)


#: Indices of heads of a tensor.
_Heads = slice | list[int]


def kv_heads_here(me: ContextMember, each: int, part: ContextPart, *, repeated: bool) -> _Heads:
    """Which of the keys of a device are those of the kv-heads of a part.

    Args:
        me: the device.
        each: query heads that a kv-head serves.
        part: the part.
        repeated: whether the device has keys for each of its heads.
    """
    if repeated:
        firsts = (max(head * each, me.heads[0]) for head in range(part.first, part.last))
        return [first - me.heads[0] for first in firsts]
    return slice(part.first - me.kv_heads[0], part.last - me.kv_heads[0])


class _Exchange:
    """Tensors of one pass that go from the row to all tokens of some heads, and others that go back. Queries,
    and what is of their layout, come first; keys and values follow, if there are any."""

    def __init__(self, layer: HeadsLayer, parallel: Launching, number: int, dtype: torch.dtype) -> None:
        self._layer, self._parallel, self._number, self._dtype = layer, parallel, number, dtype
        self._work: Any = None
        self._rooms: dict[str, Tensor] = {}

    def scatter(self, row: Sequence[Tensor]) -> None:
        """Launches what other devices compute with, of tensors [heads, tokens of the row, size]."""
        sends: list[tuple[str, Tensor]] = []
        self._rooms = {}
        for each in self._layer.messages:
            cut = [
                torch.cat([x[heads, rows] for heads, rows, _ in self._layer.here(part, keys=keys)], 1).flatten()
                for x, part, keys in self._parts(row, each.sends_queries, each.sends_keys)
            ]
            self._put(each.peer, cut, sends)
            self._make_room(each.peer, self._parts(row, each.takes_queries, each.takes_keys))
        self._work = self._parallel.launch(self._number + HEADS_IN, sends, list(self._rooms.items()))

    def scattered(self, row: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Waits for what comes: by sequence tensors [heads, all tokens, size]."""
        layer, found = self._layer, dict[int, list[Tensor]]()
        for each in layer.sequences:
            made = found[each.sequence] = []
            for at, x in enumerate(row):
                first, last = layer.heads(each, keys=at > 0)
                made.append(x.new_empty(last - first, each.length, x.shape[2]))
                for part in layer.own(each, keys=at > 0):
                    for heads, rows, tokens in layer.here(part, keys=at > 0):
                        self._of(made[at], part, keys=at > 0)[:, tokens] = x[heads, rows]
        for message, room in self._came(self._number - 1):
            taken = 0
            for at, part in self._listed(len(row), message.takes_queries, message.takes_keys):
                into = self._of(found[part.sequence][at], part, keys=at > 0)
                into.copy_(room[taken : taken + into.numel()].view(into.shape))
                taken += into.numel()
        return found

    def gather(self, made: Mapping[int, Sequence[Tensor]], row: Sequence[Tensor]) -> None:
        """Launches what goes back, of what `scattered` gave, to tensors of the row."""
        sends: list[tuple[str, Tensor]] = []
        self._rooms = {}
        for each in self._layer.messages:
            listed = self._listed(len(row), each.takes_queries, each.takes_keys)
            cut = [self._of(made[part.sequence][at], part, keys=at > 0).flatten() for at, part in listed]
            self._put(each.peer, cut, sends)
            self._make_room(each.peer, self._parts(row, each.sends_queries, each.sends_keys))
        self._work = self._parallel.launch(self._number + HEADS_OUT, sends, list(self._rooms.items()))

    def gathered(self, made: Mapping[int, Sequence[Tensor]], row: Sequence[Tensor]) -> None:
        """Waits for it, and adds it to the tensors of the row: each device's terms in one order."""
        layer = self._layer
        for each in layer.sequences:
            for at, into in enumerate(row):
                for part in layer.own(each, keys=at > 0):
                    value = self._of(made[each.sequence][at], part, keys=at > 0)
                    for heads, rows, tokens in layer.here(part, keys=at > 0):
                        into[heads, rows] += value[:, tokens]
        for message, room in self._came(self._number + HEADS_IN):
            taken = 0
            for into, part, keys in self._parts(row, message.sends_queries, message.sends_keys):
                shape = part.last - part.first, part.stop - part.start, into.shape[2]
                value = room[taken : taken + math.prod(shape)].view(shape)
                taken += value.numel()
                for heads, rows, tokens in layer.here(part, keys=keys):
                    into[heads, rows] += value[:, tokens]

    def _of(self, made: Tensor, part: ContextPart, *, keys: bool) -> Tensor:
        """A part of a tensor of all tokens of some heads."""
        first = self._layer.first(part.sequence, keys=keys)
        return made[part.first - first : part.last - first, part.start : part.stop]

    def _parts(
        self, row: Sequence[Tensor], queries: Sequence[ContextPart], keys: Sequence[ContextPart]
    ) -> Iterator[tuple[Tensor, ContextPart, bool]]:
        for at, part in self._listed(len(row), queries, keys):
            yield row[at], part, at > 0

    @staticmethod
    def _listed(
        count: int, queries: Sequence[ContextPart], keys: Sequence[ContextPart]
    ) -> Iterator[tuple[int, ContextPart]]:
        """The order of a message: which tensor, and which part of it."""
        yield from ((0, part) for part in queries)
        yield from ((at, part) for part in keys for at in range(1, count))

    def _put(self, peer: str, cut: Sequence[Tensor], sends: list[tuple[str, Tensor]]) -> None:
        if cut:
            sends.append((peer, torch.cat([each.to(self._dtype) for each in cut])))

    def _make_room(self, peer: str, parts: Iterator[tuple[Tensor, ContextPart, bool]]) -> None:
        sizes = [(x, part.size * x.shape[2]) for x, part, _ in parts]
        if sizes:
            self._rooms[peer] = sizes[0][0].new_empty(sum(size for _, size in sizes), dtype=self._dtype)

    def _came(self, proves: int) -> Iterator[tuple[HeadsMessages, Tensor]]:
        """Waits for an exchange: its messages, which prove that those up to a number arrived."""
        self._parallel.finish(self._work, list(self._rooms), proves)
        for message in self._layer.messages:
            if message.peer in self._rooms:
                yield message, self._rooms.pop(message.peer)


class HeadsForward:
    """Attention by heads in a forward pass: begin, compute, end."""

    def __init__(self, layer: HeadsLayer, parallel: Launching, number: int, scale: float) -> None:
        self._layer, self._parallel, self._number, self._scale = layer, parallel, number, scale
        self.kept: dict[int, OfHeads] = {}  #: by sequence, for the backward pass

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Launches the exchange of tensors [heads, tokens of the row, size]."""
        self._row, self._exchange = (q, k, v), _Exchange(self._layer, self._parallel, self._number, q.dtype)
        self._exchange.scatter(self._row)

    def compute(self, out: Tensor) -> None:
        """Waits for what comes, computes, and launches what goes back.

        Args:
            out: the output of the row, of a type as wide as that of queries or wider.
        """
        given = self._exchange.scattered(self._row)
        for each in self._layer.sequences:
            q, k, v = given[each.sequence]
            reads = self._layer.reads(each)
            keys, values = (k, v) if reads is None else (k[reads], v[reads])
            made = q.new_zeros((*q.shape[:2], v.shape[2])), q.new_zeros(q.shape[:2])
            if len(q):
                made = kernels.forward(q, keys, values, self._layer.visible, self._scale)
            self.kept[each.sequence] = OfHeads(q, k, v, *made)
        self._exchange.gather(self._outputs(), (out,))

    def end(self, out: Tensor) -> None:
        """Waits for outputs of this device's rows and heads, and puts them there: they were zero."""
        self._exchange.gathered(self._outputs(), (out,))

    def _outputs(self) -> dict[int, list[Tensor]]:
        return {sequence: [kept.out] for sequence, kept in self.kept.items()}


class HeadsBackward:
    """Its gradients in a backward pass: begin, compute, end."""

    def __init__(
        self,
        layer: HeadsLayer,
        parallel: Launching,
        number: int,
        scale: float,
        kept: Mapping[int, OfHeads],
    ) -> None:
        self._layer, self._parallel, self._number = layer, parallel, number
        self._scale, self._kept = scale, kept
        self._made: dict[int, list[Tensor]] = {}

    def begin(self, grad: Tensor) -> None:
        """Launches the exchange of the output's gradient."""
        self._grad = grad
        self._exchange = _Exchange(self._layer, self._parallel, self._number, grad.dtype)
        self._exchange.scatter((grad,))

    def compute(self, row: Sequence[Tensor]) -> None:
        """Waits for it, computes, and launches what goes back, to gradients of q, k and v of the row."""
        given = self._exchange.scattered((self._grad,))
        for each in self._layer.sequences:
            q, k, v, out, lse = self._kept[each.sequence]
            reads, (grad,) = self._layer.reads(each), given[each.sequence]
            keys, values = (k, v) if reads is None else (k[reads], v[reads])
            dq, *terms = [torch.zeros_like(x) for x in (q, keys, values)]
            if len(q):
                visible, scale = self._layer.visible, self._scale
                dq, *terms = kernels.backward(grad, q, keys, values, out, lse, visible, scale)
            if reads is not None:
                added = [term.new_zeros(of.shape) for term, of in zip(terms, (k, v), strict=True)]
                for into, term in zip(added, terms, strict=True):
                    for at, head in enumerate(reads):
                        into[head] += term[at]
                terms = added
            self._made[each.sequence] = [dq, *terms]
        self._exchange.gather(self._made, row)

    def end(self, row: Sequence[Tensor]) -> None:
        """Waits for the gradients of this device's rows and heads, and adds them."""
        self._exchange.gathered(self._made, row)
