"""A rank's view of the data: padding, the header that travels, and what the dataset was asked for."""

from __future__ import annotations

import pytest
import torch

from elasticd.runtime.data import Loader, expected_hash, length_of, pad, sample_tokens
from elasticd.runtime.headers import empty_header, pack_header, unpack_header
from elasticd.runtime.reader import Reader, SampleError
from elasticd.runtime.vote import hash_samples


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


def test_a_header_carries_shape_and_ids() -> None:
    header = pack_header((2, 7, 16), (5, 9))
    assert empty_header(2).shape == header.shape
    assert unpack_header(header) == ((2, 7, 16), (5, 9))
    with pytest.raises(ValueError, match="4 dimensions, not 5"):
        pack_header((1, 1, 1, 1, 1), (5,))


def loader(dataset: object, threads: int = 0) -> Loader:
    return Loader(Reader(dataset, threads), pad)  # type: ignore[arg-type]


def test_the_loader_remembers_what_the_dataset_was_asked_for() -> None:
    made = loader(Numbers())
    made.batch((3, 1))
    made.batch((2,))
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
    assert made.batch((2, 3, 1))["inputs"].tolist() == [[2, 2, 2], [2, 2, 2], [1, 1, 0]]
    asked, failure = made.take()
    assert asked == [2, 3, 1]
    assert failure is not None
    assert failure.index == 3
    assert "sample 3 of the dataset could not be read: KeyError: 'torn'" in str(failure)


def test_where_nothing_of_a_micro_batch_can_be_read_one_of_the_first_samples_stands_in() -> None:
    made = loader(Holed(0, 3))
    assert made.batch((3,))["inputs"].tolist() == [[1, 1]]
    with pytest.raises(SampleError, match="sample 3"):
        loader(Holed(*range(16))).batch((3,))


def test_the_expected_hash_is_that_of_the_micro_batches_in_order() -> None:
    assert expected_hash(((3, 1), (2, 0))) == hash_samples([3, 1, 2, 0])


def test_the_mean_length_of_samples() -> None:
    assert sample_tokens(Numbers()) == 5.5


@pytest.mark.parametrize("sample", [torch.zeros(3), {"name": "x"}])
def test_a_sample_of_another_form_is_named(sample: object) -> None:
    with pytest.raises(TypeError, match="must be a mapping of 1-D tensors"):
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
