"""What the ranks of a plan launch in a step can always be carried out, whatever the timing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.channels import channels
from elasticd_planner.layout.gradient_buckets import buckets
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece, batch_plan
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from tests import sizes
from tests.migration.plans import with_experts
from tests.planner import launches as launches_
from tests.planner.drawn_plans import MIXTURE, SPEC, drawn_plan
from tests.planner.launch_order import Join, Launch, Log, deadlock, in_one_queue
from tests.planner.launches import launches


def plan_of(seed: int, experts: bool) -> Plan:
    """A drawn plan, perhaps with experts that lanes share."""
    made = drawn_plan(seed)
    return with_experts(made, random.Random(seed)) if experts else made


def logs_of(
    seed: int, tensors: tuple[int, int] = (1, 1), *, experts: bool = False
) -> dict[str, tuple[Launch | Join, ...]]:
    """The launches of a drawn plan, with buckets of a drawn size."""
    made = plan_of(seed, experts)
    batch = batch_plan(made, 0, range(made.global_batch))
    bucket = random.Random(seed).choice([1, 1 << 10, 1 << 14, 1 << 22])
    layouts = Layouts(MIXTURE if experts else SPEC, made)
    return launches(layouts, batch, passes, bucket=bucket, tensors=tensors)


def hangs(logs: Mapping[str, Log]) -> bool:
    """Whether some launch never runs: on streams that run side by side, or in one queue."""
    return deadlock(logs) is not None or deadlock(in_one_queue(logs)) is not None


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", sizes.beside(range(8), range(1000)))
def test_no_plan_deadlocks(seed: int, experts: bool) -> None:
    assert not hangs(logs_of(seed, experts=experts))


@pytest.mark.parametrize("seed", sizes.beside(range(4), range(100)))
def test_no_plan_deadlocks_where_named_tensors_pass(seed: int) -> None:
    tensors = random.Random(seed).choice([(2, 1), (3, 2), (5, 3)])
    assert not hangs(logs_of(seed, tensors))


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_all_launch_on_the_communicators_that_they_have_and_on_no_other(seed: int, experts: bool) -> None:
    layouts = Layouts(MIXTURE if experts else SPEC, plan_of(seed, experts))
    for device, log in logs_of(seed, experts=experts).items():
        launched = {entry.communicator for entry in log if isinstance(entry, Launch)}
        has = channels(layouts, device)
        assert launched <= set(map(str, has))
        # A device that keeps all of what it computes with has nothing to deliver.
        assert {str(channel) for channel in has if channel.use != "state"} <= launched


def test_buckets_are_bounded_of_one_dtype_and_in_one_order_on_all_devices() -> None:
    layouts = Layouts(SPEC, drawn_plan(3))
    cut = buckets(
        layouts, reductions(layouts), lambda name: "float64" if "o.weight" in name else "float32", 4096
    )
    assert len(cut) > 20
    for bucket in cut:
        assert len({"o.weight" in piece.name for piece in bucket.pieces}) == 1
        assert bucket.size * (8 if bucket.dtype == "float64" else 4) <= 4096 or len(bucket.pieces) == 1
    for device in layouts.plan.members:
        mine = [each for each in reductions(layouts) if device in each.devices]
        own = list(buckets(layouts, mine, None, 4096))
        assert own == [
            bucket for bucket in buckets(layouts, reductions(layouts), None, 4096) if device in bucket.devices
        ]


def test_a_rank_that_launched_two_buckets_the_other_way_round_would_wait_for_ever() -> None:
    found = 0
    for seed in range(10):
        logs = logs_of(seed)
        for device, log in logs.items():
            at = [
                i
                for i, entry in enumerate(log)
                if isinstance(entry, Launch) and entry.communicator.startswith("reduce")
            ]
            if len({log[i].communicator for i in at}) < len(at):  # type: ignore[union-attr]
                mixed = list(log)
                first = next(i for i in at[1:] if log[i].communicator == log[at[0]].communicator)  # type: ignore[union-attr]
                mixed[at[0]], mixed[first] = log[first], log[at[0]]
                found += deadlock({**logs, device: mixed}) is not None
                break
    assert found >= 3


def lanes_of(rows: Sequence[Sequence[Sequence[int]]], chunks: int = 1) -> dict[str, tuple[Launch | Join, ...]]:
    """The launches of two stages with three lanes, of one device, of two and of one. A row names by lane the
    sequences that the lane has all of, or, those below 0, a part of."""
    owners = {
        sample: [lane for row in rows for lane in range(3) if sample in row[lane]]
        for row in rows
        for own in row
        for sample in own
    }

    def piece(sample: int, lane: int) -> SequencePiece:
        if sample >= 0:
            return SequencePiece.whole(sample, 12)
        at, of = owners[sample].index(lane), len(owners[sample])
        return SequencePiece(sample, 12, 6 * at // of, 6 * (at + 1) // of)

    listed = tuple(
        BatchRow(lanes=tuple(tuple(piece(sample, lane) for sample in row[lane]) for lane in range(3)))
        for row in rows
    )
    made = plan_of_lanes(tuple(max(1, sum(bool(row[lane]) for row in rows)) for lane in range(3)), chunks)
    batch = BatchPlan(step=0, plan=0, pipelines=(listed,), packed=True)
    return launches(Layouts(SPEC, made), batch, passes)


def plan_of_lanes(counts: tuple[int, ...], chunks: int = 1) -> Plan:
    """Two stages of three lanes."""
    size = len(SPEC.layers) // (2 * chunks)
    spans = [[(size * at, size * (at + 1)) for at in range(stage, 2 * chunks, 2)] for stage in range(2)]
    stages = tuple(
        Stage(start=start, stop=stop, later=tuple(later), devices=devices, shares=(1,) * 4, lanes=(1, 2, 1))
        for ((start, stop), *later), devices in zip(
            spans, [("a/0", "b/0", "b/1", "c/0"), ("a/1", "b/2", "b/3", "c/1")], strict=True
        )
    )
    pipeline = Pipeline(stages=stages, micro_batches=sum(counts), rows=counts)
    module = ModulePlan(module="model", pipelines=(pipeline,))
    return Plan(number=0, strategies=(Strategy(modules=(module,)),), micro_batch=1, global_batch=sum(counts))


#: Rows by lane; the sequences below 0 are cut.
JOINT = {
    "first": [[[-1], [-1], [-1]], [[1], [2], [3]], [[4], [], [5]], [[6], [], []]],
    "anywhere": [[[1], [2], [3]], [[-1], [-1], [4]], [[5], [-2], [-2, 6]], [[7], [], [8]], [[9], [], []]],
    "several in a row": [[[-1, -3], [-1, -2], [-2, -3, 1]], [[-4], [-4], [2]], [[3], [], [4]]],
    "last of some": [[[1], [2], [3]], [[-1, 4], [-1], [-1]], [[5], [], []], [[6], [], []], [[7], [], []]],
}


@pytest.mark.parametrize("name", JOINT)
def test_lanes_that_share_sequences_never_wait_for_ever(name: str) -> None:
    """Whatever the numbers of their rows, because all rows that they share have one index."""
    logs = lanes_of(JOINT[name])
    joint = sum(any(sample < 0 for own in row for sample in own) for row in JOINT[name])
    shared = {e.communicator for log in logs.values() for e in log if isinstance(e, Launch)}
    assert any(name.startswith("context") for name in shared)
    counted = sum(isinstance(e, Launch) and e.communicator.startswith("context") for e in logs["b/0"])
    assert counted == 2 * 6 * joint, "once in each block of the stage, both ways"
    assert not hangs(logs)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("seed", sizes.beside(range(5), range(500)))
def test_no_drawn_rows_of_lanes_deadlock(seed: int, chunks: int) -> None:
    """Rows may leave out lanes anywhere, and stages may be interleaved."""
    drawn = random.Random(seed)
    rows: list[list[list[int]]] = []
    for row in range(drawn.randint(1, 8)):
        rows.append([[100 * lane + row + 1] if drawn.random() < 0.7 else [] for lane in range(3)])
    for sample in range(1, drawn.randint(2, 7)):
        for own in drawn.sample(drawn.choice(rows), drawn.randint(2, 3)):
            own.append(-sample)
    assert not hangs(lanes_of([row for row in rows if any(row)], chunks))


def test_a_tied_sum_on_the_last_stage_before_its_last_message_would_hang_in_one_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stages before could not come to their last sums, which others launch before that one."""
    monkeypatch.setattr(launches_, "last_users", lambda spec, sections: {})
    assert any(deadlock(in_one_queue(logs_of(seed))) is not None for seed in range(10))
    assert not any(deadlock(logs_of(seed)) is not None for seed in range(10))


def test_sums_of_a_lane_before_the_last_row_that_lanes_share_would_hang_in_one_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [[[1], [2], [3]], [[-1], [-1], [-1]], [[], [4], [5]]]
    assert not hangs(lanes_of(rows))
    monkeypatch.setattr(launches_, "sums_wait", lambda *given: False)
    assert deadlock(in_one_queue(lanes_of(rows))) is not None


def test_sums_wait_for_all_passes_where_lanes_share_sequences_and_end_with_unlike_rows_alone() -> None:
    def log(rows: Sequence[Sequence[Sequence[int]]], device: str, chunks: int = 1) -> list[str]:
        """What is launched first, the last message or the first sum."""
        listed = [e.communicator for e in lanes_of(rows, chunks)[device] if isinstance(e, Launch)]
        sums = [at for at, name in enumerate(listed) if name.startswith("reduce")]
        messages = [at for at, name in enumerate(listed) if name.startswith(("activation", "gradient"))]
        return ["sum", "message"] if sums[0] < messages[-1] else ["message", "sum"]

    apart = [[[1], [2], [3]], [[], [4], [5]]]
    shared = [[[-1], [-1], [-1]], [[], [4], [5]]]
    for device in ("a/1", "b/2"):
        assert log(apart, device) == ["sum", "message"]
    assert log(shared, "a/1") == ["message", "sum"]
    assert log(shared, "b/2") == ["sum", "message"]
    assert log(shared, "b/2", chunks=2) == ["message", "sum"]


def test_lanes_that_pass_shared_rows_in_another_order_would_wait_for_ever() -> None:
    logs = lanes_of([[[-1], [-1], [1]], [[-2], [-2], [2]]])
    assert not hangs(logs)
    log = logs["a/0"]
    first, second = (
        next(at for at, entry in enumerate(log) if f"forward {row} blocks.1" in str(entry)) for row in range(2)
    )
    assert first < second
    other = list(log)
    other[first : first + 2], other[second : second + 2] = log[second : second + 2], log[first : first + 2]
    assert deadlock({**logs, "a/0": other}) is not None
