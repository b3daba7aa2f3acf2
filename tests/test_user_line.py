"""An error's line is the user's, however deep in a library it was raised."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from elasticd.system.user_line import described, raised_by_user, user_line, warning_level

CASES = {
    # the script, and the line of it that the message names
    "its own raise": ("x = 1\nraise ValueError('mine')\n", 2),
    "in elasticd": ("import elasticd\n\nelasticd.Model(embed=None, blocks=[], head=None)\n", 3),
    "in the planner": ("from elasticd_planner.spec.box import Box\nBox(start=(3,),\n  stop=(1,))\n", 2),
    "in torch": ("import torch\ndef f(x):\n    return x @ x\nf(torch.ones(2, 3))\n", 3),
    "in the standard library": ("import json\n\n\njson.loads('{')\n", 4),
    "in text that a library compiled": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA()\n",
        5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_line_is_the_innermost_one_of_the_users_own(case: str, tmp_path: Path) -> None:
    text, line = CASES[case]
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        runpy.run_path(str(script), run_name="__main__")
    assert user_line(raised.value) == f"{script}, line {line}"


def test_a_syntax_error_is_at_its_own_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\ny = = 2\n")
    with pytest.raises(SyntaxError) as raised:
        runpy.run_path(str(script))
    assert user_line(raised.value) == f"{script}, line 2"


def test_an_error_that_was_never_raised_has_no_line() -> None:
    assert user_line(ValueError("x")) == ""


def test_a_warning_names_the_line_that_called_elasticd(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import elasticd\nfrom torch import nn\n\nfor make in (elasticd.Model,):\n"
        "    make(embed=nn.Embedding(9, 4), blocks=[nn.Linear(4, 4)], head=nn.Linear(4, 9))\n"
    )
    with pytest.warns(UserWarning, match="no tensor-parallel rules") as warned:
        runpy.run_path(str(script), run_name="__main__")
    assert [(one.filename, one.lineno) for one in warned] == [(str(script), 5)]
    assert warning_level() == 1


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_the_users_where_their_code_raised_it_or_called_the_library_that_did(
    case: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CASES[case][0])
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        runpy.run_path(str(script))
    error = raised.value
    assert raised_by_user(error) == (case not in ("in elasticd", "in the planner"))
    place = f" ({user_line(error)})" if raised_by_user(error) else ""
    assert described(error) == f"{type(error).__name__}: {error}{place}"
