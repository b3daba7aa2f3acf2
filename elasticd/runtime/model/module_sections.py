"""Sections of an ordinary nn.Module: one that has its embedding, layers and head in a single forward.

Theory of operation. The module's forward is watched once on an example batch. Everything that it does before it
calls the first of the blocks is the embedding: that section runs the module's own forward, and leaves it where
the first block would be called. Blocks must be called one after the other, each with what the one before
returned. After the last block forward must call a chain of modules, and return what the last of them returned:
that chain is the head. The identity of tensors tells whether values are handed on unchanged, so that a step in
between (a slice, a sum, a second use of the embedding) is found and refused. At last the sections are run one
after the other, and their output must be equal to the module's own, to the bit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import STATES, kept_states
from elasticd.runtime.model.validation import ModelError, refuse_wrapper

__all__ = ["from_module"]

Inputs = Callable[[Any], Mapping[str, Any] | Sequence[Any]]
_INSTEAD = "describe it with elasticd.Model(embed=..., blocks=[...], head=...)"


def from_module(
    module: nn.Module, *, blocks: str, example: Any, inputs: Inputs | None = None, **options: Any
) -> Model:
    """A module that has embedding, layers and head in one forward, as elasticd trains it. It is not changed.

    Rules and messages name parameters by their section: "embed.wte.weight", "blocks.3.attn.c_attn.weight",
    "head.lm_head.weight", each with the rest of the name that it has in the module. `job.state_dict()`,
    checkpoints as torch reads them and exports have the module's own names.

    Args:
        module: a model whose forward computes an activation [samples, tokens, width] of the batch, passes it
            through the blocks in order, and returns the head's output, by itself or among other values.
        blocks: the name of the nn.ModuleList with the layers, as "h" or "transformer.h".
        example: a batch as the job's `collate` makes it; a few samples are enough. It is run through the module
            once or twice.
        inputs: what forward is called with for a batch: a mapping of keywords, or a sequence. None: those keys
            of the batch that forward has as parameters.
        options: further arguments of `elasticd.Model`: rules, tp_plan, units, init, name, width. A `tp_plan`
            may name modules as the module does, and a mapping for `init` parameters.

    Returns:
        The model, whose head's output is what the job's loss gets.

    Raises:
        ModelError: forward does something else than that; the message names what, and what to do.
    """
    refuse_wrapper("the module", module)
    layers = _layers(module, blocks)
    call = _Call(module, inputs)
    watched = _watch(module, layers, call, example)
    chain = _chain(module, blocks, watched)
    embed = _Before(_without(module, [blocks, *_after_only(chain, watched)]), blocks, call)
    sections = (embed, list(layers), _After({path: watched.paths[path] for path in chain}))
    _prove(module, sections, call, example, watched.output)
    if "width" not in options and watched.hidden is not None:
        options["width"] = int(watched.hidden.shape[-1])
    if options.get("tp_plan"):
        options["tp_plan"] = {
            _in_section(n, chain, watched, layers): word for n, word in options["tp_plan"].items()
        }
    options.setdefault("name", type(module).__name__.lower())
    if isinstance(init := options.get("init"), Mapping):
        options["init"] = dict(init)
        for own, value in init.items():
            options["init"].update(dict.fromkeys(_full_names(own, blocks), value))
    model = Model(embed=sections[0], blocks=sections[1], head=sections[2], **options)
    owners = {_own_name(full, blocks): owner for full, owner in reversed(list(model.own_names.items()))}
    order = dict.fromkeys((*(own for own in module.state_dict() if own in owners), *owners))
    model.own_names = {own: owners[own] for own in order}
    return model


# -- calling the module --------------------------------------------------------------------------------------


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Call:
    """Calls a module's forward for a batch."""

    def __init__(self, module: nn.Module, inputs: Inputs | None) -> None:
        self._inputs = inputs
        parameters = inspect.signature(module.forward).parameters
        self._names = frozenset(parameters)
        named = {name: one for name, one in parameters.items() if one.kind in _NAMED}
        self._needed = [name for name, one in named.items() if one.default is one.empty]
        self._kind = type(module).__name__

    def __call__(self, module: nn.Module, batch: Any) -> Any:
        values: Any
        if self._inputs is not None:
            values = self._inputs(batch)
        elif isinstance(batch, Mapping):
            values = {key: value for key, value in batch.items() if key in self._names}
            if not values or any(name not in values for name in self._needed):
                takes = ", ".join(self._needed or sorted(self._names))
                raise ModelError(
                    f"the batch has the keys {', '.join(map(str, batch))}; {self._kind}.forward takes {takes}: "
                    "give samples with these keys, or from_module(inputs=lambda batch: ...)"
                )
        else:
            values = (batch,)
        return module(**values) if isinstance(values, Mapping) else module(*values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Call:
        return self  # copies of a section call the same function


class _Reached(Exception):
    """Forward called the first block."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Stop(nn.Module):
    """Stands in place of the first block, and leaves forward with its argument."""

    def forward(self, hidden: Tensor) -> NoReturn:
        raise _Reached(hidden)


class _Before(nn.Module):
    """The embedding: the module's own forward up to its first block."""

    def __init__(self, shell: nn.Module, blocks: str, call: _Call) -> None:
        super().__init__()
        _put(shell, blocks, nn.ModuleList([_Stop()]))
        # The shell's parts are this section's own, so that parameters keep their names.
        self._modules.update(shell._modules)
        self._parameters.update(shell._parameters)
        self._buffers.update(shell._buffers)
        self._non_persistent_buffers_set = set(shell._non_persistent_buffers_set)
        self._shell, self._call = [shell], call

    def forward(self, batch: Any) -> Tensor:
        (shell,) = self._shell
        for own, of_shell in (
            (self._modules, shell._modules),
            (self._parameters, shell._parameters),
            (self._buffers, shell._buffers),
        ):
            of_shell.update(own)  # type: ignore[arg-type]
        shell.training = self.training
        try:
            self._call(shell, batch)
        except _Reached as reached:
            return reached.hidden
        raise ModelError(f"{type(shell).__name__}.forward did not call its blocks for this batch")


class _After(nn.Module):
    """The head: the modules that are called after the last block, in order."""

    def __init__(self, chain: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for path, module in chain.items():
            _put(self, path, module)
        self._chain = tuple(chain)

    def forward(self, hidden: Tensor) -> Any:
        for path in self._chain:
            hidden = self.get_submodule(path)(hidden)
        return hidden


# -- parts of modules ----------------------------------------------------------------------------------------


def _layers(module: nn.Module, blocks: str) -> nn.ModuleList:
    """The list of layers of this name."""
    try:
        layers = module.get_submodule(blocks)
    except AttributeError:
        layers = None
    if isinstance(layers, nn.ModuleList) and len(layers):
        return layers
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    kind = type(module).__name__
    raise ModelError(
        f"blocks={blocks!r} is no nn.ModuleList of {kind}; its lists are: {', '.join(lists) or 'none'}"
        + ("" if lists else f": {_INSTEAD}")
    )


def _put(module: nn.Module, path: str, part: nn.Module) -> None:
    """Puts a part at its path, making the containers on the way."""
    parent, _, name = path.rpartition(".")
    for step in parent.split(".") if parent else ():
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    module._modules[name] = part


def _without(module: nn.Module, paths: Sequence[str]) -> nn.Module:
    """A copy of the module's outer parts that lacks those at these paths; parameters are shared with it."""
    shell = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        setattr(shell, name, dict(getattr(module, name)))
    names = {path.partition(".")[0] for path in paths}
    for name in names & set(shell._modules):
        rest = [path.partition(".")[2] for path in paths if path.partition(".")[0] == name]
        part = shell._modules[name]
        if "" in rest or part is None:
            del shell._modules[name]
        else:
            shell._modules[name] = _without(part, rest)
    return shell


def _own_name(full: str, blocks: str) -> str:
    """The module's own name of a parameter or buffer, by its name in the sections."""
    section, _, rest = full.partition(".")
    return f"{blocks}.{rest}" if section == "blocks" else rest


def _full_names(own: str, blocks: str) -> tuple[str, ...]:
    """The names in the sections that a parameter or buffer may have."""
    inside = own.startswith(f"{blocks}.")
    return (f"blocks{own.removeprefix(blocks)}",) if inside else (f"embed.{own}", f"head.{own}")


def _in_section(name: str, chain: Sequence[str], watched: _Watched, layers: nn.ModuleList) -> str:
    """A name of a tensor-parallel plan: of a module beside the blocks with its section before it."""
    part = watched.paths.get(name)
    if part is None or part in layers.modules():
        return name  # of a block's module, or a pattern
    return f"{'head' if any(name == path or name.startswith(f'{path}.') for path in chain) else 'embed'}.{name}"


# -- watching ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Watched:
    """The record of a module's forward pass."""

    output: Any = None  #: what it returned
    hidden: Tensor | None = None  #: what the last block returned
    before: set[str] = field(default_factory=set)  #: modules that were called before the first block
    #: The outermost modules that were called after the last block, with what they got and what they returned.
    after: list[tuple[str, Sequence[Any], Any]] = field(default_factory=list)
    paths: dict[str, nn.Module] = field(default_factory=dict)  #: all modules by name


def _watch(module: nn.Module, layers: nn.ModuleList, call: _Call, example: Any) -> _Watched:
    """Runs forward on the example, and notes which modules it calls."""
    watched, passed, inside = _Watched(paths=dict(module.named_modules())), list[nn.Module](), list[str]()

    def enters(path: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if not passed:
            watched.before.add(path)
        elif passed[-1] is layers[-1]:
            if not inside:
                watched.after.append((path, (*arguments, *keywords.values()), None))
            inside.append(path)

    def leaves(path: str, result: Any) -> None:
        if inside and inside[-1] == path:
            inside.pop()
            if not inside:
                name, arguments, _ = watched.after[-1]
                watched.after[-1] = (name, arguments, result)

    def block_enters(block: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        place = f"block {len(passed)} of {type(module).__name__}"
        if len(passed) >= len(layers) or block is not layers[len(passed)]:
            raise ModelError(f"{place}: forward does not call its blocks once each and in order: {_INSTEAD}")
        if len(arguments) != 1 or keywords or not isinstance(arguments[0], Tensor):
            raise ModelError(
                f"{place} is called with {_said(arguments, keywords)}, and not with one tensor alone: "
                f"{_INSTEAD}; named tensors ride along (docs/training.md)"
            )
        if passed and arguments[0] is not watched.hidden:
            raise ModelError(f"{place} is not called with what the block before it returned: {_INSTEAD}")

    def block_leaves(block: nn.Module, result: Any) -> None:
        passed.append(block)
        if not isinstance(result, Tensor):
            raise ModelError(
                f"block {len(passed) - 1} of {type(module).__name__} returns no tensor: {_INSTEAD}"
            )
        watched.hidden = result

    within = {id(part) for part in layers.modules()}
    with ExitStack() as hooks:
        for block in layers:
            _hook(hooks, block, lambda m, a, k: block_enters(m, a, k), lambda m, r: block_leaves(m, r))
        for path, part in watched.paths.items():
            if path and id(part) not in within:
                _hook(
                    hooks,
                    part,
                    lambda m, a, k, path=path: enters(path, a, k),
                    lambda m, r, path=path: leaves(path, r),
                )
        hooks.enter_context(_quietly(module))
        watched.output = call(module, example)
    if len(passed) != len(layers):
        raise ModelError(
            f"forward called {len(passed)} of the {len(layers)} blocks of {type(module).__name__}: {_INSTEAD}"
        )
    return watched


def _hook(hooks: ExitStack, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
    handles = (
        module.register_forward_pre_hook(lambda m, a, k: before(m, a, k), with_kwargs=True),
        module.register_forward_hook(lambda m, a, k, result: after(m, result), with_kwargs=True),
    )
    for handle in handles:
        hooks.callback(handle.remove)


@contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    """Without dropout, and with the generators as they were afterwards."""
    training = {part: part.training for part in module.modules()}
    with STATES, kept_states(), torch.no_grad():
        module.eval()
        try:
            yield
        finally:
            for part, flag in training.items():
                part.training = flag


def _said(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    kinds = [type(value).__name__ for value in arguments]
    return (
        ", ".join([*kinds, *(f"{name}={type(value).__name__}" for name, value in keywords.items())])
        or "nothing"
    )


def _chain(module: nn.Module, blocks: str, watched: _Watched) -> list[str]:
    """The modules of the head, in order: each called with what the one before returned, and nothing else."""
    kind, last, value = type(module).__name__, f"the last of {blocks}", watched.hidden
    results = watched.output if isinstance(watched.output, tuple | list) else [watched.output]
    results = list(results.values()) if isinstance(results, Mapping) else list(results)
    if len(results) == 1 and isinstance(results[0], Mapping):
        results = list(results[0].values())
    chain: list[str] = []
    for path, arguments, result in watched.after:
        if any(value is one for one in results) and chain:
            break  # a loss that forward computes of its output
        if len(arguments) != 1 or arguments[0] is not value:
            raise ModelError(
                f"after its blocks {kind} calls {path} with something else than what {last} returned: "
                f"{_INSTEAD}"
            )
        if path in chain:
            raise ModelError(f"{kind} calls {path} twice after its blocks: {_INSTEAD}")
        chain, last, value = [*chain, path], path, result
    if not chain or not any(value is one for one in results):
        raise ModelError(
            f"{kind}.forward does not return what {last} returned, but something computed of it: a slice, or a "
            f"sum. Let forward return {last}'s output, or {_INSTEAD}"
        )
    return chain


def _after_only(chain: Sequence[str], watched: _Watched) -> list[str]:
    """The modules of the head that nothing before the blocks calls."""
    return [path for path in chain if path not in watched.before]


def _prove(
    module: nn.Module,
    sections: tuple[nn.Module, list[nn.Module], nn.Module],
    call: _Call,
    example: Any,
    output: Any,
) -> None:
    """Compares the sections' output with the module's own."""
    embed, blocks, head = sections
    flags = [(part, part.training) for section in (embed, head) for part in section.modules()]
    with _quietly(module):
        for part, _ in flags:
            part.eval()
        hidden = embed(example)
        for block in blocks:
            hidden = block(hidden)
        result = head(hidden)
    for part, flag in flags:
        part.training = flag
    candidates = list(output.values()) if isinstance(output, Mapping) else output
    candidates = candidates if isinstance(candidates, tuple | list) else [candidates]
    if not any(isinstance(one, Tensor) and _same(one, result) for one in candidates):
        raise ModelError(
            f"the sections of {type(module).__name__} give another output than its forward for the example: "
            f"its embedding, blocks or head depend on more than what they are called with; {_INSTEAD}"
        )


def _same(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.is_meta or torch.equal(one, other)
