"""How much `make test` tries of a behaviour, and how much more `make test-all` does.

`make test` is run at every commit: it tries each behaviour by representatives, and draws the same examples each
time. `make test-all` (pytest --full) has every size, seed and cell of a matrix, and draws anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: A test of this mark runs in `make test-all` alone: a smaller size, another seed or another cell of the same
#: matrix stands for it in `make test`.
MARK = "full"

#: Says to the processes that tests start, which import the same files, that all sizes are tried.
_VARIABLE = "ELASTICD_TESTS_FULL"

_full = bool(os.environ.get(_VARIABLE))


def choose(full: bool) -> None:
    """Called once, before the tests are imported."""
    global _full
    _full = full
    os.environ[_VARIABLE] = "1" if full else ""


def examples(full: int) -> int:
    """How many examples hypothesis draws where `make test-all` draws `full`: a quarter, five at least."""
    return full if _full else min(full, max(5, full // 4))


def number(full: int, quick: int) -> int:
    """`full` under `make test-all`, else `quick`: of repetitions, steps, seeds."""
    return full if _full else quick


def every(cases: Sequence[T], step: int, start: int = 0) -> list[T]:
    """All cases under `make test-all`, else each `step`-th one from `start` on."""
    return list(cases) if _full else list(cases[start::step])


def beside(representatives: Sequence[T], cases: Iterable[T]) -> list[Any]:
    """For `parametrize`: the representatives, and under `make test-all` all cases, of which the others have the
    mark. Each process of pytest collects all tests: those that are not made cost it nothing."""
    values = list(cases)
    assert not (missing := [case for case in representatives if case not in values]), f"no cases: {missing}"
    if representatives and not _full:
        values = [case for case in values if case in representatives]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=_marks(case in representatives))
        for case in values
    ]


def _marks(represents: bool) -> list[pytest.MarkDecorator]:
    return [] if represents else [getattr(pytest.mark, MARK)]


def skip_full(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run and those to leave out."""
    left_out = [] if _full else [item for item in items if item.get_closest_marker(MARK)]
    left = set(left_out)
    return [item for item in items if item not in left], left_out
