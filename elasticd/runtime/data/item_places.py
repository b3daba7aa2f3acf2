"""The places of items among the tokens of samples: which rows of a sample's items a part of it takes.

A sample's items give rows, one item after the other, and its text has a token for each of them: the j-th of
these tokens takes the j-th row. A mask of the tokens says so. Where a sequence is cut, each part of it takes
the rows at its own tokens, and those of a packed row follow each other as its parts do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from elasticd_planner.spec.batch import SequencePiece
from torch import Tensor

from elasticd.runtime.data.collate import Unlike
from elasticd.runtime.model.batch_format import ItemPlaces
from elasticd.system.user_line import described


class PieceRows(NamedTuple):
    """The rows that a part of a sample takes of those of its items."""

    places: int  #: that the whole sample has for them
    spans: tuple[tuple[int, int], ...]  #: that the part takes: ranges [start, stop) of them


def whole_rows(mask: Tensor) -> PieceRows:
    """The rows of a whole sample by the mask of its tokens."""
    count = int(mask.sum())
    return PieceRows(count, ((0, count),))


def piece_rows(mask: Tensor, piece: SequencePiece) -> PieceRows:
    """The rows of a part of a sample by the mask of all its tokens.

    Raises:
        Unlike: the mask is not of the sample's tokens.
    """
    if mask.shape != (piece.length,):
        raise Unlike(
            0, f"the mask of its items' places is {list(mask.shape)}, and it has {piece.length} tokens"
        )
    ends = [0, *mask.cumsum(0).tolist()]
    return PieceRows(ends[-1], tuple((ends[start], ends[stop]) for start, stop in piece.spans))


def mask_of(places: ItemPlaces, key: str, sample: Any) -> Tensor:
    """The mask that a function of the user's gives of a sample.

    Raises:
        Unlike: it gives none.
    """
    try:
        mask = torch.as_tensor(places(sample))
    except Exception as error:
        raise Unlike(0, f"Module(places=) of {key!r} failed: {described(error)}") from error
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise Unlike(
            0,
            f"Module(places=) of {key!r} gave {mask.dtype} {list(mask.shape)}: it must give a mask of the "
            "sample's tokens, bool [tokens], True of each that takes a row of its items",
        )
    return mask
