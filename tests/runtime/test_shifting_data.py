"""A dataset that can be read in other sequences is; one that cannot is refused, in words."""

from __future__ import annotations

import pytest
from torch import Tensor

from elasticd.runtime.data.loader import at_length
from examples.train_lm import StandardLibrary


def test_the_standard_library_has_as_many_windows_of_any_length_and_they_begin_alike() -> None:
    data = StandardLibrary(64)
    longer = at_length(data, 512)
    assert len(longer) == len(data)
    for index in (0, 7, 100):
        short, long = data[index]["inputs"], longer[index]["inputs"]
        assert (len(short), len(long)) == (64, 512)
        assert long[:64].tolist() == short.tolist()
    assert len(longer[len(longer) - 1]["targets"]) == 512, "also at the end"
    assert len(at_length(longer, 64)) == len(data)


class Fixed:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise NotImplementedError


class Shrinking(Fixed):
    def at_length(self, tokens: int) -> Fixed:
        made = Shrinking()
        made.__class__ = type("Two", (Fixed,), {"__len__": lambda self: 2})
        return made


def test_a_dataset_without_at_length_or_with_another_number_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no at_length\(tokens\)"):
        at_length(Fixed(), 8)
    with pytest.raises(ValueError, match="has 2 samples, the dataset 3"):
        at_length(Shrinking(), 8)
