"""`BatchFormat`: how the samples and batches of a dataset become what the sections of a model read.

A model that is called with batches of its own library (`elasticd.from_hf`) has one. It works on the host,
before a batch is copied to the device, so that what depends on the values in a batch costs no wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

#: A sample, without its items -> a mask of its tokens, bool [tokens]: True of each that takes a row of them.
ItemPlaces = Callable[[Any], Any]


class BatchFormat(Protocol):
    """Reads the samples and the batches of a job for its model. Each method raises ValueError, with the remedy,
    for what the model cannot be trained on."""

    def tokens(self, sample: Any) -> int:
        """The tokens of a sample; 0: it has none yet, the collate makes them."""

    def sample(self, sample: Any) -> Any:
        """A sample as elasticd's own collate, `pad`, takes it: tensors by name."""

    def row(self, sample: Any) -> Any:
        """A sample as a packed row takes it: each tensor has an entry for each token, made of the sample before
        it is cut."""

    def batch(self, batch: Any) -> Any:
        """A collated batch as the sections and the loss take it."""

    def item_places(self, batch: Any) -> Mapping[str, Tensor]:
        """The tokens that take a row of an item each, in their order, by key of the items: True of these,
        [samples, tokens] of a batch as `batch` gives it, [tokens] of a sample as `row` gives it; without the
        items of which the model says nothing."""

    def has_targets(self, batch: Any) -> bool:
        """Returns True if a batch, as `batch` gives it, has targets of the model's own loss."""

    def for_other_loss(self) -> BatchFormat:
        """The same for a job with a loss of its own: its labels may be anything."""

    def alone(self) -> BatchFormat:
        """The same for layers that are given the activation alone: batches that say more to the layers, by a
        mask say, are refused."""
