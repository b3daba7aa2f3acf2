"""`BoxReader`: first values that lie on disk, of which each device reads the boxes that it holds."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from elasticd_planner.spec.box import Box
from torch import Tensor


@runtime_checkable
class BoxReader(Protocol):
    """Gives boxes of parameters and buffers by full name."""

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a value, of the shape that its module gives it, in the type that the disk has. It is copied
        before it is changed."""

    def digest(self) -> str:
        """Differs where another rank reads other files."""
