"""The tutorials in a fresh environment, by a script: seconds after the install, and lines that differ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from _results import Row, row

from tests.pages.console import blocks
from tests.pages.play import CLONE, clone, environment
from tests.pages.terminals import Session

DOCS = Path(__file__).resolve().parent.parent / "docs"
MOST_SECONDS = 600


def rows(smallest: bool) -> Iterator[Row]:
    """With `smallest` the first tutorial's commands up to its first job alone."""
    for page in sorted(DOCS.glob("tutorial*.md"))[: 1 if smallest else None]:
        began = time.monotonic()
        with (
            clone(*CLONE) as folder,
            Session(folder / "examples/tutorial", environment(folder)) as session,
        ):
            if smallest:
                first = next(block for block in blocks(page) if "--steps 21" in block.commands[0].text)
                differences = [str(each) for each in session.play_block(first)]
            else:
                differences = session.play(page)
        seconds = time.monotonic() - began
        for difference in differences:
            print(difference)
        yield row(
            f"{page.stem}: seconds after the install",
            seconds,
            "s",
            goal=f"<= {MOST_SECONDS}",
            met=seconds <= MOST_SECONDS,
        )
        yield row(f"{page.stem}: lines that differ", len(differences), "lines", goal="0", met=not differences)
        yield row(f"{page.stem}: lines as shown", session.checked_lines, "lines")
