"""First values of a model of transformers that was made on the meta device: its own `_init_weights`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.models.huggingface import adapters
from elasticd.runtime.model.model import Init
from elasticd.runtime.model.validation import ModelError


def on_meta(model: nn.Module) -> bool:
    """Returns True if a model has parameters without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def with_buffers(model: Any) -> Any:
    """A copy whose buffers that no checkpoint has (rotary frequencies, embedding scales) have values, as
    transformers itself makes them after loading. Raises ModelError for one that it does not make."""
    copied = copy.deepcopy(model)
    for path, module in copied.named_modules():
        names = list(_missing(module))
        for name in names:
            buffer = getattr(module, name)
            blank = torch.nan if buffer.is_floating_point() else 0
            setattr(module, name, torch.full(buffer.shape, blank, dtype=buffer.dtype, device="cpu"))
        if names:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                _initialised_by(copied, path)._init_weights(module)
        for name in names:
            value = getattr(module, name)
            if bool(value.isnan().any() if value.is_floating_point() else (value == 0).all()):
                raise ModelError(
                    f"{path}.{name} of {type(model).__name__} has no values on the meta device: make the model "
                    "with storage"
                )
    return copied


def own_init(model: Any, theirs: Callable[[str], str]) -> Init:
    """The model's own `_init_weights`, module by module, with the generator of each. theirs: the name in the
    model of a parameter."""

    def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        path, _, leaf = theirs(name).rpartition(".")
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            value = adapters.first_value(model, path, leaf)
            if value is not None:
                return value
            owner = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
            _initialised_by(model, path)._init_weights(owner)
            _around(model, path, owner)
        return getattr(owner, leaf).detach()

    return init


def _around(model: Any, path: str, owner: nn.Module) -> None:
    """Applies the changes that the module around it makes to a module's values: GPT-2 scales what goes to the
    residual."""
    outer, _, name = path.rpartition(".")
    if not outer or isinstance(model.get_submodule(outer), nn.ModuleList):
        return
    around = copy.copy(model.get_submodule(outer))
    around._modules = dict(around._modules) | {name: owner}
    if not any(True for _ in around.parameters(recurse=False)):
        _initialised_by(model, outer)._init_weights(around)


def _initialised_by(model: Any, path: str) -> Any:
    """The innermost model of transformers around a module: an encoder has first values of its own."""
    while path:
        module = model.get_submodule(path)
        if hasattr(module, "_init_weights"):
            return module
        path = path.rpartition(".")[0]
    return model


def _missing(module: nn.Module) -> Iterator[str]:
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta and name in module._non_persistent_buffers_set:
            yield name
