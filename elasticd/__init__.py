"""elasticd: keeps a PyTorch training job at full speed while devices slow down, die, join, and data shifts.

`import elasticd` is free of torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticd.runtime.endings import JobStopped
    from elasticd.runtime.job import Job, Step
    from elasticd.runtime.model import Model
    from elasticd.runtime.rules import Add, Column, Row, Rule, Slice, UnitsOf
    from elasticd.runtime.watching import watch

__all__ = [
    "Add",
    "Column",
    "Job",
    "JobStopped",
    "Model",
    "Row",
    "Rule",
    "Slice",
    "Step",
    "UnitsOf",
    "watch",
]

_HOMES = {
    "Add": "elasticd.runtime.rules",
    "Column": "elasticd.runtime.rules",
    "Job": "elasticd.runtime.job",
    "JobStopped": "elasticd.runtime.switching",
    "Model": "elasticd.runtime.model",
    "Row": "elasticd.runtime.rules",
    "Rule": "elasticd.runtime.rules",
    "Slice": "elasticd.runtime.rules",
    "Step": "elasticd.runtime.job",
    "UnitsOf": "elasticd.runtime.rules",
    "watch": "elasticd.runtime.watching",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elasticd' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
