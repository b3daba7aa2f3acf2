"""A model's tied parameters: both are there, and alike."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import SPEC

#: Every parameter by its full name.
NAMED = {
    f"{section}.{parameter.name}": parameter
    for section in SPEC.sections(0, len(SPEC.layers))
    for parameter in SPEC.section(section)
}
STRANGE = (
    "",
    "embed",
    "blocks",
    "blocks.0",
    "blocks.00.x",
    "blocks.-1.x",
    "blocks.99.x",
    "tail.x",
    "embed.none",
)


def tied(first: str, second: str) -> str:
    """Why the model with this tie is none, or nothing."""
    try:
        msgspec.structs.replace(SPEC, ties=((first, second),))
    except ValueError as error:
        return str(error)
    return ""


@given(st.sampled_from(sorted(NAMED)), st.sampled_from(sorted(NAMED)))
def test_parameters_that_are_alike_can_be_tied_and_no_others(first: str, second: str) -> None:
    a, b = NAMED[first], NAMED[second]
    alike = (a.shape, a.dtype, a.cut, a.kind) == (b.shape, b.dtype, b.cut, b.kind)
    assert (tied(first, second) == "") == alike


@pytest.mark.parametrize("name", STRANGE)
def test_tie_to_a_parameter_that_the_model_lacks_is_refused_by_name(name: str) -> None:
    assert f"tied parameter {name!r} is not in the model" in tied("embed.tokens.weight", name)
