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
    from elasticd.runtime.api.ema import average
    from elasticd.runtime.api.evaluation import Evaluation, EvaluationOptions, HeldOut
    from elasticd.runtime.api.job import Callback, Job
    from elasticd.runtime.api.metrics import Metrics
    from elasticd.runtime.api.step import Step
    from elasticd.runtime.api.watch import watch
    from elasticd.runtime.checkpoint.options import CheckpointingOptions
    from elasticd.runtime.data.options import DataOptions
    from elasticd.runtime.data.stream import Stream
    from elasticd.runtime.engine.mixed_precision import LossScale, Precision
    from elasticd.runtime.engine.parallelism import ParallelismOptions
    from elasticd.runtime.exits import JobStopped
    from elasticd.runtime.model.model import Model
    from elasticd.runtime.model.tp_rules import Add, Column, Row, Rule, Slice, UnitsOf

__all__ = [
    "Add",
    "Callback",
    "CheckpointingOptions",
    "Column",
    "DataOptions",
    "Evaluation",
    "EvaluationOptions",
    "HeldOut",
    "Job",
    "JobStopped",
    "LossScale",
    "Metrics",
    "Model",
    "ParallelismOptions",
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
    "Add": "elasticd.runtime.model.tp_rules",
    "Callback": "elasticd.runtime.api.job",
    "CheckpointingOptions": "elasticd.runtime.checkpoint.options",
    "Column": "elasticd.runtime.model.tp_rules",
    "DataOptions": "elasticd.runtime.data.options",
    "Evaluation": "elasticd.runtime.api.evaluation",
    "EvaluationOptions": "elasticd.runtime.api.evaluation",
    "HeldOut": "elasticd.runtime.api.evaluation",
    "Job": "elasticd.runtime.api.job",
    "JobStopped": "elasticd.runtime.exits",
    "LossScale": "elasticd.runtime.engine.mixed_precision",
    "Metrics": "elasticd.runtime.api.metrics",
    "Model": "elasticd.runtime.model.model",
    "ParallelismOptions": "elasticd.runtime.engine.parallelism",
    "Precision": "elasticd.runtime.engine.mixed_precision",
    "Row": "elasticd.runtime.model.tp_rules",
    "Rule": "elasticd.runtime.model.tp_rules",
    "Slice": "elasticd.runtime.model.tp_rules",
    "Step": "elasticd.runtime.api.step",
    "Stream": "elasticd.runtime.data.stream",
    "UnitsOf": "elasticd.runtime.model.tp_rules",
    "average": "elasticd.runtime.api.ema",
    "from_hf": "elasticd.models.huggingface",
    "watch": "elasticd.runtime.api.watch",
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
