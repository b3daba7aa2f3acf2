"""A rank dies at each of its steps: all that live end on one and the same plan, with their state whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver, sizes
from tests.house import ROOT


def run(victim: str, every: int, folder: Path) -> dict[str, Any]:
    script = ROOT / "tests" / "migration" / "deaths.py"
    (printed,) = forkserver.outputs(script, [(victim, str(every))], folder, seconds=380)
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "every"),
    [("n0/0", sizes.number(full=1, quick=16)), ("n1/1", sizes.number(full=3, quick=22))],
    ids=["a member", "a joiner"],
)
def test_whatever_step_a_rank_dies_at_the_others_agree_and_hold_all_that_they_need(
    victim: str, every: int, tmp_path: Path
) -> None:
    found = run(victim, every, tmp_path)
    steps = found["quiet"]["steps"]
    for what in ("gather schemas", "post data", "send data" if victim == "n0/0" else "send receipt", "ok"):
        assert any(what in step for step in steps), f"{victim} has no step '{what}': {steps}"
    assert set(found["quiet"]["outcomes"].values()) == {"swapped"}
    for case in found["cases"]:
        assert "stuck" not in case["outcomes"].values(), case
        numbers = {number for number, _ in case["ended"].values()}
        assert len(numbers) == 1, case
        assert all(whole for _, whole in case["ended"].values()), case
    outcomes = [set(case["outcomes"].values()) for case in found["cases"]]
    assert any("doubt" in each for each in outcomes), "no death left anyone in doubt"
    assert {"swapped"} in outcomes, "a death after the last ok undoes nothing"
    assert {"kept"} in outcomes
    deaf = found["cases"][-1]
    assert deaf["outcomes"]["n0/1"] == "doubt"
    assert "swapped" in deaf["outcomes"].values()
    assert {number for number, _ in deaf["ended"].values()} == {2}, "who is in doubt swaps if anyone did"
