"""Context parallelism: attention of sequences whose tokens are on several lanes.

Queries attend to keys that this device has, and to keys of other lanes that are fetched round by round
(`elasticd_planner.batching.context_exchange`), the next round under way while one is computed. The parts merge
by their log-sum-exps in one order, so that a step that is repeated has the same bits. The backward pass fetches
the keys again, so that nothing of other lanes is kept; the gradients of a round's keys go back at once, and are
added where the keys are, in the order of rounds. A block that recomputes its activations exchanges nothing in
its second forward pass: outputs and log-sum-exps of the first are kept.

What must hold, so that nobody waits for ever:

- Lanes that share a sequence have it in rows of one index, and pass their rows in one order. They then run the
  same layers, forward and backward, and each layer's attention in the same order. Rows that share no sequence
  may come between them, in any number.
- Within a row each device launches its rounds in the order of their numbers. In a backward pass the terms of
  round n follow the keys of round n + 1, or, between replicas, the keys of all rounds; of all devices alike. So
  launches have an order that all agree on, and a communicator that runs them one by one is never stuck.
- A device waits in a round for its partner alone, which waits for nobody before it sends.

A message is kept until its arrival is known: a peer's message of a later exchange proves that it has received
those of the exchanges before, and gradients of keys prove that the keys came. Where keys go one way alone, as
between lanes of unlike widths, the other way has a message of one number. (Lanes of one width always need keys
of each other, because their pieces are mirrored, under a window, too.)
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from elasticd_planner.batching.context_exchange import (
    ContextExchange,
    ContextMembers,
    ContextPart,
    ContextRound,
    context_exchange,
    context_members,
)
from elasticd_planner.spec.batch import MicroBatch
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Stage
from torch import Tensor
from torch.autograd.function import once_differentiable

from elasticd.runtime.comm.communicators import Mesh
from elasticd.runtime.comm.running_group import running_group
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel import attention_kernels as kernels
from elasticd.runtime.parallel.attention_kernels import Visible
from elasticd.runtime.parallel.packed_row import PackedRow, Segment


class ContextParallel:
    """The exchanges of keys of one device with the other lanes of its stage."""

    def __init__(self, spec: ModelSpec, stage: Stage, device: str, mesh: Mesh) -> None:
        """
        Args:
            spec: of the model.
            stage: with all its lanes.
            device: this one.
            mesh: over which the members of the stage reach each other.
        """
        self._spec, self._stage, self.device, self.mesh = spec, stage, device, mesh
        self._members: dict[tuple[int, int], ContextMembers] = {}
        self._sent: dict[str, list[tuple[int, bool, Any]]] = defaultdict(list)
        self._exchanges = 0

    def begin_step(self) -> None:
        """All messages of the step before have arrived."""
        self._sent.clear()

    def row(self, lanes: Sequence[MicroBatch]) -> RowExchange:
        """The exchanges of one row.

        Args:
            lanes: the pieces of each lane.
        """
        return RowExchange(self, tuple(lanes))

    def members(self, q: Tensor, k: Tensor) -> ContextMembers:
        """Who has which heads, in layers in which this device has as many as these queries and keys.

        Raises:
            ModelError: no kind of units says which of them this device has.
        """
        key = q.shape[1], k.shape[1]
        if key not in self._members:
            found = context_members(self._spec, self._stage, self.device, *key)
            if found.replicas and not _replicated(k):
                raise ModelError(
                    f"a member of a TP group attends with {key[0]} heads and {key[1]} kv-heads of its own, and "
                    "no kind of units has such a part: cut the attention in units that are its heads, or keep "
                    "sequences whole with DataOptions(packing=Packing(cut=False))"
                )
            self._members[key] = found
        return self._members[key]

    def begin(self) -> int:
        """A number for the exchanges of one pass through an attention."""
        self._exchanges += 1
        return self._exchanges

    def launch(
        self, exchange: int, peer: str, message: Tensor | None, room: Tensor | None, *, keys: bool
    ) -> Any:
        """Launches a round with a peer.

        Args:
            exchange: see `begin`.
            peer: the other device.
            message: what it gets; None: nothing.
            room: for what it sends; None: nothing.
            keys: whether it is a round of keys, and not of their gradients.

        Returns:
            The work for `finish`.
        """
        sends = [] if message is None else [(peer, message)]
        work = self.mesh.begin_round(sends, [] if room is None else [(peer, room)])
        if sends:
            self._sent[peer].append((exchange, keys, work))
        return work

    def finish(self, exchange: int, peer: str, work: Any, *, received: bool, keys: bool) -> None:
        """Waits for a round. `received`: something came in it."""
        self.mesh.finish(work)
        if not received:
            return
        left = []
        for sent in self._sent[peer]:
            if sent[0] < exchange or (sent[1] and not keys):
                self.mesh.arrived(sent[2])
            else:
                left.append(sent)
        self._sent[peer] = left


def _replicated(k: Tensor) -> bool:
    """Whether all members of the TP group have the same keys: so many of them, and those of the first token."""
    first = k[0, 0, 0, :8].double()
    mine = torch.cat([first.new_tensor(k.shape[1:2]), first, first.new_zeros(8 - len(first))])
    every = running_group().all_gather(mine)
    return bool(torch.allclose(every, mine, rtol=1e-2, atol=1e-6))


class RowExchange:
    """What one device exchanges for the attention of a row, in all layers of its stage, both ways."""

    def __init__(self, of: ContextParallel, lanes: tuple[MicroBatch, ...]) -> None:
        self._of, self._lanes = of, lanes
        self._layers: dict[tuple[Any, ...], _Layer] = {}
        self._kept: dict[str, deque[tuple[Tensor, Tensor]]] = {}
        self._keeping: deque[tuple[Tensor, Tensor]] | None = None
        self._again: deque[tuple[Tensor, Tensor]] | None = None

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row: PackedRow,
        *,
        causal: bool,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        """See `elasticd.attention`. All lanes that share a sequence of the row call it for the same layer.

        Args:
            q, k, v, causal, window, scale: as of `elasticd.attention`, of all tokens of the row.
            row: the pieces of this lane.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        layer = self._layer(row, q, k, causal, window)
        out: Tensor = _CutAttention.apply(q, k, v, layer, scale)
        return out

    def _layer(self, row: PackedRow, q: Tensor, k: Tensor, causal: bool, window: int | None) -> _Layer:
        key = q.shape[1], k.shape[1], causal, window
        if key not in self._layers:
            members = self._of.members(q, k)
            exchange = context_exchange(self._lanes, members, self._of.device, causal=causal, window=window)
            self._layers[key] = _Layer(self, self._of, row, members, k.shape[1], exchange, causal, window)
        return self._layers[key]

    @contextmanager
    def first_pass(self, section: str) -> Iterator[None]:
        """Around the first forward pass of a block that recomputes: what attention gives is kept."""
        self._keeping = self._kept.setdefault(section, deque())
        try:
            yield
        finally:
            self._keeping = None

    @contextmanager
    def second_pass(self, section: str) -> Iterator[None]:
        """Around its second forward pass: attention gives what it gave, without an exchange."""
        self._again = self._kept.pop(section)
        try:
            yield
        finally:
            self._again = None

    def given_before(self) -> tuple[Tensor, Tensor] | None:
        """In a second pass: output and log-sum-exp of the same attention in the first one."""
        return None if self._again is None else self._again.popleft()

    def keep(self, out: Tensor, lse: Tensor) -> None:
        """In a first pass: keeps them for the second one."""
        if self._keeping is not None:
            self._keeping.append((out, lse))


class _Came(NamedTuple):
    """Keys and values that came from another lane."""

    part: ContextPart
    keys: Tensor  #: [kv-heads, tokens, head size]
    values: Tensor


class _Pair(NamedTuple):
    """Queries here that attend to some keys."""

    rows: slice  #: of the row
    heads: slice  #: of this device's
    visible: Visible


_Act = Literal["fetch", "compute", "give back"]


class _Layer:
    """How the attention of layers of one shape is computed in a row: heads, masks, and what is exchanged."""

    def __init__(
        self,
        row_exchange: RowExchange,
        parallel: ContextParallel,
        row: PackedRow,
        members: ContextMembers,
        kv_heads: int,
        exchange: ContextExchange,
        causal: bool,
        window: int | None,
    ) -> None:
        me = members.members[members.index[parallel.device]]
        self.row_exchange, self.parallel = row_exchange, parallel
        self.rounds, self.replicas = exchange.rounds, exchange.replicas
        self._causal, self._window = causal, window
        self._heads, self._kv_heads, self._each = me.heads, me.kv_heads, members.each
        #: Where heads and kv-heads do not divide, there are keys for each head.
        self._repeated = kv_heads != me.kv_heads[1] - me.kv_heads[0]
        by_piece = iter(row.segments)
        self._segments: list[tuple[int, Segment]] = []  # with the number of its sequence
        for number, piece in zip(exchange.sequences, row.pieces, strict=True):
            self._segments += [(number, next(by_piece)) for _ in piece.spans]

    @cached_property
    def order(self) -> list[tuple[_Act, ContextRound]]:
        """What a backward pass does, the same on all devices but for rounds that one has no part in."""
        at: list[tuple[tuple[float, ...], _Act, ContextRound]] = []
        for each in self.rounds:
            first = 2 * each.number
            at.append(((first,), "fetch", each))
            at.append(((first + 2.5,), "compute", each))
            at.append(((math.inf, first) if self.replicas else (first + 3,), "give back", each))
        return [(what, each) for _, what, each in sorted(at, key=lambda one: one[0])]

    def own(self) -> Iterator[tuple[slice, _Pair]]:
        """Rows of keys here and queries here that attend to them; first those of each segment to itself."""
        every = slice(0, self._heads[1] - self._heads[0])
        pairs = [(one, one) for one in self._segments]
        pairs += [(a, b) for a in self._segments for b in self._segments if a is not b and a[0] == b[0]]
        for (_, queries), (_, keys) in pairs:
            visible = Visible(queries.start - keys.start, self._causal, self._window)
            if visible.any(queries.stop - queries.start, keys.stop - keys.start):
                yield keys.rows, _Pair(queries.rows, every, visible)

    def others(self, part: ContextPart) -> Iterator[_Pair]:
        """Queries here that attend to keys of another lane."""
        start = max(self._heads[0], part.first * self._each) - self._heads[0]
        stop = min(self._heads[1], part.last * self._each) - self._heads[0]
        for number, queries in self._segments:
            visible = Visible(queries.start - part.start, self._causal, self._window)
            if number == part.sequence and visible.any(queries.stop - queries.start, part.stop - part.start):
                yield _Pair(queries.rows, slice(start, stop), visible)

    def grouped(self, part: ContextPart, heads: slice) -> list[int] | None:
        """Which kv-head of a part each of some heads reads; None: as many heads read each as in the model."""
        if heads.stop - heads.start == (part.last - part.first) * self._each:
            return None
        return [(self._heads[0] + head) // self._each - part.first for head in range(heads.start, heads.stop)]

    def here(self, part: ContextPart) -> Iterator[tuple[slice, list[int] | slice, slice]]:
        """Where keys that this device sends are: rows and heads here, and their tokens among those sent."""
        heads: list[int] | slice
        if self._repeated:
            firsts = (max(head * self._each, self._heads[0]) for head in range(part.first, part.last))
            heads = [first - self._heads[0] for first in firsts]
        else:
            heads = slice(part.first - self._kv_heads[0], part.last - self._kv_heads[0])
        for number, segment in self._segments:
            start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
            if number == part.sequence and start < stop:
                first = segment.first + start - segment.start
                yield slice(first, first + stop - start), heads, slice(start - part.start, stop - part.start)


class _Exchange:
    """The rounds of one pass of one attention."""

    def __init__(self, layer: _Layer, k: Tensor, v: Tensor) -> None:
        self._layer, self._parallel, self._k, self._v = layer, layer.parallel, k, v
        self._number = self._parallel.begin()

    def fetch(self, each: ContextRound) -> tuple[Any, list[_Came]]:
        """Launches a round of keys."""
        message = self._k.new_zeros(1)  # so that the other one knows that what it sent before has arrived
        if each.sends:
            message = torch.cat([x.flatten() for part in each.sends for x in self._cut(part)])
        room = self._k.new_empty(max(1, self._size(each.takes)))
        work = self._parallel.launch(self._number, each.peer, message, room, keys=True)
        return work, list(self._views(each.takes, room))

    def fetched(self, each: ContextRound, work: Any) -> None:
        """Waits for it."""
        self._parallel.finish(self._number, each.peer, work, received=True, keys=True)

    def give_back(self, each: ContextRound, terms: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, list[_Came]]:
        """Launches the round of the gradients: those of keys that came go to a device that has the keys."""
        message = room = None
        if each.gives:
            message = torch.cat([x.flatten() for term in terms for x in term]).to(self._k.dtype)
        if each.gets:
            room = self._k.new_empty(self._size(each.gets))
        work = self._parallel.launch(self._number, each.peer, message, room, keys=False)
        return work, [] if room is None else list(self._views(each.gets, room))

    def given_back(self, each: ContextRound, work: Any) -> None:
        """Waits for it."""
        self._parallel.finish(self._number, each.peer, work, received=bool(each.gets), keys=False)

    def _cut(self, part: ContextPart) -> Iterator[Tensor]:
        """Keys and values of a part."""
        for x in (self._k, self._v):
            cut = [x[heads, rows] for rows, heads, _ in self._layer.here(part)]
            yield cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)

    def _size(self, parts: Sequence[ContextPart]) -> int:
        return sum(part.size for part in parts) * (self._k.shape[2] + self._v.shape[2])

    def _views(self, parts: Sequence[ContextPart], room: Tensor) -> Iterator[_Came]:
        at = 0
        for part in parts:
            both = []
            for x in (self._k, self._v):
                shape = part.last - part.first, part.stop - part.start, x.shape[2]
                both.append(room[at : at + part.size * x.shape[2]].view(shape))
                at += part.size * x.shape[2]
            yield _Came(part, *both)


def _output(q: Tensor, k: Tensor, v: Tensor, layer: _Layer, scale: float) -> tuple[Tensor, Tensor]:
    """The output [heads, tokens, value size] and its log-sum-exp [heads, tokens], exchanging keys."""
    dtype = kernels.wide(q.dtype)
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)

    def add(pair: _Pair, keys: Tensor, values: Tensor) -> None:
        part = kernels.forward(q[pair.heads, pair.rows], keys, values, pair.visible, scale)
        kernels.merge(out[pair.heads, pair.rows], lse[pair.heads, pair.rows], *part)

    exchange, rounds = _Exchange(layer, k, v), layer.rounds
    ahead = exchange.fetch(rounds[0]) if rounds else None
    for rows, pair in layer.own():
        add(pair, k[:, rows], v[:, rows])
    for index, each in enumerate(rounds):
        assert ahead is not None
        work, came = ahead
        exchange.fetched(each, work)
        ahead = exchange.fetch(rounds[index + 1]) if index + 1 < len(rounds) else None
        for part, keys, values in came:
            for pair in layer.others(part):
                reads = layer.grouped(part, pair.heads)
                add(pair, *((keys, values) if reads is None else (keys[reads], values[reads])))
    return out.to(q.dtype), lse


class _Gradients:
    """The gradients of one attention, as their terms come."""

    def __init__(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layer: _Layer,
        scale: float,
    ) -> None:
        self._grad, self._q, self._k, self._v, self._out, self._lse = grad, q, k, v, out, lse
        self._layer, self._scale = layer, scale
        dtype = kernels.wide(q.dtype)
        self.q, self.k, self.v = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))

    def run(self) -> None:
        """All of it. The keys of a round are fetched while those of the one before are computed with, and the
        terms of that follow them; between replicas the terms of all rounds follow the last of them."""
        layer, exchange = self._layer, _Exchange(self._layer, self._k, self._v)
        terms: dict[ContextPart, tuple[Tensor, Tensor]] = {}
        fetched: dict[int, tuple[Any, list[_Came]]] = {}
        before: tuple[ContextRound, Any, list[_Came]] | None = None
        for at, (what, each) in enumerate(layer.order):
            if what == "fetch":
                fetched[each.number] = exchange.fetch(each)
            if not at:
                self._own()
            if what == "compute":
                work, came = fetched.pop(each.number)
                exchange.fetched(each, work)
                terms |= {part: self._of(part, *both) for part, *both in came}
            if what == "give back" and (each.gives or each.gets):
                pieces = [terms[part] if layer.replicas else terms.pop(part) for part in each.gives]
                begun = exchange.give_back(each, pieces)
                self._collect(exchange, before)
                before = each, *begun
        self._collect(exchange, before)
        if not layer.order:
            self._own()

    def _own(self) -> None:
        for rows, pair in self._layer.own():
            term = self._term(pair, self._k[:, rows], self._v[:, rows])
            self.k[:, rows] += term[0]
            self.v[:, rows] += term[1]

    def _of(self, part: ContextPart, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of keys and values of another lane."""
        terms = torch.zeros_like(keys, dtype=self.k.dtype), torch.zeros_like(values, dtype=self.v.dtype)
        for pair in self._layer.others(part):
            reads = self._layer.grouped(part, pair.heads)
            if reads is None:
                for into, term in zip(terms, self._term(pair, keys, values), strict=True):
                    into += term
            else:
                for into, term in zip(terms, self._term(pair, keys[reads], values[reads]), strict=True):
                    for at, head in enumerate(reads):
                        into[head] += term[at]
        return terms

    def _term(self, pair: _Pair, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the term of some keys to the gradient of the queries; returns that of keys and values."""
        at = pair.heads, pair.rows
        term, *others = kernels.backward(
            self._grad[at], self._q[at], keys, values, self._out[at], self._lse[at], pair.visible, self._scale
        )
        self.q[at] += term
        return others[0], others[1]

    def _collect(self, exchange: _Exchange, begun: tuple[ContextRound, Any, list[_Came]] | None) -> None:
        """Adds the terms of a round to the gradients of keys and values here."""
        if begun is None:
            return
        each, work, came = begun
        exchange.given_back(each, work)
        for part, *terms in came:
            for rows, heads, tokens in self._layer.here(part):
                for into, term in zip((self.k, self.v), terms, strict=True):
                    into[heads, rows] += term[:, tokens]


class _CutAttention(torch.autograd.Function):
    """Attention of a row some of whose sequences are on other lanes, too: [1, heads, tokens, head size]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: _Layer, scale: float) -> Tensor:
        kept = layer.row_exchange.given_before()
        out, lse = _output(q[0], k[0], v[0], layer, scale) if kept is None else kept
        if kept is None:
            layer.row_exchange.keep(out, lse)
        ctx.layer, ctx.scale = layer, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out.unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _Gradients(grad[0].contiguous(), q[0], k[0], v[0], out, lse, ctx.layer, ctx.scale)
        gradients.run()
        dq, dk, dv = (
            x.to(of.dtype).unsqueeze(0)
            for x, of in zip((gradients.q, gradients.k, gradients.v), (q, k, v), strict=True)
        )
        return dq, dk, dv, None, None
