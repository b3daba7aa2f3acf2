"""Iterable datasets: read once by the first rank, handed out, and gone on from wherever the state says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.spec.sample_packing import linear_of

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.prefetch import SampleError, SamplePrefetcher
from elasticd.runtime.data.step_samples import MapStyleSamples
from elasticd.runtime.data.stream import (
    Stream,
    Streamed,
    _Handed,
    _packed,
    _sendable,
    _Source,
    _unpacked,
    first_samples,
)
from elasticd.runtime.engine.engine import DATA, Engine
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.runtime.test_engine import TWO_STAGES, UNEQUAL, engine_on
from tests.runtime.test_engine_parity import BATCH, SEED, Text, make_recipe
from tests.runtime.test_lanes import PLANS as LANES

STEPS = 6


class Counted:
    """The samples of `Text` in passes of `size`, each pass begun at another place; counts what it gives."""

    given: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, owner: str = "", size: int = 20, torn: int = -1) -> None:
        self.owner, self.size, self.torn = owner, size, torn
        self.passes, self.at = 0, 0
        self.mine = self.given.setdefault(owner, [])  # a test's own: a reader may outlive it by a step

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < self.size:
            number = self.passes * self.size + self.at
            if number == self.torn:
                raise OSError("the line is dead")
            self.at += 1
            self.mine.append(number)
            yield sample(number)
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "at": self.at,
            "generator": torch.zeros(5056, dtype=torch.uint8),
            "x": b"\0",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["generator"].shape == (5056,)
        self.passes, self.at = state["passes"], state["at"]


def sample(number: int) -> dict[str, torch.Tensor]:
    return Text()[(3 * number) % 64]


class InOrder:
    """What a map-style dataset of the same samples in the same order is."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return sample(index)


def recipe(owner: str, **changes: Any) -> Recipe:
    made = make_recipe()
    source = Streamed(Stream(dataset=Counted(owner, **changes), tokens=8.0), BATCH, 100)
    return replace(made, source=source)


def packed(owner: str) -> Recipe:
    """The same stream in packed rows."""
    made = make_recipe()
    source = Streamed(Stream(dataset=Counted(owner), tokens=8.0), BATCH, 100, packing=Packing(tokens=30))
    return replace(made, source=source)


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Named:
    x: int = 1


@pytest.fixture(autouse=True)
def begun() -> None:
    Counted.given.clear()


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses of a plain job on the same samples in the same order."""

    class Straight(Sampler, frozen=True, kw_only=True):
        def samples(self, step: int) -> tuple[int, ...]:
            return tuple(range(step * BATCH, (step + 1) * BATCH))

    one, order = TWO_STAGES, Straight(size=1000, global_batch=BATCH, seed=SEED)

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        made = make_recipe()
        source = MapStyleSamples(order, SamplePrefetcher(InOrder()), None, linear_of(made.model.spec))
        engine = engine_on(plan_groups, replace(made, source=source), one)
        return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]

    return run_threads(one.members, worker)["a/0"]


MIXED = LANES["2 + 1, uneven, in two stages"]
ZERO_2 = UNEQUAL.replace(state=StatePolicy(zero=2, replicas=1))
SOME = [(TWO_STAGES, recipe), (ZERO_2, recipe), (MIXED, packed)]


@pytest.mark.parametrize(("plan", "make"), sizes.beside(SOME, [*SOME, (UNEQUAL, recipe), (MIXED, recipe)]))
def test_a_stream_trains_like_its_samples_in_order_and_one_rank_reads_each_once(
    plan: Plan, make: Callable[[str], Recipe], alone: list[float]
) -> None:
    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        engine = engine_on(plan_groups, make(plan_groups.me), plan)
        return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]

    found = run_threads(plan.members, worker)
    assert found["a/0"] == pytest.approx(alone, abs=1e-12)
    assert [owner for owner, read in Counted.given.items() if read] == ["a/0"], "nobody else reads"
    read = Counted.given["a/0"]
    assert read[: STEPS * BATCH] == list(range(STEPS * BATCH)), "three passes, each sample once"
    assert len(read) <= (STEPS + 1) * BATCH, "a step ahead"


def test_a_packed_stream_hands_out_what_slowdowns_give_to_each_lane(alone: list[float]) -> None:
    plan = MIXED

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        engine = engine_on(plan_groups, packed(plan_groups.me), plan)
        engine._batches.agreed = (64, 200)
        return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]

    assert run_threads(plan.members, worker)["a/0"] == pytest.approx(alone, abs=1e-12)


def test_a_sample_of_a_stream_that_goes_into_no_row_is_named_on_every_rank() -> None:
    plan = MIXED

    def worker(plan_groups: MemoryPlanGroups) -> tuple[str, bool]:
        made = packed(plan_groups.me)
        source = Streamed(
            Stream(dataset=Counted(plan_groups.me), tokens=8.0), BATCH, 100, packing=Packing(tokens=5, least=1)
        )
        engine = engine_on(plan_groups, replace(made, source=source), plan)
        lengths = [max(len(sample(i)["inputs"]) for i in range(8 * k, 8 * k + 8)) for k in range(9)]
        step = next(k for k in range(9) if lengths[k] > 10)
        for earlier in range(step):
            engine.step(earlier, lambda: 0)
        with pytest.raises(SampleError) as refused:
            engine.step(step, lambda: 0)
        return str(refused.value), source.longest == max(lengths[: step + 1])

    ((said, known),) = set(run_threads(plan.members, worker).values())
    assert "tokens, and no pipeline's lanes hold more than 10 in a row: raise Packing(tokens=...), or " in said
    assert known, "what goes into no row is the longest so far: the next checkpoint says so"


def test_the_position_moves_with_the_state_and_another_rank_reads_on_from_there(alone: list[float]) -> None:
    """The first rank of the first plan is no member of the second."""
    after = UNEQUAL.replace(number=2)
    before = renamed(TWO_STAGES, {"a/0": "c/0", "a/1": "a/0"})
    members = tuple(dict.fromkeys((*before.members, *after.members)))
    transports = dict(zip(members, MemoryTransport.connect(members, timeout=180.0), strict=True))

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        made, me = recipe(plan_groups.me), plan_groups.me
        engine = engine_on(plan_groups, made, before) if me in before.members else None
        found = []
        for step in range(3):
            if engine is not None:
                found.append(engine.step(step, lambda: 0).outcome.vote.loss)
        old, new = (Layouts(made.model.spec, plan) for plan in (before, after))
        moved = migrate(old, new, engine.state() if engine is not None else LocalState(), transports[me])
        if me not in after.members:
            return found
        assert DATA in moved.state.extras
        engine = engine_on(plan_groups, made, after)
        engine.adopt(moved.state)
        return [*found, *(engine.step(step, lambda: 0).outcome.vote.loss for step in range(3, STEPS))]

    results = run_threads(members, worker)
    assert results["a/0"] == pytest.approx(alone, abs=1e-12)
    assert results["c/0"] == pytest.approx(alone[:3], abs=1e-12)
    assert Counted.given["c/0"][: 3 * BATCH] == list(range(3 * BATCH))
    assert Counted.given["a/0"][: 3 * BATCH] == list(range(3 * BATCH, STEPS * BATCH)), "on, not again"


def renamed(plan: Plan, names: dict[str, str]) -> Plan:
    text = msgspec.json.encode(plan.strategies).decode()
    for name, other in names.items():
        text = text.replace(f'"{name}"', f'"new {other}"')
    strategies = msgspec.json.decode(text.replace("new ", ""), type=tuple[type(plan.strategies[0]), ...])  # type: ignore[misc]
    return plan.replace(strategies=strategies)


def test_a_step_that_was_undone_is_given_the_same_samples_by_the_reader_that_lives(alone: list[float]) -> None:
    """And by one that goes back to a state before it, too."""

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        made = recipe(plan_groups.me)
        engine: Engine = engine_on(plan_groups, made, TWO_STAGES)
        found, early = [], LocalState()
        for step in range(STEPS):
            if step == 2:
                kept = engine.state()
                early = LocalState(
                    tensors={item: replace_planes(tensor) for item, tensor in kept.tensors.items()},
                    groups=kept.groups,
                    extras=kept.extras,
                )
            if step == 3:  # it began, and what was read for it is dropped with it
                made.feed.begin(3, engine.plan, engine.everyone, engine._carried.get(DATA))
            found.append(engine.step(step, lambda: 0).outcome.vote.loss)
        again = engine_on(plan_groups, made, TWO_STAGES)
        again.adopt(early)
        found += [again.step(step, lambda: 0).outcome.vote.loss for step in range(2, STEPS)]
        return found

    found = run_threads(TWO_STAGES.members, worker)["a/0"]
    assert found == pytest.approx([*alone, *alone[2:]], abs=1e-12)
    read = Counted.given["a/0"]
    ahead = read[STEPS * BATCH : (STEPS + 1) * BATCH]
    assert read[: STEPS * BATCH] == list(range(STEPS * BATCH)), "the repeated step was not read again"
    assert ahead == list(range(STEPS * BATCH, (STEPS + 1) * BATCH))
    assert read[(STEPS + 1) * BATCH :][: 4 * BATCH] == list(range(2 * BATCH, STEPS * BATCH))


def replace_planes(tensor: Any) -> Any:
    shards = [
        replace(shard, planes={name: plane.clone() for name, plane in shard.planes.items()})
        for shard in tensor.shards
    ]
    scalars = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in tensor.scalars.items()
    }
    return replace(tensor, shards=tuple(shards), scalars=scalars)


def test_what_the_stream_raises_names_the_sample_on_every_rank_before_anything_is_computed() -> None:
    torn = 2 * BATCH + 3

    def worker(plan_groups: MemoryPlanGroups) -> tuple[str, str | None]:
        engine = engine_on(plan_groups, recipe(plan_groups.me, torn=torn), UNEQUAL)
        for step in range(2):
            engine.step(step, lambda: 0)
        with pytest.raises(
            SampleError, match=f"sample {torn} of the dataset.*OSError: the line is dead"
        ) as caught:
            engine.step(2, lambda: 0)
        assert caught.value.index == torn
        # Of all ranks the one that read tells the leader why the job ends.
        assert isinstance(caught.value.__cause__, OSError) == (engine.rank == 0)
        return str(caught.value), engine._carried.get(DATA)

    found = run_threads(UNEQUAL.members, worker)
    (position,) = {position for _, position in found.values()}
    assert position is not None


def test_samples_of_another_form_and_a_dataset_that_gives_none_are_named() -> None:
    class Strange(Counted):
        def __iter__(self) -> Iterator[Any]:
            yield from self.gives

        gives: ClassVar[list[Any]] = []

    for gives, why in (
        ([torch.zeros(3)], "a sample must be a mapping of 1-D tensors"),
        ([{"inputs": torch.zeros(3), "more": object()}], "TypeError: it has a object: a sample of a stream is"),
        ([], "the dataset gives no sample"),
    ):
        Strange.gives = gives
        feed = Streamed(Stream(dataset=Strange(), tokens=8.0), BATCH, 100, readers=0)
        group = MemoryPlanGroups(None, "a/0").group(("a/0",), "vote")  # type: ignore[arg-type]
        with pytest.raises(SampleError, match=why):
            feed.begin(0, TWO_STAGES, group, None)  # type: ignore[arg-type]


def test_a_sample_goes_over_the_wire_bit_by_bit() -> None:
    whole = {
        "inputs": torch.arange(5),
        "scale": torch.tensor(0.1, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "name": "x",
        "bytes": b"\xff",
        "pair": (1, [2.5, (None, True)]),
    }
    sent = msgspec.msgpack.encode(_Handed(samples={7: _sendable(whole)}), enc_hook=_packed)
    came = msgspec.msgpack.Decoder(_Handed, ext_hook=_unpacked).decode(sent).samples[7]
    assert came.keys() == whole.keys()
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            assert (came[key].dtype, came[key].shape) == (value.dtype, value.shape)
            assert torch.equal(came[key], value)
        else:
            assert came[key] == value


def test_a_part_that_other_ranks_would_get_as_another_type_is_refused() -> None:
    """Else the ranks of one step would collate tuples here and lists there."""
    for part in (Point(1, 2), {1, 2}, np.float32(1), datetime(2026, 1, 1), Named()):
        for whole in (part, [part], (part,), {"inner": part}):
            with pytest.raises(TypeError, match=f"it has a {type(part).__name__}: a sample of a stream"):
                _sendable({"x": whole})


class Wrapped:
    """A loader of a dataset, as torchdata's without workers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["of"])


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, Wrapped])
@pytest.mark.parametrize("loaded_at", range(1, 6))
def test_a_stream_of_hugging_face_has_whole_passes_after_one_that_began_in_the_midst(
    wrap: Callable[[Any], Any], loaded_at: int
) -> None:
    """Each of its later passes would begin where that one began."""
    datasets = pytest.importorskip("datasets")

    def source() -> _Source:
        rows = datasets.Dataset.from_dict({"inputs": [[number] * 3 for number in range(10)]})
        dataset = rows.to_iterable_dataset(num_shards=2).with_format("torch")
        return _Source(wrap(dataset), 4, threaded=False)

    reader, position, found = source(), None, []
    for step in range(9):
        if step == loaded_at:
            reader = source()
        read = reader.take(step, position)
        assert read.error is None
        found += [int(sample["inputs"][0]) for sample in read.samples]
        position = read.after
    assert found == [number % 10 for number in range(36)]


def test_a_dataset_without_a_position_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has no state_dict: .* use torchdata's StatefulDataLoader"):
        Stream(dataset=[1, 2, 3], tokens=8.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        Stream(dataset=Counted(), tokens=0)
    assert len(first_samples(Stream(dataset=Counted(), tokens=8.0), 8)) == 8
