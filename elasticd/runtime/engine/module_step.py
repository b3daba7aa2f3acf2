"""`ModuleStep`: what one device does in a step of a model of several modules, in its order.

Every rank makes the batches of items and the order by itself, the same to the bit. That takes host time in
which nothing is launched, so another thread does it once the passes of the step before are launched. The vote
of that step has a digest of the batches, and waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, xor
from typing import NamedTuple

from elasticd_planner.batching.item_dealing import LaneSpeeds
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.layout.gradient_buckets import Bucket
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.module_order import ModuleAct, module_order, sum_places
from elasticd_planner.layout.pass_order import Act, Schedule
from elasticd_planner.spec.batch import BatchPlan, BatchRow, MicroBatch
from elasticd_planner.spec.item_batch import ItemBatch, SampleItem, item_batch

from elasticd.runtime.data.loader import ItemSizes

#: By module what it takes in a step.
Batches = Mapping[str, BatchPlan | ItemBatch]


class GradientSum(NamedTuple):
    """A sum of gradients that this device launches."""

    after: int  #: the place in the order of all acts after which it does
    module: str
    bucket: int  #: index in the queue of the module's reducer


class LaneActs(NamedTuple):
    """The passes of one module on this device."""

    micro: Sequence[MicroBatch] | Sequence[Sequence[SampleItem]]  #: of its lane
    acts: Sequence[Act]  #: the passes of this stage
    before: Sequence[Pass]  #: the passes of the stage before
    rows: Sequence[BatchRow]  #: of all lanes of its pipeline, if they are packed; else none


@dataclass(frozen=True)
class ModuleStep:
    """The part of a device in the passes of one step."""

    batches: Batches
    acts: Sequence[tuple[int, ModuleAct]]  #: with their places in the order of all acts
    lanes: Mapping[str, LaneActs]  #: by module that this device is in
    sums: Sequence[GradientSum]  #: in the order in which they are launched
    digest: int  #: a hash of the batches of all modules, the same on all ranks


@dataclass(frozen=True)
class StepMaker:
    """Makes the steps of one device under one plan. It has no state, so that any thread may use it."""

    layouts: Layouts  #: of all modules
    own: str  #: the module that computes the loss
    device: str
    schedule: Schedule
    buckets: Mapping[str, Sequence[Bucket]]  #: by module the buckets that this device sums with others

    def __call__(
        self,
        batch: BatchPlan,
        sizes: Mapping[str, ItemSizes],
        speeds: Mapping[str, LaneSpeeds],
        *,
        backward: bool,
    ) -> ModuleStep:
        """Makes a step.

        Args:
            batch: of the module that computes the loss.
            sizes: by module of items.
            speeds: of its lanes, likewise.
            backward: whether there are backward passes and sums.

        Raises:
            Invalid: a sample or an item has no size.
        """
        plan = self.layouts.plan
        items = {name: item_batch(plan, name, batch, *each, *speeds[name]) for name, each in sizes.items()}
        batches: dict[str, BatchPlan | ItemBatch] = {self.own: batch, **items}
        alone = self.device if plan.strategies[0].divided else None
        order = module_order(plan, batches, self.schedule, backward=backward, device=alone)
        lanes: dict[str, LaneActs] = {}
        mine: list[tuple[int, ModuleAct]] = []
        for name, view in self.layouts.views.items():
            if (place := view.plan.places.get(self.device)) is None:
                continue
            lane = name, place.pipeline, place.lane
            acts = [(at, each) for at, each in enumerate(order) if each[:4] == (*lane, place.stage)]
            mine += acts
            taken, stages = batches[name], len(view.plan.pipeline(place).stages)
            lanes[name] = LaneActs(
                [group.items for group in taken.of(place)] if isinstance(taken, ItemBatch) else taken.of(place),
                [each.act for _, each in acts if each.act.what == "pass"],
                [
                    _pass(each.act)
                    for each in order
                    if each[:4] == (*lane, (place.stage - 1) % stages) and each.act.what == "pass"
                ],
                () if isinstance(taken, ItemBatch) else taken.rows(place),
            )
        sums = sorted(self._sums(order), key=attrgetter("after")) if backward else []
        return ModuleStep(
            batches, sorted(mine), lanes, sums, together(each.digest for each in batches.values())
        )

    def _sums(self, order: Sequence[ModuleAct]) -> Iterator[GradientSum]:
        """Those of this device, in the sequence of their launches."""
        views = self.layouts.views
        names = [self.own, *(name for name in views if name != self.own)]
        trained = [views[name] for name in names if views[name].trained]
        divided = self.layouts.plan.strategies[0].divided
        places = sum_places(order, [(view.plan, view.spec) for view in trained], chained=divided)
        for name in names:
            for bucket, each in enumerate(self.buckets[name]):
                yield GradientSum(places[name][each.pieces[-1].name], name, bucket)


def together(digests: Iterable[int]) -> int:
    """One hash of those of all modules."""
    return reduce(xor, digests, 0)


def _pass(act: Act) -> Pass:
    return Pass("forward" if act.kind == "forward" else "backward", act.micro_batch, act.chunk)
