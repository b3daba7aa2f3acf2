"""elasticd: keeps a PyTorch training job at full speed while devices slow down, die, join, and data shifts.

`import elasticd` is free of torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elasticd.extras import remedy
from elasticd.version import __version__

if TYPE_CHECKING:
    from elasticd.models.huggingface import from_hf
    from elasticd.runtime.averages import average
    from elasticd.runtime.callbacks import Metrics
    from elasticd.runtime.endings import JobStopped
    from elasticd.runtime.evaluation import Evaluation, HeldOut
    from elasticd.runtime.job import Callback, Job
    from elasticd.runtime.model import Model
    from elasticd.runtime.precision import LossScale, Precision
    from elasticd.runtime.rules import Add, Column, Row, Rule, Slice, UnitsOf
    from elasticd.runtime.step import Step
    from elasticd.runtime.stream import Stream
    from elasticd.runtime.watching import watch

__all__ = [
    "Add",
    "Callback",
    "Column",
    "Evaluation",
    "HeldOut",
    "Job",
    "JobStopped",
    "LossScale",
    "Metrics",
    "Model",
    "Precision",
    "Row",
    "Rule",
    "Slice",
    "Step",
    "Stream",
    "UnitsOf",
    "__version__",
    "average",
    "from_hf",
    "watch",
]

_HOMES = {
    "Add": "elasticd.runtime.rules",
    "Callback": "elasticd.runtime.job",
    "Column": "elasticd.runtime.rules",
    "Evaluation": "elasticd.runtime.evaluation",
    "HeldOut": "elasticd.runtime.evaluation",
    "Job": "elasticd.runtime.job",
    "JobStopped": "elasticd.runtime.endings",
    "LossScale": "elasticd.runtime.precision",
    "Metrics": "elasticd.runtime.callbacks",
    "Model": "elasticd.runtime.model",
    "Precision": "elasticd.runtime.precision",
    "Row": "elasticd.runtime.rules",
    "Rule": "elasticd.runtime.rules",
    "Slice": "elasticd.runtime.rules",
    "Step": "elasticd.runtime.step",
    "Stream": "elasticd.runtime.stream",
    "UnitsOf": "elasticd.runtime.rules",
    "average": "elasticd.runtime.averages",
    "from_hf": "elasticd.models.huggingface",
    "watch": "elasticd.runtime.watching",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elasticd' has no attribute {name!r}")
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"elasticd.{name} needs torch: {remedy('torch')}", name="torch") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
