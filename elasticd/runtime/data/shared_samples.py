"""`SharedSamples`: samples that several modules of a device read, each read from the dataset once in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from elasticd.runtime.data.prefetch import SampleKey
from elasticd.runtime.data.step_samples import Samples


class SharedSamples:
    """A `Samples` that keeps a sample from its first use in a step to its last one.

    A sample with three images is used four times where its text and its images go through one device.
    """

    def __init__(self, reader: Samples) -> None:
        """
        Args:
            reader: gives samples.
        """
        self._reader = reader
        self._uses: Counter[SampleKey] = Counter()  # that are still to come in the step
        self._kept: dict[SampleKey, Any] = {}

    @property
    def here(self) -> bool:
        """True where a sample is read by the thread that takes it."""
        return self._reader.here

    def want(self, keys: Sequence[SampleKey]) -> None:
        """Has the samples of these uses, those of one step, read ahead in this order.

        Args:
            keys: of a sample as often as it is used.
        """
        self._uses, self._kept = Counter(keys), {}
        self._reader.want([*self._uses])

    def take(self, key: SampleKey) -> Any:
        """Waits for a sample. Whoever takes it does not change it, since others may get the same object.

        Raises:
            SampleError: it cannot be read.
        """
        self._uses[key] -= 1
        if key in self._kept:
            sample = self._kept[key]
        else:
            here = self._reader.here
            sample = self._reader.take(key)
            if self._reader.here != here:  # it is not the sample, and is taken again
                self._uses[key] += 1
                return sample
            self._kept[key] = sample
        if self._uses[key] <= 0:
            del self._kept[key]
        return sample
