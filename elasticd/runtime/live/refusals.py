"""Models and optimizers that a script's own loop may not train with, refused by name, with what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from elasticd_migration.local_state import NotElementWise
from elasticd_migration.text_codec import NotPlain, from_text, to_text
from torch import nn
from torch.distributed.tensor import DTensor

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.live.device_groups import VARIABLE
from elasticd.runtime.live.live_copy import PIPELINES
from elasticd.runtime.live.live_state import LiveRefusal, State
from elasticd.runtime.live.loop_step import LoopStep, counts_of
from elasticd.runtime.model.optimizer_check import NotCarried, refuse_others, refuse_unsaved
from elasticd.runtime.model.parameter_groups import ParameterGroups

#: The base of modules with statistics of the samples that their rank saw, of batches or of instances.
_STATISTICS = nn.modules.batchnorm._NormBase


def refuse_state(state: State, device: torch.device = CPU.device) -> None:
    """Refuses what cannot be kept alive of what `build` returned.

    Args:
        state: the return value.
        device: that this worker trains on.

    Raises:
        LiveRefusal: with what to do instead.
    """
    _refuse_modules(state.model)
    _refuse_other_devices(state.model, device)
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
    for name, each in state.others.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise LiveRefusal(f"{name} is a {type(each).__name__}, without state_dict and load_state_dict")
        try:
            each.load_state_dict(from_text(to_text(each.state_dict(), f"state_dict() of the {name}")))
        except NotPlain as error:
            raise LiveRefusal(
                f"{error}: let it hold numbers, text, small tensors, and lists and mappings of those"
            ) from error


def _refuse_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel":
            raise LiveRefusal(
                "the model is FSDP1 (FullyShardedDataParallel), which flattens parameters: use "
                "torch.distributed.fsdp.fully_shard"
            )
        if kind.__module__.startswith("torch.distributed.pipelining"):
            raise LiveRefusal(f"{name or 'the model'} ({kind.__name__}) is a stage of a pipeline: {PIPELINES}")
        if kind.get_extra_state is not nn.Module.get_extra_state:
            raise LiveRefusal(
                f"{name or 'the model'} ({kind.__name__}) has get_extra_state(), whose state no box of a "
                "tensor holds: keep it in buffers, or in an object that State(extra={...}) has"
            )
        if any(nn.parameter.is_lazy(each) for each in module.parameters(recurse=False)):
            raise LiveRefusal(
                f"{name or 'the model'} ({kind.__name__}) has parameters without shapes: let `build` make a "
                "forward pass with it, before wrappers and optimizers"
            )
        if isinstance(module, _STATISTICS) and module.track_running_stats:
            raise LiveRefusal(
                f"{name} ({kind.__name__}) keeps statistics of its own rank's samples, which no other mesh "
                "has: use LayerNorm or GroupNorm, or track_running_stats=False"
            )


def _refuse_other_devices(model: nn.Module, device: torch.device) -> None:
    others = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} - {str(device)}
    if "meta" in others:
        raise LiveRefusal(
            f"the model is on meta, without values: let `build` end with model.to_empty(device='{device}') and "
            "the first values of all parameters and buffers"
        )
    if others and device.type == "cpu":
        raise LiveRefusal(
            f"the model is on {min(others)}: elasticd.live trains on CPUs over gloo; elasticd.Job and restart "
            f"mode take accelerators. (With {VARIABLE}=1 it takes CUDA devices, over NCCL: no GPU has run that)"
        )
    if others:
        raise LiveRefusal(
            f"the model is on {min(others)}, and {VARIABLE} is 1: let `build` put all of it on {device}, the "
            "current device of this worker"
        )


def _refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses one whose steps on a part of a parameter are not those on the whole."""
    kind = type(optimizer)
    if not {"param_groups", "state", "defaults"} <= vars(optimizer).keys():
        raise LiveRefusal(
            f"{kind.__name__} wraps another optimizer: give State(optimizer=...) the one that steps"
        )
    if kind.__module__.startswith("torch.distributed"):
        raise LiveRefusal(
            f"{kind.__name__} keeps state by rank, which no other number of ranks has: use fully_shard, which "
            "cuts parameters and their optimizer's state alike, with an optimizer of torch.optim"
        )

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> Any:
        parameters = [parameter for _, parameter in named]
        try:
            anew: Any = kind
            return anew(parameters, **optimizer.defaults)
        except Exception:  # it takes other arguments
            return _copied(optimizer, parameters)

    groups = ParameterGroups.of(make, {"weight": torch.empty(64, 48, device="meta")})
    try:
        refuse_others(make, groups)
        refuse_unsaved(make, None, groups)
    except (NotElementWise, NotCarried) as error:
        raise LiveRefusal(str(error)) from error


def _copied(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with the attributes and settings of another, of other parameters, and without its state."""
    anew = object.__new__(type(optimizer))
    anew.__dict__.update(optimizer.__dict__)
    anew.__dict__.pop("step", None)  # a scheduler's, which calls the other one's
    members = ("params", "param_names")
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key not in members}
    anew.state = defaultdict(dict)
    anew.param_groups = [{**settings, "params": parameters}]
    return anew


def refuse_another_optimizer(optimizer: torch.optim.Optimizer, step: LoopStep) -> None:
    """Refuses an update of the state's parameters by an optimizer that the state does not have: no vote comes
    before it, and its moments move with no switch.

    Raises:
        LiveRefusal: with what to do instead.
    """
    known = {id(parameter) for parameter in step.state.model.parameters()}
    if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise LiveRefusal(
            f"{type(optimizer).__name__} steps on parameters of State(model=...), and State(optimizer=...) "
            "does not have it: make all optimizers in `build`, and give State those that step, not what wraps "
            "them"
        )


def refuse_later_moves(step: LoopStep) -> None:
    """Refuses a scheduler or an average that moved after the `with` of a step that counts.

    Raises:
        LiveRefusal: with what to do instead.
    """
    now = counts_of(step.state)
    if now == step.counts:
        return
    moved = "the average" if now[:-1] == step.counts[:-1] else "a scheduler"
    raise LiveRefusal(
        f"{moved} stepped after the `with step:` of step {step.index}: the snapshot of that step lacks it, and "
        "code there runs for a try that was lost, too. Move it into the `with`, after optimizer.step()"
    )


def refuse_kept_gradients(step: LoopStep, *, computed: bool) -> None:
    """Refuses a body that computed gradients and leaves them for a later step: a change of the mesh drops them.

    Args:
        step: whose body ends without an update.
        computed: gradients were computed in it.

    Raises:
        LiveRefusal: with what to do instead.
    """
    if not computed or step.state.scaler is not None:
        return
    assert step.copy.tensors is not None
    for parameter in step.copy.tensors.trained.values():
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if bool(local.any()):
            raise LiveRefusal(
                f"the body of step {step.index} ends with gradients, and no optimizer stepped: they would be "
                "lost where the mesh changes. Accumulate over micro-batches of step.data within one `with "
                "step:` (batch= is then of one update); or drop them, optimizer.zero_grad()"
            )
