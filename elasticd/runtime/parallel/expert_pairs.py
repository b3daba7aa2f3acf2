"""The pairs of a row and an expert that a device computes, of those of its lane: what an emulated device is
slow by.

A block with experts takes a device as long as its share of the block says only where experts are as evenly
loaded as shares are. The rest follows from the router's choice, which each pass has anew.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticd_planner.spec.expert_load import expert_part
from elasticd_planner.spec.model import ModelSpec


class Pairs(NamedTuple):
    """Of a forward pass of a block."""

    computed: int  #: by this device
    rows: int  #: of its lane
    chosen: int  #: experts of a row
    experts: int  #: of the block, all of them


class ExpertPairs:
    """Notes the pairs of the newest forward pass of each block whose experts devices share."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._newest: dict[str, Pairs] = {}

    def note(self, section: str, pairs: Pairs) -> None:
        """Takes in a forward pass."""
        self._newest[section] = pairs

    def newest(self, section: str) -> Pairs | None:
        """The pairs of the newest forward pass of a section; None: it has no experts that devices share."""
        return self._newest.get(section)

    def share(self, share: float, pairs: Pairs | None, tokens: int) -> float:
        """The part of a block's computation that a pass is.

        Args:
            share: of the block that this device has.
            pairs: of the pass; None: it has no experts.
            tokens: of a sample.
        """
        if pairs is None or not pairs.rows:
            return share
        part = expert_part(self._spec, tokens, pairs.chosen, pairs.experts)
        return share + part * (pairs.computed / (pairs.rows * pairs.chosen) - share)
