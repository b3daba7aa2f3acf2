"""The keywords of `elasticd.Job` up to 0.1, which became fields of its groups of options.

They are accepted, with one DeprecationWarning, until release 0.3. The warning names the new spelling.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, get_type_hints

from elasticd.runtime.api.evaluation import EvaluationOptions, HeldOut
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.data.collate import Collate
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import Dataset
from elasticd.runtime.engine.activation_checkpoint import Recompute
from elasticd.runtime.engine.mixed_precision import Name, Precision
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.stability import StabilityOptions


class OldKeywords(TypedDict, total=False):
    """The keywords of release 0.1 that are fields of the groups now."""

    collate: Collate
    length: Callable[[int], int] | None
    readers: int
    zero: Literal[0, 1, 2]
    replicas: int | None
    precision: Name | Precision | None
    recompute: Recompute
    profile: str | os.PathLike[str] | None
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int
    keep: int
    checkpoint_keep_every: int | None
    snapshot_every: int | None
    held_out: Dataset | HeldOut | Mapping[str, Dataset | HeldOut] | None


@dataclass(frozen=True, kw_only=True)
class OptionGroups:
    """The grouped options of a Job."""

    data: DataOptions
    parallelism: ParallelismOptions
    checkpointing: CheckpointingOptions
    evaluation: EvaluationOptions
    stability: StabilityOptions = field(default_factory=StabilityOptions)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(OptionGroups).items():
            if not isinstance(getattr(self, name), kind):
                value = getattr(self, name)
                none = f", or leave {name} out" if value is None else ""
                raise TypeError(f"Job got {name}={value!r}; it takes an elasticd.{kind.__name__}(){none}")


#: What a Job does where it is given no options.
DEFAULTS = OptionGroups(
    data=DataOptions(),
    parallelism=ParallelismOptions(),
    checkpointing=CheckpointingOptions(),
    evaluation=EvaluationOptions(),
)
#: Fields that had another name as a keyword.
_RENAMED = {"checkpoint": "folder", "checkpoint_every": "every", "checkpoint_keep_every": "keep_every"}
_GROUP_OF = {
    field.name: group.name for group in fields(OptionGroups) for field in fields(getattr(DEFAULTS, group.name))
}


def _as_then(old: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as release 0.1 took them: 0 for no `checkpoint_keep_every`, and anything where there was no
    folder."""
    kept = dict(old)
    if kept.get("checkpoint_keep_every") == 0:
        kept["checkpoint_keep_every"] = None
    if "checkpoint" in kept and kept["checkpoint"] is None:
        for keyword in ("checkpoint_every", "keep", "checkpoint_keep_every"):
            kept.pop(keyword, None)
    return kept


_STEPS = "the number of steps is an argument of job.steps(...)"
#: Where a job takes what trainers of other libraries take by these keywords.
_ELSEWHERE = {
    "steps": _STEPS,
    "max_steps": _STEPS,
    "total_steps": _STEPS,
    "epochs": f"{_STEPS}: epochs * len(dataset) // global_batch",
    "num_epochs": f"{_STEPS}: epochs * len(dataset) // global_batch",
    "batch_size": "did you mean global_batch=..., the samples of a step over all devices?",
    "lr": "optimizer=... makes an optimizer of named parameters, with its learning rate",
    "learning_rate": "optimizer=... makes an optimizer of named parameters, with its learning rate",
    "collate_fn": "did you mean data=elasticd.DataOptions(collate=...)?",
}


def _meant(keyword: str, keywords: Iterable[str]) -> str:
    """The keyword, or the field of a group, that is spelled like one which a Job does not have, or has its
    meaning."""
    if keyword in _ELSEWHERE:
        return f": {_ELSEWHERE[keyword]}"
    places = {name: f"{name}=..." for name in keywords}
    for name, group in _GROUP_OF.items():
        places[name] = f"{group}=elasticd.{type(getattr(DEFAULTS, group)).__name__}({name}=...)"
    near = get_close_matches(keyword, places, n=1)
    return f": did you mean {places[near[0]]}?" if near else ""


def refuse_unknown(names: Iterable[str], keywords: Iterable[str]) -> None:
    """Refuses a keyword that Job never had.

    Args:
        names: of the keywords of a call of `Job`.
        keywords: those that `Job` takes today, one of which may have been meant.

    Raises:
        TypeError: what was meant, where a name is close.
    """
    known = tuple(keywords)
    for name in names:
        if name not in known and name not in OldKeywords.__annotations__:
            raise TypeError(f"Job() got an unexpected keyword argument {name!r}{_meant(name, known)}")


def with_old_keywords(groups: OptionGroups, old: Mapping[str, Any]) -> OptionGroups:
    """The groups with the values of old keywords; warns of those, on behalf of the caller of `Job`.

    Args:
        groups: as the caller gave them.
        old: further keywords by name.

    Raises:
        ValueError: an old keyword beside its group, or a value that the group refuses.
    """
    changes: dict[str, dict[str, Any]] = {}
    old = _as_then(old)
    for keyword, value in old.items():
        name = _RENAMED.get(keyword, keyword)
        changes.setdefault(_GROUP_OF[name], {})[name] = value
    if not changes:
        return groups
    spelled = []
    for group, values in changes.items():
        given = getattr(groups, group)
        spelling = ", ".join(f"{name}=..." for name in values)
        spelled.append(f"{group}=elasticd.{type(given).__name__}({spelling})")
        if any(getattr(given, field.name) != field.default for field in fields(given)):
            raise ValueError(
                f"Job got {group}=... and old keywords for fields of it: put them into {spelled[-1]} as well"
            )
    warnings.warn(
        f"Job({', '.join(f'{keyword}=...' for keyword in old)}) is deprecated, and refused from 0.3 on: write "
        f"Job({', '.join(spelled)})",
        DeprecationWarning,
        stacklevel=3,
    )
    return replace(groups, **{group: replace(getattr(groups, group), **new) for group, new in changes.items()})
