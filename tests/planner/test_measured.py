"""A profile from samples has the seconds and kept bytes that were measured, and the shapes' bytes."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.problem_files.times import TimedModel, entry_of, profile_of
from elasticd_planner.profiling.sample_profile import measured_profile
from elasticd_planner.value import Invalid

from tests.planner.measurements import CUT, SLOWDOWN, TRUTH, WHOLE, samples
from tests.planner.models import LAYERS, SPEC

PROFILE = measured_profile(samples()).profile


@pytest.mark.parametrize("section", ["embed", "block", "head"])
def test_seconds_are_those_that_were_measured(section: str) -> None:
    found = getattr(PROFILE, section)
    assert (found.fixed_seconds, found.seconds) == pytest.approx(TRUTH[section])
    assert found.slowdown == pytest.approx(SLOWDOWN)


def test_kept_bytes_are_parted_by_how_they_fall_with_the_share() -> None:
    assert (PROFILE.block.cut_activation, PROFILE.block.whole_activation) == pytest.approx((CUT, WHOLE))
    assert PROFILE.block.recomputed_activation == 32


def test_kept_bytes_of_one_width_are_parted_as_the_shapes_would() -> None:
    alone = samples(timings=tuple(t for t in samples().timings if t.width == 1))
    block, base = measured_profile(alone).profile.block, derive(SPEC, 16, 1).block
    assert block.cut_activation + block.whole_activation == pytest.approx(CUT + WHOLE)
    ratio = base.cut_activation / base.whole_activation
    assert block.cut_activation / block.whole_activation == pytest.approx(ratio)


def test_the_rest_is_measured_too() -> None:
    assert PROFILE.forward == pytest.approx(0.3)
    assert PROFILE.recompute_factor == pytest.approx(1.4)
    assert PROFILE.optimizer_seconds == pytest.approx(4e-6 / 200)
    assert PROFILE.collective_seconds == {2: pytest.approx(1e-3)}
    assert PROFILE.collective_token_seconds == {2: pytest.approx(1e-5)}


def test_bytes_of_parameters_are_those_of_the_shapes() -> None:
    base = derive(SPEC, 16, 1)
    assert PROFILE.parameter_bytes == base.parameter_bytes
    assert (PROFILE.share_units, PROFILE.groups, PROFILE.tied_bytes) == (4, 2, base.tied_bytes)


def test_whole_model_is_predicted_from_its_sections() -> None:
    found = measured_profile(samples())
    each = {name: fixed + 32 * seconds for name, (fixed, seconds) in TRUTH.items()}
    assert found.predicted == pytest.approx(each["embed"] + LAYERS * each["block"] + each["head"])
    assert measured_profile(samples(whole=None)).predicted is None


def test_kinds_of_block_count_as_often_as_the_model_has_them() -> None:
    two = msgspec.structs.replace(SPEC, kinds=(*SPEC.kinds, SPEC.kinds[0][:4]), layers=(0, 1, 1, 0, 1))
    found = measured_profile(samples(two))
    assert [fit.section for fit in found.fits] == ["embed", "block.0", "block.1", "block", "head"]
    mean = (2 * 1 + 3 * 2) / 5  # the second kind is twice as slow
    assert found.profile.block.seconds == pytest.approx(mean * TRUTH["block"][1])
    assert found.profile.block.fixed_seconds == pytest.approx(mean * TRUTH["block"][0])


def test_experts_are_a_part_of_the_mean_block() -> None:
    two = msgspec.structs.replace(SPEC, kinds=(*SPEC.kinds, SPEC.kinds[0][:4]), layers=(0, 1, 1, 0, 1))
    made = samples(two)
    of_experts = tuple(
        msgspec.structs.replace(t, section="experts.1", forward=0.45 * t.forward, backward=0.45 * t.backward)
        for t in made.timings
        if t.section == "block.1"
    )
    made = msgspec.structs.replace(made, timings=made.timings + of_experts, chosen=2, experts=8)
    found = measured_profile(made)
    assert [fit.section for fit in found.fits] == ["embed", "block.0", "block.1", "experts.1", "block", "head"]
    assert found.profile.experts is not None
    assert found.profile.experts.part == pytest.approx(0.45 * 2 / 1.6)  # of the slower of two kinds
    assert (found.profile.experts.chosen, found.profile.experts.count) == (2, 8)
    without = measured_profile(samples(two)).profile
    assert without.experts is None
    assert without.block == found.profile.block
    entry = entry_of(found.profile)
    assert "experts" not in entry_of(without)["times"]
    read = profile_of(msgspec.convert(entry, type=TimedModel, str_keys=True), found.profile.tokens)
    assert read.experts == found.profile.experts


def test_block_that_does_not_grow_is_refused() -> None:
    flat = [msgspec.structs.replace(t, forward=1e-3, backward=1e-3) for t in samples().timings]
    with pytest.raises(Invalid, match="do not grow with tokens"):
        measured_profile(samples(timings=tuple(flat)))
