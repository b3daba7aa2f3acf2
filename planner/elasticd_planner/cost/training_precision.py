"""What a job trains in, as memory sees it: master weights, moments and gradients, and what is made again."""

from __future__ import annotations

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile, item_size
from elasticd_planner.value import Value, refuse


class Numbers(Value, frozen=True, kw_only=True):
    """Types of numbers as torch names them: of master weights and the optimizer's moments, and of gradients.
    Parameters and activations are of the types in the model's spec, `compute` for nearly all of them."""

    compute: str
    master: str = "float32"
    gradients: str = "float32"

    def __post_init__(self) -> None:
        if item_size(self.master) < item_size(self.compute):
            refuse(f"numbers: master weights of {self.master} are no finer than {self.compute}")


def suited(profile: ModelProfile, numbers: Numbers | None, recomputed_part: float = 0.0) -> ModelProfile:
    """The profile of a model in `compute` (its spec's types), whose state is of these numbers (None: all is of
    the parameters' own type) and of whose blocks this part makes its activations again by the user's word."""
    profile = msgspec.structs.replace(profile, recomputed_part=recomputed_part)
    if numbers is None:
        return profile
    wider = item_size(numbers.master) / item_size(numbers.compute)
    return msgspec.structs.replace(
        profile,
        gradient_factor=item_size(numbers.gradients) / item_size(numbers.compute),
        optimizer_factor=(1 + profile.optimizer_factor) * wider,
    )
