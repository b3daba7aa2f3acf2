"""Lines that a plain script changes to become a job (written, changed or moved), and the losses of both.

Lines without code (blank ones, comments, the module's docstring) are left out. A line that was moved counts as
a written one. Lines that are gone, as the loop over micro-batches, are counted beside it.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _results import Row, row

SCRIPTS = Path(__file__).resolve().parent.parent / "examples/tutorial"
#: A plain script and the same as a job, each in the files of its model and its training; the goal.
PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int | None]] = {
    "nanoGPT-like script": (("gpt.py", "plain.py"), ("gpt.py", "train.py"), 40),
    "nanoGPT-like script, its attention for tensor parallelism": (("gpt.py",), ("gpt_tp.py",), None),
    "HF causal LM script": (("finetune_plain.py",), ("finetune.py",), 12),
}
#: Losses of plain torch and of a job in float32 agree to this.
APART = 2e-4


def code_lines(name: str) -> list[str]:
    """The lines of a script that have code."""
    text = re.sub(r'\A""".*?"""', "", (SCRIPTS / name).read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def changed(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[int, int]:
    """How many lines of `after` are not in `before` at their place, and how many of `before` are gone."""
    old, new = ([line for name in names for line in code_lines(name)] for names in (before, after))
    diff = list(difflib.ndiff(old, new))
    return sum(line.startswith("+ ") for line in diff), sum(line.startswith("- ") for line in diff)


def rows(smallest: bool) -> Iterator[Row]:
    for name, (before, after, goal) in PAIRS.items():
        written, gone = changed(before, after)
        met = None if goal is None else written <= goal
        yield row(f"{name}: changed lines", written, "lines", goal=goal and f"<= {goal}", met=met)
        yield row(f"{name}: lines that are gone", gone, "lines")
    yield from _losses(steps=5 if smallest else 30)


def _losses(steps: int) -> Iterator[Row]:
    """Both scripts of a pair in one process each: the largest difference of a loss."""
    with tempfile.TemporaryDirectory() as folder:
        _printed("make_base.py", f"{folder}/base")
        count = ("--steps", str(steps))
        for name, plain, job in (
            ("nanoGPT-like script", ("plain.py",), ("train.py",)),
            (
                "HF causal LM script",
                ("finetune_plain.py", f"{folder}/base"),
                ("finetune.py", f"{folder}/base"),
            ),
        ):
            expected = _printed(*plain, *count, "--out", f"{folder}/plain-{plain[0]}")
            found = _printed(*job, *count, "--out", f"{folder}/job-{job[0]}")
            assert len(expected) == len(found) > 0, (expected, found)
            apart = max(abs(a - b) for a, b in zip(expected, found, strict=True))
            yield row(
                f"{name}: losses of the job apart from the plain ones",
                apart,
                "",
                goal=f"<= {APART}",
                met=apart <= APART,
            )


def _printed(script: str, *arguments: str) -> list[float]:
    """The losses that a script prints."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
