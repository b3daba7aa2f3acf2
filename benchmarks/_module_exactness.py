"""Rows: drawn plans of two modules train exactly in processes under strict communicators; messages between
modules; a step without an image; a frozen encoder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from elasticd_planner.spec.batch import batch_plan
from elasticd_planner.spec.item_batch import item_batch
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from tests.accelerators import test_module_training as on_device
from tests.runtime import test_modules as by_hand
from tests.runtime.drawn_placements import drawn_placement
from tests.runtime.image_model import Captions

#: Drawn plans, of which so many are trained by one group of processes in turn.
PLANS, IN_TURN = 50, 10


def exact_rows(plans: int = PLANS) -> Iterator[Row]:
    """Any layouts of both modules on at most 6 emulated devices, a process each, under the rules of NCCL."""
    exact = 0
    for start in range(0, plans, IN_TURN):
        for plan, results in on_device.trained_in_turn(range(start, min(start + IN_TURN, plans))):
            try:
                on_device.launches_are_right(plan, results)
            except AssertionError as error:
                print(f"{plan.strategies}: {error}", file=sys.stderr)
            else:
                exact += 1
    title = "drawn plans of two modules that train exactly in processes under strict communicators"
    yield row(title, exact, "", goal=f"{plans}", met=exact == plans)


def border_rows(plans: int = 40) -> Iterator[Row]:
    """Rows of messages, counted where they are sent, over the rows that a device needs and did not make itself;
    drawn plans, and three steps of each. Beside it the rows of leaders that broadcast what a leader sends them
    (Megatron's MIMO)."""
    sent = lacking = broadcast = 0
    for seed in range(plans):
        plan = drawn_placement(seed)
        sent += sum(rows for *_, rows in by_hand.counted(plan))
        need, leaders = _rows(plan)
        lacking, broadcast = lacking + need, broadcast + leaders
    title = f"{plans} drawn plans: rows over borders between modules, both ways, over the rows lacking"
    yield row(title, sent / lacking, "", goal="1.00", met=sent == lacking)
    yield row(
        f"{plans} drawn plans: the same of leaders that broadcast", broadcast / lacking, "", kind="simulated"
    )
    yield _frozen_gradients(plans)
    yield from _frozen_state()
    yield _step_without_images(plans)


def _rows(plan: Plan) -> tuple[int, int]:
    """The rows that devices need and did not make, and those of leaders that broadcast; both ways."""
    vision, language = plan.view("vision"), plan.view("language")
    sampler, data = by_hand.make_recipe().sampler, Captions()
    lacking = broadcast = 0
    for step in range(by_hand.STEPS):
        batch = batch_plan(language, step, sampler.samples(step))
        counts = dict(enumerate(data.counts["images"]))
        for key, group in item_batch(plan, "vision", batch, counts).walk():
            rows = sum(len(data[item.sample]["images"][item.number]) for item in group.items)
            near = vision.pipelines[key.pipeline].by_lane[key.lane].stages[-1].devices
            for lane in group.lanes:
                far = language.pipelines[group.pipeline].by_lane[lane].stages[0].devices
                lacking += rows * (len({*far} - {*near}) + len({*near} - {*far}))
                apart = near[0] != far[0]
                broadcast += rows * (len(far) + len(near) - (0 if apart else 2))
    return lacking, broadcast


def _frozen(plan: Plan) -> Plan:
    """The plan with an encoder that is not trained."""
    vision, language = plan.modules
    modules = (msgspec.structs.replace(vision, trainable=False), language)
    strategy = msgspec.structs.replace(plan.strategies[0], modules=modules)
    return plan.replace(strategies=(strategy,))


def _frozen_gradients(plans: int) -> Row:
    """Rows that a device sends back to one that encodes, of drawn plans."""
    back = 0
    for seed in range(plans):
        plan = _frozen(drawn_placement(seed))
        vision, language = plan.view("vision"), plan.view("language")
        makers = {device for each in vision.by_lane for device in each.stages[-1].devices}
        takers = {device for each in language.by_lane for device in each.stages[0].devices}
        messages = by_hand.counted(plan, frozen=True)
        back += sum(rows for source, to, rows in messages if source in takers - makers or to in makers - takers)
    title = f"{plans} drawn plans, frozen encoder: rows of gradients over borders"
    return row(title, back, "rows", goal="0", met=not back)


def _frozen_state() -> Iterator[Row]:
    plan = _frozen(by_hand.PLACEMENTS["disjoint"])
    results = run_threads(
        plan.members, lambda memory: by_hand.trained(memory.me, plan, cast(PlanGroups, memory), frozen=True)
    )
    shards = [
        shard
        for result in results.values()
        for item, local in result["state"].tensors.items()
        if item.name.startswith("vision.")
        for shard in local.shards
    ]
    values = sum(shard.planes["value"].nbytes for shard in shards if "value" in shard.planes)
    ratio = sum(plane.nbytes for shard in shards for plane in shard.planes.values()) / values
    yield row(
        "frozen encoder: bytes of its state over those of its values", ratio, "", goal="1.00", met=ratio == 1
    )


def _step_without_images(plans: int) -> Row:
    """Weights and moments of encoders after a step with images, and after one without."""
    changed = 0
    for seed in range(plans):
        plan = drawn_placement(seed)
        train = partial(_trained, plan)
        for result in run_threads(plan.members, train).values():
            first, second, _ = result["encoder"]
            changed += sum(
                not torch.equal(one, other)
                for name, before in first.items()
                for one, other in zip(before, second[name], strict=True)
            )
    title = f"{plans} drawn plans, a step without an image: weights and moments of the encoder that change"
    return row(title, changed, "tensors", goal="0", met=not changed)


def _trained(plan: Plan, memory: object) -> dict[str, Any]:
    groups = cast(PlanGroups, memory)
    return by_hand.trained(groups.me, plan, groups)
