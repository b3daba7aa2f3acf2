"""Models of transformers train like one process, or are refused by name: the table of docs/huggingface.md."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests import sizes
from tests.models import families

KNOWN = families.rows()
EVERY = sorted(families.classes())
USUAL = [f"{name}ForCausalLM" for name in families.USUAL] + list(families.OTHERS)
EXPERTS = [f"{name}ForCausalLM" for name in families.USUAL_WITH_EXPERTS]
TRIED = [*USUAL, *EXPERTS]


@pytest.mark.parametrize("name", sizes.beside([*USUAL[::5], *EXPERTS[::5]], TRIED))
def test_a_usual_family_trains_like_one_process(name: str) -> None:
    family = families.tried(families.found(name))
    assert family.outcome == "trains", family.why
    assert family.row() == KNOWN[name], "write the table anew: python -m tests.models.families"


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EVERY if name not in TRIED])
def test_every_class_does_as_the_table_says(name: str) -> None:
    assert families.tried(families.found(name)).row() == KNOWN[name]


def test_the_table_has_every_class_and_nine_of_ten_could_be_made() -> None:
    assert sorted(KNOWN) == EVERY
    outcomes = [row.split("|")[2].strip() for row in KNOWN.values()]
    assert set(outcomes) <= {"trains", "refused", "not made"}
    assert outcomes.count("not made") <= len(outcomes) / 10


@pytest.mark.full
@pytest.mark.parametrize("name", TRIED)
def test_no_number_of_the_configuration_is_lost(name: str) -> None:
    """Each is changed alone; caps and scales change what the model gives, so that losing one would show."""
    families.every_number(families.found(name))
