"""A profile derived from shapes agrees with the layouts and with arithmetic done by hand."""

import msgspec
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile, derive
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem_files.times import TimedModel, entry_of
from elasticd_planner.problem_files.times import profile_of as profile_of_entry
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.model import item_size
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import LAYERS, SPEC, at_rest, plan, profile, replica_bytes
from tests.planner.real_models import profile_of

DERIVED = derive(SPEC, sample_tokens=16, micro_batch=2, flops=1e6)


def bytes_in_layouts(made_shares: list[int]) -> list[int]:
    """Bytes of parameters by member of a one-stage plan, from the boxes."""
    devices = [f"n0/{i}" for i in range(len(made_shares))]
    layouts = Layouts(SPEC, plan((1, [(LAYERS, devices, made_shares)])))
    held = [layouts.of(device).values() for device in devices]
    return [sum(4 * box.size for boxes in own for box in boxes) for own in held]


@pytest.mark.parametrize("shares", [[4], [2, 2], [1, 1, 1, 1]])
def test_state_bytes_are_those_of_the_layouts_up_to_rounding_of_units(shares: list[int]) -> None:
    cost = ProfileCost(at_rest(DERIVED))
    held = bytes_in_layouts(shares)
    for position, size in enumerate(held):
        said = cost.memory(LAYERS, shares, position, first=True, last=True, in_flight=0)
        # Four units of shares, but five rows and six columns: a unit of each either way.
        slack = 4 * (10 * 8 / 5 + LAYERS * 2 * 12 * 8 / 6) if len(shares) > 1 else 0
        assert abs(said / DERIVED.state_factor - size) <= slack
    assert DERIVED.gradient_bytes == bytes_in_layouts([4])[0]
    assert replica_bytes(DERIVED) == 4 * DERIVED.gradient_bytes


def test_share_units_are_the_coarsest_units_that_cut_blocks() -> None:
    assert DERIVED.share_units == 4  # not 2 kv-heads, which follow, nor 5 rows, which cut no block
    assert DERIVED.groups == 2
    assert DERIVED.layers == LAYERS
    assert DERIVED.tokens == 32
    assert DERIVED.tied_bytes == 10 * 8 * 4
    assert DERIVED.boundary_bytes == 8 * 4


def test_seconds_are_six_operations_an_element_and_token() -> None:
    elements = 8 + 64 + 32 + 64 + 96 + 96
    assert DERIVED.block.seconds == pytest.approx(6 * (elements + 8 * 16) / 1e6)
    assert DERIVED.head.seconds == pytest.approx(6 * (8 + 80) / 1e6)
    assert DERIVED.embed.seconds == 0
    assert DERIVED.block.collectives == 4
    faster = derive(SPEC, sample_tokens=16, micro_batch=2, flops=2e6)
    assert faster.block.seconds == pytest.approx(DERIVED.block.seconds / 2)


def test_bytes_are_parted_into_cut_grouped_and_whole() -> None:
    assert DERIVED.block.cut_bytes == 4 * (64 + 64 + 96 + 96)
    assert DERIVED.block.grouped_bytes == 4 * 32
    assert DERIVED.block.whole_bytes == 4 * 8
    assert DERIVED.head.whole_bytes == 4 * 8


def test_a_group_of_units_that_is_cut_is_held_on_both_sides() -> None:
    section = SectionProfile(grouped_bytes=200)
    model = profile(share_units=8, groups=2, gradient_factor=0.0, optimizer_factor=0.0)
    assert model.aligned((4, 4))
    assert model.held_bytes(section, 4, True) == 100
    assert not model.aligned((6, 2))
    assert model.held_bytes(section, 6, False) == 200
    assert model.held_bytes(section, 1, False) == 100


def test_heads_that_are_wider_together_than_the_activation_count_where_sequences_are_cut() -> None:
    """Qwen3-0.6B: 16 heads of 128 over a width of 1,024; 8 kv-heads. In Llama-3.1-8B both are 4,096."""
    wide, even = profile_of("Qwen3-0.6B"), profile_of("Llama-3.1-8B")
    assert wide.query_bytes == 2 * 16 * 128
    assert even.query_bytes == 0
    for model, queries, groups in ((wide, 2 * 2048, 8 / 16), (even, 2 * 4096, 8 / 32)):
        needs = [
            ProfileCost(model, recompute=True, cut=cut).memory(
                model.layers, [model.share_units], 0, first=True, last=False, in_flight=1
            )
            for cut in (True, False)
        ]
        assert needs[0] - needs[1] == pytest.approx(model.layers * model.tokens * queries * (3 + 2 * groups))
    entry = entry_of(wide)
    assert entry["times"]["query_bytes"] == wide.query_bytes
    assert "query_bytes" not in entry_of(even)["times"]
    read = profile_of_entry(msgspec.convert(entry, type=TimedModel, str_keys=True), wide.tokens)
    assert read.query_bytes == wide.query_bytes


def test_a_profile_survives_json() -> None:
    made = profile(collective_seconds={2: 0.001, 4: 0.003})
    assert msgspec.json.decode(msgspec.json.encode(made), type=ModelProfile) == made


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8), ("float8_e4m3fn", 1), ("bool", 1)]
)
def test_item_sizes(dtype: str, size: int) -> None:
    assert item_size(dtype) == size


def test_wrong_profiles_are_refused() -> None:
    with pytest.raises(Invalid, match="must be finite and not negative"):
        SectionProfile(seconds=-1)
    with pytest.raises(Invalid, match="a block must take more than"):
        profile(block=SectionProfile())
    with pytest.raises(Invalid, match="layers, share_units and tokens"):
        profile(layers=0)
    with pytest.raises(Invalid, match="9 groups cannot follow 8"):
        profile(groups=9)
    with pytest.raises(Invalid, match="flops, sample_tokens and micro_batch"):
        derive(SPEC, 16, 1, flops=0)
    with pytest.raises(Invalid, match="memory_bandwidth -1 must be bytes a second, as 2e12"):
        derive(SPEC, 16, 1, memory_bandwidth=-1)


def test_tensor_parallelism_divides_neither_norms_nor_additions_and_slices_of_tokens_do() -> None:
    model = derive(SPEC, sample_tokens=16, micro_batch=2, flops=1e6, memory_bandwidth=1e5)
    block, link, tokens = model.block, Link(bandwidth=1e30, latency=0), model.tokens
    plain, slices = (ProfileCost(model, sequence_parallel=on) for on in (False, True))
    one = tokens * (block.seconds + block.whole_seconds)
    assert plain.group((1.0,), (4,), link).block == slices.group((1.0,), (4,), link).block == pytest.approx(one)
    four = tokens * (block.seconds / 4 + block.whole_seconds)
    assert plain.group((1.0,) * 4, (1,) * 4, link).block == pytest.approx(four)
    assert slices.group((1.0,) * 4, (1,) * 4, link).block == pytest.approx(one / 4)
    # With a slow device whose part is smaller: what is whole it has all of, and of slices its part.
    unequal = 3 * tokens * (block.seconds / 4 + block.whole_seconds)
    assert plain.group((3.0, 1.0), (1, 3), link).block == pytest.approx(unequal)
    assert slices.group((3.0, 1.0), (1, 3), link).block == pytest.approx(one * 3 / 4)


@given(
    rates=st.lists(st.floats(1, 8), min_size=1, max_size=4),
    slices=st.booleans(),
    bandwidth=st.sampled_from([1e3, 1e5, 1e7]),
)
def test_no_group_is_quicker_than_its_bounds_where_work_waits_for_memory(
    rates: list[float], slices: bool, bandwidth: float
) -> None:
    model = derive(SPEC, sample_tokens=16, micro_batch=2, flops=1e6, memory_bandwidth=bandwidth)
    cost, link = ProfileCost(model, sequence_parallel=slices), Link(bandwidth=1e5, latency=1e-3)
    paces = cost.paces(tuple(sorted(rates)), link)
    for shares in cost.shares(rates):
        group = cost.group(rates, shares, link)
        assert 1 / group.block <= max(pace for pace, *_ in paces) * (1 + 1e-9)
        step = model.layers * group.block + group.embed + group.head
        assert step >= cost.bound(rates, 1) * (1 - 1e-9)


def test_seconds_of_all_members_go_through_a_problem_file() -> None:
    model = derive(SPEC, sample_tokens=16, micro_batch=2, flops=1e6, memory_bandwidth=1e5)
    entry = entry_of(model)
    assert entry["times"]["block"]["whole_seconds_per_token"] == model.block.whole_seconds > 0
    assert "whole_seconds_per_token" not in entry["times"]["head"], "a key that earlier releases refuse"
    again = profile_of_entry(msgspec.convert(entry, TimedModel, strict=False), model.tokens)
    assert again.block.whole_seconds == model.block.whole_seconds
