"""`Balance`: how a job keeps the experts of a mixture evenly loaded, and the modules that it concerns.

A block with experts has a router, whose output begins with the logits of all experts [rows, experts], and one
module of experts, which is called with rows, the experts of each row, and their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Literal, NamedTuple

from elasticd_planner.spec.model import BALANCE_COUNTS
from torch import nn

from elasticd.runtime.exits import script_options
from elasticd.runtime.model.tp_rules import takes_rows
from elasticd.runtime.model.validation import ModelError

#: Which rows pad a sample is not known.
LENGTHS_UNKNOWN = (
    "a balance leaves out the rows that pad a sample, and how long samples are is not known: give the dataset "
    "an attribute `lengths`, or DataOptions(length=...), or micro_batch=1"
)


@script_options
@dataclass(frozen=True, kw_only=True)
class Balance:
    """Keeps the experts of a mixture evenly loaded, in the same way under every plan: the argument `balance` of
    `elasticd.Job`.

    Raises:
        ValueError: a field has none of the values below.
    """

    #: The factor of a balance loss, of each sample and block: experts x sum over the experts of (part of the
    #: sample's choices) x (mean probability), 1 where all experts are alike (DeepSeek-V3, 2024, section 2.1.2).
    #: The losses of all blocks are added; a sample counts as often as it has targets. None: there is none.
    loss: float | None = None
    #: The samples that a balance loss is of: each one, or all of a step together. Of a "step" it multiplies the
    #: parts of the choices in the step before with the mean probabilities of this one, over all rows alike (Qiu
    #: et al., 2025, whose frequencies have no gradient either); it is of cut sequences, too.
    over: Literal["sample", "step"] = "sample"
    #: How much a step changes the biases by which routers choose: up for each expert that had fewer rows than
    #: the mean of the step, and down for one that had more (Wang et al., 2024). None: they stay.
    bias: float | None = None
    #: A pattern of the routers ("blocks.*.router"), whose output is the logits of all experts, or begins with
    #: them. Empty: those that a model of `from_hf` has.
    router: str = ""
    #: A pattern of the biases, parameters or buffers of blocks with one number for each expert.
    parameter: str = "*.e_score_correction_bias"

    def __post_init__(self) -> None:
        for name, value in (("loss", self.loss), ("bias", self.bias)):
            if value is not None and not (isinstance(value, Real) and 0 < value < float("inf")):
                raise ValueError(f"Balance: {name} must be a positive number, or None, not {value!r}")
        if self.loss is None and self.bias is None:
            raise ValueError(
                "Balance: give loss=, a factor of balance losses, or bias=, a change of biases, or both"
            )
        if self.over not in ("sample", "step"):
            raise ValueError(f'Balance: over must be "sample" or "step", not {self.over!r}')
        if self.over == "step" and self.loss is None:
            raise ValueError('Balance: over="step" is of a balance loss: give loss=, its factor')


class BalancedBlock(NamedTuple):
    """The modules of a block that its balance concerns, by their paths in it."""

    experts: str
    router: str | None  #: None: no loss is made of its logits
    logits: int  #: the place of the logits in a router's output of several tensors
    bias: str | None  #: the full name of the bias; None: it has none that moves
    number: int  #: of the experts
    counts: str | None  #: the full name of the counts of the step before; None: no loss is of them


def balanced_blocks(
    balance: Balance, sections: Mapping[str, nn.Module], routers: Mapping[str, int]
) -> dict[str, BalancedBlock]:
    """The blocks that a balance concerns, by section.

    Args:
        balance: of the job.
        sections: of the model.
        routers: by full name of a router that is known the place of the logits in its output.

    Raises:
        ModelError: the model has none, or a block is unlike what is said above.
    """
    found: dict[str, BalancedBlock] = {}
    for section, module in sections.items():
        router, logits = _router(balance, section, module, routers)
        bias = _bias(balance, section, module) if balance.bias is not None else None
        if router is not None or bias is not None:
            experts = _experts(section, module)
            stacked = next(
                each for each in module.get_submodule(experts).parameters(recurse=False) if each.dim() > 2
            )
            counts = f"{section}.{BALANCE_COUNTS}" if router is not None and balance.over == "step" else None
            found[section] = BalancedBlock(experts, router, logits, bias, stacked.shape[0], counts)
    if not found and balance.loss is not None:
        given = f"{balance.router!r} matches none" if balance.router else "none is known"
        raise ModelError(
            f"Balance(loss=) needs the routers of the model, and {given}: give Balance(router=) a pattern of "
            "their full names, as 'blocks.*.router'"
        )
    if not found:
        raise ModelError(
            f"Balance(bias=) needs the biases of the routers, and {balance.parameter!r} matches no parameter "
            "or buffer of a block: give Balance(parameter=) a pattern of their full names, or Balance(loss=)"
        )
    return found


def _router(
    balance: Balance, section: str, module: nn.Module, routers: Mapping[str, int]
) -> tuple[str | None, int]:
    if balance.loss is None:
        return None, 0
    if balance.router:
        names = (name for name, _ in module.named_modules(prefix=section))
        known = {name: 0 for name in names if fnmatchcase(name, balance.router)}
    else:
        known = {name: at for name, at in routers.items() if name.startswith(f"{section}.")}
    if len(known) > 1:
        raise ModelError(f"{section} has the routers {' and '.join(known)}: a balance is of one in a block")
    for name, logits in known.items():
        return name.removeprefix(section)[1:], logits
    return None, 0


def _bias(balance: Balance, section: str, module: nn.Module) -> str | None:
    named = [
        name for name, _ in (*module.named_parameters(prefix=section), *module.named_buffers(prefix=section))
    ]
    known = [name for name in named if fnmatchcase(name, balance.parameter)]
    if len(known) > 1:
        raise ModelError(f"{section} has the biases {' and '.join(known)}: a balance is of one in a block")
    return known[0] if known else None


def _experts(section: str, module: nn.Module) -> str:
    known = [
        path
        for path, each in module.named_modules()
        if takes_rows(each) and any(parameter.dim() > 2 for parameter in each.parameters(recurse=False))
    ]
    if len(known) != 1:
        named = " and ".join(known) or "none"
        raise ModelError(
            f"{section} has a router, and of modules whose forward takes (rows, index, weights) and whose "
            f"parameters are stacked by expert it has {named}: a balance is of one in a block"
        )
    return known[0]
