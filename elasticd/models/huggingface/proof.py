"""Proof that the sections of a model compute the same as the model, on a small copy of it.

The copy has the model's class and its configuration with few layers and small widths (`tiny_config`), and
weights so large that caps act. Its own forward and backward pass are compared with those of its sections: once
with the configuration's numbers, and once with all of them changed, so that a number that is neutral now is
seen, too, where it is lost. What differs is looked for number by number and refused by name.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.codec.safe_text import shortened
from elasticd.models.huggingface import tiny_config
from elasticd.models.huggingface.adapters import Adapters, plain_modules
from elasticd.models.huggingface.anatomy import (
    REMEDY,
    Anatomy,
    AnatomyTrace,
    arguments,
    layers_path,
    logits_of,
    parts,
    same,
    text_of,
)
from elasticd.models.huggingface.batches import FOR_LAYERS, LAYER_INPUTS, TARGETS, shifted
from elasticd.models.huggingface.loss import causal_lm_loss
from elasticd.models.huggingface.sections import Sections, sections_of
from elasticd.runtime.model.validation import ModelError, replace_dropouts
from elasticd.runtime.parallel.sequence_mixing import RowAndSequences, mixing
from elasticd.runtime.reference.comparison import difference, first_line

#: Of the micro-batch that is tried.
SAMPLES, TOKENS = 2, 7
#: Tokens of padding at the begin of a sample that are tried.
PADDED = 2
#: Parameters of a small copy: more would take seconds and gigabytes.
MOST = 20_000_000
#: How far results may be apart where they are not equal to the bit, in units of the largest value.
NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}
#: Modules that a probability of 0, which a copy has, may turn into each other.
_NOTHING = (nn.Dropout, nn.Identity)
#: Standard deviations of outputs of a matrix whose inputs have one of 1.
GAINS = (3.0, 1.0, 0.2)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The findings about a model. exact: logits and gradients are equal to the bit."""

    model: str
    anatomy: Anatomy
    exact: bool
    numbers: tuple[str, ...]  # of the configuration: those that were changed, and that change the logits
    unpackable: str  # why its sequences cannot be packed in one row; empty: they can
    #: Whether the target of a token is the next one's label; None: the model's own loss is another.
    shifts: bool | None
    lacks: Mapping[str, str]  # of what batches may give every layer: why the stages do not take it
    counts_from_zero: bool  # positions that are counted from 0 are those that the model takes by itself
    absolute: bool  # padding at the begin of a sample changes what its tokens give

    def __str__(self) -> str:
        text = f"the model's own forward: {self.model}, on a small copy "
        text += "equal to the bit" if self.exact else f"within {NEAR[torch.float64]:.0e}"
        if self.numbers:
            text += f", also with {', '.join(self.numbers)} changed"
        return text


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A small model with random weights, tokens for it, and its own logits."""

    model: Any
    ids: Tensor
    logits: Tensor

    @property
    def name(self) -> str:
        """The name of the model's class, for messages."""
        return type(self.model).__name__

    @property
    def near(self) -> float:
        """The largest relative difference that rounding explains in the type of the logits."""
        return NEAR.get(self.logits.dtype, 1e-3)


class ModelMaker:
    """Makes models of a class of a configuration, with adapters where there are any."""

    def __init__(self, made: Any, adapters: Adapters | None) -> None:
        self._made, self._adapters, self.__name__ = made, adapters, made.__name__

    def __call__(self, config: Any) -> Any:
        """A model with values."""
        model = self._made(config)
        return model if self._adapters is None else self._adapters.put_into(model)


def prove(model: Any, adapters: Adapters | None = None) -> Proof:
    """Tries a model's sections on small copies. Raises ModelError where they are not the model."""
    kind, config = ModelMaker(type(model), adapters), model.config
    with on_the_side():
        copy = _small(model, kind)
        refuse_other_outputs(copy)
        refuse_draws_and_state(copy)
        refuse_other_tokens(copy)
        anatomy, same_bits = compared(copy)
        exact, numbers = _with_changed_numbers(kind, copy.model.config)
        numbers = [name for name in numbers if acts(kind, copy, name)]
        _refuse_draws(kind, copy.model.config, tiny_config.dropouts(config))
        return Proof(
            model=kind.__name__,
            anatomy=anatomy,
            exact=same_bits and exact,
            numbers=tuple(numbers),
            unpackable=why_unpackable(copy, anatomy),
            shifts=shifts_labels(copy),
            lacks=lacking_layer_inputs(copy, anatomy),
            counts_from_zero=counts_from_zero(copy),
            absolute=absolute(copy),
        )


def _with_changed_numbers(kind: Any, base: Any) -> tuple[bool, list[str]]:
    """All numbers changed at once; one by one where such a model cannot be made or is not its sections."""
    changed = tiny_config.numbers(base)
    if not changed:
        return True, []
    lost: ModelError | None = None
    try:
        return compared(copy_of(kind, tiny_config.with_numbers(base, changed)))[1], list(changed)
    except Exception as error:
        lost = error if isinstance(error, ModelError) else None
    alone = {name: changed_alone(kind, base, name, value) for name, value in changed.items()}
    if lost is not None:  # by some of them together
        raise ModelError(f"with {', '.join(changed)} changed: {lost}") from lost
    return all(exact is not False for exact in alone.values()), [k for k, v in alone.items() if v is not None]


def changed_alone(kind: Any, base: Any, name: str, value: Any) -> bool | None:
    """Returns True if a model with this one number changed is equal to the bit; None: there is no such model.
    Raises ModelError where it is not its sections."""
    try:
        copy = copy_of(kind, tiny_config.with_numbers(base, {name: value}))
    except Exception:
        return None
    try:
        return compared(copy)[1]
    except ModelError as error:
        raise ModelError(
            f"{name} of the configuration of {kind.__name__} would be lost between stages: {error}"
        ) from error


def acts(kind: Any, copy: SmallModel, name: str) -> bool:
    """Returns True if the copy's logits are others with this number of its configuration changed."""
    config = copy.model.config
    try:
        other = copy_of(kind, tiny_config.with_numbers(config, {name: tiny_config.numbers(config)[name]}))
    except Exception:  # it cannot be changed alone
        return True
    return not torch.equal(other.logits, copy.logits)


def copy_of(kind: Any, config: Any) -> SmallModel:
    """A model of the configuration. Raises what its forward raises."""
    failure: Exception | None = None
    for dtype in NEAR:
        model = kind(config).to(dtype).train()
        rows = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(0, rows, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
        for place, mark in enumerate(_marks(config, rows), start=2):
            ids[0, place] = mark
        for gain in GAINS:
            fill(model, gain)
            try:
                with torch.no_grad():
                    logits = logits_of(model(input_ids=ids, **arguments(model)))
            except RuntimeError as error:  # kernels that have no double precision
                failure = error
                break
            if bool(logits.isfinite().all()):
                return SmallModel(model=model, ids=ids, logits=logits)
    raise failure or ModelError(f"the logits of a small copy of {kind.__name__} are not finite: {REMEDY}")


def _marks(config: Any, rows: int) -> Iterable[int]:
    """Tokens that a model may treat in a way of their own. It shall be seen, also where it is padding."""
    given = [getattr(text_of(config), f"{mark}_token_id", None) for mark in ("pad", "bos", "eos")]
    return [mark for mark in given if isinstance(mark, int) and 0 <= mark < rows]


def compared(copy: SmallModel) -> tuple[Anatomy, bool]:
    """A copy's own forward and backward pass beside those of its sections.

    Returns its anatomy, and whether they are equal to the bit. Raises ModelError where they are further apart
    than rounding explains."""
    model, name = copy.model, copy.name
    watched = AnatomyTrace(model, copy.ids)
    width = getattr(text_of(model.config), "hidden_size", None)
    if watched.inputs[0].shape[-1] != width:
        raise ModelError(
            f"the layers of {name} pass {watched.inputs[0].shape[-1]} on, not its {width}: {REMEDY}"
        )
    weights = torch.randn(watched.logits.shape, generator=torch.Generator().manual_seed(2)).to(watched.logits)
    own = _gradients(model, watched.logits, weights)
    sections = sections_of(model, watched.anatomy)
    logits, exact = _outputs(copy, sections, watched)
    held = {id(parameter) for _, section in sections for parameter in section.parameters()}
    for full, parameter in model.named_parameters():
        if full in own and id(parameter) not in held:
            raise ModelError(f"{full} of {name} acts where no module that has it is called: {REMEDY}")
    gradients = _gradients(model, logits, weights)
    for full in own.keys() | gradients.keys():
        apart = difference(gradients.get(full), own.get(full))
        exact = exact and apart == 0
        if apart > copy.near:
            raise ModelError(f"the gradient of {full} of {name} is {apart:.0e} off in its section: {REMEDY}")
    return watched.anatomy, exact


def _outputs(copy: SmallModel, sections: Sections, watched: AnatomyTrace) -> tuple[Tensor, bool]:
    """The sections' logits, and whether all outputs on the way are equal to the bit."""
    given: list[dict[str, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(partial(_note, given), with_kwargs=True)
        for layer in copy.model.get_submodule(watched.anatomy.layers).children()
    ]
    x: Any = {"inputs": copy.ids}
    exact = True
    try:
        for (section, module), wanted in zip(sections, [*watched.inputs, None, watched.logits], strict=True):
            try:
                x = module(x)
            except Exception as error:
                raise ModelError(
                    f"{section} of {copy.name} cannot run by itself ({first_failure(error)}): {REMEDY}"
                ) from error
            apart = 0.0 if wanted is None else difference(x.detach(), wanted.detach())
            exact = exact and apart == 0
            if apart > copy.near:
                raise ModelError(f"{_why(copy.name, section, given, watched)}: {REMEDY}")
    finally:
        for hook in hooks:
            hook.remove()
    return x, exact


def _note(given: list[dict[str, Any]], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = {f"argument {i}": value for i, value in enumerate(args) if i}
    given.append(named | {key: value for key, value in kwargs.items() if key != "hidden_states"})


def _why(name: str, section: str, given: Sequence[Mapping[str, Any]], watched: AnatomyTrace) -> str:
    if section == "embed":
        return f"what {name} gives its first layer is not what its embedding gives"
    index = len(given) - 1
    ours, theirs = given[index], watched.others[index]
    names = [key for key in theirs if not same(ours.get(key), theirs[key])]
    if names:
        return (
            f"{', '.join(names)} of layer {index} of {name} depend on the tokens or on other layers, and one "
            "activation passes between stages"
        )
    if section == "head":
        return f"the logits of {name} are no function of its last layer's output"
    return f"{name} changes the activation between layers {index} and {index + 1}"


def refuse_other_outputs(copy: SmallModel) -> None:
    """Raises ModelError where the model gives no logits for each token, as one that classifies sequences."""
    if copy.logits.shape[:2] != copy.ids.shape:
        raise ModelError(
            f"{copy.name} gives {list(copy.logits.shape)} for {list(copy.ids.shape)} tokens, not logits for "
            f"each: from_hf takes causal language models, ...ForCausalLM; {REMEDY}"
        )


def refuse_draws_and_state(copy: SmallModel) -> None:
    """Raises ModelError where the same samples give something else in the next forward pass."""
    model, before = copy.model, {name: buffer.clone() for name, buffer in copy.model.named_buffers()}
    with torch.no_grad():
        logits = logits_of(model(input_ids=copy.ids, **arguments(model)))
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ModelError(
                f"{name} of {copy.name} is a state that each forward pass in training changes, so that a "
                f"layout would change it: {REMEDY}"
            )
    if not torch.equal(logits, copy.logits):
        raise ModelError(
            f"{copy.name} gives something else for the same samples each time in training, as one that draws "
            f"random numbers does: set what makes it draw to 0, or {REMEDY}"
        )


def refuse_other_tokens(copy: SmallModel) -> None:
    """A layout decides how much padding is at the end of a sample, and which samples a micro-batch has. Where
    experts have a capacity, earlier samples take it from later ones."""
    model, first, last = copy.model, copy.ids.clone(), copy.ids.clone()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    first[0] = (first[0] + 1) % vocabulary
    last[-1, -1] = (last[-1, -1] + 1) % vocabulary
    with torch.no_grad():
        behind, logits = (logits_of(model(input_ids=ids, **arguments(model))) for ids in (first, last))
    if max(difference(behind[1:], copy.logits[1:]), difference(logits[:-1], copy.logits[:-1])) > copy.near:
        raise ModelError(
            f"what {copy.name} gives for a sample depends on the others of the micro-batch: {REMEDY}"
        )
    if difference(logits[:, :-1], copy.logits[:, :-1]) > copy.near:
        decoder = "set is_decoder=True in its configuration, or " if hasattr(model.config, "is_decoder") else ""
        raise ModelError(
            f"{copy.name} attends to later tokens, as an encoder does, so that padding at the end of a sample "
            f"would change its output: {decoder}{REMEDY}"
        )


def why_unpackable(copy: SmallModel, anatomy: Anatomy) -> str:
    """Why a packed row does not give what the model itself gives for its sequences, with the name of the
    module; empty where it does."""
    lengths = (TOKENS, 1, TOKENS - 2)
    sequences = [copy.ids[:1], copy.ids[1:, :1], copy.ids[1:, 2:]]
    x = RowAndSequences(
        lengths, {"inputs": torch.cat(sequences, dim=1)}, [{"inputs": ids} for ids in sequences]
    )
    refused = f"samples of {copy.name} can be padded, not packed"
    for section, module in sections_of(copy.model, anatomy):
        outcome = mixing(section, module, x)
        if isinstance(outcome, str):
            return f"{refused}: {outcome}"
        x = outcome
    with torch.no_grad():
        own = [logits_of(copy.model(input_ids=ids, **arguments(copy.model))) for ids in sequences]
    if (apart := difference(x.together, torch.cat(own, dim=1))) > copy.near:
        return f"{refused}: the logits of a packed row are {apart:.0e} off"
    return ""


def shifts_labels(copy: SmallModel) -> bool | None:
    """Returns True if the copy's own loss is the cross entropy of each token's next label, or (False) of its
    own; None: it is another, or it has none."""
    return shifted_by(copy.model, {"input_ids": copy.ids}, copy.logits)


def shifted_by(model: Any, batch: Mapping[str, Tensor], logits: Tensor) -> bool | None:
    """The same of any model, a batch with `input_ids` and what the model gives of it."""
    labels = batch["input_ids"].clone()
    labels[0, :3] = -100
    try:
        with torch.no_grad():
            own = model(**batch, labels=labels, **arguments(model)).loss
    except Exception:  # it takes no labels, or gives a tuple
        return None
    for shifts, targets in ((True, shifted(labels)), (False, labels)):
        total, count = causal_lm_loss(logits, {TARGETS: targets})
        # The model's own is computed in single precision.
        if isinstance(own, Tensor) and difference((total / count).float(), own.float()) < NEAR[torch.float32]:
            return shifts
    return None


def counts_from_zero(copy: SmallModel) -> bool:
    """Returns True if the copy gives with positions 0, 1, 2, ... what it gives without positions."""
    places = torch.arange(copy.ids.shape[1]).expand(copy.ids.shape)
    if "position_ids" not in takes(copy.model):
        return True
    try:
        with torch.no_grad():
            own = logits_of(copy.model(input_ids=copy.ids, position_ids=places, **arguments(copy.model)))
    except Exception:
        return False
    return difference(own, copy.logits) <= copy.near


def absolute(copy: SmallModel) -> bool:
    """Returns whether padding before tokens, which a mask leaves out, changes what the copy gives for them."""
    mask = torch.ones_like(copy.ids)
    mask[:, :PADDED] = 0
    try:
        with torch.no_grad():
            own = logits_of(copy.model(input_ids=copy.ids[:, PADDED:], **arguments(copy.model)))
            padded = copy.model(input_ids=copy.ids, attention_mask=mask, **arguments(copy.model))
    except Exception:  # it takes no mask, and such a batch is refused
        return False
    # Rotary tables are computed in single precision.
    return difference(logits_of(padded)[:, PADDED:], own) > max(copy.near, NEAR[torch.float32])


def lacking_layer_inputs(copy: SmallModel, anatomy: Anatomy) -> dict[str, str]:
    """Why stages do not take what a batch may say to every layer: a mask with padding at the begin of a sample,
    positions that are not counted from 0. Those that are taken are left out."""
    mask = torch.ones_like(copy.ids)
    mask[0, :2] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return {name: why for name in FOR_LAYERS if (why := _why_not_taken(copy, anatomy, name, given))}


def _why_not_taken(copy: SmallModel, anatomy: Anatomy, name: str, given: Mapping[str, Tensor]) -> str:
    if name not in takes(copy.model):
        return f"the forward of {copy.name} takes no {name}"
    # Positions come with the mask where the model takes both.
    names = [each for each in FOR_LAYERS if each == name or each in takes(copy.model)]
    for beside in ({name: given[name]}, {each: given[each] for each in names}):
        try:
            with torch.no_grad():
                own = logits_of(copy.model(input_ids=copy.ids, **beside, **arguments(copy.model)))
                x: Any = {"inputs": copy.ids, LAYER_INPUTS: beside}
                for _, section in sections_of(copy.model, anatomy):
                    x = section(x)
        except Exception as error:
            return f"{copy.name} fails with it on a small copy ({first_failure(error)})"
        seen = beside.get("attention_mask", torch.ones_like(copy.ids)).bool()
        if not difference(x[seen], own[seen]) <= copy.near:
            return f"the stages of {copy.name} give something else with it"
    return ""


def takes(model: Any) -> frozenset[str]:
    """The arguments of a model's forward."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def _refuse_draws(kind: Any, base: Any, dropouts: Mapping[str, float]) -> None:
    """Raises ModelError for dropouts of functions, whose masks a layout would change."""
    if not dropouts or not _draws(kind, base, dropouts):
        return
    drawn = [name for name, value in dropouts.items() if _draws(kind, base, {name: value})] or list(dropouts)
    raise ModelError(drawn_inside(kind.__name__, {name: dropouts[name] for name in drawn}))


def drawn_inside(kind: str, dropouts: Mapping[str, float]) -> str:
    """Says that dropouts of a model's configuration are drawn where a layout changes them."""
    one = len(dropouts) == 1
    return (
        f"{' and '.join(f'{name} = {value}' for name, value in dropouts.items())} of {kind} "
        f"{'is' if one else 'are'} drawn inside its functions, not by an nn.Dropout, "
        f"where a layout changes what is dropped: set {'it' if one else 'them'} to 0"
    )


def _draws(kind: Any, base: Any, dropouts: Mapping[str, float]) -> bool:
    """Returns True if the sections draw random numbers once every nn.Dropout is a keyed one."""
    copy = copy_of(kind, tiny_config.with_numbers(base, dropouts))
    for layer in copy.model.modules():  # layers that are dropped whole are not called
        layer.training = False
    anatomy = AnatomyTrace(copy.model, copy.ids).anatomy
    before = torch.default_generator.get_state()
    x: Any = {"inputs": copy.ids}
    try:
        with torch.no_grad():
            for section, module in sections_of(copy.model, anatomy):
                x = replace_dropouts(section, module).train()(x)
    except Exception:  # a layer was dropped whole
        return True
    return not torch.equal(before, torch.default_generator.get_state())


def _small(model: Any, kind: Any) -> SmallModel:
    """A small copy that has layers of every kind that the model has, and the same modules around them."""
    wanted = _kinds(model)
    try:
        base = tiny_config.small(model.config)
        with torch.device("meta"):
            blank = type(model)(base)
            if wanted - _kinds(blank):
                base = tiny_config.small(model.config, tiny_config.MOST_LAYERS)
                blank = type(model)(base)
        if why := _another_model(model, blank):
            raise ModelError(f"a small copy of {kind.__name__} {why}, and cannot be compared: {REMEDY}")
        return copy_of(kind, base)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"no small copy of {kind.__name__} can be made to compare it with its stages "
            f"({first_failure(error)}): {REMEDY}"
        ) from error


def _another_model(model: nn.Module, copy: nn.Module) -> str:
    """Why what is found of a copy says nothing of the model; empty where it does."""
    size = sum(parameter.numel() for parameter in copy.parameters())
    if size > MOST:
        return f"has {size / 1e6:.0f} million parameters"
    if _kinds(model) - _kinds(copy):
        return "lacks a kind of its layers"
    others = sorted({path for path, _ in _around(model) ^ _around(copy)})
    return f"has not the same {', '.join(others)}" if others else ""


def _kinds(model: nn.Module) -> set[frozenset[tuple[str, type]]]:
    """The kinds of layers of a model, by the modules that they have."""
    return {module_kinds(layer) for layer in model.get_submodule(layers_path(model)).children()}


def _around(model: nn.Module) -> frozenset[tuple[str, type]]:
    """The modules beside the layers: a module that only the model has would be in no section of it."""
    beside = parts(model, layers_path(model))
    return frozenset().union(*(module_kinds(part, path) for path, part in beside.items()))


def module_kinds(module: nn.Module, path: str = "") -> frozenset[tuple[str, type]]:
    """The modules in a module, by path and class, without adapters; those of a list are alike."""
    return frozenset(
        (re.sub(r"\d+", "*", full), type(inner))
        for full, inner in plain_modules(module, path)
        if not isinstance(inner, _NOTHING)
    )


def fill(model: nn.Module, gain: float) -> None:
    """Random weights: matrices and embeddings by `gain`, vectors around what they begin with."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * gain / max(1, parameter.shape[-1]) ** 0.5)
            elif name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)


def _gradients(model: nn.Module, logits: Tensor, weights: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((logits * weights).sum(), list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, gradients, strict=True) if grad is not None}


def first_failure(error: Exception) -> str:
    """The first line of an error, for a message."""
    return shortened(first_line(error), 240)


@contextmanager
def on_the_side() -> Iterator[None]:
    """Runs on the CPU, whatever the default device is, and without a trace in the generator or in the log."""
    library = logging.getLogger("transformers")
    level = library.level
    library.setLevel(logging.ERROR)  # what it warns of is the small copy
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        library.setLevel(level)
