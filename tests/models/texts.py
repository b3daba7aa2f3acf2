"""Samples of unequal length, each a function of its index."""

from __future__ import annotations

import torch


class Text:
    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 5 + index % 9
        ids = torch.randint(0, self._vocabulary, (length + 1,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}
