"""A profile in a file is taken for the model that it was measured of, and for no other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, derive
from elasticd_planner.problem_files.profile_file import given_profile
from elasticd_planner.problem_files.times import entry_of
from elasticd_planner.profiling.sample_profile import measured_profile
from elasticd_planner.value import Invalid

from tests.planner.measurements import TRUTH, samples
from tests.planner.models import SPEC

MEASURED = measured_profile(samples()).profile


def file(profile: ModelProfile = MEASURED, **changes: Any) -> bytes:
    model = {**entry_of(profile), **changes}
    return msgspec.json.encode({"model": {key: value for key, value in model.items() if value is not None}})


def test_a_job_gets_what_was_measured_for_its_own_micro_batches() -> None:
    found = given_profile(file(), SPEC, 16, 2)
    assert found.tokens == 32
    assert not found.fitted  # measured steps will be believed more
    assert found.widths == ()
    expected = msgspec.structs.replace(MEASURED, tokens=32.0)
    assert found == expected


def test_a_job_gets_what_was_measured_of_named_tensors_and_no_older_release_reads_past_it() -> None:
    measured = msgspec.structs.replace(MEASURED, bundle_bytes=96.5)
    assert given_profile(file(measured), SPEC, 16, 2).bundle_bytes == 96.5
    assert b"bundle_bytes" in file(measured)
    assert b"bundle_bytes" not in file(), "its reader refuses keys that it does not know"


def test_seconds_alone_are_enough() -> None:
    found = given_profile(file(state=None), SPEC, 16, 2)
    base = derive(SPEC, 16, 2)
    assert found.block.seconds == pytest.approx(TRUTH["block"][1])
    assert found.block.cut_bytes == base.block.cut_bytes
    assert found.block.cut_activation == base.block.cut_activation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"profile", "no profile of `elasticd profile`"),
        (b'{"model": {"name": "small", "layers": 3}}', "missing required field `times`"),
        (
            file(name="other"),
            r"it is of other with 3 layers, and this job trains small with 3.*elasticd profile",
        ),
        (file(layers=6), "it is of small with 6 layers"),
        (file(tims={}), "unknown field `tims`"),
    ],
)
def test_a_file_that_is_none_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        given_profile(text, SPEC, 16, 1)


def test_a_model_of_other_sizes_is_refused_with_both() -> None:
    state = entry_of(MEASURED)["state"]
    wider = {**state, "block": {**state["block"], "cut_bytes": 12_345}}
    with pytest.raises(Invalid, match=r"its block has 12,5\d\d bytes of parameters, and that of .* 1,440"):
        given_profile(file(state=wider), SPEC, 16, 1)
