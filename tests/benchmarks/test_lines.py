"""Lines of code are counted without what only people read."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

TEXT = '''\
"""A docstring
of two lines."""

import os  # a comment behind code


# a comment
class Some:
    """Of a class."""

    text = """not a docstring,
    two lines"""

    def much(self, a: int) -> str:
        """Of a function."""
        return (
            os.name  # in brackets

            * a
        )
'''


def test_blank_lines_comments_and_docstrings_are_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    code_lines = importlib.import_module("_lines").code_lines
    assert code_lines(TEXT) == 9
    assert code_lines('"""Only this."""\n') == 0
    assert code_lines("") == 0
