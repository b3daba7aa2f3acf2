"""`Pretrained`: a model that its own library reads from a folder, and how it is written into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

#: Bytes of a file of weights, at most, unless one tensor has more.
SHARD_SIZE = "5GB"

#: Gives the whole values of parameters and buffers by their full names, on the host. It is called with the same
#: names, in the same order, on every rank; on a rank that does not write it gives nothing.
ReadValues = Callable[[Sequence[str]], Mapping[str, Tensor]]


class Pretrained(Protocol):
    """Writes the model as its library does, a file of weights after the other."""

    @property
    def adapted(self) -> bool:
        """True if it is a model with adapters, which are written alone unless they are merged into it."""

    def wanted(self, merge: bool) -> Sequence[str]:
        """The full names of the values that are written."""

    def describe(self) -> str:
        """All but the values, as text that a checkpoint keeps."""

    def save(
        self,
        folder: Path,
        read: ReadValues,
        *,
        dtypes: Mapping[str, torch.dtype],
        writes: bool,
        base: Path | None,
        max_shard_size: int | str,
        merge: bool = False,
    ) -> str:
        """Writes the model's folder.

        Args:
            folder: is made where it is not there.
            read: gives the values.
            dtypes: the type of each value by full name.
            writes: whether this rank writes. Every rank reads the same values.
            base: the folder of the model that this one was made of, whose tokenizer is copied; None: none is.
            max_shard_size: of a file of weights, in bytes or as "5GB".
            merge: write the whole model, with its adapters merged into it.

        Returns:
            Why the folder could not be written; empty: it was. All values were read in both cases.
        """
