"""Experts over the lanes of a stage: rows go to the devices that have their experts, and outputs come back.

Where a plan places the experts of a block so that a lane lacks some, each device of the stage computes for all
lanes. A member of a lane takes a part of its rows. Each row goes once to each device that has one of its
experts, with the weights and the device's numbers of these; the device computes its pairs of a row and an
expert and sends one row back. Of an expert on several devices each takes its part of a member's rows
(`expert_holders`).

A pass of a block has three rounds of messages: how many rows there will be, the rows, the outputs. The host
waits for the first one alone. Its backward pass has two, of known sizes. All devices of the stage come to these
rounds in one order: lanes pass rows in one order, and one that has no micro-batch in a row serves: its experts
compute for the others, block by block, with no rows of its own.

A device to which no row goes keeps its place in the backward pass; and where a block trains, rows need a
gradient on every device alike, whatever else is frozen there. Otherwise rounds of unlike blocks would meet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from elasticd_planner.spec.model import ModelSpec, block_of
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elasticd.runtime.accelerator import put
from elasticd.runtime.comm.communicators import Mesh, Team
from elasticd.runtime.comm.running_group import OneDevice
from elasticd.runtime.model.graph_breaks import breaks_graphs
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.tp_rules import Experts
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.expert_holders import ExpertHolders
from elasticd.runtime.parallel.expert_pairs import ExpertPairs, Pairs
from elasticd.runtime.parallel.redistribute import Redistribution, slices, whole

#: Numbers of experts on a device.
_NUMBERS = torch.int16


class ExpertExchange:
    """The exchange of one device with the others of its stage, in the blocks whose experts lanes share."""

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        me: str,
        mesh: Mesh,
        lane: Team | OneDevice,
        pairs: ExpertPairs | None = None,
    ) -> None:
        """
        Args:
            spec: of the model.
            stage: of all lanes.
            me: this device.
            mesh: of all devices of the stage.
            lane: this device's.
            pairs: notes the pairs of rows and experts of each pass; None: nothing does.
        """
        self._spec, self._stage, self._lane, self.mesh = spec, stage, lane, mesh
        self._pairs = pairs or ExpertPairs(spec)
        self.devices, self.here, self.width = stage.devices, stage.devices.index(me), spec.width
        self._blocks: dict[str, _Block] = {}
        self._rounds: list[Any] = []  # whose messages may be under way
        self._parts = lru_cache(maxsize=64)(self._part_of)

    @property
    def sections(self) -> frozenset[str]:
        """The blocks whose experts it exchanges rows for."""
        return frozenset(self._blocks)

    def attach(self, model: Model, section: str, module: nn.Module) -> None:
        """Has the experts of a block compute for all lanes, if lanes share them.

        Args:
            model: has the rules.
            section: its name.
            module: it, with the parameters of this device.

        Raises:
            ModelError: it cannot be.
        """
        block = block_of(section)
        if block is None or block not in self._stage.shared_blocks:
            return
        owners = {
            path: rule
            for path, rules in model.owners(section).items()
            for rule in rules.values()
            if isinstance(rule, Experts)
        }
        if len(owners) > 1:
            raise ModelError(
                f"{section} has experts in {' and '.join(owners)}: lanes share those of one module alone; have "
                "each lane hold all of them"
            )
        ((path, rule),) = owners.items()
        owner = module.get_submodule(path)
        if any(isinstance(each, Dropout) and each.p for each in owner.modules()):
            raise ModelError(
                f"{section}.{path} has a dropout: other lanes' rows have no keys of their samples there; have "
                "each lane hold all experts"
            )
        holders = ExpertHolders(
            self._stage.experts_of(block),
            self._stage.splits_of(block),
            self._spec.units_of(rule.units).count,
        )
        trains = any(
            parameter.kind == "trained"
            for before in ("embed", *(f"blocks.{number}" for number in range(block + 1)))
            for parameter in self._spec.section(before)
        )
        note = partial(self._pairs.note, section)
        self._blocks[section] = made = _Block(self, owner, holders, note, trains=trains)
        owner.forward = made.forward

    def begin_step(self) -> None:
        """All messages of the step before have arrived."""
        self._rounds.clear()

    def serve(self, section: str) -> Tensor:
        """A forward pass of the experts of a block for other lanes alone.

        Returns:
            The output without a row, whose backward pass serves, too, if it needs a gradient.
        """
        return self._blocks[section].serve()

    def launch(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """A round: to and from each other device, in order; empty tensors are not sent."""
        others = [device for place, device in enumerate(self.devices) if place != self.here]
        work = self.mesh.begin_round(
            [(device, tensor) for device, tensor in zip(others, sends, strict=True) if tensor.numel()],
            [(device, tensor) for device, tensor in zip(others, receives, strict=True) if tensor.numel()],
        )
        self.mesh.finish(work)
        self._rounds.append(work)

    def all_came(self) -> None:
        """After a round of messages from all to all, all earlier rounds have arrived."""
        while len(self._rounds) > 1:
            self.mesh.arrived(self._rounds.pop(0))

    def part(self, rows: int) -> tuple[Redistribution | None, Redistribution | None, int, int]:
        """This member's part of a lane's rows: the way to it and back, and where it begins and ends."""
        return self._parts(rows)

    def _part_of(self, rows: int) -> tuple[Redistribution | None, Redistribution | None, int, int]:
        size, rank = self._lane.size, self._lane.rank
        if size == 1 or not rows:
            return None, None, 0, rows
        assert not isinstance(self._lane, OneDevice)
        widths = [rows * (member + 1) // size - rows * member // size for member in range(size)]
        all_rows, parts = whole(self._lane, rows), slices(self._lane, widths)
        there = Redistribution(self._lane, all_rows, parts, dim=0)
        back = Redistribution(self._lane, parts, all_rows, dim=0)
        return there, back, sum(widths[:rank]), sum(widths[: rank + 1])


#: What a round of counts says of rows and weights, by their places here.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Kind(NamedTuple):
    """The form of a block's rows; a lane without rows hears it from others."""

    width: int  #: elements of a row
    k: int  #: experts of a row
    rows: int  #: the place of their type in `_DTYPES`
    weights: int  #: likewise

    @classmethod
    def of(cls, rows: Tensor, weights: Tensor) -> _Kind:
        """Raises ModelError for types that cannot be sent."""
        if unknown := {rows.dtype, weights.dtype} - {*_DTYPES}:
            raise ModelError(f"experts that lanes share take rows of {unknown.pop()}: none can be sent")
        return cls(rows.shape[1], weights.shape[1], _DTYPES.index(rows.dtype), _DTYPES.index(weights.dtype))

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """No rows and no weights."""
        return (
            torch.empty(0, self.width, dtype=_DTYPES[self.rows], device=device),
            torch.empty(0, self.k, dtype=_DTYPES[self.weights], device=device),
        )


_NO_KIND = _Kind(0, 0, 0, 0)


class _Routes(NamedTuple):
    """Which rows go between this device and each device of the stage, itself among them."""

    row: Tensor  #: the own rows that are sent, device by device
    ids: Tensor  #: [sent rows, k], the device's numbers of the experts; -1: another one computes it
    sent: list[int]  #: rows by device
    received: list[int]  #: likewise
    computed: int  #: pairs of a row and an expert that this device computes
    kind: _Kind  #: of the rows


class _Block:
    """The experts of one block."""

    def __init__(
        self,
        exchange: ExpertExchange,
        owner: nn.Module,
        holders: ExpertHolders,
        note: Callable[[Pairs], None],
        *,
        trains: bool,
    ) -> None:
        """
        Args:
            exchange: of the stage.
            owner: the module with the experts of this device.
            holders: the devices of the stage that have each expert.
            note: called with the pairs of each pass of this lane.
            trains: something is trained here or before.
        """
        self._note = note
        self._exchange, self._own_forward, self._trains = exchange, owner.forward, trains
        self._names = tuple(inspect.signature(owner.forward).parameters)[:3]
        self._holders = holders
        self._local = torch.full((len(holders.held), holders.count + 2), -1, dtype=_NUMBERS)
        for place, own in enumerate(holders.held):
            self._local[place, list(own)] = torch.arange(len(own), dtype=_NUMBERS)
        self._parameter = next(owner.parameters())
        self._forms: dict[_Kind, Tensor] = {}

    def _form(self, kind: _Kind, device: torch.device) -> Tensor:
        """The form of rows as a tensor; each one is copied to the device once."""
        if kind not in self._forms:
            self._forms[kind] = put(torch.tensor(kind), device)
        return self._forms[kind]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the module's own: of the rows of this lane."""
        rows, index, weights = (*args, *(kwargs.pop(name) for name in self._names[len(args) :]))
        return self._of_lane(rows, index, weights, kwargs)

    @breaks_graphs
    def _of_lane(self, rows: Tensor, index: Tensor, weights: Tensor, others: Mapping[str, Any]) -> Tensor:
        exchange = self._exchange
        there, back, start, stop = exchange.part(len(rows))
        if torch.is_grad_enabled() and self._trains:
            rows, weights = (x if x.requires_grad else x.detach().requires_grad_() for x in (rows, weights))
        else:  # a lane that only serves makes no backward pass either, whatever asks for a gradient here
            rows, weights = rows.detach(), weights.detach()
        if there is not None:
            rows, weights = there(rows), there(weights)
        routes = self._routes(index[start:stop].long(), _Kind.of(rows, weights))
        self._note(Pairs(routes.computed, len(index), index.shape[1], self._holders.count))
        output = self._computed(routes, rows, weights, others)
        return output if back is None else back(output)

    def serve(self) -> Tensor:
        """For other lanes alone: of no row."""
        none = torch.empty(0, 1, dtype=torch.long, device=self._parameter.device)
        routes = self._routes(none, None)
        grad = torch.is_grad_enabled() and self._trains
        rows, weights = routes.kind.empty(self._parameter.device)
        return self._computed(routes, rows.requires_grad_(grad), weights.requires_grad_(grad), {})

    def _routes(self, index: Tensor, kind: _Kind | None) -> _Routes:
        """Chooses a device for each pair of an own row and an expert [rows, k], and tells the devices."""
        if self._local.device != index.device:
            self._local = self._local.to(index.device)
        exchange, devices = self._exchange, len(self._exchange.devices)
        index = index.clamp(-1, self._holders.count)
        to = self._holders.of(index)
        pairs = to == torch.arange(devices, device=index.device)[:, None, None]  # [devices, rows, k]
        goes = pairs.any(-1)
        form = self._form(kind or _NO_KIND, index.device).expand(devices, -1)
        mine = torch.cat((goes.sum(1)[:, None], pairs.sum((1, 2))[:, None], form), 1)
        others = [place for place in range(devices) if place != exchange.here]
        every = torch.empty_like(mine)
        every[exchange.here] = mine[exchange.here]
        exchange.launch([mine[place] for place in others], [every[place] for place in others])
        exchange.all_came()
        # The one wait of the host.
        (sent, *_), (received, computed, *told) = torch.stack((mine, every)).permute(0, 2, 1).tolist()
        of_row = _indices(goes.flatten(), sum(sent))
        device, row = of_row // max(1, len(index)), of_row % max(1, len(index))
        ids = self._local[device[:, None], index[row]].where(pairs[device, row], -1)
        kinds = [_Kind(*each) for place, each in enumerate(zip(*told, strict=True)) if received[place]]
        default = _Kind(exchange.width, 1, *(_DTYPES.index(self._parameter.dtype),) * 2)
        kind = kind or next(iter(kinds), default)
        ids = ids if len(ids) else ids.new_empty(0, kind.k)
        return _Routes(row, ids, sent, received, sum(computed), kind)

    def _computed(self, routes: _Routes, rows: Tensor, weights: Tensor, others: Mapping[str, Any]) -> Tensor:
        """The output of the own rows, while this device computes for all."""
        came, came_weights, ids = _There.apply(rows, weights, self._exchange, routes)
        flat = _indices((ids >= 0).flatten(), routes.computed)
        row, slot = flat // ids.shape[1], flat % ids.shape[1]
        pairs, pair_weights = came[row], came_weights[row, slot][:, None]
        if len(row):
            local = ids[row, slot][:, None].long()
            pairs = self._own_forward(pairs, local, pair_weights, **others)
        else:
            pairs = pairs * pair_weights
        output = torch.zeros_like(came).index_add(0, row, pairs.to(came.dtype))
        given: Tensor = _Back.apply(output, len(rows), self._exchange, routes)
        return given


class _There(torch.autograd.Function):
    """Rows, their weights and the numbers of their experts to the devices that have these."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, exchange: ExpertExchange, routes: _Routes
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, ctx.routes, ctx.rows = exchange, routes, len(rows)
        sent = rows[routes.row], weights[routes.row], routes.ids
        came, came_weights, ids = _passed(exchange, sent, routes.sent, routes.received)
        ctx.mark_non_differentiable(ids)
        return came, came_weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        routes = ctx.routes
        grads = _passed(ctx.exchange, (rows, weights), routes.received, routes.sent)
        own_rows, own_weights = (_added(ctx.rows, routes.row, part) for part in grads)
        return own_rows, own_weights, None, None


class _Back(torch.autograd.Function):
    """Outputs to the devices that have the rows, where those of one row are added."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: int, exchange: ExpertExchange, routes: _Routes) -> Tensor:
        ctx.exchange, ctx.routes = exchange, routes
        (came,) = _passed(exchange, (output,), routes.received, routes.sent)
        return _added(rows, routes.row, came)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        routes = ctx.routes
        (came,) = _passed(ctx.exchange, (grad[routes.row],), routes.sent, routes.received)
        return came, None, None, None


def _added(rows: int, row: Tensor, parts: Tensor) -> Tensor:
    return parts.new_zeros(rows, parts.shape[1]).index_add(0, row, parts)


def _indices(mask: Tensor, count: int) -> Tensor:
    """The indices at which a mask is True, in order, of which the host knows the number: it does not wait."""
    return mask.to(torch.uint8).argsort(descending=True, stable=True)[:count]


def _bytes(tensor: Tensor, width: int) -> Tensor:
    """A tensor [rows, ...] as [rows, width]; one without rows may have any strides."""
    if not len(tensor):
        return tensor.new_empty((0, width), dtype=torch.uint8)
    return tensor.contiguous().view(torch.uint8)


def _passed(
    exchange: ExpertExchange, tensors: Sequence[Tensor], sends: Sequence[int], receives: Sequence[int]
) -> list[Tensor]:
    """A round of rows: each row of all tensors is one row of bytes.

    Args:
        exchange: of the stage.
        tensors: [rows, ...] each, the rows of each device one after the other.
        sends: rows that go to each device.
        receives: rows that come from each.
    """
    widths = [tensor.shape[1] * tensor.element_size() for tensor in tensors]
    flat = [_bytes(tensor, width) for tensor, width in zip(tensors, widths, strict=True)]
    packed = torch.cat(flat, 1).split(list(sends))
    room = flat[0].new_empty(sum(receives), sum(widths))
    came = room.split(list(receives))
    others = [place for place in range(len(sends)) if place != exchange.here]
    came[exchange.here].copy_(packed[exchange.here])
    exchange.launch([packed[place] for place in others], [came[place] for place in others])
    parts = [part.clone(memory_format=torch.contiguous_format) for part in room.split(widths, 1)]
    return [part.view(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
