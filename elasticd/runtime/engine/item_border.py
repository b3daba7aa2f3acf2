"""The border between a module of items and the module that takes them: outputs forth, their gradients back.

What a lane of the module of items makes of a group of items goes to the first stage of each lane that has a
part of their sample. Both ends are TP groups that may share devices (`flows.between`): a device that has an
output already gets no message. Each lane that takes it gives a term of its gradient, and terms are added in the
order of lanes. A header goes ahead of each message, as between stages, with the items that are in it. When
messages are launched, at both ends, is said by `module_order`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.flows import Border, TensorFlow, between
from elasticd_planner.spec.item_batch import GroupId, ItemBatch, SampleItem
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.data.sample_ledger import entries
from elasticd.runtime.engine.activation_header import TensorHeader, empty_header, pack_header, unpack_header
from elasticd.runtime.engine.p2p import AbsentGradients, gradient_messages
from elasticd.runtime.model.bundle import Bundle, Gradients, entering, going_back, tensors
from elasticd.runtime.model.validation import ModelError

_Parts = TensorHeader | dict[str, TensorHeader]


class ItemBorder:
    """A device's part of the border between two modules: of either end, or of both."""

    trained: bool  #: something before the border is trained, so that gradients go back

    def __init__(
        self,
        peers: Peers,
        source: Plan,
        target: Plan,
        channel: Channel,
        dtype: torch.dtype,
        accelerator: Accelerator,
        *,
        trained: bool,
        implies_all_received: bool,
        first_tag: int,
    ) -> None:
        """
        Args:
            peers: the other members of the plan.
            source: the view of the module of items.
            target: the view of the module that takes them.
            channel: of the border's messages.
            dtype: the type of the module of items, `Model.dtype`.
            accelerator: where activations and gradients lie. Headers stay on the host.
            trained: whether gradients go back.
            implies_all_received: a gradient proves that every member of the first stage that takes an output
                has received it, because they wait for each other in a block.
            first_tag: of its headers in the group of all members, the first of `HEADERS`.
        """
        self.trained, self._everyone, self._me = trained, peers.everyone, peers.me
        self._source, self._target, self._dtype, self._accelerator = source, target, dtype, accelerator
        self._mesh = peers.communicators.mesh(channel) if peers.me in channel.members else None
        self._first_tag, self._left_out = first_tag, AbsentGradients()
        self._implies_all_received = implies_all_received
        self._flows: dict[tuple[int, int, int, int], TensorFlow] = {}

    @property
    def _answered(self) -> bool:
        """Returns True if gradients go back: not in an evaluation."""
        return self.trained and torch.is_grad_enabled()

    def begin_step(self, batch: ItemBatch) -> None:
        """No output of the step is made yet."""
        self.groups, self._needs = dict(batch.walk()), batch.needs
        self._tags = {key: self._first_tag + number for number, key in enumerate(self.groups)}
        self._outputs: dict[GroupId, tuple[Bundle, tuple[int, ...]]] = {}  # that both ends have here
        self._gradients: dict[GroupId, list[Tensor]] = {}  # likewise
        self._begun: dict[GroupId, tuple[_Parts, tuple[int, ...], list[Tensor], Any]] = {}
        # Of each lane that takes the output, in order; None: its term is made here.
        self._awaited: dict[GroupId, tuple[list[dict[str, Tensor | None] | None], list[Any]]] = {}
        self._sent: dict[GroupId, Any] = {}  # messages whose arrival the gradient proves

    def needed(self, pipeline: int, lane: int, row: int) -> Sequence[GroupId]:
        """The groups of the items that a micro-batch needs: that of a lane in a row of its pipeline."""
        return self._needs.get((pipeline, lane, row), ())

    def expected(self, key: GroupId) -> tuple[int, ...]:
        """The entries of a group in the ledger."""
        return entries(self.groups[key].items, packed=False)

    def _flow(self, key: GroupId, lane: int) -> TensorFlow:
        """The way of an output to a lane that takes it."""
        ends = key.pipeline, key.lane, self.groups[key].pipeline, lane
        if ends not in self._flows:
            near = self._source.pipelines[ends[0]].by_lane[ends[1]].stages[-1]
            far = self._target.pipelines[ends[2]].by_lane[ends[3]].stages[0]
            self._flows[ends] = between(near.devices, far.devices)
        return self._flows[ends]

    def _near(self, key: GroupId) -> list[Border]:
        """This device's end of the ways of an output, where it is made, by lane that takes it."""
        return [self._flow(key, lane).at_source(self._me) for lane in self.groups[key].lanes]

    def _far(self, key: GroupId) -> Border:
        """Its end of the way of an output, where it is taken."""
        return self._flow(key, self._target.places[self._me].lane).at_target(self._me)

    def announce(self, key: GroupId, x: Bundle, ids: Sequence[int]) -> None:
        """Sends the header of an output, with the items that are in it; returns at once.

        Raises:
            ValueError: this output cannot pass between modules.
            ModelError: it does not begin with the items.
        """
        count = len(self.groups[key].items)
        odd = [part for part in tensors(x) if part.dim() < 2 or part.shape[0] != count]
        if odd:
            raise ModelError(
                f"the head of {key.module} gave a tensor of shape {tuple(odd[0].shape)} for {count} "
                f"item{'s' if count > 1 else ''}: each tensor must begin with the items, [{count}, rows, ...]; "
                "put the parts of an item (crops, tiles) one behind the other in its rows"
            )
        header = pack_header(x, ids, self._dtype)
        for to in chain.from_iterable(border.destinations for border in self._near(key)):
            self._everyone.send(header, self._everyone.members.index(to), self._tags[key])
        self._outputs[key] = entering(x), tuple(ids)

    def send(self, key: GroupId) -> None:
        """Sends an output that was announced; returns at once."""
        borders = self._near(key)
        sent = self._send(
            chain.from_iterable(each.destinations for each in borders), tensors(self._outputs[key][0])
        )
        if self._answered and all(map(self._proves, borders)):
            self._sent[key] = sent
        if not self._answered and not self._taken_here(key):
            del self._outputs[key]

    def _taken_here(self, key: GroupId) -> bool:
        here, group = self._target.places.get(self._me), self.groups[key]
        if here is None or here.stage or here.pipeline != group.pipeline:
            return False
        return here.lane in group.lanes

    def _proves(self, border: Border) -> bool:
        """Returns True if the gradient over a border proves that all have the output that were sent it."""
        if not border.destinations:
            return True
        return border.source is not None and (
            self._implies_all_received or border.destinations == (border.source,)
        )

    def receive(self, key: GroupId) -> None:
        """Waits for the header of an output, and starts to receive it, unless it was made here."""
        if key in self._outputs:
            return
        source = self._far(key).source
        assert source is not None
        assert self._mesh is not None
        rank, count = self._everyone.members.index(source), len(self.expected(key))
        header = empty_header(count)
        self._everyone.take(self._everyone.post(header, rank, self._tags[key]), source=rank)
        parts, ids = unpack_header(header, count, self._dtype)
        listed = [parts] if isinstance(parts, TensorHeader) else parts.values()
        came = [torch.empty(each.shape, dtype=each.dtype, device=self._accelerator.device) for each in listed]
        work = self._mesh.begin_round([], [(source, each) for each in came if each.numel()])
        self._begun[key] = parts, ids, came, work

    def activation(self, key: GroupId) -> tuple[Bundle, tuple[int, ...]]:
        """Waits for an output that `receive` started to receive. Returns it, as new leaves of the autograd
        graph, with its items."""
        if key in self._outputs:
            if self._answered:
                x, ids = self._outputs[key]
                return entering(x), ids
            x, ids = self._outputs.pop(key)  # no gradient will ask for it
            if isinstance(x, Tensor):
                return x.detach(), ids
            return {name: part.detach() for name, part in x.items()}, ids
        parts, ids, came, work = self._begun.pop(key)
        assert self._mesh is not None
        self._mesh.finish(work)
        if isinstance(parts, TensorHeader):
            return came[0].requires_grad_(self.trained), ids
        return {
            name: part.requires_grad_(self.trained and about.needs)
            for (name, about), part in zip(parts.items(), came, strict=True)
        }, ids

    def send_back(self, key: GroupId, x: Bundle, given: Gradients) -> None:
        """Sends the gradients of an output, as far as this lane adds to them; returns at once.

        Args:
            key: of the group.
            x: the output, as `activation` gave it.
            given: its gradients.
        """
        messages = gradient_messages(x, given)
        self._send(self._far(key).destinations, messages)
        if key in self._outputs:
            self._gradients[key] = messages

    def post(self, key: GroupId) -> None:
        """Starts to receive the next lane's term of the gradients of an output, unless it is made here."""
        terms, works = self._awaited.setdefault(key, ([], []))
        source = self._near(key)[len(terms)].source
        if source is None:
            terms.append(None)
            return
        assert self._mesh is not None
        terms.append(grads := self._blank(self._outputs[key][0]))
        takes = [(source, each) for each in grads.values() if each is not None and each.numel()]
        works.append(self._mesh.begin_round([], takes))

    def gradient(self, key: GroupId) -> Gradients:
        """Waits for the gradients of an output that `post` started to receive."""
        x = self._outputs.pop(key)[0]
        terms, works = self._awaited.pop(key)
        for work in works:
            assert self._mesh is not None
            self._mesh.finish(work)
        if works and (sent := self._sent.pop(key, None)) is not None:
            assert self._mesh is not None
            self._mesh.arrived(sent)
        total: dict[str, Tensor | None] = {}
        for term in terms:
            grads = {} if isinstance(x, Tensor) else dict.fromkeys(x)
            grads.update(zip(going_back(x), self._gradients.pop(key), strict=True) if term is None else term)
            for name, grad in self._left_out.without(grads).items():
                before = total.get(name)
                total[name] = grad if before is None else before if grad is None else before + grad
        return total[""] if isinstance(x, Tensor) else total

    def end_step(self) -> None:
        """All messages of the step are launched."""
        self._outputs.clear()

    @staticmethod
    def _blank(x: Bundle) -> dict[str, Tensor | None]:
        grads: dict[str, Tensor | None] = {} if isinstance(x, Tensor) else dict.fromkeys(x)
        for name, part in going_back(x).items():
            grads[name] = torch.empty_like(part, memory_format=torch.contiguous_format)
        return grads

    def _send(self, destinations: Iterable[str], parts: Iterable[Tensor]) -> Any:
        """Launches messages, and returns their work; None: there are none."""
        together = [part.detach().contiguous() for part in parts if part.numel()]
        sends = [(to, part) for to in destinations for part in together]
        if not sends:
            return None
        assert self._mesh is not None
        # Kept until a gradient or the vote proves that they have arrived: `item_messages` of the planner.
        return self._mesh.begin_round(sends, [])


class ItemSource:
    """The end of a border at a lane of the module of items, in the place of a next stage."""

    def __init__(self, border: ItemBorder, module: str, pipeline: int, lane: int) -> None:
        self._border, self._lane = border, (module, pipeline, lane)

    def _group(self, index: int) -> GroupId:
        return GroupId(*self._lane, index)

    def begin_step(self) -> None:
        """`ItemBorder.begin_step` has."""

    def announce(self, index: int, x: Bundle, ids: Sequence[int]) -> None:
        """See `ItemBorder.announce`. `index`: of the group in this lane, as in all methods."""
        self._border.announce(self._group(index), x, ids)

    def send(self, index: int, messages: Iterable[Tensor]) -> None:
        """Sends the output that was announced."""
        self._border.send(self._group(index))

    def post(self, index: int, x: Bundle) -> None:
        """See `ItemBorder.post`."""
        self._border.post(self._group(index))

    def gradient(self, index: int) -> Gradients:
        """See `ItemBorder.gradient`."""
        return self._border.gradient(self._group(index))

    def end_step(self) -> None:
        """`ItemBorder.end_step` does."""


def row_of(x: Bundle, place: int) -> Bundle:
    """The output for one item of a group: [rows, ...], or named tensors of that shape."""
    return x[place] if isinstance(x, Tensor) else {name: part[place] for name, part in x.items()}


def in_order_of(samples: Sequence[int], parts: Sequence[tuple[SampleItem, Bundle]]) -> list[list[Bundle]]:
    """Of each sample the outputs for its items, in their order.

    Args:
        samples: of a micro-batch; one may be there several times.
        parts: by item; of a sample that is there several times, as often, or once for all of them.
    """
    by_item: dict[SampleItem, list[Bundle]] = {}
    for item, part in parts:
        by_item.setdefault(item, []).append(part)
    by_sample: dict[int, list[list[Bundle]]] = {}
    for item in sorted(by_item):
        by_sample.setdefault(item.sample, []).append(by_item[item])
    seen, found = Counter[int](), list[list[Bundle]]()
    for sample in samples:
        found.append([each[min(seen[sample], len(each) - 1)] for each in by_sample.get(sample, ())])
        seen[sample] += 1
    return found


def row_count(parts: Sequence[Bundle]) -> int:
    """The rows of some outputs."""
    return sum(len(tensors(part)[0]) for part in parts)


def rows_in(parts: Sequence[Bundle], spans: Iterable[tuple[int, int]]) -> list[Bundle]:
    """Of the rows of some outputs, one behind the other, those in these ranges [start, stop).

    Raises:
        ModelError: one of the named tensors of an output has another number of rows, and a part of them is
            asked for.
    """
    parts_inside = []
    for start, stop in spans:
        first = 0
        for part in parts:
            count = row_count([part])
            near, far = max(start - first, 0), min(stop - first, count)
            if near < far:
                parts_inside.append(part if far - near == count else _rows(part, near, far, count))
            first += count
    return parts_inside


def _rows(x: Bundle, start: int, stop: int, count: int) -> Bundle:
    if isinstance(x, Tensor):
        return x[start:stop]
    if odd := next((name for name, part in x.items() if len(part) != count), None):
        raise ModelError(
            f"of an item that gives {count} rows, {odd!r} has {len(x[odd])}: its sample is cut, and each lane "
            "takes some of the rows, so that each named tensor must begin with them; or give Packing(cut=False)"
        )
    return {name: part[start:stop] for name, part in x.items()}


def joined(parts: Sequence[Bundle]) -> Bundle | None:
    """The rows of all items, one after the other; None: there is no item."""
    if not parts:
        return None
    first = parts[0]
    alike = [part for part in parts if isinstance(part, Tensor)]
    if len(alike) == len(parts):
        return torch.cat(alike)
    if isinstance(first, Tensor):
        raise ModelError("a module of items must give a tensor of each item, or named tensors of each")
    named = [part for part in parts if not isinstance(part, Tensor)]
    if len(named) < len(parts) or any(part.keys() != first.keys() for part in named):
        raise ModelError("a module of items must give the same named tensors of each item")
    return {name: torch.cat([part[name] for part in named]) for name in first}
