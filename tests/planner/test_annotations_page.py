"""The examples of docs/annotations.md run, and print what the page shows."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from elasticd_planner.spec.plan import Plan

from tests.migration.plans import SPEC

PAGE = (Path(__file__).resolve().parents[2] / "docs/annotations.md").read_text()


def test_the_examples_run_and_print_what_the_page_shows() -> None:
    blocks = ["\n".join(block) for block in blocks_of(PAGE)]
    code = [block for block in blocks if not block.startswith("all-reduce")]
    (shown,) = (block for block in blocks if block.startswith("all-reduce"))
    names: dict[str, object] = {"model": SPEC}
    with redirect_stdout(StringIO()) as printed:
        for block in code:
            exec(block, names)
    assert printed.getvalue().strip() == shown
    plan = names["plan"]
    assert isinstance(plan, Plan)
    assert [[stage.named for stage in pipeline.stages] for pipeline in plan.pipelines] == [
        ["0-1", "2"],
        ["0-2"],
    ]


def blocks_of(page: str) -> list[list[str]]:
    """Code: lines that are indented by four, with empty lines between; lists are indented by two."""
    found: list[list[str]] = []
    inside = False
    for line in page.splitlines():
        if re.match(" {4}", line):
            if not inside or line.startswith("    all-reduce"):
                found.append([])
            found[-1].append(line[4:])
            inside = True
        elif line:
            inside = False
        elif inside:
            found[-1].append("")
    return [[*block[: len("\n".join(block).rstrip().splitlines())]] for block in found]
