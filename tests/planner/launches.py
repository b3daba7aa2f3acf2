"""The launches of each rank in a step, on the communicators of its plan.

Tensors of the model go over communicators: one for each TP group, one for each set of devices that reduce
gradients together, one for each direction between two devices of neighbouring stages, and under ZeRO one of all
members, over which they deliver values to each other in rounds. Devices of a stage with several lanes have one
more, for keys of sequences that are cut over lanes, and one where the lanes share experts. A communicator
carries out the operations of a rank one after the other, as NCCL does: messages have no tags, and a receive
takes the next message of exactly its size. So all members of a communicator must launch the same operations in
the same order. `launches` derives that order from the plan and the batch; tests compare it with what the
runtime launches, and `deadlock(launches(...))` says whether it can be carried out at all, whatever the timing.

The order can also be carried out in one queue (`launch_order.in_one_queue`), where each rank's operations and
passes run strictly one after the other. Each stage has its part of one order of the passes and messages of its
pipeline (`pass_order`). Sums connect pipelines, and each pipeline comes to them in the order of buckets, which
is that of the last backward passes.

What the host tells others (votes, headers of activations, sample ids) is not data and goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from elasticd_planner.layout.channels import Channel, Use, own_sets
from elasticd_planner.layout.flows import borders
from elasticd_planner.layout.gradient_buckets import BUCKET, Bucket, DtypeOf, buckets, last_users, passed_on
from elasticd_planner.layout.gradient_reduction import (
    Delivery,
    buffers_away,
    gradients_away,
    reductions,
    values_back,
)
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.pass_order import Act, Schedule, acts_of_rows, stage_order
from elasticd_planner.spec.batch import BatchPlan, sums_wait

from tests.planner.launch_order import Join, Launch, Operation


def launches(
    layouts: Layouts,
    batch: BatchPlan,
    schedule: Schedule,
    *,
    dtype_of: DtypeOf | None = None,
    bucket: int = BUCKET,
    tensors: tuple[int, int] = (1, 1),
) -> dict[str, tuple[Launch | Join, ...]]:
    """The launches of each member of a plan in one step, and the points where its computation waits for them,
    in its order.

    The collectives of a section of one pass count as one, and so do the rounds in which lanes exchange the keys
    of a block: of all lanes that sequences of the row connect; and those of rows for experts that lanes share:
    of all lanes. A rank alone in a set launches nothing for it.

    Args:
        layouts: of the plan.
        batch: of the step.
        schedule: the order of passes.
        dtype_of: the dtype that gradients are summed in, by parameter; None: that of the parameter.
        bucket: bytes of a bucket of gradients.
        tensors: what passes between stages, a message for each; and of how many the gradient goes back.
    """
    cut = buckets(layouts, reductions(layouts), dtype_of, bucket)
    own = own_sets(layouts)
    delivered = {
        "gradients": gradients_away(layouts),
        "values": values_back(layouts),
        "buffers": buffers_away(layouts),
    }
    return {
        device: tuple(_Rank(layouts, device, cut, own, delivered, batch, schedule, tensors).log)
        for device in layouts.plan.members
    }


class _Rank:
    """Collects the launches of one rank."""

    def __init__(
        self,
        layouts: Layouts,
        device: str,
        cut: Sequence[Bucket],
        own: Collection[tuple[str, ...]],
        delivered: Mapping[str, Sequence[Delivery]],
        batch: BatchPlan,
        schedule: Schedule,
        tensors: tuple[int, int],
    ) -> None:
        self._tensors = {"activation": tensors[0], "gradient": tensors[1]}
        self.log: list[Launch | Join] = []
        self._layouts, self._device = layouts, device
        mine = [bucket for bucket in cut if device in bucket.devices]
        self._buckets = [bucket for bucket in mine if bucket.devices in own]
        self._launched: list[str] = []
        if device in layouts.plan.places:
            place = layouts.plan.places[device]
            pipeline = layouts.plan.pipeline(place)
            self._place, self._layers, self._stage = place, pipeline.layers, layouts.plan.stage(place)
            self._sections = [list(layouts.spec.sections(*span)) for span in self._stage.chunks]
            if len(pipeline.stages) > 1:
                self._before, self._after = borders(pipeline, place, device)
            rows = batch.rows(place)
            self._rows = [(number, row) for number, row in enumerate(rows) if row.lanes[place.lane]]
            of_lanes = layouts.plan.pipelines[place.pipeline].stages[place.stage]
            self._context, self._lanes = Channel("context", of_lanes.devices), of_lanes.by_lane
            self._experts = Channel("experts", of_lanes.devices)
            self._shared = {f"blocks.{block}" for block in of_lanes.shared_blocks}
            shares = layouts.plan.pipelines[place.pipeline].shares_experts
            all_rows = batch.pipelines[place.pipeline] if shares else rows
            self._numbers = [number for number, row in enumerate(all_rows) if row.lanes[place.lane]]
            if not all_rows:
                self._numbers = list(range(len(batch.of(place))))
            count = len(all_rows) or len(self._numbers)
            acts = stage_order(schedule, len(pipeline.stages), place.stage, count, pipeline.chunks)
            here = [section for sections in self._sections for section in sections]
            self._gates = last_users(layouts.spec, here)
            waits = sums_wait(rows, place.lane, pipeline.chunks)
            uneven = any(not all(row.lanes) for row in all_rows)
            listed = list(acts_of_rows(acts, self._numbers, serves=bool(self._shared)))
            self._carry_out(listed, sums_wait=waits or (bool(self._shared) and uneven))
        self._reduce(None)
        for together in passed_on(layouts, mine, own):
            self._pass_on(together)
        self.log += [Join(operation) for operation in self._launched]
        for what, deliveries in delivered.items():
            self._deliver(what, deliveries)

    def _launch(self, channel: Channel, operation: str, *, join: bool = False) -> None:
        self.log.append(Launch(str(channel), (Operation(operation, channel.members),)))
        if join:
            self.log.append(Join(operation))

    def _carry_out(self, acts: Sequence[Act], *, sums_wait: bool) -> None:
        last = {act.chunk: act for act in acts if (act.what, act.kind) == ("pass", "backward")}
        done: set[str] = set()
        for act in acts:
            if act.what == "serve":
                listed = self._sections[act.chunk]
                for section in listed if act.kind == "forward" else reversed(listed):
                    self._exchange(act.kind, act.micro_batch, section)
                continue
            messages = self._messages(act)
            if act.what != "pass":
                for channel, operation in messages:
                    self._launch(channel, operation)
                continue
            self.log += [Join(operation) for _, operation in messages]
            sections = self._sections[act.chunk]
            for section in sections if act.kind == "forward" else reversed(sections):
                self._inside(act.kind, act.micro_batch, section)
                if act is last.get(act.chunk) and not sums_wait:
                    done.add(section)
                    self._reduce(done)

    def _messages(self, act: Act) -> Iterator[tuple[Channel, str]]:
        """The messages that an act sends or receives, or a pass has received: a message for each tensor and
        destination."""
        forth, sends = act.kind == "forward", act.what == "send"
        use: Use = "activation" if forth else "gradient"
        start, stop = self._stage.chunks[act.chunk]
        later = forth == sends  # the other stage is the one after
        if stop == self._layers if later else start == 0:
            return
        border = self._after if later else self._before
        chunk = act.chunk if later else act.chunk - (self._place.stage == 0)  # of the earlier stage
        source = border.source or self._device
        pairs = [(self._device, to) for to in border.destinations] if sends else [(source, self._device)]
        for channel in [Channel(use, pair) for pair in pairs]:
            for tensor in range(self._tensors[use]):
                yield channel, f"{channel}: tensor {tensor} of micro-batch {act.micro_batch} of chunk {chunk}"

    def _inside(self, kind: str, index: int, section: str) -> None:
        """The keys of other lanes, and the collectives of the TP group."""
        number, row = self._rows[index] if self._rows else (index, None)
        joined = row.connected(self._place.lane) if row is not None else ()
        if joined and section.startswith("blocks."):
            operation = f"{self._context}: {kind} {number} {section} of lanes {joined}"
            ends = tuple(device for lane in joined for device in self._lanes[lane].devices)
            self.log += [Launch(str(self._context), (Operation(operation, ends),)), Join(operation)]
        self._exchange(kind, self._numbers[index], section)
        cut = any(parameter.cut is not None for parameter in self._layouts.spec.section(section))
        if cut and len(self._stage.devices) > 1:
            channel = Channel("tensor", self._stage.devices)
            self._launch(channel, f"{channel}: {kind} {index} {section}", join=True)

    def _exchange(self, kind: str, row: int, section: str) -> None:
        """The rows of all lanes to experts that lanes share."""
        if section in self._shared:
            self._launch(self._experts, f"{self._experts}: {kind} {row} {section}", join=True)

    def _reduce(self, done: set[str] | None) -> None:
        """Launches the next buckets whose gradients are all there; None: all that are left."""
        for bucket in self._buckets[len(self._launched) :]:
            users = {user for piece in bucket.pieces for user in self._users(piece.name)}
            if done is not None and not users <= done:
                return
            channel, first = Channel("reduce", bucket.devices), bucket.pieces[0]
            operation = f"{channel}: {first.name} {first.box.start}"
            self._launch(channel, operation)
            self._launched.append(operation)

    def _pass_on(self, together: Sequence[Bucket]) -> None:
        """Terms go to one device of each bucket, which adds them, and the sum back to all."""
        channel = Channel("state", self._layouts.plan.members)
        for what in ("term", "sum"):
            messages = []
            for bucket in together:
                first = bucket.pieces[0]
                for device in bucket.devices:
                    ends = (device, bucket.counter) if what == "term" else (bucket.counter, device)
                    if device != bucket.counter and self._device in ends:
                        name = f"{what} of {' '.join(bucket.devices)} {first.name} {first.box.start}: {ends}"
                        messages.append(Operation(name, ends))
            self.log += [Launch(str(channel), tuple(messages)), Join(messages[0].name)]

    def _users(self, name: str) -> Iterator[str]:
        """The sections here after which its gradients are there; a tied one may have several."""
        if name in self._gates:
            yield self._gates[name]
        held = {section for sections in self._sections for section in sections}
        for used in (name, *(alias for alias, owner in self._layouts.spec.ties if owner == name)):
            yield from (section for section in held if used.startswith(f"{section}."))

    def _deliver(self, what: str, deliveries: Sequence[Delivery]) -> None:
        """Round by round, all messages of a round in one launch."""
        channel = Channel("state", self._layouts.plan.members)
        for number, together in groupby(deliveries, key=attrgetter("round")):
            messages = []
            for each in together:
                name, box = each.pieces[0]
                first = f"{' '.join(each.destinations)} {name} {box.start}"
                for to in each.destinations:
                    if self._device in (each.source, to):
                        message = f"{what} {number}: {each.source} to {to}: {first}"
                        messages.append(Operation(message, (each.source, to)))
            if messages:
                self.log += [Launch(str(channel), tuple(messages)), Join(messages[0].name)]
