"""Sequence parallelism: between the cut modules of a block each member of a TP group has a slice of the tokens.

After Korthikanti et al., 2022, section 4.2.2. Norms, dropouts and residuals act on one token at a time. So the
members of a TP group need not all compute and keep them of all tokens:

    slices ── norm ── all-gather ── Column ... Row ── reduce-scatter ── dropout, residual ── slices

An all-gather and a reduce-scatter move the bytes of the all-reduce that they take the place of. What a Column
module keeps for its backward pass is the slice: the backward pass gathers the tokens once more.

Slices are of the tokens, dimension 1 of [samples, tokens, width], as large as the members' shares say, so that
a member with few heads has few tokens; one with no token takes part as the others do. Embedding and head are on
all tokens, and so is what passes between stages. A parameter that is used on slices has a term of its gradient
on each member (`elasticd_planner.layout.layouts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from elasticd_planner.layout.optimizer_sharding import divided
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from elasticd.runtime.comm.communicators import Team
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.tp_rules import Column, Experts, Row, Rule
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.redistribute import Redistribution, slices, terms, whole

#: The dimension of an activation that counts its tokens.
TOKENS = 1

#: Modules whose output for a token depends on other tokens.
_MIXING: tuple[type[nn.Module], ...] = (
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase),
    *(nn.modules.conv._ConvNd, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm),
    *(nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd),
    *(nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
)


class SequenceSlices:
    """The slices of a TP group's tokens in the pass that is under way."""

    length: int  #: tokens of the samples in the pass, all slices together; set before each pass

    def __init__(self, group: Team, shares: tuple[int, ...]) -> None:
        """
        Args:
            group: the TP group.
            shares: of its members, by rank; tokens are apportioned by them.
        """
        self._group, self._shares, self.length = group, shares, 0
        self._way = lru_cache(maxsize=256)(self._made)

    @property
    def width(self) -> int:
        """The number of tokens that this member has."""
        return self._widths()[self._group.rank]

    def _widths(self) -> list[int]:
        return divided(self.length, self._shares)

    def first(self, tokens: int) -> int:
        """The index of the first token of a tensor with so many: of a slice, or of all tokens."""
        widths, rank = self._widths(), self._group.rank
        return sum(widths[:rank]) if tokens == widths[rank] else 0

    def cut(self, x: Tensor) -> Tensor:
        """This member's slice of a tensor that all members have, in memory of its own; not differentiable.

        Args:
            x: [samples, tokens, ...]. Its tokens are those of the pass from now on.
        """
        self.length = x.shape[TOKENS]
        return self._way("cut", self.length).forward(x)

    def join(self, x: Tensor) -> Tensor:
        """The tensor of all tokens, from the members' slices of it; not differentiable."""
        return self._way("join", self.length).forward(x)

    def blank(self, x: Tensor, length: int) -> Tensor:
        """A tensor of the shape and type that `join` gives for a slice `x`, without memory for its elements.

        Args:
            x: the slice.
            length: how many tokens `join` gives.
        """
        return x.new_empty(()).expand(x.shape[0], length, *x.shape[2:])

    def leaving_embed(self, x: Tensor) -> Tensor:
        """This member's slice of what all members computed; differentiable."""
        self.length = x.shape[TOKENS]
        return self._way("cut", self.length)(x)

    def entering_head(self, x: Tensor) -> Tensor:
        """All tokens, with which all members compute the same; differentiable."""
        return self._way("join", self.length)(x)

    def leaving(self, where: str, x: Tensor) -> Tensor:
        """This member's slice of the sum of terms of it; differentiable.

        Args:
            where: the module that computed the term, for the message.
            x: the term of this member, [samples, tokens, ...].

        Raises:
            ModelError: it is not of all tokens.
        """
        if x.dim() < 3 or x.shape[TOKENS] != self.length:
            raise ModelError(f"{where}: its output is {tuple(x.shape)}, {self._wanted()}. {_REMEDY}")
        return self._way("leave", self.length)(x)

    def gathering(self) -> Redistribution:
        """From slices to all tokens, which each member uses in its own way."""
        return self._way("enter", self.length)

    def fits(self, x: object) -> bool:
        """Returns True if something may be a slice of an activation."""
        return isinstance(x, Tensor) and x.dim() >= 3 and x.shape[TOKENS] == self.width

    def refuse(self, where: str) -> ModelError:
        """The error of a module that was called without a slice."""
        return ModelError(
            f"{where} was called without a slice of {self.width} tokens, {self._wanted()}. {_REMEDY}"
        )

    def _wanted(self) -> str:
        return f"of {self.length} tokens in all"

    def _made(self, way: str, length: int) -> Redistribution:
        group = self._group
        all_, mine = whole(group, length), slices(group, divided(length, self._shares))
        if way == "leave":
            return Redistribution(group, terms(group, length), mine, dim=TOKENS)
        if way == "cut":
            return Redistribution(group, all_, mine, dim=TOKENS)
        return Redistribution(group, mine, all_, dim=TOKENS, add=way == "enter")


def single(x: object) -> Tensor:
    """The one tensor that a section gives.

    Raises:
        ModelError: it gives named tensors, which cannot be on slices of the tokens.
    """
    if isinstance(x, Tensor):
        return x
    raise ModelError(
        "sequence parallelism is for sections that give one tensor, and one gives a "
        f"{type(x).__name__}: leave sequence_parallel out of ParallelismOptions"
    )


_REMEDY = (
    "Sequence parallelism needs blocks that act on one token at a time outside of the modules that rules cut: "
    "leave ParallelismOptions(sequence_parallel=...) out, or let one module have the attention with its rules"
)


class _View(NamedTuple):
    """In place of a tensor that was saved for the backward pass: a view of gathered tokens."""

    of: _Gathered
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Gathered:
    """Gathered tokens, of which the slice alone is kept until the backward pass."""

    def __init__(self, part: Tensor, way: Redistribution) -> None:
        self._part, self._version, self._way = part.detach(), part._version, way
        self._again: Tensor | None = None

    def view(self, at: _View) -> Tensor:
        """A view of the tokens, which are gathered once more in a backward pass."""
        if self._again is None:
            if self._part._version != self._version:
                raise RuntimeError(
                    "a tensor that a cut module took was changed in place before its backward pass"
                )
            self._again = self._way.forward(self._part)
        return self._again.as_strided(at.size, at.stride, at.offset)

    def drop(self, _: Tensor) -> None:
        """The backward pass has left all that took the tokens."""
        self._again = None


class _Entered(NamedTuple):
    """A slice that has become all tokens."""

    slice: Tensor
    whole: Tensor
    kept: _Gathered | None  #: what is saved in its place; None: there is no backward pass
    memory: int  #: of `whole`, and its version
    version: int

    def has(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is in the memory of all tokens, as they came."""
        if self.kept is None or tensor.dtype != self.whole.dtype or tensor._version != self.version:
            return False
        return tensor.untyped_storage().data_ptr() == self.memory


class Entrance:
    """Hooks by which slices become all tokens where they enter the cut modules of a block.

    A tensor is gathered once, however many modules take it one after the other, and its gradient is
    reduce-scattered once. A saved tensor in the gathered one's memory is saved as its slice.
    """

    def __init__(self, tokens: SequenceSlices, section: str) -> None:
        self._tokens, self._section = tokens, section
        self._inside: set[str] = set()
        self._keeping = ExitStack()
        self._known: list[_Entered] = []  # by the call of a module before this one

    def watch(self, module: nn.Module) -> None:
        """Hooks the block itself."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def around(self, path: str, region: nn.Module) -> None:
        """Hooks a module that takes slices and has all that is cut in it on all tokens."""
        region.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
        region.register_forward_hook(lambda *_: self._inside.discard(path), always_call=True)

    def at(self, path: str, column: nn.Module, region: str) -> None:
        """Hooks a Column module: its input has been gathered where `region` has been called."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return None if region in self._inside else self._entered(path, args, kwargs)

        column.register_forward_pre_hook(enter, with_kwargs=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not self._tokens.fits(args[0]):
            raise self._tokens.refuse(self._section)
        if hasattr(module, "sequence_tokens"):
            setattr(module, "sequence_tokens", self._tokens.length)  # noqa: B010  to mypy it is a Module
        self._end()
        self._keeping.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def _end(self, *_: object) -> None:
        self._keeping.close()
        self._inside.clear()
        self._known = []

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered = self._entered(path, args, kwargs)
        self._inside.add(path)
        return entered

    def _entered(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with all tokens in place of the first slice among them, and of others of its shape:
        queries, keys and values may be three arguments."""
        first = next((value for value in (*args, *kwargs.values()) if self._tokens.fits(value)), None)
        if first is None:
            raise self._tokens.refuse(f"{self._section}.{path}")

        def sliced(value: Any) -> bool:
            return self._tokens.fits(value) and value.shape == first.shape and value.dtype == first.dtype

        taken = {id(value): value for value in (*args, *kwargs.values()) if sliced(value)}
        known = {id(entered.slice): entered for entered in self._known}
        entered = {key: known.get(key) or self._gathered(value) for key, value in taken.items()}
        self._known = [*entered.values()]

        def whole(value: Any) -> Any:
            return entered[id(value)].whole if id(value) in entered else value

        return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}

    def _gathered(self, x: Tensor) -> _Entered:
        way = self._tokens.gathering()
        found, kept = way(x), None
        if found.requires_grad and found.numel():
            kept = _Gathered(x, way)
            found.register_hook(kept.drop)
        return _Entered(x, found, kept, found.untyped_storage().data_ptr(), found._version)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        """Returns the value that is kept for a tensor that is saved. Gathered ones are alive as long as their
        memory is known here, so that no other tensor has that memory."""
        for entered in self._known:
            if entered.kept is not None and entered.has(tensor):
                return _View(entered.kept, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor


def _unpack(kept: Tensor | _View) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.of.view(kept)


def regions(model: Model, section: str, module: nn.Module) -> dict[str, str]:
    """The modules at which the inputs of a block's Column modules become all tokens.

    That is the outermost module around a Column module in which every parameter has a rule, and at most one Row
    module gives slices again: the attention, say, whose code reads the number of tokens off its input.

    Returns:
        By path of the Column module: the path of that module, often the Column module's own.
    """
    owners = model.owners(section)
    bare = [
        path
        for path, inner in module.named_modules()
        if path not in owners and any(True for _ in inner.parameters(recurse=False))
    ]
    rows = _rows(owners)
    found: dict[str, str] = {}
    for path, rules in owners.items():
        if not any(isinstance(rule, Column) for rule in rules.values()):
            continue
        found[path] = path
        for around in _ancestors(path):
            inside = partial(_within, around)
            if any(map(inside, bare)) or sum(map(inside, rows)) > 1:
                break
            uncalled = isinstance(module.get_submodule(around), nn.ModuleList | nn.ModuleDict)
            found[path] = found[path] if uncalled else around
    return found


def _rows(owners: Mapping[str, Mapping[str, Rule]]) -> list[str]:
    return [path for path, rules in owners.items() if any(isinstance(rule, Row) for rule in rules.values())]


def _ancestors(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _within(around: str, path: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def refuse_model(model: Model) -> None:
    """Refuses a model of which it can be told that its blocks cannot be on slices of tokens.

    Raises:
        ModelError: which module, and why.
    """
    if model.mixing:
        raise _refused(*model.mixing)
    for section in (section for section in model.sections if section.startswith("blocks.")):
        module, owners = model.sections[section], model.owners(section)
        around, rows = set(regions(model, section, module).values()), _rows(owners)
        closed = [region for region in around if any(_within(region, row) for row in rows)]
        for path, rules in owners.items():
            where, inside = f"{section}.{path}", any(_within(region, path) for region in closed)
            for rule in rules.values():
                if why := _rule_refusal(rule, module.get_submodule(path), inside=inside):
                    raise _refused(where, why)
        for path, inner in module.named_modules():
            if isinstance(inner, _MIXING) and not any(_within(region, path) for region in around):
                said = f"is a {type(inner).__name__}, which takes several tokens at once"
                raise _refused(f"{section}.{path}".rstrip("."), said)
    for names in model.spec.ties:
        blocks = [name for name in names if name.startswith("blocks.")]
        if len(blocks) == 1 and model.parameter(blocks[0]).replicas == "same":
            raise _refused(blocks[0], f"is tied to {next(name for name in names if name not in blocks)}")


def _rule_refusal(rule: Rule, owner: nn.Module, *, inside: bool) -> str:
    """Returns why a block with this rule cannot be on slices of tokens; empty where it can. inside: the owner
    is in a region whose rows come together again."""
    if not inside and isinstance(rule, Column) and rule.gather:
        return "gathers its output, so that what follows it is of all tokens"
    if not inside and isinstance(rule, Row) and rule.split:
        return "splits its input, so that what precedes it is of all tokens"
    if isinstance(rule, Column | Row) and isinstance(owner, nn.Embedding):
        return "is an embedding in a block"
    return "has experts, which take rows that a router chose" if isinstance(rule, Experts) else ""


def _refused(where: str, why: str) -> ModelError:
    return ModelError(f"{where} {why}. {_REMEDY}")


def tell_dropouts(module: nn.Module, tokens: SequenceSlices) -> None:
    """Tells the dropouts of a block where its slice of the tokens begins."""
    for inner in module.modules():
        if isinstance(inner, Dropout):
            inner.first_token = tokens.first
