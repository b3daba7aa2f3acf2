"""Which modules elasticd can train; for the others, what is wrong and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from elasticd.runtime.exits import ScriptRefusal
from elasticd.runtime.model.rng import Dropout

#: Modules whose statistics are those of a micro-batch, which a layout composes.
_STATISTICS = (nn.modules.batchnorm._BatchNorm,)

#: Modules whose random masks would differ by layout; nn.Dropout itself is replaced.
_DROPOUTS = (
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)

#: Wraps of the user's own, by the name of their class in torch (imported by whoever made one).
_WRAPS = {
    "OptimizedModule": (
        "compiled by torch.compile: give elasticd the plain module, and ParallelismOptions(compile=True); "
        "functions that its forward calls may be compiled"
    ),
    "DistributedDataParallel": (
        "wrapped in DistributedDataParallel: give elasticd the plain module, the Job reduces the gradients"
    ),
    "DataParallel": ("wrapped in DataParallel: give elasticd the plain module, the Job distributes the data"),
    "FullyShardedDataParallel": (
        "wrapped in FSDP: give elasticd the plain module; ParallelismOptions(zero=1) shards its state"
    ),
    "FSDPModule": (
        "wrapped by fully_shard: give elasticd the plain module; ParallelismOptions(zero=1) shards its state"
    ),
}


class ModelError(ScriptRefusal):
    """The model cannot be trained as it is described: what is wrong and what would be right."""


def sum_and_count(returned: Any) -> tuple[Tensor, float | Tensor]:
    """Returns what a loss returned, if it is the sum over targets [] and their count.

    Raises:
        ModelError: it is something else, as a mean alone.
    """
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor):
        return returned[0], returned[1]
    what = type(returned).__name__
    if isinstance(returned, tuple | list):
        what = f"({', '.join(type(each).__name__ for each in returned)})"
        if len(returned) == 2:
            raise ModelError(
                "loss must return the sum over targets, a tensor with its gradient, and their count, and "
                f"returned {what}: leave out .item() or float() around the sum"
            )
    if isinstance(returned, Tensor):
        what = f"a tensor of shape {list(returned.shape)}"
    raise ModelError(
        f"loss must return the sum over targets and their count, and returned {what}: write "
        "total = F.cross_entropy(..., reduction='sum') and return total, (targets != -100).sum()"
    )


def refuse_wrapper(path: str, module: nn.Module) -> None:
    """Refuses a module that torch.compile or another way of parallelism has wrapped.

    Raises:
        ModelError: what to give instead.
    """
    for kind in type(module).__mro__:
        remedy = _WRAPS.get(kind.__qualname__)
        if remedy is not None and kind.__module__.startswith("torch."):
            raise ModelError(f"{path} is {remedy}")


def refuse_module(path: str, module: nn.Module) -> None:
    """Refuses a module that no layout, or not every layout, can train exactly.

    Args:
        path: its full name, for the message.
        module: one module; its children are checked by themselves.

    Raises:
        ModelError: why it cannot be trained, and what to do instead.
    """
    refuse_wrapper(path, module)
    if isinstance(module, _STATISTICS):
        raise ModelError(
            f"{path} is a {type(module).__name__}: its statistics are those of a micro-batch, and running ones "
            "would differ by layout; use a layer, group or RMS norm"
        )
    if isinstance(module, _DROPOUTS) and getattr(module, "p", 1) > 0:
        raise ModelError(
            f"{path} is a {type(module).__name__}: its masks would differ by layout; use nn.Dropout, which "
            "elasticd keys by step, sample and place"
        )
    if getattr(module, "max_norm", None) is not None:
        raise ModelError(
            f"{path} has max_norm: its forward changes the weight, so that replicas would differ; leave it out"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        raise ModelError(
            f"{path} has scale_grad_by_freq: gradients would be divided by how often an id is in a "
            "micro-batch, which differs by layout; leave it out"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise ModelError(f"{path} has sparse=True: sparse gradients are not reduced; leave it out")
    for name, value in module.named_buffers(recurse=False):
        if not value.is_leaf:
            raise ModelError(f"{path}.{name} is a buffer that was computed from parameters: detach it")
    if getattr(module, "track_running_stats", False):
        raise ModelError(
            f"{path} keeps running statistics, which would differ by layout; use track_running_stats=False"
        )
    for name, parameter in module.named_parameters(recurse=False):
        _refuse_parameter(f"{path}.{name}", parameter)


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ModelError(f"{name} has no shape yet: run the lazy module once before it is given to elasticd")
    if hasattr(parameter, "device_mesh"):
        raise ModelError(f"{name} is a DTensor: give elasticd the plain module; its rules say how it is cut")
    if not parameter.dtype.is_floating_point:
        raise ModelError(f"{name} is of {parameter.dtype}: parameters must be floating point; use a buffer")


def refuse_modes(device: torch.device) -> None:
    """Refuses modes of torch around a job's loop that would train something else, or nothing.

    Args:
        device: that the job computes on.

    Raises:
        ModelError: autocast is on, or gradients are off.
    """
    if torch.is_autocast_enabled(device.type):
        raise ModelError(
            "torch.autocast is on around the job's loop, and keeps the weights that it cast until it ends: "
            "every step would compute with those of the first. Take it away, and give "
            'ParallelismOptions(precision="bf16")'
        )
    if not torch.is_grad_enabled():
        raise ModelError(
            "gradients are off around the job's loop (torch.no_grad, torch.inference_mode or "
            "torch.set_grad_enabled(False)), so that nothing would be trained: switch them on again before it"
        )


def shared(sections: Mapping[str, nn.Module]) -> dict[str, str]:
    """The parameters that several sections share.

    Args:
        sections: the modules by section, in order.

    Returns:
        By the full name of each later use: the full name of the first.

    Raises:
        ModelError: one section has a parameter under two names.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for section, module in sections.items():
        for name, parameter in module.named_parameters(prefix=section, remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner == name:
                continue
            if owner.startswith(f"{section}.") or (ties.get(owner) is None and _twice(ties, owner, section)):
                raise ModelError(f"{name} and {owner} are one parameter inside {section}: use one name for it")
            ties[name] = owner
    return ties


def _twice(ties: Mapping[str, str], owner: str, section: str) -> bool:
    return any(to == owner and name.startswith(f"{section}.") for name, to in ties.items())


def replace_dropouts(section: str, module: nn.Module) -> nn.Module:
    """Replaces every nn.Dropout by one that is keyed by step, sample and place.

    Args:
        section: the name of the section, which keys the draws too.
        module: the section; its submodules are replaced in place.

    Returns:
        The module, or its replacement if it is an nn.Dropout itself.
    """
    for path, submodule in list(module.named_modules(prefix=section, remove_duplicate=False)):
        for name, child in list(submodule.named_children()):
            if type(child) is nn.Dropout:
                setattr(submodule, name, _keyed(child, f"{path}.{name}"))
    return _keyed(module, section) if type(module) is nn.Dropout else module


def _keyed(module: nn.Dropout, site: str) -> Dropout:
    return Dropout(module.p, site).train(module.training)


def buffers_of(section: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers of a section.

    Yields:
        The name in the section, and the buffer.

    Raises:
        ModelError: a buffer that is not persistent has no values.
    """
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer
        elif buffer.is_meta:
            raise ModelError(
                f"{section}.{name} is a buffer without values that is not persistent: make the model with "
                "storage, let the buffer be persistent, or compute it in forward"
            )
