"""A newcomer's first hour: unmodified scripts, models in and out, one process, figures against a truth.

make bench NAME=newcomer                        # all parts
make bench NAME=newcomer ARGS='--only scripts'  # a part; the results keep the others as they are

Each part is `_newcomer_PART.py` beside this file, with `rows(smallest: bool) -> Iterator[Row]`; it is imported
when it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _frame import Part, module_rows, run

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

_PRODUCT = ("elasticd", "agent", "migration", "planner")
_TRAINING = ("elasticd/runtime", "elasticd/models", "migration", "planner")
#: What each part measures; those whose file is not there are not listed.
_MEASURES: dict[str, tuple[str, ...]] = {
    "scripts": _PRODUCT,
    "refusal": _PRODUCT,
    "classes": _TRAINING,
    "lora": _TRAINING,
    "tutorial": ("docs/tutorial.md", *_PRODUCT),
    "lines": ("examples", "docs/training.md"),
    "one-process": _TRAINING,
    "figures": _PRODUCT,
}


def _module(part: str) -> str:
    return f"_newcomer_{part.replace('-', '_')}"


PARTS = {
    part: Part(module_rows(_module(part)), paths)
    for part, paths in _MEASURES.items()
    if (ROOT / "benchmarks" / f"{_module(part)}.py").exists()
}

if __name__ == "__main__":
    sys.exit(run("newcomer", __doc__, PARTS))
