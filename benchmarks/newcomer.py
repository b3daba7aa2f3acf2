"""A newcomer's first hour: unmodified scripts, models in and out, one process, figures against a truth.

make bench NAME=newcomer                        # all parts
make bench NAME=newcomer ARGS='--only scripts'  # a part; the results keep the others as they are

Each part is `_newcomer_PART.py` beside this file, with `rows(smallest: bool) -> Iterator[Row]`; it is imported
when it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _frame import PRODUCT, TRAINING, Part, module_rows, run

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

#: What each part measures; those whose file is not there are not listed.
_MEASURES: dict[str, tuple[str, ...]] = {
    "scripts": PRODUCT,
    "refusal": PRODUCT,
    "classes": TRAINING,
    "lora": TRAINING,
    "tutorial": ("docs/tutorial.md", *PRODUCT),
    "lines": ("examples", "docs/training.md"),
    "one-process": TRAINING,
    "figures": PRODUCT,
}


def _module(part: str) -> str:
    return f"_newcomer_{part.replace('-', '_')}"


PARTS = {
    part: Part(module_rows(_module(part)), paths, {"smallest": True})
    for part, paths in _MEASURES.items()
    if (ROOT / "benchmarks" / f"{_module(part)}.py").exists()
}

if __name__ == "__main__":
    sys.exit(run("newcomer", __doc__, PARTS))
