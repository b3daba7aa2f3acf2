"""The tutorials are played from their first line to the last one, and print what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages.commands import ROOT, TUTORIALS
from tests.pages.console import blocks
from tests.pages.play import CLONE, clone, environment
from tests.pages.terminals import Session

EXAMPLES = ROOT / "examples/tutorial"


def page_of(name: str) -> Path:
    return ROOT / "docs" / name


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_step_has_one_loss_on_the_whole_page(name: str) -> None:
    """In one process, on any number of devices, after any fault."""
    losses: dict[str, set[str]] = {}
    for step, kind, loss in re.findall(r"step (\d+): (validation )?loss ([\d.]+)", page_of(name).read_text()):
        losses.setdefault(f"{kind}{step}", set()).add(loss)
    assert len(losses) >= 5
    assert {step: found for step, found in losses.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", TUTORIALS)
def test_lines_of_scripts_that_a_page_shows_are_those_of_its_examples(name: str) -> None:
    scripts = "\n".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    prose = re.sub(r"```.*?```", "", page_of(name).read_text(), flags=re.DOTALL)
    shown = re.findall(r"^    (\S.*|    .*\S)$", prose, re.MULTILINE)
    code = [line for line in shown if not re.match(r"(source|cd) ", line)]
    assert code
    assert [line for line in code if line.strip() not in scripts] == []


def test_the_job_in_one_process_prints_what_the_tutorial_shows() -> None:
    """A representative of the whole page, which runs in `make test-all`."""
    (block,) = [
        block for block in blocks(page_of("tutorial.md")) if any("--steps 21" in c.text for c in block.commands)
    ]
    with clone(*CLONE) as folder, Session(folder / "examples/tutorial", environment(folder)) as session:
        assert session.play_block(block) == []
        assert session.checked_lines == 4


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_prints_what_it_shows(name: str) -> None:
    with clone(*CLONE) as folder, Session(folder / "examples/tutorial", environment(folder)) as session:
        differences = session.play(page_of(name))
        assert differences == [], "\n".join(differences)
        assert session.checked_lines > 20
