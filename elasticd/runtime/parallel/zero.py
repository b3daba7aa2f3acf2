"""ZeRO state of one device under one plan: the boxes that its optimizer steps on, and what passes to others.

Without ZeRO the device owns its local parameters. With ZeRO (Rajbhandari et al., 2020; stages 1 and 2) it owns
parts of them, and parts that it keeps for devices which compute with them. Before the vote, reduced gradients
go to the devices that keep a box's optimizer state without computing with the box. After the optimizer's step
the updated values of each part go from a keeper to all devices that compute with the part and do not keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from elasticd_migration.local_state import LocalState, Owned, install, own, torch_dtype
from elasticd_planner.layout.channels import Channel
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

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.model.local_model import LocalModel, LocalParameter
from elasticd.runtime.parallel.gradient_reduction import GradientReducer, sum_of_squares

Values = dict[str, list[tuple[Box, nn.Parameter]]]


class ZeroState:
    """The values that one device holds, and the parts of them that its optimizer steps on."""

    values: Values  #: by parameter: boxes and their tensors, local ones and those kept for other devices
    buffers: dict[str, list[tuple[Box, Tensor]]]  #: by buffer, likewise
    owned: list[Owned]  #: the parts that the optimizer steps on; empty until `attach`

    def __init__(
        self,
        layouts: Layouts,
        peers: Peers,
        local: LocalModel,
        reducer: GradientReducer,
        master: torch.dtype | None = None,
        accelerator: Accelerator = CPU,
        counts: Collection[str] = (),
    ) -> None:
        """
        Args:
            layouts: of the plan.
            peers: this device, and the other members of the plan.
            local: its modules.
            reducer: sums the gradients of the local parameters.
            master: the type of master weights. Then the master weights are owned, and values are their rounded
                copies. None: there are none, and values themselves are owned.
            accelerator: where all this lies.
            counts: parameters whose gradients are counts, which are in no norm.
        """
        device = peers.me
        self._layouts, self._device, self._reducer = layouts, device, reducer
        self._communicators = peers.communicators
        self._stage, self._master = layouts.plan.state.zero, master
        self.values = _values(layouts, device, local, accelerator)
        #: The local parameters of several boxes, each of which is a value by itself, in the memory of all.
        self._several = {name: held for name, held in local.parameters.items() if len(held.boxes) > 1}
        self.buffers = _buffers(layouts, device, local, accelerator)
        self.owned = []
        self._boxes: dict[str, list[Owned]] = {}
        self._cleared: list[nn.Parameter] = []  # the parameters that may have a gradient
        self._away = gradients_away(layouts, device)
        self._back = values_back(layouts, device)
        self._copies = buffers_away(layouts, device)
        self._leads = [(name, box) for name, box in leading(layouts, device) if name not in counts]

    def install(self, state: LocalState) -> None:
        """Makes a state's values and buffers those of this device, which adopt its tensors. Values of one local
        parameter are copied into its memory."""
        install(state, self.values, buffers=self.buffers)
        for name, held in self._several.items():
            parts = self._parts_of(name, held)
            for box, part in parts.items():
                held.tensor.detach()[held.slices(box)].copy_(part)
                part.data = held.part(box)
            held.tensor.grad = None

    def _parts_of(self, name: str, held: LocalParameter) -> Mapping[Box, nn.Parameter]:
        """The values of a local parameter of several boxes."""
        return {box: value for box, value in self.values[name] if box in held.boxes}

    def attach(self, state: LocalState) -> list[Owned]:
        """Makes the parts that the optimizer is to step on, as views of the values.

        Call it once the values have the memory that they will keep.

        Args:
            state: gives the master weights, which are adopted by reference.
        """
        self.owned = own(self._layouts, self._device, self.values, state, self._master)
        for part in self.owned:
            if not part.box.empty:
                self._boxes.setdefault(part.name, []).append(part)
        listed = [parameter for boxes in self.values.values() for _, parameter in boxes]
        listed += [held.tensor for held in self._several.values()]
        self._cleared = list(dict.fromkeys([*listed, *(part.parameter for part in self.owned)]))
        return self.owned

    def reduce(self) -> float | Tensor:
        """Gives each owned box its gradient, summed over all devices that hold a term of it.

        All members call it together, after the step's backward passes.

        Returns:
            The sum of squares of the elements that this device counts, perhaps still on the accelerator: each
            element counts on one device.
        """
        if not self._stage:
            self._reducer()
            self._divide()
            if self._master is not None:
                self._view()
            return self._reducer.squares
        if self._stage == 1:
            self._reducer()
            self._divide()
            self._view()
        else:
            self._reducer.into([part for parts in self._boxes.values() for part in parts])
        self._deliver(self._away, self._outgoing, self._incoming)
        led = [(self._part(name, box), box) for name, box in self._leads]
        return sum_of_squares(
            part.parameter.grad[box.slices(part.box)] for part, box in led if part.parameter.grad is not None
        )

    def round(self) -> None:
        """Sets values to their master weights, rounded, after the optimizer's step."""
        if self._master is not None and (held := [part for part in self.owned if not part.box.empty]):
            values = [self._value(name, box) for name, box, _ in held]
            torch._foreach_copy_(values, [part.parameter.detach() for part in held])

    def all_gather_params(self) -> None:
        """Sends the new values, after the optimizer's step, to the devices that compute with them.

        All members call it together.
        """
        self._deliver(self._back, self._value, self._value)

    def broadcast_buffers(self) -> None:
        """Sends buffers, after a step, to the devices that keep them without computing with them.

        All members call it together.
        """
        self._deliver(self._copies, self._buffer, self._buffer)

    def agree(self, unreached: Collection[str], counts: Collection[str] = ()) -> list[Tensor]:
        """Has all parts of a parameter have a gradient, or none, before the optimizer's step.

        Args:
            unreached: the parameters that no backward pass of the step reached on any device.
            counts: the parameters whose gradients are counts.

        Returns:
            The gradients of the owned parts, without counts.
        """
        found = []
        for name, box, parameter in self.owned:
            if name in unreached:
                parameter.grad = None
            elif name in counts:
                continue
            elif (gradient := parameter.grad) is not None:
                found.append(gradient)
            elif not box.empty:
                parameter.grad = gradient = torch.zeros_like(parameter)
                found.append(gradient)
        return found

    def clear(self) -> None:
        """Drops all gradients."""
        for parameter in self._cleared:
            parameter.grad = None

    def _divide(self) -> None:
        """Values of a local parameter of several boxes read their gradients where they are."""
        for name, held in self._several.items():
            sums, gradient = self._reducer.box_sums.pop(name, {}), held.tensor.grad
            for box, part in self._parts_of(name, held).items():
                part.grad = None
                of_box = sums.get(box) if gradient is None else gradient[held.slices(box)]
                if of_box is not None:
                    if of_box.dtype != part.dtype:
                        part.grad_dtype = of_box.dtype
                    part.grad = of_box

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
        """A gradient for the device that keeps its state."""
        _, around, parameter = self._part(name, box)
        if parameter.grad is None:
            return parameter.new_zeros(box.shape)
        return parameter.grad[box.slices(around)]

    def _incoming(self, name: str, box: Box) -> Tensor:
        """The buffer for a gradient from another device."""
        _, around, parameter = self._part(name, box)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad[box.slices(around)]

    def _deliver(
        self,
        deliveries: Sequence[Delivery],
        outgoing: Callable[[str, Box], Tensor],
        incoming: Callable[[str, Box], Tensor],
    ) -> None:
        """Round by round, in the one order of all members."""
        mesh = self._communicators.mesh(Channel("state", self._layouts.plan.members)) if deliveries else None
        for _, together in groupby(deliveries, key=attrgetter("round")):
            sends: list[tuple[str, Tensor]] = []
            receives: list[tuple[str, Tensor]] = []
            coming: list[list[Tensor]] = []
            for delivery in together:
                if delivery.source == self._device:
                    flat = torch.cat([outgoing(name, box).reshape(-1) for name, box in delivery.pieces])
                    sends += [(device, flat) for device in delivery.destinations]
                else:
                    parts = [incoming(name, box) for name, box in delivery.pieces]
                    flat = parts[0].new_empty(sum(part.numel() for part in parts))
                    receives.append((delivery.source, flat))
                    coming.append(parts)
            assert mesh is not None
            mesh.finish(mesh.begin_round(_as_bytes(sends), _as_bytes(receives)))
            for (_, flat), parts in zip(receives, coming, strict=True):
                for part, came in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    part.copy_(came.view(part.shape))


def _as_bytes(messages: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Values of any type travel so, also those that a library cannot add up."""
    return [(device, flat.view(torch.uint8)) for device, flat in messages]


def _buffers(
    layouts: Layouts, device: str, local: LocalModel, accelerator: Accelerator
) -> dict[str, list[tuple[Box, Tensor]]]:
    """The local modules' buffers, and room for those that are kept for others."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for (name, role), boxes in layouts.held(device).items():
        if role == "buffer":
            dtype = torch_dtype(layouts.rule(name).dtype)
            kept = [torch.empty(box.shape, dtype=dtype, device=accelerator.device) for box in boxes]
            mine = local.buffers.get(name)
            found[name] = list(zip(boxes, kept if mine is None else [mine], strict=True))
    return found


def _values(layouts: Layouts, device: str, local: LocalModel, accelerator: Accelerator) -> Values:
    """The local parameters, and room for the boxes that are kept for others."""
    found: Values = {}
    for (name, role), boxes in layouts.held(device).items():
        if role != "value":
            continue
        dtype = torch_dtype(layouts.rule(name).dtype)
        for box in boxes:
            mine = local.parameters.get(name)
            if mine is not None and mine.boxes == (box,):
                found.setdefault(name, []).append((box, mine.tensor))
            elif mine is not None and box in mine.boxes:
                part = nn.Parameter(mine.part(box), requires_grad=mine.tensor.requires_grad)
                found.setdefault(name, []).append((box, part))
            else:
                empty = torch.empty(box.shape, dtype=dtype, device=accelerator.device)
                found.setdefault(name, []).append((box, nn.Parameter(empty, requires_grad=False)))
    return found
