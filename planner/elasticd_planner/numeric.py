"""Numbers: the types of arrays, when two times are equal, and the median."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Values this close (relatively) are equal: sums in another order must not look different.
EQUAL = 1e-9


def middle(ordered: Sequence[float] | Floats) -> float:
    """The median of numbers in ascending order."""
    half = len(ordered) // 2
    found = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return float(found)
