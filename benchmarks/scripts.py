"""Ordinary training scripts as jobs: equal to plain torch, refused by name, or wrong in silence.

make bench NAME=scripts                        # all parts
make bench NAME=scripts ARGS='--only corpus'   # a part; the results keep the others as they are

Each part is `_scripts_PART.py` beside this file, with `rows(smallest: bool) -> Iterator[Row]`; it is imported
when it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _frame import TRAINING, Part, module_rows, run

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

#: The parts, and what each measures.
_MEASURES: dict[str, tuple[str, ...]] = {
    "corpus": ("tests/scripts", "elasticd/machines", *TRAINING),
    "findings": ("tests/scripts", *TRAINING),
    "reference": TRAINING,
    "lines": TRAINING,
}

PARTS = {
    part: Part(module_rows(f"_scripts_{part}"), paths, {"smallest": True}) for part, paths in _MEASURES.items()
}

if __name__ == "__main__":
    sys.exit(run("scripts", __doc__, PARTS))
