"""Digests of drawn plans: the acts of their devices, times of their passes, their borders and launches.

`recorded/drawn_orders.json` has those of commit 40ff4026, for blocks of consecutive seeds. A plan of one module
has had these orders and borders since then; a second order, which messages over gloo had, is gone from them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from elasticd_planner.batching.row_balance import pipeline_time
from elasticd_planner.cost.schedule import passes
from elasticd_planner.cost.schedule_timeline import pass_times, played_seconds
from elasticd_planner.layout.flows import borders, stage_flows
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.pass_order import acts_of_rows, stage_order
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece, batch_plan
from elasticd_planner.spec.plan import Pipeline, Plan

from elasticd.runtime.engine.pipeline_stage import all_forward
from tests.planner.drawn_plans import SPEC, drawn_plan
from tests.planner.launch_order import Launch
from tests.planner.launches import launches

RECORDED: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "recorded" / "drawn_orders.json").read_text()
)
#: Seeds of a block.
BLOCK = {"acts": 100, "times": 100, "borders": 100, "launches": 20}
_DEVICES = tuple(f"n{node}/{local}" for node in range(6) for local in range(4))


def digest(what: str, block: int) -> str:
    """Of one block of seeds."""
    made = hashlib.blake2b(digest_size=8)
    for seed in range(block * BLOCK[what], (block + 1) * BLOCK[what]):
        for line in _LINES[what](seed):
            made.update(f"{line}\n".encode())
    return made.hexdigest()


def _plan(seed: int) -> Plan:
    """Pipelines of unlike depths, widths, lanes and chunks; some stages recompute."""
    rng = random.Random(f"plan {seed}")
    plan = drawn_plan(seed, layers=24, devices=_DEVICES, micro_batches=rng.randint(3, 30))
    recomputing = {device for device in plan.members if rng.random() < 0.2}

    def drawn(pipeline: Pipeline) -> Pipeline:
        stages = tuple(
            msgspec.structs.replace(stage, recompute=not recomputing.isdisjoint(stage.devices))
            for stage in pipeline.stages
        )
        return msgspec.structs.replace(pipeline, stages=stages)

    (strategy,) = plan.strategies
    (module,) = strategy.modules
    module = msgspec.structs.replace(module, pipelines=tuple(map(drawn, module.pipelines)))
    return plan.replace(strategies=(msgspec.structs.replace(strategy, modules=(module,)),))


def _packed(seed: int, plan: Plan) -> BatchPlan:
    """Rows of whole sequences, of which a lane may lack any."""
    rng = random.Random(f"rows {seed}")
    pipelines = []
    for pipeline in plan.pipelines:
        rows = []
        for row in range(pipeline.micro_batches):
            lanes = [
                (SequencePiece.whole(row, 8),) if rng.random() < 0.7 else ()
                for _ in pipeline.micro_batches_by_lane
            ]
            if any(lanes):
                rows.append(BatchRow(lanes=tuple(lanes)))
        pipelines.append(tuple(rows))
    return BatchPlan(step=0, plan=plan.number, pipelines=tuple(pipelines), packed=True)


def _acts(seed: int) -> Iterator[str]:
    """Of each lane of each stage, padded and packed, in training and in an evaluation; of one pipeline more
    with up to eight stages."""
    plan = _plan(seed)
    for batch in (batch_plan(plan, 0, range(plan.global_batch)), _packed(seed, plan)):
        for schedule in (passes, all_forward):
            for place in dict.fromkeys(place._replace(position=0) for _, place in sorted(plan.places.items())):
                pipeline, rows = plan.pipeline(place), batch.rows(place)
                count = len(rows) or len(batch.of(place))
                numbers = [number for number, row in enumerate(rows) if row.lanes[place.lane]]
                acts = stage_order(schedule, len(pipeline.stages), place.stage, count, pipeline.chunks)
                yield _words(acts_of_rows(acts, numbers if rows else range(count)))
    rng = random.Random(f"deep {seed}")
    stages, count = rng.randint(1, 8), rng.randint(1, 24)
    chunks = rng.randint(1, 4) if stages > 1 else 1
    for stage in range(stages):
        acts = stage_order(passes, stages, stage, count, chunks)
        yield f"{stage}: {_words(acts)}"


def _words(acts: Iterator[tuple[object, ...]] | Sequence[tuple[object, ...]]) -> str:
    return " ".join(["{} {} {} {}".format(*act) for act in acts])


def _times(seed: int) -> Iterator[str]:
    """To the last bit: of passes by stage, of all together, of rows in whole numbers."""
    rng = random.Random(f"times {seed}")
    stages, count = rng.randint(1, 8), rng.randint(1, 24)
    chunks = rng.randint(1, 4) if stages > 1 else 1
    forward = [rng.uniform(0.1, 2) for _ in range(stages * chunks)]
    backward = [rng.uniform(0.1, 4) for _ in forward]
    hops = rng.choice([0.0, 0.3, 3.0])
    boundary = [hops * rng.random() for _ in forward[1:]]
    for stage in pass_times(forward, backward, boundary, count, chunks):
        yield " ".join(
            f"{one.kind},{one.micro_batch},{one.chunk},{one.start.hex()},{one.stop.hex()}" for one in stage
        )
    yield played_seconds(forward, backward, boundary, count, chunks).hex()
    yield str(pipeline_time([rng.randint(0, 10**9) for _ in range(count)], stages))


def _borders(seed: int) -> Iterator[str]:
    """Of all boundaries of all lanes, and of each device with the stages around it."""
    plan = _plan(seed)
    for lane in plan.by_lane:
        for flow, times in stage_flows(lane):
            ways = [{each.source: each.destinations for each in way} for way in flow]
            yield f"{ways[0]} {ways[1]} {times}"
    for device, place in sorted(plan.places.items()):
        pipeline = plan.pipeline(place)
        if len(pipeline.stages) > 1:
            yield f"{device}: {[tuple(each) for each in borders(pipeline, place, device)]}"


def _launches(seed: int) -> Iterator[str]:
    """All that each member launches in a step."""
    plan, rng = _plan(seed), random.Random(f"launches {seed}")
    layers = msgspec.structs.replace(SPEC, layers=(0,) * 24)
    bucket, tensors = rng.choice([1 << 16, 1 << 22]), rng.choice([(1, 1), (3, 2)])
    batch = _packed(seed, plan) if rng.random() < 0.5 else batch_plan(plan, 0, range(plan.global_batch))
    for device, log in launches(Layouts(layers, plan), batch, passes, bucket=bucket, tensors=tensors).items():
        yield device
        for entry in log:
            if isinstance(entry, Launch):
                yield f"{entry.communicator} {[operation.name for operation in entry.operations]}"
            else:
                yield entry.operation


_LINES: dict[str, Callable[[int], Iterator[str]]] = {
    "acts": _acts,
    "times": _times,
    "borders": _borders,
    "launches": _launches,
}
