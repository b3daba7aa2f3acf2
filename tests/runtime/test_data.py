"""A rank's view of the data: padding, the header that travels, and what the dataset was asked for."""

from __future__ import annotations

import pytest
import torch

from elasticd.runtime.data import Header, Loader, expected_hash, pad, sample_tokens
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
    header = Header(micro_batch=2)
    assert header.empty().shape == header.pack((2, 7, 16), (5, 9)).shape
    assert header.unpack(header.pack((2, 7, 16), (5, 9))) == ((2, 7, 16), (5, 9))


def test_the_loader_remembers_what_the_dataset_gave() -> None:
    loader = Loader(Numbers(), pad)
    loader.batch((3, 1))
    loader.batch((2,))
    assert loader.take() == [3, 1, 2]
    assert loader.take() == []
    with pytest.raises(IndexError):
        Loader([{}], lambda samples: samples).batch((4,))


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
