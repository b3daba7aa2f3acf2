"""Context parallelism: attention of sequences whose tokens are on several lanes.

Queries attend to keys that this device has, and to keys of other lanes that are fetched round by round
(`elasticd_planner.batching.context_exchange`), the next round under way while one is computed. The parts merge
by their log-sum-exps in one order, so that a step that is repeated has the same bits. The backward pass fetches
the keys again, so that nothing of other lanes is kept; the gradients of a round's keys go back at once, and are
added where the keys are, in the order of rounds. A block that recomputes its activations exchanges nothing in
its second forward pass: outputs and log-sum-exps of the first are kept.

Keys that came from another node may be passed on inside of this one, and so may their gradients, the other way
round. Sequences that are computed by heads are `attention_by_heads`.

What must hold, so that nobody waits for ever:

- Lanes that share a sequence have it in rows of one index, and pass their rows in one order. They then run the
  same layers, forward and backward, and each layer's attention in the same order. Rows that share no sequence
  may come between them, in any number.
- Within a row each device launches its rounds in the order of their numbers, after both exchanges of sequences
  that are computed by heads. In a backward pass the terms of round n follow the keys of round n + 1; those of
  rounds between nodes, and of replicas, follow all others; of all devices alike. So launches have an order that
  all agree on, and a communicator that runs them one by one is never stuck.
- What a device waits for before a launch comes before that launch in this order.

A message is kept until its arrival is known: a peer's message of a later pass proves that it has received all
of the passes before, and gradients of keys prove that the keys came. Where keys go one way alone, as
between lanes of unlike widths, the other way has a message of one number. (Lanes of one width always need keys
of each other, because their pieces are mirrored, under a window, too.)
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from elasticd_planner.batching.context_exchange import ContextExchange, ContextRound, context_exchange
from elasticd_planner.batching.context_members import ContextMembers, ContextPart, context_members
from elasticd_planner.spec.batch import MicroBatch
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Stage
from torch import Tensor
from torch.autograd.function import once_differentiable

from elasticd.runtime.comm.communicators import Mesh
from elasticd.runtime.comm.running_group import running_group
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel import attention_kernels as kernels
from elasticd.runtime.parallel.attention_by_heads import (
    HEADS_IN,
    KEYS,
    NUMBERS,
    TERMS,
    HeadsBackward,
    HeadsForward,
    HeadsLayer,
    OfHeads,
    kv_heads_here,
)
from elasticd.runtime.parallel.attention_kernels import Visible
from elasticd.runtime.parallel.packed_row import PackedRow, Segment

#: [elements] Rounds are launched together as long as a device sends no more in them.
TOGETHER = 1 << 15


@dataclass(slots=True)
class _Sent:
    """Messages that were launched, and whose arrival is not known at all of their receivers."""

    number: int
    work: Any
    peers: set[str]


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
        self._sent: dict[str, list[_Sent]] = defaultdict(list)
        self._passes = 0

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
        """The members by their heads, in layers in which this device has as many as these queries and keys.

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
        """The first of some numbers for the messages of one pass through an attention."""
        self._passes += 1
        return self._passes * NUMBERS

    def launch(
        self, number: int, sends: Sequence[tuple[str, Tensor]], takes: Sequence[tuple[str, Tensor]]
    ) -> Any:
        """Launches messages, all side by side.

        Args:
            number: of them.
            sends: to whom, and what.
            takes: from whom, and room for it.

        Returns:
            The work for `finish`.
        """
        work = self.mesh.begin_round(sends, takes)
        if sends:
            sent = _Sent(number, work, {peer for peer, _ in sends})
            for peer, _ in sends:
                self._sent[peer].append(sent)
        return work

    def finish(self, work: Any, received: Sequence[str], proves: int) -> None:
        """Waits for messages.

        Args:
            work: of `launch`.
            received: whom something came from.
            proves: these have all messages up to this number.
        """
        self.mesh.finish(work)
        for peer in received:
            left = []
            for sent in self._sent[peer]:
                if sent.number > proves:
                    left.append(sent)
                    continue
                sent.peers.discard(peer)
                if not sent.peers:
                    self.mesh.arrived(sent.work)
            self._sent[peer] = left


def _replicated(k: Tensor) -> bool:
    """Returns True if all members of the TP group have the same keys: so many of them, and those of the first
    token."""
    first = k[0, 0, 0, :8].double()
    mine = torch.cat([first.new_tensor(k.shape[1:2]), first, first.new_zeros(8 - len(first))])
    every = running_group().all_gather(mine)
    return bool(torch.allclose(every, mine, rtol=1e-2, atol=1e-6))


class RowExchange:
    """The exchange of one device for the attention of a row, in all layers of its stage, both ways."""

    def __init__(self, of: ContextParallel, lanes: tuple[MicroBatch, ...]) -> None:
        self._of, self._lanes = of, lanes
        self._layers: dict[tuple[Any, ...], _Layer] = {}
        self._kept: dict[str, deque[_Given]] = {}
        self._keeping: deque[_Given] | None = None
        self._again: deque[_Given] | None = None

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
        layer = self._layer(row, q, k, v, causal, window)
        out: Tensor = _CutAttention.apply(q, k, v, layer, scale)
        return out

    def _layer(
        self, row: PackedRow, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None
    ) -> _Layer:
        size = k.shape[3] + v.shape[3]
        key = q.shape[1], k.shape[1], size, causal, window
        if key not in self._layers:
            members = self._of.members(q, k)
            exchange = context_exchange(
                self._lanes,
                members,
                self._of.device,
                causal=causal,
                window=window,
                together=TOGETHER // size,
            )
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

    def given_before(self) -> _Given | None:
        """In a second pass: what the same attention gave in the first one."""
        return None if self._again is None else self._again.popleft()

    def keep(self, given: _Given) -> None:
        """In a first pass: keeps it for the second one."""
        if self._keeping is not None:
            self._keeping.append(given)


class _Given(NamedTuple):
    """The result of an attention, with the values that it keeps for its backward pass."""

    whole: Tensor  #: the output of the row [heads, tokens, value size]
    #: Tokens whose keys are exchanged: queries, keys and values, their output and its log-sum-exp.
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    by_heads: Mapping[int, OfHeads]  #: sequences that are computed by heads


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
#: Rounds that are launched together.
_Rounds = tuple[ContextRound, ...]


class _Layer:
    """The computation of attention in a row, for layers of one shape: heads, masks, and what is exchanged."""

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
        self._me = me = members.members[members.index[parallel.device]]
        self.row_exchange, self.parallel, self.replicas = row_exchange, parallel, exchange.replicas
        together = groupby(exchange.rounds, key=lambda each: each.number)
        self.rounds: list[_Rounds] = [tuple(rounds) for _, rounds in together]
        self._causal, self._window = causal, window
        self._heads, self._each = me.heads, members.each
        #: Where heads and kv-heads do not divide, there are keys for each head.
        self._repeated = kv_heads != me.kv_heads[1] - me.kv_heads[0]
        by_piece, by_heads = iter(row.segments), {each.sequence for each in exchange.heads}
        segments: list[tuple[int, Segment]] = []  # with the number of its sequence
        for number, piece in zip(exchange.sequences, row.pieces, strict=True):
            segments += [(number, next(by_piece)) for _ in piece.spans]
        #: Of the row those whose keys are exchanged; None: all. Their tensors are apart from the others'.
        self._rest: list[slice] | None = None
        self._segments = segments
        self.by_heads: HeadsLayer | None = None
        if by_heads:
            rest = [(number, segment) for number, segment in segments if number not in by_heads]
            self._rest, self._segments, at = [segment.rows for _, segment in rest], [], 0
            for number, segment in rest:
                self._segments.append((number, segment._replace(first=at)))
                at += segment.stop - segment.start
            self.by_heads = HeadsLayer(
                members,
                parallel.device,
                exchange.heads,
                exchange.heads_messages,
                [each for each in segments if each[0] in by_heads],
                repeated=self._repeated,
                causal=causal,
                window=window,
            )

    def rest(self, x: Tensor) -> Tensor:
        """Of a tensor [heads, tokens of the row, size] the tokens whose keys are exchanged."""
        if self._rest is None:
            return x
        none = x.new_empty((x.shape[0], 0, x.shape[2]))  # no view, which would keep the tensor
        return torch.cat([x[:, rows] for rows in self._rest], 1) if self._rest else none

    def put(self, rest: Tensor, into: Tensor) -> None:
        """Writes them back."""
        at = 0
        for rows in self._rest or ():
            into[:, rows] = rest[:, at : at + rows.stop - rows.start]
            at += rows.stop - rows.start

    @cached_property
    def order(self) -> list[tuple[_Act, _Rounds]]:
        """The acts of a backward pass, the same on all devices but for rounds that one has no part in."""
        at: list[tuple[tuple[float, ...], _Act, _Rounds]] = []
        for each in self.rounds:
            first = 2 * each[0].number
            at.append(((first,), "fetch", each))
            at.append(((first + 2.5,), "compute", each))
            at.append(((math.inf, first) if each[0].last else (first + 3,), "give back", each))
        return [(what, each) for _, what, each in sorted(at, key=lambda one: one[0])]

    @cached_property
    def own(self) -> list[tuple[slice, _Pair]]:
        """Rows of keys here and queries here that attend to them; first those of each segment to itself."""
        every, found = slice(0, self._heads[1] - self._heads[0]), []
        pairs = [(one, one) for one in self._segments]
        pairs += [(a, b) for a in self._segments for b in self._segments if a is not b and a[0] == b[0]]
        for (_, queries), (_, keys) in pairs:
            visible = Visible(queries.start - keys.start, self._causal, self._window)
            if visible.any(queries.stop - queries.start, keys.stop - keys.start):
                found.append((keys.rows, _Pair(queries.rows, every, visible)))
        return found

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
        """The places of the keys that this device sends: rows and heads here, and their tokens among those
        sent. Keys that it passes on are not here."""
        heads = kv_heads_here(self._me, self._each, part, repeated=self._repeated)
        for number, segment in self._segments:
            start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
            if number == part.sequence and start < stop:
                first = segment.first + start - segment.start
                yield slice(first, first + stop - start), heads, slice(start - part.start, stop - part.start)


class _Exchange:
    """The rounds of one pass of one attention."""

    def __init__(self, layer: _Layer, number: int, k: Tensor, v: Tensor) -> None:
        self._layer, self._parallel, self._number, self._k, self._v = layer, layer.parallel, number, k, v
        self._fetched: set[int] = set()  # numbers of rounds
        self._came: list[_Came] = []  # what may be passed on
        self._terms: dict[ContextPart, tuple[Tensor, Tensor]] = {}  # of the gradients of what came

    def fetch(self, rounds: _Rounds) -> tuple[Any, list[_Came]]:
        """Launches rounds of keys. What they pass on must have come."""
        sends, takes, came = [], [], []
        for each in rounds:
            message = self._k.new_zeros(1)  # so that the other one knows that what it sent before has arrived
            if each.sends:
                message = torch.cat([x.flatten() for part in each.sends for x in self._cut(part)])
            room = self._k.new_empty(max(1, self._size(each.takes)))
            sends.append((each.peer, message))
            takes.append((each.peer, room))
            came += list(self._views(each.takes, room))
        if rounds[0].last and not self._layer.replicas:
            self._came += came
        return self._parallel.launch(self._number + KEYS, sends, takes), came

    def fetched(self, rounds: _Rounds, work: Any) -> None:
        """Waits for them, once."""
        if rounds[0].number not in self._fetched:
            self._fetched.add(rounds[0].number)
            self._parallel.finish(work, [each.peer for each in rounds], self._number + HEADS_IN)

    def give_back(self, rounds: _Rounds) -> tuple[Any, list[_Came]]:
        """Launches the rounds of the gradients: those of keys that came go to the devices that sent them."""
        sends, takes, got = [], [], []
        for each in rounds:
            if each.gives:
                terms = [term for part in each.gives for term in self._terms[part]]
                sends.append((each.peer, torch.cat([x.flatten() for x in terms]).to(self._k.dtype)))
            if each.gets:
                room = self._k.new_empty(self._size(each.gets))
                takes.append((each.peer, room))
                got += list(self._views(each.gets, room))
            if not each.last:
                for part in each.gives:
                    del self._terms[part]
        return self._parallel.launch(self._number + TERMS, sends, takes), got

    def given_back(self, rounds: _Rounds, work: Any) -> None:
        """Waits for them."""
        self._parallel.finish(work, [each.peer for each in rounds if each.gets], self._number + KEYS)

    def add(self, part: ContextPart, terms: tuple[Tensor, Tensor]) -> None:
        """Keeps terms of the gradients of a part that came, until they are given back."""
        self._terms[part] = terms

    def passed_on(self, part: ContextPart, terms: Sequence[Tensor]) -> None:
        """Adds what came back of a part that this device passed on to the terms that it will give back."""
        within = next(each.part for each in self._came if _inside(part, each.part))
        for into, term in zip(self._terms[within], terms, strict=True):
            _cut_of(into, part, within).add_(term)

    def _cut(self, part: ContextPart) -> Iterator[Tensor]:
        """Keys and values of a part: of this device, or that came."""
        here = list(self._layer.here(part))
        if here:
            for x in (self._k, self._v):
                cut = [x[heads, rows] for rows, heads, _ in here]
                yield cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)
            return
        within = next(each for each in self._came if _inside(part, each.part))
        yield from (_cut_of(x, part, within.part) for x in within[1:])

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


def _inside(part: ContextPart, other: ContextPart) -> bool:
    tokens = other.start <= part.start and part.stop <= other.stop
    return part.sequence == other.sequence and tokens and other.first <= part.first and part.last <= other.last


def _cut_of(x: Tensor, part: ContextPart, within: ContextPart) -> Tensor:
    """Of a tensor of a part [kv-heads, tokens, size] what is of another part inside of it."""
    heads = slice(part.first - within.first, part.last - within.first)
    return x[heads, part.start - within.start : part.stop - within.start]


def _given(q: Tensor, k: Tensor, v: Tensor, layer: _Layer, scale: float) -> _Given:
    """Attention of queries [heads, tokens, size] and keys and values [kv-heads, tokens, size] of the row."""
    row, dtype = (q, k, v), kernels.wide(q.dtype)
    q, k, v = map(layer.rest, row)
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
    whole = out if layer.by_heads is None else row[0].new_zeros((*row[0].shape[:2], v.shape[2]))

    def add(pair: _Pair, keys: Tensor, values: Tensor) -> None:
        part = kernels.forward(q[pair.heads, pair.rows], keys, values, pair.visible, scale)
        kernels.merge(out[pair.heads, pair.rows], lse[pair.heads, pair.rows], *part)

    number, rounds = layer.parallel.begin(), layer.rounds
    exchange, own = _Exchange(layer, number, k, v), layer.own
    by_heads = None if layer.by_heads is None else HeadsForward(layer.by_heads, layer.parallel, number, scale)
    half = 0
    if by_heads is not None:
        by_heads.begin(*row)
        half = (len(own) + 1) // 2  # while queries and keys come; the rest while outputs go back
        for rows, pair in own[:half]:
            add(pair, k[:, rows], v[:, rows])
        by_heads.compute(whole)
    ahead = exchange.fetch(rounds[0]) if rounds else None
    for rows, pair in own[half:]:
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
    out = out.to(q.dtype)
    if by_heads is None:
        return _Given(out, q, k, v, out, lse, {})
    by_heads.end(whole)
    layer.put(out, whole)
    return _Given(whole, q, k, v, out, lse, by_heads.kept)


class _Gradients:
    """The gradients of one attention, as their terms come."""

    def __init__(self, grad: Tensor, given: _Given, layer: _Layer, scale: float) -> None:
        self._row_grad, self._grad, self._given = grad, layer.rest(grad), given
        self._q, self._k, self._v = given.q, given.k, given.v
        self._layer, self._scale = layer, scale
        self.q, self.k, self.v = (self._zeros(x, x.shape[1]) for x in (given.q, given.k, given.v))

    @staticmethod
    def _zeros(like: Tensor, tokens: int) -> Tensor:
        shape = like.shape[0], tokens, like.shape[2]
        return torch.zeros(shape, dtype=kernels.wide(like.dtype), device=like.device)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of it. The keys of a round are fetched while those of the one before are computed with, and the
        terms of that follow them; between nodes and replicas terms follow those of all other rounds."""
        layer, number = self._layer, self._layer.parallel.begin()
        exchange, own, half = _Exchange(layer, number, self._k, self._v), layer.own, 0
        by_heads, row = None, (self.q, self.k, self.v)
        if layer.by_heads is not None:
            kept, tokens = self._given.by_heads, self._row_grad.shape[1]
            q, k, v = (self._zeros(x, tokens) for x in row)
            row = q, k, v
            by_heads = HeadsBackward(layer.by_heads, layer.parallel, number, self._scale, kept)
            by_heads.begin(self._row_grad)
            half = (len(own) + 1) // 2
            self._own(own[:half])
            by_heads.compute(row)
        fetched: dict[int, tuple[_Rounds, Any, list[_Came]]] = {}
        before: tuple[_Rounds, Any, list[_Came]] | None = None
        for at, (what, each) in enumerate(layer.order):
            if what == "fetch":
                if not each[0].last:  # it may pass on what earlier ones bring
                    for earlier, work, _ in fetched.values():
                        exchange.fetched(earlier, work)
                fetched[each[0].number] = each, *exchange.fetch(each)
            if not at:
                self._own(own[half:])
            if what == "compute":
                _, work, came = fetched.pop(each[0].number)
                exchange.fetched(each, work)
                for part, *both in came:
                    exchange.add(part, self._of(part, *both))
            if what == "give back" and any(one.gives or one.gets for one in each):
                if before is not None and each[0].last and not before[0][0].last:  # it has terms of those
                    self._collect(exchange, before)
                    before = None
                begun = exchange.give_back(each)
                self._collect(exchange, before)
                before = each, *begun
        self._collect(exchange, before)
        if not layer.order:
            self._own(own[half:])
        if by_heads is not None:
            by_heads.end(row)
            for rest, into in zip((self.q, self.k, self.v), row, strict=True):
                layer.put(rest, into)
        return row

    def _own(self, pairs: Sequence[tuple[slice, _Pair]]) -> None:
        for rows, pair in pairs:
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
            self._grad[at],
            self._q[at],
            keys,
            values,
            self._given.out[at],
            self._given.lse[at],
            pair.visible,
            self._scale,
        )
        self.q[at] += term
        return others[0], others[1]

    def _collect(self, exchange: _Exchange, begun: tuple[_Rounds, Any, list[_Came]] | None) -> None:
        """Adds the terms of rounds to the gradients of keys and values here, or to those of what was passed
        on."""
        if begun is None:
            return
        rounds, work, came = begun
        exchange.given_back(rounds, work)
        for part, *terms in came:
            here = list(self._layer.here(part))
            for rows, heads, tokens in here:
                for into, term in zip((self.k, self.v), terms, strict=True):
                    into[heads, rows] += term[:, tokens]
            if not here:
                exchange.passed_on(part, terms)


class _CutAttention(torch.autograd.Function):
    """Attention of a row some of whose sequences are on other lanes, too: [1, heads, tokens, head size]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: _Layer, scale: float) -> Tensor:
        given = layer.row_exchange.given_before()
        if given is None:
            given = _given(q[0], k[0], v[0], layer, scale)
            none = q.new_empty(0)  # the second pass makes these again
            layer.row_exchange.keep(given._replace(q=none, k=none, v=none))
        else:
            given = given._replace(q=layer.rest(q[0]), k=layer.rest(k[0]), v=layer.rest(v[0]))
        ctx.layer, ctx.scale, ctx.by_heads = layer, scale, [*given.by_heads]
        whole, *rest, by_heads = given
        ctx.save_for_backward(*rest, *(x for each in by_heads.values() for x in each))
        return whole.unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *of_heads = ctx.saved_tensors
        each = (OfHeads(*of_heads[at : at + 5]) for at in range(0, len(of_heads), 5))
        by_heads = dict(zip(ctx.by_heads, each, strict=True))
        given = _Given(grad, q, k, v, out, lse, by_heads)  # nobody asks for the output of the row
        found = _Gradients(grad[0].contiguous(), given, ctx.layer, ctx.scale).run()
        dq, dk, dv = (x.to(of.dtype).unsqueeze(0) for x, of in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, None, None
