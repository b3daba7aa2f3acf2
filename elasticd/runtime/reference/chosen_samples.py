"""Some samples of a dataset, chosen for a step that is tried."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticd.runtime.data.loader import item_counts
from elasticd.runtime.engine.recipe import Recipe

#: So many samples of a dataset are looked at for some with and without items.
LOOKED_AT = 4096


class ChosenSamples:
    """Some samples of a dataset, as a dataset."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self._dataset, self._indices = dataset, list(indices)
        for name in ("counts", "rows"):
            if isinstance(known := getattr(dataset, name, None), Mapping):
                setattr(self, name, {key: [of[index] for index in indices] for key, of in known.items()})
        if hasattr(dataset, "part"):
            self.part = lambda index, keys: dataset.part(self._indices[index], keys)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._indices[index]]


def recipe_of_samples(recipe: Recipe, indices: Sequence[int]) -> Recipe:
    """The recipe of a step of some samples of its dataset, with the lengths that the job knows of them."""
    length, data = recipe.length, recipe.data
    if length is not None:
        data = replace(data, length=lambda index: length(indices[index]))
    dataset = ChosenSamples(recipe.dataset, indices)
    return replace(recipe, dataset=dataset, data=data, global_batch=len(indices))


def first_items(dataset: object, kinds: Collection[str]) -> list[int]:
    """The number of items, of all kinds, of the first samples of a dataset."""
    listed = [item_counts(dataset, kind) for kind in kinds]
    return [sum(int(counts[index]) for counts in listed) for index in range(min(len(listed[0]), LOOKED_AT))]
