"""Lines of code of the checks of a user's script, after over before."""

from __future__ import annotations

from collections.abc import Iterator

from _lines import lines_of
from _results import Row, row

#: The commit that the review of the runtime read.
BEFORE = "b857f13e"
#: Files and folders of the checks, then and now.
CHECKS = (
    "elasticd/runtime/api/script.py",
    "elasticd/runtime/checking",
    "elasticd/runtime/engine/warmup.py",
    "elasticd/runtime/model/buffer_check.py",
    "elasticd/runtime/model/optimizer_check.py",
    "elasticd/runtime/model/rng.py",
    "elasticd/runtime/model/validation.py",
)
#: What came beside them since.
BESIDE = (
    "elasticd/runtime/api/resumed_optimizer.py",
    "elasticd/runtime/model/handed_over.py",
    "elasticd/runtime/model/parameter_groups.py",
    "elasticd/runtime/reference",
)


def rows(smallest: bool) -> Iterator[Row]:
    before, after = lines_of(CHECKS, BEFORE), lines_of(CHECKS)
    every = after + lines_of(BESIDE)
    what = "lines of code of the checks of a script"
    yield row(f"{what}: before ({BEFORE})", before, "lines")
    yield row(f"{what}: after, in the same files", after, "lines")
    yield row(f"{what}: after, with the files that came beside them", every, "lines")
    over = every / before
    yield row(f"{what}: after over before", over, "x", goal="<= 1", met=over <= 1)
