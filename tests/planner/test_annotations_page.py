"""The examples of docs/annotations.md run, and print what the page shows."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.plan import Plan

import elasticd
from elasticd.annotations import Annotation, redistribute
from elasticd.store.server import free_ports
from tests.migration.plans import SPEC

GROUP = "from torch.distributed"
PAGE = (Path(__file__).resolve().parents[2] / "docs/annotations.md").read_text()


def test_the_examples_run_and_print_what_the_page_shows() -> None:
    blocks = ["\n".join(block) for block in blocks_of(PAGE)]
    code = [block for block in blocks if not block.startswith(("all-reduce", GROUP))]
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


def test_a_group_is_made_as_the_page_says_and_no_module_that_holds_it_is_trained() -> None:
    (code,) = (block for block in map("\n".join, blocks_of(PAGE)) if block.startswith(GROUP))
    devices, port = ("n0/0", "n0/1", "n0/2"), free_ports(1)[0]
    rows, columns = (Annotation(groups=[devices], states=[{dim: 3}]) for dim in (0, 1))

    def worker(rank: int) -> tuple[int, ...]:
        names = {"rank": rank, "device": devices[rank], "host": "127.0.0.1", "port": port}
        made: dict[str, Any] = {**names, "address": "127.0.0.1"}
        exec(code, made)
        found = redistribute(torch.ones(1, 6), rows, columns, made["group"], (3, 6))
        holding = torch.nn.Linear(2, 2)
        holding.group = made["group"]
        with pytest.raises(TypeError, match="a Job cannot train a module that holds one"):
            elasticd.Model(embed=torch.nn.Embedding(2, 2), blocks=[holding], head=torch.nn.Linear(2, 2))
        made["group"].all_reduce(torch.ones(1))  # all have what they were sent
        return tuple(found.shape)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(worker, range(3))] == [(3, 2)] * 3


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
