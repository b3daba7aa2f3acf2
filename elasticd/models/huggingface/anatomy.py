"""The parts of a causal language model of transformers: its layers, and what runs before and after them.

It is found by watching one forward pass of a small copy (`proof`), not by names: which modules are called
before the first layer, which after the last, and how each layer is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.model.validation import ModelError

#: What a refusal ends with.
REMEDY = "describe it with elasticd.Model(embed=..., blocks=..., head=...)"


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Paths of modules in a `...ForCausalLM`, in the order in which they are first called."""

    layers: str  # the list of layers: "model.layers"
    before: tuple[str, ...]  # make the first layer's input: embeddings, their norms, their dropouts
    after: tuple[str, ...]  # make the logits of the last layer's output: the final norm, the projection
    anywhere: tuple[str, ...]  # have no parameters and may run in any section: rotary tables
    unused: tuple[str, ...]  # have parameters, and forward does not call them
    returns: Mapping[type, int]  # of a layer's class: it gives a tuple of so many; 0: a tensor
    #: The first module of `after`, where it is called once, with the activation: the last layer's section ends
    #: there, and the head begins there. Empty: the section ends with its layer's output.
    end: str = ""


def text_of(config: Any) -> Any:
    """The configuration of the language model, where it is one of several."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments of forward beside the tokens: no cache, and an output with names."""
    known = inspect.signature(type(model).forward).parameters
    if "input_ids" not in known:
        raise ModelError(f"the forward of {type(model).__name__} takes no input_ids: {REMEDY}")
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    options: dict[str, Any] = {"use_cache": False} if anything or "use_cache" in known else {}
    return options | ({"return_dict": True} if "return_dict" in known else {})


def logits_of(output: Any) -> Tensor:
    """The logits in what a forward gave."""
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = output[0] if isinstance(output, tuple) else output
    if not isinstance(logits, Tensor):
        raise ModelError(f"its forward gave a {type(output).__name__} without logits: {REMEDY}")
    return logits


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The activation among the arguments of a layer: the first, or the one of that name."""
    return args[0] if args else kwargs.get("hidden_states")


def layers_path(model: Any, within: str = "") -> str:
    """Of the lists of modules in a model that are in no other list: the one with the most parameters, of those
    that are as long as the language model has layers where there are such. within: the path of the module that
    has it."""
    count = getattr(text_of(model.config), "num_hidden_layers", None)
    candidates: list[tuple[bool, int, str]] = []
    for path, module in model.named_modules():
        inside = path.startswith(f"{within}.") or not within
        if (
            inside
            and isinstance(module, nn.ModuleList)
            and not any(isinstance(model.get_submodule(outer), nn.ModuleList) for outer in _outer(path))
        ):
            size = sum(parameter.numel() for parameter in module.parameters())
            candidates.append((len(module) == count, size, path))
    if not candidates or not max(candidates)[1]:
        raise ModelError(f"{type(model).__name__} keeps its layers in no nn.ModuleList: {REMEDY}")
    return max(candidates)[2]


def parts(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """The modules beside the layers, by path: those that a forward calls as one."""

    def below(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if full == layers:
                continue
            if is_outer(full, child, layers):
                yield from below(child, full)
            else:
                yield full, child

    return dict(below(model, ""))


def is_outer(path: str, module: nn.Module, layers: str) -> bool:
    """Returns True if a module is around the layers, or a list of modules beside them: no part by itself."""
    return layers.startswith(f"{path}.") or isinstance(module, nn.ModuleList | nn.ModuleDict)


class AnatomyTrace:
    """One forward pass of a model, noted by hooks on its layers and on the parts beside them."""

    anatomy: Anatomy
    logits: Tensor
    inputs: list[Tensor]  # the activation that each layer was called with
    others: list[dict[str, Any]]  # by name: what else each layer was called with

    def __init__(
        self, model: Any, ids: Tensor, *, within: str = "", beside: Mapping[str, Any] | None = None
    ) -> None:
        """Runs the model's own forward on `ids`.

        Args:
            model: a small copy.
            ids: of tokens [samples, tokens].
            within: the path of the module that has the layers.
            beside: what else the forward is called with, by name.

        Raises:
            ModelError: it does what no stage could do.
        """
        self._name, self._layers = type(model).__name__, layers_path(model, within)
        self._list = list(model.get_submodule(self._layers).children())
        self._parts = parts(model, self._layers)
        self._inside = 0
        self._order: list[int] = []
        self._phases: dict[str, set[str]] = {}
        self._calls: dict[str, list[bool]] = {}  # of a part: for each call, whether it is with an activation
        self._returns: dict[type, int] = {}
        self.inputs, self.others = [], []
        hooks: list[Any] = []
        for index, layer in enumerate(self._list):
            hooks.append(layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._leave))
        for path, part in self._parts.items():
            hooks.append(part.register_forward_pre_hook(partial(self._note, path)))
            for module in part.modules():
                hooks.append(module.register_forward_pre_hook(partial(self._call, path)))
        try:
            self.logits = logits_of(model(input_ids=ids, **arguments(model), **(beside or {})))
        finally:
            for hook in hooks:
                hook.remove()
        self.anatomy = self._anatomy()

    def _enter(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ModelError(
                f"the layers of {self._name} are called with {shape}, not with one activation of samples, "
                f"tokens and width: {REMEDY}"
            )
        self._order.append(index)
        self.inputs.append(hidden.detach())
        named = {f"argument {i}": value for i, value in enumerate(args) if i}
        self.others.append(named | {k: v for k, v in kwargs.items() if v is not hidden})

    def _leave(self, layer: nn.Module, args: object, output: Any) -> None:
        self._inside -= 1
        if self._inside:
            return
        if not isinstance(output, Tensor) and not (isinstance(output, tuple) and output):
            raise ModelError(f"a layer of {self._name} gave a {type(output).__name__}: {REMEDY}")
        self._returns[type(layer)] = 0 if isinstance(output, Tensor) else len(output)

    def _note(self, path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        hidden = args[0] if args else None
        shape = hidden.shape if isinstance(hidden, Tensor) else None
        self._calls.setdefault(path, []).append(bool(self.inputs) and shape == self.inputs[-1].shape)

    def _call(self, path: str, *_: object) -> None:
        if self._inside:
            phase = "inside"
        elif not self._order:
            phase = "before"
        else:
            phase = "after" if len(self._order) >= len(self._list) else "between"
        self._phases.setdefault(path, set()).add(phase)

    def _anatomy(self) -> Anatomy:
        if self._order != list(range(len(self._list))):
            order = f"in the order {', '.join(map(str, self._order))}" if self._order else "not at all"
            raise ModelError(
                f"{self._name} calls the {len(self._list)} layers of {self._layers} {order}. Each is to be "
                f"called once, in order: {REMEDY}"
            )
        places: dict[str, list[str]] = {"before": [], "after": [], "anywhere": [], "unused": []}
        for path in [*self._phases, *(path for path in self._parts if path not in self._phases)]:
            part, phases = self._parts[path], self._phases.get(path, set())
            trained = any(True for _ in part.parameters())
            if not phases:
                places["unused"] += [path] * trained
            elif not trained and not draws(part):
                places["after" if phases == {"after"} else "anywhere"].append(path)
            elif phases & {"inside", "between"}:
                raise ModelError(f"{self._name} calls {path} between its layers or in them: {REMEDY}")
            else:
                for phase in phases:
                    places[phase].append(path)
        listed = {name: tuple(paths) for name, paths in places.items()}
        first = next((path for path in self._phases if path in listed["after"]), "")
        end = first if self._calls.get(first) == [True] else ""
        return Anatomy(layers=self._layers, returns=self._returns, end=end, **listed)


def draws(part: nn.Module) -> bool:
    """Returns True if a part has dropouts."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) for module in part.modules())


def _outer(path: str) -> Iterator[str]:
    """The paths of the modules that a module is in, the model itself left out."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def same(a: Any, b: Any) -> bool:
    """Returns True if two arguments of a layer are alike, tensors by their values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b)
