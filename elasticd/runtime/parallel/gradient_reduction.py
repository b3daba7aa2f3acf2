"""Gradient reduction by holder set, during the backward pass: all-reduces of flat buffers for each set.

The sets, their pieces and the devices that count come from the layouts
(elasticd_planner.layout.gradient_reduction), so that replicas, unequal shards, tied copies and pipelines of any
shape are one case. A bucket's all-reduce begins as soon as the last micro-batch has left the sections that its
pieces belong to, and is waited for after all passes. A gradient is dropped once all of its pieces are in
buckets, so that it does not lie in memory twice. Where each of its boxes is one piece, its sums stay there.
Otherwise it is made anew from them, bucket by bucket, each of which is dropped then. If only the devices that
keep the optimizer's state keep gradients (ZeRO 2), what a device keeps is copied out of the bucket, and the
bucket is dropped.

A device without a gradient of a piece adds zeros to its sum. Which parameters a backward pass of the step
reached on this device, `reached` says. The vote tells of all devices, and a parameter that none has reached has
no gradient in the update, so that the optimizer skips it, as in one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from elasticd_migration.local_state import Owned
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.gradient_buckets import Bucket
from elasticd_planner.layout.gradient_reduction import Piece
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.model.local_model import LocalParameter
from elasticd.runtime.telemetry.comm_timer import Stopwatch

#: Elements whose squares are added at once on the CPU, so that rounding stays small.
_CHUNK = 1 << 15


#: The local parameters by name.
Parameters = Mapping[str, LocalParameter]


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype that a parameter's gradients are summed in: its own, unless `Precision.add_up` set another."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class GradientReducer:
    """Runs the gradient reductions that one device takes part in."""

    #: Of the gradients that this device counts, their sum, perhaps still on the accelerator; each piece counts
    #: on one device.
    squares: float | Tensor
    reached: set[str]  #: parameters of which this device had a gradient in the last step
    queue: tuple[Bucket, ...]  #: that it reduces over communicators of their sets, in the order of launches
    #: Of a local parameter of several boxes, all of which are in buckets: their sums, views of these.
    box_sums: dict[str, dict[Box, Tensor]]
    most_bytes: int  #: largest sum of local gradients, buffers and kept gradients in the last step of ZeRO 2

    def __init__(
        self,
        device: str,
        alone: Sequence[Piece],
        queue: Sequence[Bucket],
        passed_on: Sequence[Sequence[Bucket]],
        peers: Peers,
        parameters: Parameters,
        modules: Mapping[str, nn.Module],
        *,
        members: Sequence[str] = (),
        gates: Mapping[str, str] | None = None,
        keep_all: bool = True,
        stopwatch: Stopwatch | None = None,
        counts: Collection[str] = (),
    ) -> None:
        """
        Args:
            device: this device.
            alone: pieces of gradients that no other device holds.
            queue: see above.
            passed_on: in rounds, those of sets without a communicator.
            peers: this device, and the other members of the plan.
            parameters: the local ones by name.
            modules: the local ones by section.
            members: of the module's plan; empty: all members of the plan.
            gates: for tied parameters a section that must be done before they are reduced; see `last_users`.
            keep_all: every gradient stays with its parameter; False under ZeRO 2.
            stopwatch: measures the seconds of flattening and of waits.
            counts: parameters whose gradients are counts, which are in no norm.
        """
        self._counts = frozenset(counts)
        self._device, self._parameters = device, parameters
        self._keep_all, self._stopwatch = keep_all, stopwatch or Stopwatch()
        self._alone, self.queue = tuple(alone), tuple(queue)
        self._parts = [
            (piece.name, held.tensor, None if held.boxes == (piece.box,) else held.slices(piece.box))
            for piece in alone
            for held in (parameters[piece.name],)
        ]
        self._teams = [peers.communicators.team(Channel("reduce", bucket.devices)) for bucket in queue]
        self._passed_on = tuple(map(tuple, passed_on))
        everyone = Channel("state", tuple(members) or peers.everyone.members)
        self._mesh = peers.communicators.mesh(everyone) if passed_on else None
        late = [bucket for together in passed_on for bucket in together]
        self._users = _users(parameters, modules, gates or {})
        self._used_by: dict[str, list[str]] = {}  # names by section
        for name, users in self._users.items():
            for section in users:
                self._used_by.setdefault(section, []).append(name)
        self._where: dict[str, list[int]] = {}
        for index, bucket in enumerate(queue):
            for name in {piece.name for piece in bucket.pieces}:
                self._where.setdefault(name, []).append(index)
        self._pieces = Counter(piece.name for bucket in (*queue, *late) for piece in bucket.pieces)
        self._pieces.update(piece.name for piece in self._alone)
        shared = [piece for bucket in (*queue, *late) for piece in bucket.pieces]
        self._in_buckets = _in_buckets(shared, parameters)
        self.box_sums = {}
        self.squares, self.reached = 0.0, set()
        self.most_bytes = 0
        self._begin()

    @property
    def begins(self) -> bool:
        """Returns True if it launches sums with other devices."""
        return bool(self.queue)

    @property
    def sums(self) -> Iterator[tuple[Channel, int, torch.dtype]]:
        """All that it launches in a step: channels, numbers of elements, types."""
        for bucket in self.queue:
            yield Channel("reduce", bucket.devices), bucket.size, getattr(torch, bucket.dtype)

    def _begin(self) -> None:
        """Nothing of the step is sent yet."""
        self._waits_for = {name: len(users) for name, users in self._users.items()} if self.queue else {}
        self._missing = [len({piece.name for piece in bucket.pieces}) for bucket in self.queue]
        self._left = Counter(self._pieces)
        self._flying: dict[int, tuple[Tensor, Any]] = {}  # by the index of a bucket in the queue
        self._reached = set[str]()
        self._flat_bytes = 0

    def section_done(self, section: str) -> None:
        """Launches the next buckets, as far as they are complete now.

        Args:
            section: the one that the last micro-batch's backward pass has left, so that its gradients are all
                that this device adds.
        """
        if not self.queue:
            return
        for name in self._used_by.get(section, ()):
            self._waits_for[name] -= 1
            if self._waits_for[name] == 0:
                for index in self._where.get(name, ()):
                    self._missing[index] -= 1
        while len(self._flying) < len(self.queue) and not self._missing[len(self._flying)]:
            self.launch(len(self._flying))

    def launch(self, index: int) -> None:
        """Launches the sum of a bucket, to which this device adds nothing more in the step. A caller that does
        not leave the order to `section_done` has one that is the same on all devices of a bucket.

        Args:
            index: of the bucket in `queue`.
        """
        with self._stopwatch.measure("reduce"):
            flat = self._flattened(self.queue[index])
            self._flying[index] = flat, self._teams[index].begin_all_reduce(flat)

    def _flattened(self, bucket: Bucket) -> Tensor:
        """This device's term of a bucket. Gradients all of whose pieces are in buckets by now are dropped."""
        flat = torch.cat([self._term(piece).reshape(-1) for piece in bucket.pieces])
        self._look(bucket.pieces)
        self._flat_bytes += _bytes(flat)
        self._note(0)
        for piece in bucket.pieces:
            self._left[piece.name] -= 1
            if not self._left[piece.name]:
                self._parameters[piece.name].tensor.grad = None
        return flat

    def _look(self, pieces: Iterable[Piece]) -> None:
        """Notes which of these parameters have a gradient here."""
        self._reached.update(
            piece.name for piece in pieces if self._parameters[piece.name].tensor.grad is not None
        )

    def _gradients_alone(self) -> Iterator[Tensor]:
        """The gradients that no other device has a term of; notes which parameters have one."""
        reached = self._reached
        for name, parameter, part in self._parts:
            gradient = parameter.grad
            if gradient is not None:
                reached.add(name)
                if name not in self._counts:
                    yield gradient if part is None else gradient[part]

    def _passed(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The buckets of sets without a communicator, with their sums."""
        for together in self._passed_on:
            assert self._mesh is not None
            with self._stopwatch.measure("reduce"):
                terms = [self._flattened(bucket) for bucket in together]
            out: list[tuple[str, Tensor]] = []  # to whom, and what
            back: list[tuple[str, Tensor]] = []
            added: list[tuple[Tensor, list[tuple[str, Tensor]]]] = []
            for bucket, flat in zip(together, terms, strict=True):
                if bucket.counter == self._device:
                    others = [device for device in bucket.devices if device != self._device]
                    added.append((flat, [(device, torch.empty_like(flat)) for device in others]))
                else:
                    out.append((bucket.counter, flat))
                    back.append((bucket.counter, torch.empty_like(flat)))
            self._mesh.finish(self._mesh.begin_round(out, [each for _, came in added for each in came]))
            with self._stopwatch.measure("reduce"):
                for flat, came in added:
                    for _, term in came:
                        flat += term
                copies = [(flat.clone(), came) for flat, came in added]  # sent ones may be under way later
            sums = [(device, copy) for copy, came in copies for device, _ in came]
            self._mesh.finish(self._mesh.begin_round(sums, back))
            received = iter(back)
            for bucket, flat in zip(together, terms, strict=True):
                yield bucket, flat if bucket.counter == self._device else next(received)[1]

    def _landed(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket with its sums, once all are launched."""
        for index in range(len(self.queue)):
            if index not in self._flying:
                self.launch(index)
        passed = list(self._passed())
        self.squares = sum_of_squares(self._gradients_alone())
        self.reached = self._reached
        for index, bucket in enumerate(self.queue):
            flat, work = self._flying[index]
            self._teams[index].finish(work)
            self._flying[index] = (flat.new_empty(0), None)
            yield bucket, flat
        yield from passed

    def __call__(self) -> None:
        """Waits for all reductions: every local gradient becomes the sum over the devices with a term of it."""
        for bucket, flat in self._landed():
            if bucket.counter == self._device:
                apart = any(piece.name in self._counts for piece in bucket.pieces)
                parts = (part for piece, part in _sums(bucket, flat) if piece.name not in self._counts)
                self.squares += sum_of_squares(parts if apart else [flat])
            for piece, part in _sums(bucket, flat):
                if piece.name not in self._in_buckets:
                    self._gradient(piece.name, piece.box).copy_(part)
                elif len(self._parameters[piece.name].boxes) > 1:
                    self.box_sums.setdefault(piece.name, {})[piece.box] = part
                else:
                    self._parameters[piece.name].tensor.grad = part
        self._begin()

    def into(self, owned: Sequence[Owned]) -> None:
        """Waits for all reductions under ZeRO 2: each part gets its summed gradient, all others are dropped.

        Args:
            owned: the parts of parameters whose optimizer state this device keeps.
        """
        boxes: dict[str, list[Owned]] = {}
        for each in owned:
            boxes.setdefault(each.name, []).append(each)
        kept = 0
        for bucket, flat in self._landed():
            for piece, part in _sums(bucket, flat):
                kept += _keep(piece, part, boxes.get(piece.name, ()))
                self._note(kept)
            self._flat_bytes -= _bytes(flat)
        for piece in self._alone:
            if self._parameters[piece.name].tensor.grad is not None:
                kept += _keep(piece, self._gradient(piece.name, piece.box), boxes.get(piece.name, ()))
                self._note(kept)
            self._left[piece.name] -= 1
            if not self._left[piece.name]:
                self._let_go(piece.name, boxes.get(piece.name, ()))
        self._begin()

    def _note(self, kept: int) -> None:
        """Updates `most_bytes` under ZeRO 2; `kept`: bytes of kept gradients."""
        if self._keep_all:
            return
        if not self._flying and not kept:
            self.most_bytes = 0
        alive = sum(_bytes(parameter.grad) for _, parameter in self._parameters.values())
        self.most_bytes = max(self.most_bytes, alive + self._flat_bytes + kept)

    def _let_go(self, name: str, owned: Iterable[Owned]) -> None:
        """Drops a gradient unless the parameter itself is owned."""
        parameter = self._parameters[name].tensor
        if not any(part.parameter is parameter for part in owned):
            parameter.grad = None

    def _term(self, piece: Piece) -> Tensor:
        """The term that this device adds to a piece."""
        parameter = self._parameters[piece.name].tensor
        if parameter.grad is not None and self._device in piece.counting:
            return self._gradient(piece.name, piece.box)
        return parameter.new_zeros((piece.box.size,), dtype=gradient_dtype(parameter))

    def _gradient(self, name: str, box: Box) -> Tensor:
        held = self._parameters[name]
        parameter = held.tensor
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        return parameter.grad[held.slices(box)]


def _users(
    parameters: Parameters, modules: Mapping[str, nn.Module], gates: Mapping[str, str]
) -> dict[str, frozenset[str]]:
    """The local sections that use each parameter, and its gate."""
    inside = {section: {id(p) for p in module.parameters()} for section, module in modules.items()}
    return {
        name: frozenset(section for section, ids in inside.items() if id(parameter) in ids)
        | ({gates[name]} if name in gates else frozenset())
        for name, (_, parameter) in parameters.items()
    }


def _in_buckets(pieces: Iterable[Piece], parameters: Parameters) -> frozenset[str]:
    """The parameters all of whose boxes are in buckets, each as one piece."""
    found: dict[str, list[Box]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece.box)
    return frozenset(name for name, boxes in found.items() if {*boxes} == {*parameters[name].boxes})


def _sums(bucket: Bucket, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces with their sums, each of its box's shape."""
    parts = flat.split([piece.box.size for piece in bucket.pieces])
    for piece, part in zip(bucket.pieces, parts, strict=True):
        yield piece, part.view(piece.box.shape)


def sum_of_squares(gradients: Iterable[Tensor]) -> float | Tensor:
    """The sum of squares of all elements; that of gradients on an accelerator is still there, [].

    On the CPU squares are summed by chunks in the gradients' own precision, single precision at least; chunks
    are summed in double precision. If that overflows, all is summed in double precision. On an accelerator all
    is, by one kernel for all gradients, since it takes no longer than to read them.
    """
    listed = [gradient.reshape(-1) for gradient in gradients if gradient.numel()]
    if listed and listed[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(listed, 2, dtype=torch.float64)).square().sum()
    total = sum(
        _on_host(
            [
                # Of small ones the calls cost more than the sums.
                torch.dot(flat, flat)
                if flat.dtype in _WIDE and flat.numel() <= _CHUNK
                else _squares(flat, _wide(flat.dtype))
                for flat in listed
            ]
        )
    )
    return total if math.isfinite(total) else sum(_on_host([_squares(flat, torch.float64) for flat in listed]))


#: Types whose squares are added in themselves.
_WIDE = (torch.float32, torch.float64)


@cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which squares of gradients of this type are added."""
    return torch.promote_types(dtype, torch.float32)


def _squares(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if flat.dtype == dtype and flat.numel() <= _CHUNK:
        return torch.dot(flat, flat)
    wide = (part.to(dtype) for part in flat.split(_CHUNK))
    return torch.stack([torch.dot(part, part) for part in wide]).double().sum()


def _on_host(values: Sequence[Tensor]) -> list[float]:
    """Numbers of the CPU, in one call where they are of one type."""
    if len({value.dtype for value in values}) == 1:
        numbers: list[float] = torch.stack(list(values)).tolist()
        return numbers
    return [value.item() for value in values]


def _keep(piece: Piece, reduced: Tensor, owned: Iterable[Owned]) -> int:
    """Copies the owned parts of a piece to the gradients that the optimizer reads. Returns new bytes."""
    taken = 0
    for _, box, parameter in owned:
        common = box.overlap(piece.box)
        if common is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            taken += _bytes(parameter.grad)
        target = parameter.grad[common.slices(box)]
        source = reduced[common.slices(piece.box)]
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    return taken


def _bytes(tensor: Tensor | None) -> int:
    return tensor.numel() * tensor.element_size() if tensor is not None else 0
