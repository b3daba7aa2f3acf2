"""What one device owns under one plan: the boxes that its optimizer steps on, and how they meet the model.

Without ZeRO those are the local parameters. With it they are parts of them, and parts that are kept for others:
before the vote reduced gradients go to who keeps state without computing with the box; after the optimizer the
updated values go from the lowest-ranked keeper of each part to all who compute with it and do not keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from elasticd_migration.local_state import LocalState, Owned, own, torch_dtype
from elasticd_planner.layout.gradient_reduction import (
    Delivery,
    buffers_away,
    gradients_away,
    leading,
    values_back,
)
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.model.local_model import LocalModel
from elasticd.runtime.parallel.gradient_reduction import GradientReducer, no_terms, sum_of_squares

#: Tags of messages beside those of the stages' boundaries.
GRADIENTS, VALUES, BUFFERS = range(1 << 24, (1 << 24) + 3)

Values = dict[str, list[tuple[Box, nn.Parameter]]]


class Ownership:
    """The values of one device, and what it owns of them: `owned` is there once `take` was called. master: the
    type of master weights, where what is owned are those, and values are rounded copies of them."""

    def __init__(
        self,
        layouts: Layouts,
        device: str,
        local: LocalModel,
        everyone: Group,
        reducer: GradientReducer,
        master: torch.dtype | None = None,
    ) -> None:
        self._layouts, self._device, self._everyone, self._reducer = layouts, device, everyone, reducer
        self._zero, self._master = layouts.plan.state.zero, master
        self.values = _values(layouts, device, local)
        self.buffers = _buffers(layouts, device, local)
        self.owned: list[Owned] = []
        self._boxes: dict[str, list[Owned]] = {}
        self._away = gradients_away(layouts, device)
        self._back = values_back(layouts, device)
        self._copies = buffers_away(layouts, device)
        self._leads = leading(layouts, device)

    def take(self, state: LocalState) -> list[Owned]:
        """What the optimizer is to step on, now that the values have the memory that they will keep; of `state`
        the master weights are adopted."""
        self.owned = own(self._layouts, self._device, self.values, state, self._master)
        for part in self.owned:
            if not part.box.empty:
                self._boxes.setdefault(part.name, []).append(part)
        return self.owned

    def reduce(self) -> float:
        """Gives each owned box its reduced gradient; the sum of squares of those that are counted here."""
        if not self._zero:
            self._reducer()
            if self._master is not None:
                self._view()
            return self._reducer.squares()
        if self._zero == 1:
            self._reducer()
            self._view()
        else:
            self._reducer.into([part for parts in self._boxes.values() for part in parts])
        self._deliver(self._away, GRADIENTS, self._outgoing, self._incoming)
        self._drop_without_terms()
        led = [(self._part(name, box), box) for name, box in self._leads]
        return sum_of_squares(
            part.parameter.grad[box.slices(part.box)] for part, box in led if part.parameter.grad is not None
        )

    def round(self) -> None:
        """After the optimizer's step: values become their master weights, rounded."""
        for name, box, parameter in self.owned if self._master is not None else ():
            if not box.empty:
                self._value(name, box).copy_(parameter.detach())

    def return_values(self) -> None:
        """After the optimizer's step: whoever computes with a box gets its new value."""
        self._deliver(self._back, VALUES, self._value, self._value)

    def copy_buffers(self) -> None:
        """After a step: whoever keeps a buffer without computing with it gets what forward made of it."""
        self._deliver(self._copies, BUFFERS, self._buffer, self._buffer)

    def clear(self) -> None:
        """Lets all gradients go."""
        parameters = [parameter for held in self.values.values() for _, parameter in held]
        for parameter in (*parameters, *(part.parameter for part in self.owned)):
            parameter.grad = None

    def _view(self) -> None:
        """Owned parts of local parameters read their gradients where they are."""
        for name, parts in self._boxes.items():
            for _, box, parameter in parts:
                held, value = self._around(name, box)
                if value is not parameter and value.grad is not None:
                    parameter.grad = value.grad[box.slices(held)].to(parameter.dtype)

    def _around(self, name: str, box: Box) -> tuple[Box, nn.Parameter]:
        return next((held, value) for held, value in self.values[name] if held.contains(box))

    def _value(self, name: str, box: Box) -> Tensor:
        held, value = self._around(name, box)
        return value.detach()[box.slices(held)]

    def _buffer(self, name: str, box: Box) -> Tensor:
        held, value = next((held, value) for held, value in self.buffers[name] if held.contains(box))
        return value[box.slices(held)]

    def _part(self, name: str, box: Box) -> Owned:
        return next(part for part in self._boxes[name] if part.box.contains(box))

    def _outgoing(self, name: str, box: Box) -> Tensor:
        """A gradient for who keeps its state. As in `reduce`, -0.0 stands for one that there is not."""
        _, around, parameter = self._part(name, box)
        if parameter.grad is None:
            return parameter.new_full(box.shape, -0.0)
        return parameter.grad[box.slices(around)] + 0.0

    def _incoming(self, name: str, box: Box) -> Tensor:
        """Room for it."""
        _, around, parameter = self._part(name, box)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad[box.slices(around)]

    def _drop_without_terms(self) -> None:
        """Of what was delivered, the gradients that there are not."""
        for delivery in self._away:
            if delivery.source != self._device:
                for name, box in delivery.pieces:
                    parameter = self._part(name, box).parameter
                    if parameter.grad is not None and no_terms(parameter.grad.view(-1)[:1]).all():
                        parameter.grad = None

    def _deliver(
        self,
        deliveries: Sequence[Delivery],
        tag: int,
        outgoing: Callable[[str, Box], Tensor],
        incoming: Callable[[str, Box], Tensor],
    ) -> None:
        """Sends first, which waits for nobody; then takes what comes, in the order in which it is sent."""
        rank = self._everyone.members.index
        for delivery in deliveries:
            if delivery.source == self._device:
                for alike in _by_dtype([outgoing(name, box) for name, box in delivery.pieces]):
                    flat = torch.cat([piece.reshape(-1) for piece in alike]).view(torch.uint8)
                    for device in delivery.destinations:
                        self._everyone.send(flat, rank(device), tag, "reduce")
        for delivery in deliveries:
            if delivery.source != self._device:
                for alike in _by_dtype([incoming(name, box) for name, box in delivery.pieces]):
                    flat = torch.empty(sum(piece.numel() for piece in alike), dtype=alike[0].dtype)
                    self._everyone.receive(flat.view(torch.uint8), rank(delivery.source), tag, "reduce")
                    for piece, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                        piece.copy_(part.view(piece.shape))


def _by_dtype(pieces: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for piece in pieces:
        found.setdefault(piece.dtype, []).append(piece)
    return list(found.values())


def _buffers(layouts: Layouts, device: str, local: LocalModel) -> dict[str, list[tuple[Box, Tensor]]]:
    """The local modules' buffers, and room for those that are kept for others."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for (name, role), boxes in layouts.held(device).items():
        if role == "buffer":
            dtype = torch_dtype(layouts.value(name).dtype)
            kept = [torch.empty(box.shape, dtype=dtype) for box in boxes]
            mine = local.buffers.get(name)
            found[name] = list(zip(boxes, kept if mine is None else [mine], strict=True))
    return found


def _values(layouts: Layouts, device: str, local: LocalModel) -> Values:
    """The local parameters, and room for the boxes that are kept for others."""
    found: Values = {}
    for (name, role), boxes in layouts.held(device).items():
        if role != "value":
            continue
        dtype = torch_dtype(layouts.value(name).dtype)
        for box in boxes:
            mine = local.parameters.get(name)
            if mine is not None and mine[0] == box:
                found.setdefault(name, []).append(mine)
            else:
                kept = nn.Parameter(torch.empty(box.shape, dtype=dtype), requires_grad=False)
                found.setdefault(name, []).append((box, kept))
    return found
