"""What memory a job needs in its precision, and with blocks that make their activations again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from elasticd_planner.cost.model_profile import Numbers, derive, suited
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.model import ModelSpec, Parameter
from elasticd_planner.value import Invalid

from tests.planner.models import LAYERS, SPEC, at_rest, plan


def halved(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(msgspec.structs.replace(parameter, dtype="bfloat16") for parameter in parameters)


HALF: ModelSpec = msgspec.structs.replace(
    SPEC,
    embed=halved(SPEC.embed),
    kinds=tuple(halved(kind) for kind in SPEC.kinds),
    head=halved(SPEC.head),
    dtype="bfloat16",
)
WHOLE, BF16 = (derive(spec, sample_tokens=16, micro_batch=2, flops=1e6) for spec in (SPEC, HALF))
NUMBERS = Numbers(compute="bfloat16")


def test_a_parameter_takes_eighteen_bytes_under_master_weights() -> None:
    """Value 2, gradient 4, master weight 4, two moments of 4."""
    layouts = Layouts(HALF, plan((1, [(LAYERS, ["n0/0"], [4])])))
    elements = sum(box.size for boxes in layouts.of("n0/0").values() for box in boxes)
    cost = ProfileCost(at_rest(suited(BF16, NUMBERS)))
    assert cost.memory(LAYERS, [4], 0, first=True, last=True, in_flight=0) == 18 * elements
    plain = ProfileCost(at_rest(suited(WHOLE, None)))
    assert plain.memory(LAYERS, [4], 0, first=True, last=True, in_flight=0) == 16 * elements


def test_what_blocks_take_and_pass_on_takes_half() -> None:
    """Of a norm the copy in single precision does not, nor do logits and token ids."""
    (norm, *_), (rows, _) = SPEC.kinds[0], SPEC.head[1].shape
    assert WHOLE.block.cut_activation == 2 * BF16.block.cut_activation
    assert WHOLE.block.recomputed_activation == 2 * BF16.block.recomputed_activation
    # Two inputs of matrices, the norm's input and what it gives; and the block's own input beside the copy.
    assert WHOLE.block.whole_activation == 4 * norm.shape[0] * (2 + 1 + 1)
    assert BF16.block.whole_activation == norm.shape[0] * (2 * 2 + 4 + 2 + 2)
    for made, size in ((WHOLE, 4), (BF16, 2)):
        assert made.head.whole_working == rows * (size + 2 * 4), "logits, and two gradients of them"
        assert made.embed.whole_activation == 8
        assert made.boundary_bytes == 8 * size


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_blocks_of_the_users_choice_cost_that_part_of_recomputation(part: float) -> None:
    cost, plain = ProfileCost(suited(WHOLE, None, part)), ProfileCost(WHOLE)
    again = replace(plain, recompute=True)

    def between(one: float, other: float) -> float:
        return one + part * (other - one)

    for layers in (1, LAYERS):
        sizes = [c.memory(layers, [4], 0, first=False, last=False, in_flight=3) for c in (cost, plain, again)]
        # The activations of one block at a time, but for its input, which is there.
        again_bytes = WHOLE.activation_bytes(WHOLE.block, 4) - WHOLE.block.recomputed_activation * WHOLE.tokens
        beside = again_bytes if part else 0.0
        kept = sizes[2] - again_bytes
        assert sizes[0] == pytest.approx(between(sizes[1], kept) + beside)
    seconds = [c.group((1.0, 1.0), (2, 2), Link()).block for c in (cost, plain, again)]
    assert seconds[0] == pytest.approx(between(seconds[1], seconds[2]))
    assert seconds[2] > seconds[1]


def test_master_weights_are_finer_than_what_is_computed_in() -> None:
    with pytest.raises(Invalid, match="no finer"):
        Numbers(compute="float32", master="bfloat16")
    with pytest.raises(Invalid, match="recomputed_part"):
        suited(WHOLE, None, 1.5)
