"""Ordinary training scripts: each trains as plain torch does, through a fault and a switch, or is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import sizes
from tests.scripts import corpus, disturbed

NAMES = sorted(
    path.stem
    for path in Path(corpus.__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "ordinary", "keyed")
)
REFUSED = [name for name in NAMES if hasattr(disturbed.script(name), "REFUSED")]
TRAINED = [name for name in NAMES if name not in REFUSED]


def cases(representatives: list[str], names: list[str]) -> list[object]:
    return [
        pytest.param(
            name,
            marks=[] if name in representatives else [getattr(pytest.mark, sizes.MARK)],
        )
        for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    cases(
        # Dropouts in cut modules: tests/models/test_torch_draws.py.
        ["nanogpt", "saving_after_the_loop", "seq2seq"],
        TRAINED,
    ),
)
def test_it_trains_as_plain_torch_does_in_three_layouts_through_a_fault_and_a_switch(name: str) -> None:
    ran = disturbed.run(name)
    assert ran.codes == {"a/0": 0, "b/0": 0}, ran.output
    assert ran.phase == getattr(disturbed.script(name), "PHASE", "done"), ran.output
    assert len(ran.plans) >= 3
    assert ran.apart(disturbed.script(name).plain(disturbed.order(name))) < disturbed.APART


@pytest.mark.parametrize(
    "name",
    cases(
        [
            "lora_by_a_hook",
            "optimizer_of_the_model",
            "plateau",
            "rows_of_new_tokens",
            "saving_the_modules",
        ],
        REFUSED,
    ),
)
def test_it_is_refused_by_the_message_that_the_docs_have(name: str) -> None:
    message = disturbed.script(name).REFUSED
    ran = disturbed.run_alone(name)
    lines = [line for line in ran.output.splitlines() if message in line]
    assert ran.codes != {"alone": 0}, f"it trains: {ran.losses}"
    assert ran.codes != {"alone": -signal.SIGKILL}
    assert lines, ran.output
    assert message in disturbed.DOCS.read_text(), "the table of what is refused has this message"


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_plain_torch_runs_what_is_refused(name: str) -> None:
    """So the script is an ordinary one, and no mistake of its own is refused."""
    if name == "plateau":
        pytest.skip("its scheduler gets the loss, which the common loop does not give")
    outcome = disturbed.script(name).plain(disturbed.order(name))
    assert outcome.losses[-1] != outcome.losses[0]
