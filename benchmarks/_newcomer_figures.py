"""How many figures of status, metrics, pages, commands and a report differ from a job whose truth is known.

The job and its comparison are those of the test (`tests.dashboard.known_truth`): emulated speeds, sequences of
one length, a loop with a body of 0.3 s, a straggler and the switch that answers it. There is one size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from _results import Row, row

from tests.dashboard.known_truth import compare_all, known_job


def rows(smallest: bool) -> Iterator[Row]:
    """The figures that differ, and how many were compared."""
    with (
        tempfile.TemporaryDirectory(prefix="elasticd-figures-") as folder,
        known_job(Path(folder)) as (job, comparison),
    ):
        compare_all(job, comparison)
    different = comparison.different
    for words in different:
        print(words)
    name = "figures of pages, metrics, status and report that differ from a known truth"
    yield row(name, len(different), "figures", kind="emulated", goal="0", met=not different)
    yield row("figures that are compared with it", len(comparison.figures), "figures", kind="emulated")
