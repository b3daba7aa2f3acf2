"""elasticd: keeps a PyTorch training job at full speed while devices slow down, die, join, and data shifts.

`import elasticd` is free of torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticd.runtime.job import Job, Step
    from elasticd.runtime.model import Model, Region, Rule, UnitsOf
    from elasticd.runtime.switching import JobStopped
    from elasticd.runtime.watching import watch

__all__ = ["Job", "JobStopped", "Model", "Region", "Rule", "Step", "UnitsOf", "watch"]

_HOMES = {
    "Job": "elasticd.runtime.job",
    "JobStopped": "elasticd.runtime.switching",
    "Model": "elasticd.runtime.model",
    "Region": "elasticd.runtime.model",
    "Rule": "elasticd.runtime.model",
    "Step": "elasticd.runtime.job",
    "UnitsOf": "elasticd.runtime.model",
    "watch": "elasticd.runtime.watching",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elasticd' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
