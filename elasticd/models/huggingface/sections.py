"""The sections of a model of transformers, each of which runs the model's own forward.

A section holds some of the model's modules: the embedding, one layer, or what makes the logits. Around them is
a shell, a copy of the model's outer modules without parameters, in which

    the section's own modules               are where the model has them,
    modules that run before the layers      give zeros, shaped as the activation, in blocks and head,
    other modules of other sections         are not called,
    layers of other sections                give what they are given.

So positions, rotary tables, masks, multipliers, logit scales and soft caps are the model's own code. The
embedding ends the forward at the first layer, whose input it gives. In a block the layer takes the activation
of the stage before it, and everything else as the model gives it. A block ends the forward where the next layer
is called, so that it has what the model adds between layers; the last one ends it at the final norm. The head
gives the norm the activation, and goes on to the end. (Where no module after the layers is called with the
activation, the last block ends with its layer's output, and in the head the first layer gives it.)

In a packed row the model is given the position of each token in its sequence, and attends by
`packed_attention`.

A batch whose mask or positions matter to the layers (`batches`) passes as named tensors: the activation, and
beside it what the forward of every section is called with.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.models.huggingface.anatomy import (
    REMEDY,
    Anatomy,
    arguments,
    hidden_of,
    is_outer,
    logits_of,
    parts,
    text_of,
)
from elasticd.models.huggingface.batches import IDS, LAYER_INPUTS
from elasticd.models.huggingface.packed_attention import configurations, packed
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.attention import positions
from elasticd.runtime.parallel.packed_row import current_row

#: The name of the activation where other tensors pass beside it.
HIDDEN = "hidden"
#: Where nn.Module keeps its hooks.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_pre_hooks"),
)
#: And those of its state dict, which nobody asks a section's shell for. Mamba's is a method of the whole model.
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class Reached(BaseException):
    """The forward came to where its section ends. No Exception, so that no forward catches it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Pass:
    """The forward of a layer of another section: its input is its output."""

    def __init__(self, returns: int) -> None:
        self._returns = returns

    def __deepcopy__(self, memo: object) -> _Pass:
        return self

    def form(self, hidden: Any) -> Any:
        """`hidden` as the layer gives it: a tensor, or the first of a tuple."""
        return (hidden, *[None] * (self._returns - 1)) if self._returns else hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.form(hidden_of(args, kwargs))


class SectionEnd:
    """The layer, or the module after the layers, that the forward of a section's shell ends at."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached(hidden_of(args, kwargs))


class LayerOutput:
    """The first layer in the shell of a head that has no other begin: gives the activation."""

    def __init__(self, form: _Pass) -> None:
        self._form = form
        self.x: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._form.form(self.x)


class LayerCall:
    """A block's layer in its shell: called with the activation, and with all else as the model gives it. ends:
    the section's forward ends with its output."""

    def __init__(self, layer: nn.Module, ends: bool) -> None:
        self._layer, self._ends = layer, ends
        self.x: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            output = self._layer(self.x, *args[1:], **kwargs)
        else:
            output = self._layer(**kwargs | {"hidden_states": self.x})
        if self._ends:
            raise Reached(output[0] if isinstance(output, tuple) else output)
        return output


class _First(nn.Module):
    """Stands in the head's shell for the first module after the layers, and calls it with the activation."""

    def __init__(self, section: nn.Module, name: str) -> None:
        super().__init__()
        self.__dict__["_of"] = (section, name)  # no submodule
        self.x: Tensor | None = None

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        section, name = self.__dict__["_of"]
        return getattr(section, name)(self.x, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_of" not in self.__dict__:
            raise AttributeError(name)
        section, child = self.__dict__["_of"]
        return getattr(getattr(section, child), name)


class Zeros(nn.Module):
    """Stands for a module of another section. like: what it gives as zeros; None where none may be called."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["zeros"] = None

    @property
    def like(self) -> Tensor | None:
        """Among the parameters, of whose device and type transformers says that they are the model's."""
        return self._parameters["zeros"]

    @like.setter
    def like(self, zeros: Tensor | None) -> None:
        self._parameters["zeros"] = zeros  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.like is None:
            raise ModelError("the model's forward called a module of another section")
        return self.like

    @property
    def weight(self) -> Tensor | None:
        """Of the device and the type that the module's is of, which some forwards ask for."""
        return self.like


class Section(nn.Module):
    """Modules of a model, as children, in a shell of it. paths: the children's, in the model. ends: the forward
    ends at a layer, before its own end."""

    ends = True
    #: Tokens of the samples, where a block is called with a slice of them: all but its layer is made for all.
    sequence_tokens: int | None = None

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        held: Mapping[str, nn.Module],
        layers: Sequence[nn.Module],
        others: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Args:
        model: whose forward is run.
        anatomy: what it is made of.
        held: the section's own modules, by path.
        layers: what stands at the layers' places.
        others: what stands at other places, by path.
        """
        super().__init__()
        names = _names(list(held))
        for path, module in held.items():
            self.add_module(names[path], module)
        self.paths = {name: path for path, name in names.items()}
        zeros, absent = Zeros(), Zeros()
        self._arguments, pad = arguments(model), getattr(text_of(model.config), "pad_token_id", None)
        self._id = 1 if pad == 0 else 0  # some warn of padding
        self._outer: list[nn.Module] = []
        self._bound: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []  # in the shell; and here
        inner = bare(model.get_submodule(anatomy.layers))
        inner._modules.update({str(i): layer for i, layer in enumerate(layers)})
        made = {id(model.get_submodule(anatomy.layers)): inner}  # a module may have two names
        mine = {id(model.get_submodule(path)): name for path, name in names.items()}
        standing: dict[str, nn.Module] = dict.fromkeys(parts(model, anatomy.layers), absent)
        standing |= {**dict.fromkeys(anatomy.before, zeros), **(others or {})}
        shell = self._shell_of(model, "", anatomy.layers, mine, made, standing)
        self._hidden = (shell, zeros)  # no submodules: the parameters are named once
        self._takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        self._configurations = configurations(
            [*shell.modules(), *(m for layer in layers for m in layer.modules())]
        )

    def _shell_of(
        self,
        module: Any,
        path: str,
        layers: str,
        mine: Mapping[int, str],
        done: dict[int, nn.Module],
        standing: Mapping[str, nn.Module],
    ) -> nn.Module:
        shell = done[id(module)] = bare(module)
        # The last says that hooks which note outputs are on its modules: these have none.
        for name in ("generation_config", "peft_config", "_output_capturing_hooks_installed"):
            shell.__dict__.pop(name, None)
        self._outer.append(shell)
        shell._buffers = dict(module._buffers)
        for name, buffer in module._buffers.items():
            mine_name = "_".join(["outer", *path.split("."), name])
            self.register_buffer(mine_name, buffer, persistent=False)  # goes where the section goes
            self._bound.append((shell._buffers, name, self._buffers, mine_name))
        for name, child in module._modules.items():
            full = f"{path}.{name}" if path else name
            if child is None or id(child) in done:
                shell._modules[name] = None if child is None else done[id(child)]
            elif id(child) in mine and not isinstance(standing.get(full), _First):
                shell._modules[name] = getattr(self, mine[id(child)])
                self._bound.append((shell._modules, name, self._modules, mine[id(child)]))
            elif is_outer(full, child, layers):
                shell._modules[name] = self._shell_of(child, full, layers, mine, done, standing)
            else:
                shell._modules[name] = standing[full]
        return shell

    @property
    def _shell(self) -> nn.Module:
        return self._hidden[0]

    def bound(self) -> tuple[Any, Zeros]:
        """The shell with the section's modules in their places, and what stands for those before the layers."""
        shell, zeros = self._hidden
        for there, name, here, mine in self._bound:  # a child may have been replaced
            there[name] = here[mine]
        for outer in self._outer:
            outer.training = self.training
        return shell, zeros

    def run(self, ids: Tensor | None, x: Tensor | None, beside: Mapping[str, Any]) -> Any:
        """The model's forward in the shell, to where the section ends.

        Args:
            ids: of the tokens; None: any.
            x: the activation; None: the section makes it.
            beside: what else the forward is called with, by name.
        """
        shell, zeros = self.bound()
        if x is not None:
            samples, tokens, *width = x.shape
            tokens = self.sequence_tokens or tokens
            ids = torch.full((samples, tokens), self._id, dtype=torch.long, device=x.device)
            zeros.like = x.new_zeros((samples, tokens, *width))
        try:
            output = self._called(shell, ids, beside)
        except Reached as reached:
            return reached.value
        else:
            if self.ends:
                raise ModelError("the model's forward ended before it came to the end of this section")
            return output
        finally:
            zeros.like = None

    def _called(self, shell: nn.Module, ids: Tensor | None, beside: Mapping[str, Any]) -> Any:
        assert ids is not None
        if current_row(ids.device) is None:
            return shell(input_ids=ids, **self._arguments, **beside)
        if not self._takes_positions:
            raise ModelError(f"the forward of {type(shell).__name__} takes no position_ids")
        beside = {"position_ids": positions(ids)[None], **beside}
        with packed(self._configurations):
            return shell(input_ids=ids, **self._arguments, **beside)


class HfEmbed(Section):
    """The tokens of a batch [samples, tokens] to the first layer's input [samples, tokens, width]."""

    def __init__(self, model: Any, anatomy: Anatomy, husks: Sequence[nn.Module]) -> None:
        first = with_forward(husks[0], SectionEnd())
        held = {path: model.get_submodule(path) for path in anatomy.before}
        super().__init__(model, anatomy, held | anywhere(model, anatomy), [first, *husks[1:]])

    def forward(self, batch: Mapping[str, Any]) -> Tensor | dict[str, Tensor]:
        """Runs the model's forward on the tokens of a batch [samples, tokens] up to its first layer.

        Returns:
            The activation [samples, tokens, width]; of a batch with `LAYER_INPUTS` named tensors.
        """
        beside: Mapping[str, Tensor] = batch.get(LAYER_INPUTS, {})
        ids = batch[next((name for name in IDS if name in batch), IDS[0])]
        return _bundle(self.run(ids, None, beside), beside)


class HfBlock(Section):
    """One layer and what the model does after it: its input to the next one's, [samples, tokens, width]."""

    def __init__(self, model: Any, anatomy: Anatomy, husks: Sequence[nn.Module], index: int) -> None:
        layer, last = model.get_submodule(f"{anatomy.layers}.{index}"), index == len(husks) - 1
        self_, mine = list(husks), LayerCall(layer, ends=last and not anatomy.end)
        self_[index] = with_forward(layer, mine)
        others: dict[str, nn.Module] = {}
        if not last:
            self_[index + 1] = with_forward(husks[index + 1], SectionEnd())
        elif anatomy.end:
            others = {anatomy.end: with_forward(husk(model.get_submodule(anatomy.end), 0), SectionEnd())}
        super().__init__(model, anatomy, anywhere(model, anatomy), self_, others)
        self.layer = layer
        self.paths["layer"] = f"{anatomy.layers}.{index}"
        self._mine = mine

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Runs the model's forward from this layer, which takes `x` [samples, tokens, width], alone or as
        `HIDDEN` among named tensors, to where the next layer is called."""
        hidden, beside = _parted(x)
        self._mine.x = hidden
        try:
            return _bundle(self.run(None, hidden, beside), beside)
        finally:
            self._mine.x = None


class HfHead(Section):
    """The last block's output [samples, tokens, width] to the logits [samples, tokens, vocabulary]."""

    ends = False

    def __init__(self, model: Any, anatomy: Anatomy, husks: Sequence[nn.Module]) -> None:
        held = {path: model.get_submodule(path) for path in anatomy.after}
        held = anywhere(model, anatomy) | held
        if anatomy.end:
            first = _First(self, _names(list(held))[anatomy.end])
            super().__init__(model, anatomy, held, husks, {anatomy.end: first})
            self._begin: tuple[LayerOutput | _First] = (first,)  # no submodule
        else:
            passing: Any = husks[0].forward
            begin = LayerOutput(passing)
            super().__init__(model, anatomy, held, [with_forward(husks[0], begin), *husks[1:]])
            self._begin = (begin,)

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Runs the model's forward with `x` [samples, tokens, width] in place of the last block's output."""
        hidden, beside = _parted(x)
        (begin,) = self._begin
        begin.x = hidden
        try:
            return logits_of(self.run(None, hidden, beside))
        finally:
            begin.x = None


def _bundle(hidden: Tensor, beside: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    return {HIDDEN: hidden, **beside} if beside else hidden


def _parted(x: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The activation, and what passes beside it."""
    if isinstance(x, Tensor):
        return x, {}
    return x[HIDDEN], {name: value for name, value in x.items() if name != HIDDEN}


@dataclass(frozen=True)
class Sections:
    """A model in elasticd's one shape."""

    embed: HfEmbed
    blocks: list[HfBlock]
    head: HfHead

    def __iter__(self) -> Any:
        yield "embed", self.embed
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block
        yield "head", self.head


def name_in_sections(sections: Iterable[tuple[str, Any]], path: str) -> str:
    """The name in elasticd of a module of a model of transformers; empty where no section has it."""
    for section, module in sections:
        for child, theirs in module.paths.items():
            if f"{path}.".startswith(f"{theirs}."):
                return f"{section}.{child}{path.removeprefix(theirs)}"
    return ""


def name_in_model(sections: Iterable[tuple[str, nn.Module]], name: str) -> str:
    """The name in a model of transformers of a parameter that elasticd calls `name`.

    Args:
        sections: the model's sections by name.
        name: a full name, "blocks.0.layer.mlp.up_proj.weight" say.

    Raises:
        KeyError: no section has it.
    """
    for section, module in sections:
        for child, path in getattr(module, "paths", {}).items():
            if f"{name}.".startswith(f"{section}.{child}."):
                return f"{path}{name.removeprefix(f'{section}.{child}')}"
    raise KeyError(name)


def sections_of(model: Any, anatomy: Anatomy) -> Sections:
    """The sections of a model, which share its modules."""
    refuse_outer(model, anatomy)
    for path, module in outer_modules(model, anatomy):
        for leaf, _ in module.named_parameters(recurse=False):
            raise ModelError(f"{leaf} of {path} is a parameter of no module that a stage holds")
    husks = husks_of(model, anatomy)
    sections = Sections(
        embed=HfEmbed(model, anatomy, husks),
        blocks=[HfBlock(model, anatomy, husks, index) for index in range(len(husks))],
        head=HfHead(model, anatomy, husks),
    )
    refuse_two_names(type(model).__name__, list(sections))
    return sections


def husks_of(model: Any, anatomy: Anatomy) -> list[nn.Module]:
    """The layers of a model without their parameters; each gives what it is given."""
    layers = model.get_submodule(anatomy.layers).children()
    return [husk(layer, anatomy.returns.get(type(layer), 0)) for layer in layers]


def bare(module: Any) -> Any:
    """A copy of a module without its children and without hooks; its settings are the module's."""
    copied = copy.copy(module)
    copied._modules = {}
    for name in (*_HOOKS, *_STATE_HOOKS):
        copied.__dict__[name] = OrderedDict()
    return copied


def husk(layer: nn.Module, returns: int) -> nn.Module:
    """A layer without parameters that gives what it is given. It has no state, and a copy is itself: the shell
    of each block has all of them."""
    copied = bare(layer)
    copied._parameters, copied._buffers = {}, {}
    copied.forward = _Pass(returns)
    copied.__deepcopy__ = lambda memo: copied
    return copied


def with_forward(layer: Any, forward: Any) -> nn.Module:
    """The module in a layer's place: it has the layer's settings and modules, and this forward."""
    copied = bare(layer)
    copied.__dict__.pop("__deepcopy__", None)
    copied._modules = layer._modules
    copied.forward = forward
    return copied


def anywhere(model: Any, anatomy: Anatomy) -> dict[str, nn.Module]:
    """Each section has its own copy of what all need."""
    return {path: copy.deepcopy(model.get_submodule(path)) for path in anatomy.anywhere}


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Short names of children by path: the last word, or all of it where two have the same."""
    short = [path.rpartition(".")[2] for path in paths]
    return {
        path: name if short.count(name) == 1 and name != "layer" else path.replace(".", "_")
        for path, name in zip(paths, short, strict=True)
    }


def refuse_two_names(kind: str, sections: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises ModelError for a parameter that one section has under two names. kind: the model's class."""
    for section, module in sections:
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(prefix=section, remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            if other != name:
                raise ModelError(
                    f"{name_in_model(sections, other)} and {name_in_model(sections, name)} of "
                    f"{kind} are one parameter of one section: {REMEDY}"
                )


def outer_modules(model: Any, anatomy: Anatomy, start: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that a shell has copies of, by path behind `start`; a model without a path by the name of its
    class."""
    for path, module in model.named_modules():
        if path and (path.startswith(f"{anatomy.layers}.") or not is_outer(path, module, anatomy.layers)):
            continue
        yield f"{start}{path}".removesuffix(".") or type(model).__name__, module


def refuse_outer(model: Any, anatomy: Anatomy, start: str = "") -> None:
    """Raises ModelError for what a shell, a copy of the outer modules, would lose.

    Args:
        model: the model, or one that has layers inside it.
        anatomy: of it.
        start: its path, with a dot, in the model that the user gave.
    """
    for name, module in outer_modules(model, anatomy, start):
        for method, own in vars(module).items():
            if callable(own) and callable(getattr(type(module), method, None)):
                raise ModelError(
                    f"the {method} of {name} is replaced on the instance: give elasticd the model as made"
                )
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise ModelError(f"{name} has hooks, which no stage could run: remove them")
