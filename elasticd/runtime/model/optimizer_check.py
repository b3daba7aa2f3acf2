"""Tries on small parameters, before a job starts, all that an optimizer and its scheduler must be able to do.

- Step on a part of a parameter as on the whole: else no layout may cut it. A whole one is stepped on beside
  its quarters. What is kept must be of the parameter's shape, or a number, and the parts must come out as the
  whole did. Adafactor (means over rows and columns), Muon (a matrix as a whole), LAMB and LARS (norms) and
  L-BFGS fail that; AdamW, SGD with momentum and their like pass.
- Go on from its saved state: else no switch, snapshot or checkpoint keeps the training. State and settings are
  written as they are for other ranks, and read into an optimizer and a scheduler that are made anew.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from elasticd_migration.local_state import (
    KERNEL_SETTINGS,
    LocalState,
    LocalTensor,
    NotElementWise,
    Owned,
    Shard,
    collect,
    restore,
    restore_optimizer,
)
from elasticd_migration.schema import Schema
from elasticd_migration.text_codec import from_text, to_text
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.model.parameter_groups import MakeOptimizer, ParameterGroups
from elasticd.runtime.model.rng import begun_at

log = logging.getLogger(__name__)

#: The name of a parameter's moving average in the optimizer's state.
AVERAGE = "average"

#: Makes a learning-rate scheduler of an optimizer.
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

_STEPS = 3
_SIDE = 4
#: Parameters of more dimensions are not tried: their quarters would be many elements.
_MOST_DIMENSIONS = 4
#: By how much of an update parts may differ from the whole: rounding of vectors and of what is left over.
_ROUNDING = 1e-3
_CPU = torch.device("cpu")


class NotCarried(ValueError):
    """A scheduler or an optimizer that cannot go on from its saved state."""


@dataclass(frozen=True, kw_only=True)
class ScriptOptimizer:
    """A script's optimizer and scheduler as they begin: what a saved state is compared with."""

    kinds: Mapping[str, str]  #: names of their classes, see `kinds_of`
    keeps: frozenset[str]  #: names of what it keeps for parameters after a step
    settings: Mapping[str, Mapping[str, Any]]  #: of its groups, by parameter; without those that change
    schedule: Mapping[str, Any]  #: the scheduler's state without what changes


def kinds_of(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler | None
) -> dict[str, str]:
    """The names of their classes, and whether there is a moving average: what is saved goes into the same."""
    kinds = {"optimizer": type(optimizer).__name__}
    if getattr(optimizer, "averages", False):
        kinds[AVERAGE] = AVERAGE
    if scheduler is not None:
        kinds["scheduler"] = type(scheduler).__name__
    return kinds


def refuse_kinds(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuses a saved state of an optimizer or scheduler of another class. One that came or went is none.

    Raises:
        ValueError: with both names.
    """
    for key in saved.keys() & own.keys():
        if saved[key] != own[key]:
            raise ValueError(f"its {key} is {saved[key]}, not {own[key]}")


def refuse_others(make: MakeOptimizer, groups: ParameterGroups) -> None:
    """Refuses an optimizer whose steps are not element-wise.

    Args:
        make: the user's function. If it raises, because the parameters are small or zero, nothing is tried.
        groups: those that it forms of the model's parameters.

    Raises:
        NotElementWise: with the optimizer's name, and what to use instead.
    """
    try:
        whole = _Trial(make, groups, lambda values: values)
        if not whole.steps():
            return
        quarters = [_Trial(make, groups, part) for part in _quarters()]
        for quarter in quarters:
            if not quarter.steps():
                return
    except NotElementWise:
        raise
    except Exception:
        log.debug("the optimizer could not be tried", exc_info=True)
        return
    for index, after in enumerate(whole.values()):
        parts = [quarter.values()[index] for quarter in quarters]
        gaps = [values - part(after) for values, part in zip(parts, _quarters(), strict=True)]
        apart = max(float(gap.abs().max()) for gap in gaps)
        moved = float((after - whole.before[index]).abs().max())
        if apart > _ROUNDING * moved:
            why = "steps on a part of a parameter unlike on the whole"
            raise NotElementWise(_refusal(whole.optimizer, why))


def refuse_unsaved(
    make: MakeOptimizer, make_scheduler: MakeScheduler | None, groups: ParameterGroups
) -> ScriptOptimizer | None:
    """Refuses an optimizer or a scheduler that does not go on as before once its state was written and read.

    Args:
        make: makes the optimizer.
        make_scheduler: makes the scheduler; None: there is none. If one of them or their first steps raise,
            because parameters are small or the script makes later what they ask for, nothing is tried.
        groups: those that `make` forms of the model's parameters.

    Returns:
        What a saved state is compared with; None: nothing was tried.

    Raises:
        NotCarried: the scheduler's step asks for an argument; or saved state goes on otherwise, or cannot be
            loaded.
        NotElementWise: a value of the state cannot be written.
    """
    try:
        first, anew = (_Trial(make, groups, lambda values: values, make_scheduler) for _ in range(2))
    except Exception:
        log.debug("the optimizer and its scheduler could not be tried", exc_info=True)
        return None
    if first.scheduler is not None:
        _refuse_arguments(first.scheduler)
    begins = _carried(first.state())
    try:
        first.steps(1)
    except Exception:
        log.debug("the optimizer and its scheduler could not be tried", exc_info=True)
        return None
    carried = _carried(first.state())
    try:
        anew.load(first, carried)
    except Exception as error:
        both = " and ".join(type(each).__name__ for each in (first.optimizer, first.scheduler) if each)
        raise NotCarried(
            f"{both}: the saved state cannot be loaded again ({type(error).__name__}: {error}): no switch and "
            "no checkpoint could go on from it"
        ) from error
    _refuse_otherwise(first, anew)
    return _script_optimizer(kinds_of(first.optimizer, first.scheduler), begins, carried)


#: Settings that a scheduler changes.
_SCHEDULED = frozenset({"lr", "momentum", "betas"})


def _script_optimizer(kinds: dict[str, str], begins: LocalState, carried: LocalState) -> ScriptOptimizer:
    """Returns what the optimizer keeps, and the settings of both that a step leaves as they began."""
    changes = KERNEL_SETTINGS | (_SCHEDULED if "scheduler" in kinds else frozenset())
    settings = {
        name: {key: value for key, value in _same(old.settings, new.settings).items() if key not in changes}
        for old, new in zip(begins.groups, carried.groups, strict=True)
        for name in new.names
    }
    kept = [tensor for item, tensor in carried.tensors.items() if item.role == "state"]
    planes = {name for tensor in kept for shard in tensor.shards for name in shard.planes}
    scheduler = (state.extras.get("scheduler", "{}") for state in (begins, carried))
    return ScriptOptimizer(
        kinds=kinds,
        keeps=frozenset(planes | {name for tensor in kept for name in tensor.scalars}),
        settings=settings,
        schedule={key: value for key, value in _same(*scheduler).items() if not key.startswith("_")},
    )


def _same(one: str, two: str) -> dict[str, Any]:
    """Returns the entries that two texts of mappings have in common."""
    values, others = (from_text(text) if text != "{}" else {} for text in (one, two))
    return {k: v for k, v in values.items() if k in others and to_text(v) == to_text(others[k])}


def _refuse_arguments(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError as error:
        raise NotCarried(
            f"scheduler: {type(scheduler).__name__}.step() asks for a value ({error}), and a job steps its "
            "scheduler after every step by itself: give one that goes by the number of steps, LambdaLR say"
        ) from None


def _refuse_otherwise(first: _Trial, anew: _Trial) -> None:
    """Refuses a pair of which `anew`, which has the other's state, makes another step than it."""
    before = [values.clone() for values in first.values()]
    for trial in (first, anew):
        with begun_at(0):
            try:
                trial.steps(1)
            except Exception:  # a schedule of one step, say: it ends for both
                if trial is first:
                    return
                raise
    for values, others, old in zip(first.values(), anew.values(), before, strict=True):
        if float((values - others).abs().max()) > _ROUNDING * float((values - old).abs().max()):
            raise NotCarried(
                f"{type(first.optimizer).__name__} goes on otherwise once its state was saved and loaded: keep "
                "all that its step reads in optimizer.state or in its parameter groups, as numbers and tensors"
            )
    pairs = zip(first.optimizer.param_groups, anew.optimizer.param_groups, strict=True)
    if first.scheduler is not None and any(float(group["lr"]) != float(other["lr"]) for group, other in pairs):
        raise NotCarried(
            f"scheduler: {type(first.scheduler).__name__} gives another learning rate once its state was saved "
            "and loaded: let its state_dict() have all that its step reads, as numbers"
        )


def _carried(state: LocalState) -> LocalState:
    """The state as another rank gets it: planes are copied, numbers and settings go through their text."""
    schema = Schema.from_json(state.schema().to_json())
    tensors = {}
    for item, tensor in state.tensors.items():
        described = schema.of(item)
        assert described is not None
        tensors[item] = LocalTensor(
            shards=tuple(
                Shard(box=shard.box, planes={name: plane.clone() for name, plane in shard.planes.items()})
                for shard in tensor.shards
            ),
            scalars={scalar.name: restore(scalar, _CPU) for scalar in described.scalars},
        )
    return LocalState(tensors=tensors, groups=schema.groups, extras=schema.extras)


def unfused(optimizer: torch.optim.Optimizer) -> None:
    """Has the groups of an optimizer step without torch's fused kernels where parameters have gaps between
    their elements, as parts of a sharded parameter may: torch's kernel for CPUs changes what lies in the gaps
    instead, without an error. That changes how a step is computed, not what. Call it before the first step."""
    for group in optimizer.param_groups:
        if group.get("fused") and not all(parameter.is_contiguous() for parameter in group["params"]):
            log.info("%s: fused=True is left out where state is sharded inside rows", type(optimizer).__name__)
            group["fused"] = None


def _refusal(optimizer: torch.optim.Optimizer, why: str) -> str:
    return (
        f"{type(optimizer).__name__} {why}: no layout could cut its parameters and stay exact; use an "
        "element-wise optimizer such as AdamW, Adam or SGD with momentum"
    )


def _quarters() -> Iterator[Callable[[Tensor], Tensor]]:
    """Halves along the first dimension, and each again along the last."""
    half = _SIDE // 2
    for first in (slice(None, half), slice(half, None)):
        for last in (slice(None, half), slice(half, None)):
            yield partial(_cut, first, last)


def _cut(first: slice, last: slice, values: Tensor) -> Tensor:
    return values[first][..., last] if values.dim() > 1 else values[first]


class _Trial:
    """An optimizer of the user's function, for `part` of one parameter in each group and of each shape; the
    others of the model are there by name, so that groups are as ever, and have no gradients."""

    def __init__(
        self,
        make: MakeOptimizer,
        groups: ParameterGroups,
        part: Callable[[Tensor], Tensor],
        make_scheduler: MakeScheduler | None = None,
    ) -> None:
        self._part = part
        generator = torch.Generator().manual_seed(0)
        self._named: list[tuple[str, nn.Parameter]] = []
        for name, parameter in groups.parameters.items():
            if parameter.dim() <= _MOST_DIMENSIONS:
                values = part(torch.randn((_SIDE,) * max(1, parameter.dim()), generator=generator)).clone()
            else:
                values = torch.zeros(1)
            self._named.append((name, nn.Parameter(values)))
        self.optimizer = groups.optimizer(make, self._named)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler is not None else None
        self._chosen = self._choose(groups)
        self.before = [value.clone() for value in self.values()]

    def _choose(self, groups: ParameterGroups) -> list[nn.Parameter]:
        chosen: dict[tuple[int, int], nn.Parameter] = {}
        by_name = dict(self._named)
        for index, names in enumerate(groups.names):
            for name in names:
                if (dims := groups.parameters[name].dim()) <= _MOST_DIMENSIONS:
                    chosen.setdefault((index, dims), by_name[name])
        return list(chosen.values())

    def values(self) -> list[Tensor]:
        """The values of the parameters that are stepped on, by reference."""
        return [parameter.detach() for parameter in self._chosen]

    def _owned(self) -> list[Owned]:
        """All parameters, as a device owns them that holds every one whole."""
        return [Owned(name, Box.whole(tuple(p.shape)), p) for name, p in self._named]

    def state(self) -> LocalState:
        """Its state, by reference. Raises NotElementWise for a value that cannot be written."""
        values = {name: [(box, parameter)] for name, box, parameter in self._owned()}
        extras = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return collect(values, self._owned(), self.optimizer, extras=extras)

    def load(self, other: _Trial, carried: LocalState) -> None:
        """Takes the values of another trial's parameters, and its state as it was carried."""
        for (_, parameter), (_, value) in zip(self._named, other._named, strict=True):
            parameter.data.copy_(value.data)
        restore_optimizer(carried, self._owned(), self.optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(from_text(carried.extras["scheduler"]))

    def steps(self, count: int = _STEPS) -> bool:
        """Returns whether it stepped. Raises NotElementWise by what it keeps."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(count):
            for parameter in self._chosen:
                whole = torch.randn((_SIDE,) * max(1, parameter.dim()), generator=generator)
                parameter.grad = self._part(whole).clone()
            try:
                self.optimizer.step()
            except TypeError as error:
                if "closure" in str(error):
                    raise NotElementWise(_refusal(self.optimizer, "asks for a closure")) from None
                raise
            if self.scheduler is not None:
                self.scheduler.step()
        for parameter in self._chosen:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
                    why = f"keeps {key!r} of shape {shapes}"
                    raise NotElementWise(_refusal(self.optimizer, why))
        return bool(self._chosen)
