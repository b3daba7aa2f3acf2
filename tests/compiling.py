"""What a test needs that has torch compile: it begins without graphs, and leaves none.

torch keeps the graphs that it made for the whole process. A test that counts them would find those of whichever
test came before it there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest


def graphs() -> int:
    """Graphs that were made in this process so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")  # imported by whoever compiles
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def drop_traces() -> None:
    """torch's compiler writes down all that it does where somebody reads it, which takes a quarter of its time.
    pytest takes the log of every test, and reads it so."""
    setattr(logging.getLogger("torch.__trace"), "addHandler", lambda handler: None)  # noqa: B010


def breaks() -> int:
    """Places so far where a graph was broken."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return sum(utils.counters["graph_break"].values()) if utils else 0


@pytest.fixture
def compiler() -> Iterator[None]:
    """For each test that has torch compile."""
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def traced(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, with their backward passes, and run by torch's own kernels: no C++ compiler is
    needed."""
    from elasticd.runtime.engine import compiled_blocks

    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")


@pytest.fixture(autouse=True)
def _graphs_are_of_one_test(request: pytest.FixtureRequest) -> Iterator[None]:
    before = graphs()
    yield
    said = "compiler" in request.fixturenames
    assert said or graphs() == before, "this test has torch compile: let it use the fixture 'compiler'"
