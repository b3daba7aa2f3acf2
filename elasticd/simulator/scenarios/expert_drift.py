"""The drift of the load of experts in a scenario."""

from __future__ import annotations

from elasticd_planner.value import Value, refuse


class ExpertDrift(Value, frozen=True, kw_only=True):
    """The chances of experts: the n-th one's falls as n to the power of -zipf; the logarithm of each changes by
    about `drift` from step to step."""

    zipf: float = 0.9
    drift: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.zipf <= 10 or not 0 <= self.drift <= 1:
            refuse(f"zipf = {self.zipf} must be from 0 to 10 and drift = {self.drift} from 0 to 1")
