"""A rank's view of the data: padding, and what the dataset was asked for."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_planner.spec.batch import MicroBatch, SequencePiece, batch_plan
from torch.utils.data import default_collate

from elasticd.runtime.data.collate import Unlike, pad
from elasticd.runtime.data.loader import Loader, length_of, sample_tokens
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import pack
from elasticd.runtime.data.prefetch import NothingRead, SampleError, SamplePrefetcher
from elasticd.runtime.data.sample_ledger import expected_hash, expected_hashes, hash_samples
from tests.runtime.test_engine_parity import plan_of, stage


class Numbers:
    """Sample i holds i + 1 times the number i."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = torch.full((index + 1,), index)
        return {"inputs": values, "targets": values}


def test_padding_leaves_targets_out_of_the_loss() -> None:
    batch = pad([Numbers()[0], Numbers()[2]])
    assert batch["inputs"].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert batch["targets"].tolist() == [[0, -100, -100], [2, 2, 2]]


Point = namedtuple("Point", "x y")

#: What torch's own takes, of any sample i.
TAKEN: dict[str, Callable[[int], Any]] = {
    "a class": lambda i: {"inputs": torch.ones(3), "label": i % 2},
    "a class as a tensor": lambda i: {"inputs": torch.ones(3), "label": torch.tensor(i)},
    "numbers": lambda i: {"score": i / 3, "good": bool(i % 2), "either": i if i % 2 else i / 2},
    "images": lambda i: {"image": torch.full((3, 4, 5), float(i)), "class": torch.tensor(i)},
    "a pair": lambda i: (torch.full((2, 2), i), i),
    "named": lambda i: Point(torch.tensor([i, i]), i),
    "nested": lambda i: {"a": {"b": {"c": torch.tensor([i, 2.0])}, "d": (i, torch.ones(1))}},
    "arrays": lambda i: {"x": np.full((2, 3), i, dtype=np.float32), "y": np.int64(i)},
    "numpy's numbers and Python's": lambda i: {"x": np.float32(i) if i else 0.5, "y": i if i else np.int64(7)},
    "text": lambda i: {"name": f"sample {i}", "raw": b"x"},
    "lists": lambda i: {"three": [i, i + 1, i + 2]},
    "a number": lambda i: i,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_torchs_own_takes_gives_the_same_batch(name: str) -> None:
    samples = [TAKEN[name](i) for i in range(3)]

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        if isinstance(one, tuple | list):  # torch makes a list of a plain tuple
            return len(one) == len(other) and all(map(same, one, other))
        return bool(one == other)

    assert same(pad(samples), default_collate(samples))


def test_sequences_alone_are_padded_and_labels_left_out_of_the_loss() -> None:
    samples = [{"ids": torch.ones(n), "more": {"labels": torch.ones(n)}, "of": n} for n in (1, 3)]
    batch = pad(samples)
    assert batch["ids"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["more"]["labels"].tolist() == [[1, -100, -100], [1, 1, 1]]
    assert batch["of"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("samples", "place", "said"),
    [
        (
            [{"a": {"image": torch.ones(3, 4, n)}} for n in (4, 4, 5)],
            2,
            r"a\.image: shape \(3, 4, 5\) beside .* 4\)",
        ),
        ([{"x": torch.ones(n, 2)} for n in (2, 3)], 1, r"x: shape \(3, 2\) beside shape \(2, 2\)"),
        ([{"x": 1}, {"y": 1}], 1, "the sample: the keys y beside the keys x"),
        ([{"x": 1}, {"x": "1"}], 1, "x: a str beside a int"),
        ([{"x": (1, 2)}, {"x": (1,)}], 1, "x: a tuple of 1 beside a tuple of 2"),
        ([{"x": torch.ones(2)}, {"x": None}], 1, r"x: a NoneType beside shape \(2,\)"),
        ([{"x": [1, 2]}, {"x": [1]}], 0, "x: a list goes into no batch"),
        ([{"x": object()}, {"x": object()}], 0, "x: a object goes into no batch"),
        ([{"labels": torch.ones(n, dtype=torch.bool)} for n in (2, 3)], 0, "labels: -100 is no bool"),
        ([{"x": torch.ones(2, dtype=torch.uint16)}, {"x": torch.arange(2)}], 0, "x: Promotion for uint16"),
        ([{"x": np.array(["a"])}] * 2, 0, "x: can't convert np.ndarray"),
    ],
)
def test_what_makes_no_batch_is_refused_by_key_shape_and_sample(samples: Any, place: int, said: str) -> None:
    with pytest.raises(Unlike, match=said + r".*: give DataOptions\(collate=") as refused:
        pad(samples)
    assert refused.value.place == place


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("key", ["targets", "labels"])
def test_targets_of_unsigned_types_are_padded_like_others(dtype: Any, key: str) -> None:
    """As a file of uint16 tokens gives them; torch's losses take no uint16."""
    samples = [{"inputs": torch.arange(n), key: np.arange(n, dtype=dtype)} for n in (2, 3)]
    batch = pad(samples)
    assert torch.equal(batch[key], torch.tensor([[0, 1, -100], [0, 1, 2]]))
    total = torch.nn.functional.cross_entropy(torch.zeros(6, 4), batch[key].flatten(), reduction="sum")
    assert float(total) == pytest.approx(5 * math.log(4))
    pieces = [SequencePiece.whole(i, n) for i, n in enumerate((2, 3))]
    assert torch.equal(pack(samples, pieces)[key], torch.tensor([[0, 1, 0, 1, 2]]))


LISTS = r'call dataset.set_format\("torch"\)'


def test_columns_of_a_hugging_face_dataset_are_refused_with_the_remedy() -> None:
    lists = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    with pytest.raises(TypeError, match=f"sample 0 .*: input_ids, labels: lists, no tensors: {LISTS}"):
        sample_tokens([lists])
    with pytest.raises(TypeError, match=f"text: text, no tensors: tokenize it, then {LISTS}"):
        sample_tokens([{"text": "a b c"}])
    with pytest.raises(Unlike, match=f"input_ids: a list goes into no batch .*{LISTS}"):
        pad([lists, {"input_ids": [1], "labels": [1]}])
    with pytest.raises(Unlike, match=f"labels: a list has no entry for each token: {LISTS}"):
        pack([{"input_ids": torch.arange(3), "labels": [1, 2, 3]}], [SequencePiece.whole(0, 3)])


def loader(dataset: object, threads: int = 0) -> Loader:
    return Loader(SamplePrefetcher(dataset, threads), pad)  # type: ignore[arg-type]


def pieces(*samples: int) -> MicroBatch:
    return tuple(SequencePiece.all_whole(samples))


def test_the_loader_remembers_what_the_dataset_was_asked_for() -> None:
    made = loader(Numbers())
    made.batch(pieces(3, 1))
    made.batch(pieces(2))
    assert made.take() == ([3, 1, 2], None)
    assert made.take() == ([], None)


class Holed(Numbers):
    """Some samples cannot be read."""

    def __init__(self, *holes: int) -> None:
        self.holes = holes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in self.holes:
            raise KeyError("torn")
        return super().__getitem__(index)


def test_another_sample_stands_in_for_one_that_cannot_be_read_and_it_is_named() -> None:
    made = loader(Holed(3))
    assert made.batch(pieces(2, 3, 1))["inputs"].tolist() == [[2, 2, 2], [2, 2, 2], [1, 1, 0]]
    asked, failure = made.take()
    assert asked == [2, 3, 1]
    assert failure is not None
    assert failure.index == 3
    assert "sample 3 of the dataset could not be read: KeyError: 'torn'" in str(failure)


def test_where_nothing_of_a_micro_batch_can_be_read_one_of_the_first_samples_stands_in() -> None:
    made = loader(Holed(0, 3))
    assert made.batch(pieces(3))["inputs"].tolist() == [[1, 1]]
    with pytest.raises(NothingRead, match=r"sample 3 .* nor can any of the first") as nothing:
        loader(Holed(*range(16))).batch(pieces(3))
    assert isinstance(nothing.value.__cause__, SampleError)


def test_the_expected_hash_of_a_rank_is_that_of_its_lanes_micro_batches_in_order() -> None:
    plan = plan_of(
        ((2, 1), [stage(0, 6, ("a/0", 1), ("b/0", 1), ("b/1", 1), lanes=(1, 2))]),
        (1, [stage(0, 6, ("c/0", 1))]),
        micro_batch=2,
    )
    hashes = expected_hashes(plan, batch_plan(plan, 0, (3, 1, 5, 4, 2, 0, 6, 7)))
    assert hashes == [hash_samples([3, 1, 2, 0]), *[hash_samples([5, 4])] * 2, hash_samples([6, 7])]
    batch = batch_plan(plan, 0, (3, 1, 5, 4, 2, 0, 6, 7))
    assert [expected_hash(plan, batch, device) for device in plan.members] == hashes


def test_the_mean_length_of_samples() -> None:
    assert sample_tokens(Numbers()) == 5.5


@pytest.mark.parametrize("counts", [[12, 7], {"cat": 12}, {"inputs": [3]}])
def test_counts_of_a_dataset_of_the_users_own_mean_nothing_to_a_model_without_items(counts: object) -> None:
    data = Numbers()
    data.counts = counts  # type: ignore[attr-defined]
    assert sample_tokens(data) == 5.5


@pytest.mark.parametrize("sample", [torch.zeros(3), (torch.zeros(3), 1), {"a": {"b": np.zeros(3)}, "c": 2}])
def test_the_first_tensor_of_a_sample_has_its_tokens(sample: object) -> None:
    assert sample_tokens([sample]) == 3


@pytest.mark.parametrize("sample", [3, {"name": "x"}])
def test_a_sample_without_a_tensor_is_named(sample: object) -> None:
    with pytest.raises(TypeError, match=r"sample 0 is .* without tokens"):
        sample_tokens([sample])


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        sample_tokens([])


def test_lengths_are_the_datasets_own_where_it_has_them() -> None:
    class Known(Numbers):
        lengths = torch.arange(1, 11)

    found = length_of(Known())
    assert found is not None
    assert [found(i) for i in (0, 9)] == [1, 10]
    assert length_of(Numbers()) is None


def test_lengths_that_are_not_those_of_the_samples_are_refused() -> None:
    class Short(Numbers):
        lengths = tuple(range(1, 10))

    class Asked(Numbers):
        def lengths(self) -> list[int]:
            return [1] * 10

    with pytest.raises(ValueError, match="lengths has 9 entries, and the dataset 10 samples"):
        length_of(Short())
    with pytest.raises(TypeError, match=r"lengths is of type method: it must have .* lengths\[index\]"):
        length_of(Asked())
    with pytest.raises(TypeError, match="collate is None; it must be a function of a list of samples"):
        DataOptions(collate=None)  # type: ignore[arg-type]


class Mixed(Numbers):
    """Sample 4 is of another shape than the others."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.full((2, 3 if index == 4 else 2), index)}


def test_a_sample_that_makes_no_batch_is_named_and_others_stand_in_until_the_vote() -> None:
    made = loader(Mixed())
    batch = made.batch(pieces(2, 4, 1))
    assert batch["image"].shape == (3, 2, 2)
    asked, failure = made.take()
    assert asked == [2, 4, 1]
    assert failure is not None
    assert failure.index == 4
    assert "image: shape (2, 3) beside shape (2, 2)" in str(failure)


def test_a_collate_of_the_users_that_fails_names_a_sample_too() -> None:
    def refuses(samples: Any) -> Any:
        if any(int(sample["inputs"][0]) == 4 for sample in samples):
            raise KeyError("mask")
        return pad(samples)

    made = Loader(SamplePrefetcher(Numbers(), 0), refuses)
    made.batch(pieces(4, 3))
    _, failure = made.take()
    assert "collate: KeyError: 'mask'" in str(failure)
