"""What a script's own loop may not train with, refused by name before the first step, with what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from elasticd_migration.local_state import NotElementWise
from torch import nn

from elasticd.runtime.live.live_state import LiveRefusal, State
from elasticd.runtime.model.optimizer_check import refuse_others
from elasticd.runtime.model.parameter_groups import ParameterGroups

#: Modules with statistics of the samples that their rank saw.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_state(state: State) -> None:
    """Refuses what cannot be kept alive of what `build` returned.

    Raises:
        LiveRefusal: with what to do instead.
    """
    _refuse_modules(state.model)
    known = {id(parameter) for parameter in state.model.parameters()}
    for optimizer in state.optimizers:
        _refuse_optimizer(optimizer)
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise LiveRefusal(
                    f"{type(optimizer).__name__} steps on parameters that State(model=...) does not have: make "
                    "it of model.parameters(), after fully_shard or parallelize_module; several models go into "
                    "one torch.nn.ModuleDict"
                )
    for name, each in {**state.extra, **({} if state.scaler is None else {"scaler": state.scaler})}.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise LiveRefusal(f"{name} is a {type(each).__name__}, without state_dict and load_state_dict")


def _refuse_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel":
            raise LiveRefusal(
                "the model is FSDP1 (FullyShardedDataParallel), which flattens parameters: use "
                "torch.distributed.fsdp.fully_shard"
            )
        if kind.__module__.startswith("torch.distributed.pipelining"):
            raise LiveRefusal(
                f"{name or 'the model'} is a stage of a pipeline: elasticd.live takes data, sharded and tensor "
                "parallelism; elasticd.Job has pipelines"
            )
        if isinstance(module, _BATCH_NORMS) and module.track_running_stats:
            raise LiveRefusal(
                f"{name} ({kind.__name__}) keeps statistics of its own rank's samples, which no other mesh "
                "has: use LayerNorm or GroupNorm, or track_running_stats=False"
            )
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu"}
    if devices:
        raise LiveRefusal(
            f"the model is on {min(devices)}: elasticd.live trains on CPUs over gloo so far; elasticd.Job and "
            "restart mode take accelerators"
        )


def _refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """One whose steps on a part of a parameter are not those on the whole, as far as it can be made anew."""
    kind, defaults = type(optimizer), dict(optimizer.defaults)

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> Any:
        anew: Any = kind
        return anew([parameter for _, parameter in named], **defaults)

    try:
        groups = ParameterGroups.of(make, {"weight": torch.empty(64, 48, device="meta")})
    except Exception:
        return  # it takes other arguments: state that cannot be cut is refused when it is first moved
    try:
        refuse_others(make, groups)
    except NotElementWise as error:
        raise LiveRefusal(str(error)) from error
