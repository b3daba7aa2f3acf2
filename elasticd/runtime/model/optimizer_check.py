"""Whether an optimizer steps on a part of a parameter as it would on the whole: else no layout may cut it.

Tried on small parameters before a job starts: a whole one beside its quarters. What is kept must be of the
parameter's shape, or a number, and the parts must come out as the whole did. Adafactor (means over rows and
columns), Muon (a matrix as a whole), LAMB and LARS (norms) and L-BFGS fail that; AdamW, SGD with momentum and
their like pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from elasticd_migration.local_state import NotElementWise
from torch import Tensor, nn

log = logging.getLogger(__name__)

#: Makes an optimizer of (name, parameter) pairs.
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

_STEPS = 3
_SIDE = 4
#: By how much of an update parts may differ from the whole: rounding of vectors and of what is left over.
_ROUNDING = 1e-3


def refuse_others(make: MakeOptimizer, names: Sequence[tuple[str, int]]) -> None:
    """Refuses an optimizer whose steps are not element-wise.

    Args:
        make: the user's function. If it raises, because the parameters are small or zero, nothing is tried.
        names: the model's trained parameters by full name, with their numbers of dimensions.

    Raises:
        NotElementWise: with the optimizer's name, and what to use instead.
    """
    try:
        whole = _Tried(make, names, lambda values: values)
        if not whole.steps():
            return
        quarters = [_Tried(make, names, part) for part in _quarters()]
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
        gaps = [mine - part(after) for mine, part in zip(parts, _quarters(), strict=True)]
        apart = max(float(gap.abs().max()) for gap in gaps)
        moved = float((after - whole.before[index]).abs().max())
        if apart > _ROUNDING * moved:
            why = "steps on a part of a parameter unlike on the whole"
            raise NotElementWise(_refusal(whole.optimizer, why))


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


class _Tried:
    """An optimizer of the user's function, for `part` of one parameter in each group and of each shape; the
    others of the model are there by name, so that groups are as ever, and have no gradients."""

    def __init__(
        self, make: MakeOptimizer, names: Sequence[tuple[str, int]], part: Callable[[Tensor], Tensor]
    ) -> None:
        self._part = part
        generator = torch.Generator().manual_seed(0)
        self._named = []
        for name, dims in names:
            values = torch.randn((_SIDE,) * max(1, dims), generator=generator) if dims <= 4 else torch.zeros(1)
            self._named.append((name, nn.Parameter(part(values).clone() if dims <= 4 else values)))
        self.optimizer = make(list(self._named))
        self._chosen = self._choose(dict(names))
        self.before = [value.clone() for value in self.values()]

    def _choose(self, dims: dict[str, int]) -> list[nn.Parameter]:
        found: dict[tuple[int, int], nn.Parameter] = {}
        group_of = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for name, parameter in self._named:
            if dims[name] <= 4 and id(parameter) in group_of:
                found.setdefault((group_of[id(parameter)], dims[name]), parameter)
        return list(found.values())

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._chosen]

    def steps(self) -> bool:
        """Whether it stepped. Raises NotElementWise by what it keeps."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(_STEPS):
            for parameter in self._chosen:
                whole = torch.randn((_SIDE,) * max(1, parameter.dim()), generator=generator)
                parameter.grad = self._part(whole).clone()
            try:
                self.optimizer.step()
            except TypeError as error:
                if "closure" in str(error):
                    raise NotElementWise(_refusal(self.optimizer, "asks for a closure")) from None
                raise
        for parameter in self._chosen:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
                    why = f"keeps {key!r} of shape {shapes}"
                    raise NotElementWise(_refusal(self.optimizer, why))
        return bool(self._chosen)
