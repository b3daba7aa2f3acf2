"""A model's profile for other sequence lengths, and the cost of attention by length."""

from __future__ import annotations

import math

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile, with_room
from elasticd_planner.detection.fleet_baseline import Curve
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import refuse

#: What must be known of a measured curve for it to replace what the shapes say.
KNOWN = 20.0


def attention_rise(spec: ModelSpec, measured: Curve | None = None) -> float:
    """By what a block's token costs more for each token of its sequence's length. As `measured`, where that is
    known; else from shapes: causal attention takes 6 x width operations for each, and the matrices 6 x elements
    (as in `model_profile.derive`)."""
    if measured is not None and measured.known >= KNOWN:
        return measured.per_token
    elements = [sum(math.prod(parameter.shape) for parameter in kind) for kind in spec.kinds]
    return spec.width / (sum(elements[kind] for kind in spec.layers) / len(spec.layers))


def item_rise(spec: ModelSpec) -> float:
    """The same of the rows of an item, each of which attends to all: twice as much as causal attention."""
    return 2 * attention_rise(spec)


def evaluated(
    profile: ModelProfile, before: Lengths, after: Lengths, rise: float, *, rows: bool = False
) -> ModelProfile:
    """The profile of the same model for sequences like `after`, where it was made or fitted for those like
    `before`. `rise`: by what a block's token costs more for each token of its sequence's length.

    Micro-batches have as many sequences as before: their tokens follow the mean. A block's seconds follow
    tokens and the effective length. Kept activations are those of a micro-batch of the longest sequences, since
    it must fit too; of packed rows (`rows`) a token keeps what it kept. There and back again is the profile
    that it was.
    """
    if rise < 0:
        refuse(f"lengths: attention cannot make a token cheaper (a rise of {rise})")
    seconds = profile.block.seconds * (1 + rise * after.effective) / (1 + rise * before.effective)
    sized = profile.sized(profile.tokens * after.mean / before.mean)
    block = msgspec.structs.replace(sized.block, seconds=seconds)
    room = 1.0 if rows else after.longest / before.longest * before.mean / after.mean
    return with_room(msgspec.structs.replace(sized, block=block), room)
