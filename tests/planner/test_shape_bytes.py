"""Bytes by shapes, by hand: of gates, norms, heads and dropouts; and the table of Korthikanti et al."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.cost.memory import most_tokens
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile, derive, with_room
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.cost.shape_bytes import (
    ShapeBytes,
    ShapeTraffic,
    block_bytes,
    block_traffic,
    embed_bytes,
    head_bytes,
)
from elasticd_planner.problem_files.times import TimedModel, entry_of, profile_of
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import gpt
from tests.planner.models import plan, profile
from tests.planner.real_models import spec_of

WIDTH, QUERIES, KEYS, HIDDEN, ROWS = 64, 96, 32, 160, 1000
HEADS = Cut(dim=0, units="heads")


def parameter(name: str, *shape: int, cut: Cut | None = None, frozen: bool = False) -> Parameter:
    following = cut is not None and cut.units == "kv_heads"
    return Parameter(
        name=name,
        shape=shape,
        dtype="bfloat16",
        cut=cut,
        replicas="add" if following else "same",
        kind="frozen" if frozen else "trained",
    )


ATTENTION = (
    parameter("q", QUERIES, WIDTH, cut=HEADS),
    parameter("k", KEYS, WIDTH, cut=Cut(dim=0, units="kv_heads")),
    parameter("v", KEYS, WIDTH, cut=Cut(dim=0, units="kv_heads")),
    parameter("o", WIDTH, QUERIES, cut=Cut(dim=1, units="heads")),
)
UP = parameter("up", HIDDEN, WIDTH, cut=Cut(dim=0, units="columns"))
DOWN = parameter("down", WIDTH, HIDDEN, cut=Cut(dim=1, units="columns"))
GATE = msgspec.structs.replace(UP, name="gate")
OUTPUT = parameter("output", ROWS, WIDTH, cut=Cut(dim=0, units="rows"))
#: Queries (and what attention gives), keys, values.
OF_ATTENTION = 2 * (2 * QUERIES + 2 * KEYS)


def norm(name: str, length: int = WIDTH) -> Parameter:
    return parameter(f"{name}.weight", length)


def model(*block: Parameter, head: tuple[Parameter, ...] = (OUTPUT,), dtype: str = "bfloat16") -> ModelSpec:
    return ModelSpec(
        name="by hand",
        embed=(parameter("tokens", ROWS, WIDTH, cut=Cut(dim=0, units="rows")),),
        kinds=(block,),
        layers=(0,),
        head=head,
        units=(
            Units(kind="heads", count=8),
            Units(kind="kv_heads", count=4, follows="heads"),
            Units(kind="columns", count=HIDDEN),
            Units(kind="rows", count=ROWS),
        ),
        width=WIDTH,
        dtype=dtype,
    )


def of_block(*block: Parameter, dtype: str = "bfloat16", dropouts: int = 0) -> ShapeBytes:
    spec = model(*block, dtype=dtype)
    return block_bytes(spec, spec.kinds[0], dropouts)


def test_attention_keeps_queries_keys_values_and_its_output_and_a_hidden_layer_both_sides() -> None:
    """Heads are wider together than the activation: 96 over 64."""
    found = of_block(*ATTENTION, UP, DOWN)
    assert found.cut_activation == OF_ATTENTION + 2 * 2 * HIDDEN
    assert found.whole_activation == 2 * WIDTH * 3, "inputs of both parts, and of the block"


def test_a_gate_keeps_its_activation_besides() -> None:
    three, plain = of_block(*ATTENTION, GATE, UP, DOWN), of_block(*ATTENTION, UP, DOWN)
    assert three.cut_activation == OF_ATTENTION + 2 * 4 * HIDDEN
    fused = parameter("gate_up", 2 * HIDDEN, WIDTH, cut=Cut(dim=0, units="columns"))
    assert of_block(*ATTENTION, fused, DOWN).cut_activation == three.cut_activation
    assert three.cut_working - plain.cut_working == 2 * HIDDEN, "gradients of gate and up"


def test_one_matrix_of_queries_keys_and_values_is_kept_beside_what_is_rotated() -> None:
    fused = parameter("qkv", QUERIES + 2 * KEYS, WIDTH, cut=HEADS)
    kept = of_block(fused, ATTENTION[-1]).cut_activation
    assert kept == OF_ATTENTION + 2 * (QUERIES + KEYS)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_norm_computes_in_single_precision(dtype: str, size: int) -> None:
    plain = of_block(*ATTENTION, UP, DOWN, dtype=dtype)
    found = of_block(norm("first"), *ATTENTION, norm("second"), UP, DOWN, dtype=dtype)
    own = 0 if size == 2 else size * WIDTH  # in single precision the block's input is the first norm's
    assert found.whole_activation - plain.whole_activation == 2 * WIDTH * (4 + size) - own
    assert found.cut_activation == plain.cut_activation


def test_norms_around_both_parts_apply_their_weights_in_single_precision() -> None:
    norms = [norm(name) for name in ("before", "behind", "before_hidden", "behind_hidden")]
    found, plain = (of_block(*ATTENTION, GATE, UP, DOWN, *which) for which in (norms, ()))
    assert found.whole_activation - plain.whole_activation == 4 * WIDTH * 8
    # The gradient given, and four of single precision, are more than those of the hidden layer without what the
    # last norm kept.
    assert found.whole_working == WIDTH * (2 + 4 * 4)
    assert (
        found.cut_working == 2 * WIDTH - 8 * WIDTH + 2 * 2 * HIDDEN - found.whole_working
        or not found.cut_working
    )


def test_norms_of_heads_are_over_all_queries_and_all_keys() -> None:
    both = (norm("q_norm", 16), norm("k_norm", 16))
    found, plain = (of_block(*ATTENTION, *which, UP, DOWN) for which in (both, ()))
    assert found.cut_activation - plain.cut_activation == (QUERIES + KEYS) * (4 + 2)
    assert found.whole_activation == plain.whole_activation


def test_a_layer_norm_keeps_its_input() -> None:
    layer = (norm("first"), parameter("first.bias", WIDTH), norm("second"), parameter("second.bias", WIDTH))
    assert of_block(*ATTENTION, UP, DOWN, *layer).whole_activation == 2 * WIDTH * 4


def test_dropouts_keep_masks_which_are_drawn_as_integers() -> None:
    none, two = (of_block(*ATTENTION, UP, DOWN, dropouts=number) for number in (0, 2))
    assert two.whole_activation - none.whole_activation == 2 * WIDTH
    assert two.whole_working - none.whole_working == WIDTH * (24 + 1)
    assert derive(model(*ATTENTION), 8, 1, dropouts=2).block.whole_activation == two.whole_activation
    assert embed_bytes(model(UP), 2).whole_activation - embed_bytes(model(UP)).whole_activation == WIDTH
    with pytest.raises(Invalid, match="dropouts -1 must not be negative"):
        of_block(UP, dropouts=-1)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_head_keeps_a_log_softmax_in_single_precision_and_has_two_gradients_of_it(
    dtype: str, size: int
) -> None:
    found = head_bytes(model(UP, dtype=dtype))
    assert found.cut_activation == 0, "its logits are gathered"
    assert found.whole_activation == 4 * ROWS + size * WIDTH + 8
    assert found.whole_working == (size + 2 * 4) * ROWS
    matrix = ROWS * WIDTH
    assert found.matrix_working == (6 if size == 2 else 4) * matrix, (
        "cast to single precision from another type"
    )
    assert found.beside_working == (-2 * ROWS if size == 2 else 4 * (ROWS + WIDTH))


def test_a_matrix_that_is_not_trained_has_no_gradient() -> None:
    frozen = [msgspec.structs.replace(each, kind="frozen") for each in (*ATTENTION, UP, DOWN)]
    small = parameter("adapter", 4, WIDTH)
    assert of_block(*frozen).matrix_working == 0
    assert of_block(*frozen, small).matrix_working == 6 * 4 * WIDTH
    assert of_block(*ATTENTION, UP, DOWN).matrix_working == 6 * WIDTH * HIDDEN


@pytest.mark.parametrize(("sliced", "whole", "cut"), [(True, 0, 34), (False, 10, 24)])
@pytest.mark.parametrize(
    ("width", "layers", "heads", "micro_batch"),
    [(6144, 48, 64, 4), (12288, 96, 96, 1), (20480, 105, 128, 1), (25600, 128, 160, 1)],
)
def test_activations_of_a_layer_are_those_that_korthikanti_published(
    width: int, layers: int, heads: int, micro_batch: int, sliced: bool, whole: int, cut: int
) -> None:
    """Reducing Activation Recomputation in Large Transformer Models (2022), table 2, with attention's core
    recomputed: 34 s b h / t bytes with sequence parallelism, s b h (10 + 24 / t) without."""
    made = derive(gpt("GPT", width, layers, heads), 2048, micro_batch, dropouts=2)
    kept = made.activation_bytes(made.block, made.share_units // 8, sliced=sliced)
    assert kept == (whole + cut / 8) * 2048 * micro_batch * width


@pytest.mark.parametrize("width", [2304, 25600])
def test_memory_traffic_of_a_gpt_block_is_that_of_its_kernels(width: int) -> None:
    """By hand, bytes of a token in half precision, h the width. Each of two norms: 4 h forward, 10 h backward;
    of two additions: 6 h each way; of two dropouts: h forward, its mask, and 5 h backward with it; the hidden
    layer, 4 h wide: 16 h forward, 24 h backward."""
    spec = gpt("GPT", width, 24, 32)
    traffic = block_traffic(spec, spec.kinds[0], dropouts=2)
    assert traffic == ShapeTraffic(whole=(2 * 14 + 2 * 12 + 2 * 6) * width, cut=40 * width)
    bandwidth = 2e12
    slow, quick = (derive(spec, 2048, 1, 2e14, memory_bandwidth=b, dropouts=2).block for b in (bandwidth, 0))
    assert slow.whole_seconds == pytest.approx(traffic.whole / bandwidth)
    assert slow.seconds - quick.seconds == pytest.approx(traffic.cut / bandwidth)
    assert quick.whole_seconds == 0


def test_a_gate_moves_more_than_an_activation_function() -> None:
    spec = model(*ATTENTION, GATE, UP, DOWN, norm("first"), norm("second"))
    gated = block_traffic(spec, spec.kinds[0])
    assert gated == ShapeTraffic(cut=2 * 14 * HIDDEN, whole=2 * WIDTH * (2 * 7 + 2 * 6))
    spec = model(*ATTENTION, norm("q_norm", 16), norm("k_norm", 16), UP, DOWN)
    heads = block_traffic(spec, spec.kinds[0])
    assert heads == ShapeTraffic(cut=2 * 5 * HIDDEN + 2 * 7 * (QUERIES + KEYS), whole=2 * WIDTH * 2 * 6)


def test_stacked_experts_are_not_counted_in_the_traffic() -> None:
    plain = block_traffic(model(*ATTENTION, norm("first")), (*ATTENTION, norm("first")))
    stacked = Parameter(
        name="experts.up", shape=(8, HIDDEN, WIDTH), dtype="float16", cut=Cut(dim=1, units=UP.cut.units)
    )
    spec = model(*ATTENTION, norm("first"), stacked)
    assert block_traffic(spec, spec.kinds[0]) == plain


def test_working_bytes_are_those_of_the_larger_moment() -> None:
    made = derive(spec_of("Llama-3.1-8B"), 1.0, 1)
    gradient, width, hidden = 6 * 14336 * 4096, 4096, 14336
    assert made.working_bytes(made.block, 32) == gradient + 2 * width
    many = made.sized(16384)
    assert many.working_bytes(many.block, 32) == 16384 * (2 * width + 4 * hidden)
    assert many.working_bytes(many.block, 8) == 16384 * (2 * width + hidden)
    assert made.working_bytes(made.block, 8, sliced=True) == gradient / 4 + 2 * width / 4


def test_room_for_more_tokens_leaves_a_matrix_s_gradient_as_it_is() -> None:
    made = derive(spec_of("SmolLM2-135M"), 64, 1)
    room = with_room(made, 1.5)
    for name in ("block", "head"):
        one, other = getattr(made, name), getattr(room, name)
        assert other.matrix_working == one.matrix_working
        assert other.beside_working == 1.5 * one.beside_working


def test_working_bytes_of_both_moments_stand_in_a_problem_file() -> None:
    made = derive(spec_of("SmolLM2-135M"), 64, 1)
    entry = entry_of(made)
    assert entry["state"]["head"]["beside_working"] < 0
    read = profile_of(msgspec.convert(entry, type=TimedModel, str_keys=True), made.tokens)
    assert read.block == made.block
    assert "matrix_working" not in entry["state"]["embed"]
    entry["state"]["head"]["beside_working"] = float("inf")
    with pytest.raises(msgspec.ValidationError, match="beside_working inf must be finite"):
        msgspec.convert(entry, type=TimedModel, str_keys=True)
    with pytest.raises(Invalid, match="must be finite"):
        SectionProfile(beside_working=float("nan"))


@given(
    cut=st.floats(0, 50),
    matrix=st.floats(0, 1e6),
    head=st.floats(0, 200),
    memory=st.integers(10_000, 5_000_000),
)
def test_the_most_tokens_that_fit_are_found_where_what_they_need_bends(
    cut: float, matrix: float, head: float, memory: int
) -> None:
    """A block's matrix decides for few tokens, its activations for more, the head's logits for most."""
    held = SectionProfile(
        seconds=1.0,
        cut_bytes=400,
        cut_activation=3.0,
        cut_working=cut,
        matrix_working=matrix,
        beside_working=1.0,
    )
    made: ModelProfile = profile(block=held, head=SectionProfile(whole_working=head, cut_bytes=100), layers=4)
    (lane,) = plan((2, [(4, ["n0/0", "n0/1"], [4, 4])])).pipelines
    cost = ProfileCost(made)

    def needed(tokens: float) -> float:
        return cost.sized(tokens).memory(4, (4, 4), 0, first=True, last=True, in_flight=1)

    most = most_tokens(lane, cost.sized, {"n0/0": memory, "n0/1": memory})
    if most:
        assert needed(most) <= memory * (1 + 1e-6)
    assert needed(most + 1) > memory
