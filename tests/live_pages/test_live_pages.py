"""Loops that people have, cut to a page each, before and after `elasticd.live`: how much changes; both run."""

from __future__ import annotations

import ast
import difflib
import os
import re
from pathlib import Path

import pytest

from tests import forkserver

HERE = Path(__file__).parent
#: The most lines that the loop kept alive may have beside those of the plain one.
MOST = {"nanogpt": 8, "titan": 12}


def statements(path: Path) -> list[str]:
    """The lines of a script, without docstring and indentation, each statement on one."""
    tree = ast.parse(path.read_text())
    tree.body = tree.body[1:]
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


def changed(name: str) -> list[str]:
    """The lines of a page that its plain one does not have at their place."""
    plain, kept_alive = (statements(HERE / f"{name}_{which}.py") for which in ("plain", "live"))
    return [line for line in difflib.ndiff(plain, kept_alive) if line.startswith("+ ")]


@pytest.mark.parametrize("name", MOST)
def test_the_loop_of_a_script_changes_in_few_lines(name: str) -> None:
    lines = changed(name)
    assert len(lines) <= MOST[name], "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["live", pytest.param("plain", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MOST)
def test_both_run_and_train(name: str, which: str, tmp_path: Path) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1", ITERS="12")
    if which == "plain":
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    output = tmp_path / "output"
    process = forkserver.start(HERE / f"{name}_{which}.py", environment=environment, output=output)
    assert process.wait(120) == 0, output.read_text()
    losses = [float(loss) for loss in re.findall(r"loss:? (\d+\.\d+)", output.read_text())]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
