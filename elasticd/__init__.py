"""elasticd: keeps a PyTorch training job at full speed while devices slow down, die, join, and data shifts.

`import elasticd` is free of torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elasticd.extras import remedy
from elasticd.version import __version__

if TYPE_CHECKING:
    from elasticd.models.huggingface import from_hf
    from elasticd.runtime.api.ema import MeasureError, average
    from elasticd.runtime.api.evaluation import Evaluation, EvaluationOptions, HeldOut
    from elasticd.runtime.api.job import Callback, Job
    from elasticd.runtime.api.metrics import Metrics
    from elasticd.runtime.api.step import Step
    from elasticd.runtime.api.watch import watch
    from elasticd.runtime.checkpoint.options import CheckpointingOptions
    from elasticd.runtime.data.options import DataOptions
    from elasticd.runtime.data.packing import Packing
    from elasticd.runtime.data.stream import Stream
    from elasticd.runtime.engine.mixed_precision import LossScale, Precision
    from elasticd.runtime.engine.parallelism import ParallelismOptions
    from elasticd.runtime.engine.stability import StabilityOptions
    from elasticd.runtime.exits import JobStopped
    from elasticd.runtime.live.live_state import State
    from elasticd.runtime.live.start import live
    from elasticd.runtime.model.balance import Balance
    from elasticd.runtime.model.model import Model, Module
    from elasticd.runtime.model.module_sections import from_module
    from elasticd.runtime.model.tp_rules import Column, Experts, PartialGrad, Row, Rule, Sharded, UnitsOf
    from elasticd.runtime.parallel.attention import attention, positions

__all__ = [
    "Balance",
    "Callback",
    "CheckpointingOptions",
    "Column",
    "DataOptions",
    "Evaluation",
    "EvaluationOptions",
    "Experts",
    "HeldOut",
    "Job",
    "JobStopped",
    "LossScale",
    "MeasureError",
    "Metrics",
    "Model",
    "Module",
    "Packing",
    "ParallelismOptions",
    "PartialGrad",
    "Precision",
    "Row",
    "Rule",
    "Sharded",
    "StabilityOptions",
    "State",
    "Step",
    "Stream",
    "UnitsOf",
    "__version__",
    "attention",
    "average",
    "from_hf",
    "from_module",
    "live",
    "positions",
    "watch",
]

#: The public names of each module.
_NAMES = {
    "elasticd.models.huggingface": ("from_hf",),
    "elasticd.runtime.api.ema": ("MeasureError", "average"),
    "elasticd.runtime.api.evaluation": ("Evaluation", "EvaluationOptions", "HeldOut"),
    "elasticd.runtime.api.job": ("Callback", "Job"),
    "elasticd.runtime.api.metrics": ("Metrics",),
    "elasticd.runtime.api.step": ("Step",),
    "elasticd.runtime.api.watch": ("watch",),
    "elasticd.runtime.checkpoint.options": ("CheckpointingOptions",),
    "elasticd.runtime.data.options": ("DataOptions",),
    "elasticd.runtime.data.packing": ("Packing",),
    "elasticd.runtime.data.stream": ("Stream",),
    "elasticd.runtime.engine.mixed_precision": ("LossScale", "Precision"),
    "elasticd.runtime.engine.parallelism": ("ParallelismOptions",),
    "elasticd.runtime.engine.stability": ("StabilityOptions",),
    "elasticd.runtime.exits": ("JobStopped",),
    "elasticd.runtime.live.live_state": ("State",),
    "elasticd.runtime.live.start": ("live",),
    "elasticd.runtime.model.balance": ("Balance",),
    "elasticd.runtime.model.model": ("Model", "Module"),
    "elasticd.runtime.model.module_sections": ("from_module",),
    "elasticd.runtime.model.tp_rules": (
        "Column",
        "Experts",
        "PartialGrad",
        "Row",
        "Rule",
        "Sharded",
        "UnitsOf",
    ),
    "elasticd.runtime.parallel.attention": ("attention", "positions"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
#: The present names of those of release 0.1, which are accepted with a warning until release 0.3.
_FORMER = {"Add": "PartialGrad", "Slice": "Sharded"}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        new = _FORMER[name]
        warnings.warn(
            f"elasticd.{name} is deprecated, and refused from 0.3 on: write elasticd.{new}",
            DeprecationWarning,
            stacklevel=2,
        )
        return __getattr__(new)
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
