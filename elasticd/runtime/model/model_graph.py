"""A model of several modules: encoders of items, such as images, and the module that takes what they make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from elasticd_planner.spec.model import ModelSpec

from elasticd.runtime.model.validation import ModelError

_Value = TypeVar("_Value")


class GraphModule(Protocol):
    """A module as the graph knows it: see `elasticd.runtime.model.model.Module`."""

    items: str
    takes: dict[str, str]
    spec: ModelSpec


_Module = TypeVar("_Module", bound=GraphModule)


class ModelGraph(Generic[_Module]):
    """The modules of a model, by name. One computes the loss, and takes what all others make."""

    modules: dict[str, _Module]
    name: str  #: of the model, for people

    def __init__(self, modules: Mapping[str, _Module], name: str = "model") -> None:
        """
        Raises:
            ModelError: these modules make no model; the message says why, and what to do.
        """
        self.modules, self.name = dict(modules), name
        for own, module in self.modules.items():
            if not own or "." in own:
                raise ModelError(f"module {own!r}: a name is a word without dots, which parameters begin with")
            if strangers := sorted(set(module.takes.values()) - self.modules.keys()):
                raise ModelError(
                    f"module {own!r} takes {strangers[0]!r}, and the modules are {', '.join(self.modules)}"
                )
        for own, module in self.modules.items():
            twice = [key for key, of in module.takes.items() if [*module.takes.values()].count(of) > 1]
            if twice:
                raise ModelError(
                    f"module {own!r} takes {module.takes[twice[0]]!r} as {' and as '.join(twice)}: take it "
                    "once, and use it twice in embed"
                )
        losses = [own for own, module in self.modules.items() if not module.items]
        if len(losses) != 1:
            raise ModelError(
                f"{len(losses)} modules run on samples ({', '.join(losses)}): exactly one does, and computes "
                "the loss; give the others Module(items=...), the key under which samples have their items"
            )
        self.own = losses[0]  #: the module that computes the loss
        taken = set(self.loss_module.takes.values())
        if self.own in taken:
            raise ModelError(f"module {self.own!r} takes itself: {self.own} -> {self.own} is a cycle")
        if idle := sorted(self.modules.keys() - taken - {self.own}):
            raise ModelError(
                f"module {idle[0]!r} feeds nothing: let {self.own!r} take it, with Module(takes="
                f"{{key: {idle[0]!r}}}), or leave it out"
            )

    @property
    def loss_module(self) -> _Module:
        """The module that computes the loss."""
        return self.modules[self.own]

    @property
    def encoders(self) -> tuple[str, ...]:
        """The modules that run on items."""
        return tuple(name for name, module in self.modules.items() if module.items)

    @property
    def items(self) -> frozenset[str]:
        """The keys under which samples have items."""
        return frozenset(module.items for module in self.modules.values() if module.items)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The description of each module."""
        return {name: module.spec for name, module in self.modules.items()}

    def named(self, name: str) -> tuple[_Module, str]:
        """The module of a parameter or buffer, and its name there."""
        module, _, rest = name.partition(".")
        return self.modules[module], rest

    def together(self, of: Callable[[_Module], Mapping[str, _Value]]) -> dict[str, _Value]:
        """Values that each module has by its own names, by the names of the whole model."""
        return {
            f"{module}.{name}": value
            for module, each in self.modules.items()
            for name, value in of(each).items()
        }

    def digest(self, of: Callable[[_Module], str]) -> str:
        """A digest of those of the modules; empty if all of them are."""
        found = [f"{name} {of(module)}" for name, module in self.modules.items()]
        if not any(map(of, self.modules.values())):
            return ""
        return hashlib.blake2b("\n".join(found).encode(), digest_size=16).hexdigest()
