"""The user's model, loss and batches: by name in the user's file, or those of a training script's Job."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.api.script import recipe_of
from elasticd.runtime.api.several_modules import without_items
from elasticd.runtime.data.collate import Batch, pad
from elasticd.runtime.data.loader import item_counts, items_of, reading, sample_tokens
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.item_border import joined, row_of
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.bundle import Bundle, sizes
from elasticd.runtime.model.model import Loss, Model, ModelError, Module
from elasticd.runtime.model.model_graph import ModelGraph
from elasticd.runtime.reference.parts import Values, whole_model
from elasticd.system.user_line import user_line
from elasticd.wire.profiler import Request

#: Samples of a script's dataset among which one is taken, and items whose rows are counted.
_LOOKED_AT = 64

#: Numbers of rows at which a module of items is measured, at most.
_ROW_COUNTS = 4

#: (samples, tokens of each) to a batch, as the model's embed takes it.
MakeBatch = Callable[[int, int], Batch]


class CannotLoad(ValueError):
    """The file or name is missing, or is not of the right kind: one message for the user."""


def load(target: str) -> tuple[ModuleType, Model]:
    """The module and the model of "FILE.py:NAME" or "package.module:NAME"; NAME is a Model, or a function
    without arguments that makes one."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise CannotLoad(f"{target!r} must be FILE.py:NAME or package.module:NAME")
    module = _module(where)
    found = named(module, name)
    if not isinstance(found, Model) and callable(found):
        found = _called(found, name, where)
    if not isinstance(found, Model):
        raise CannotLoad(
            f"{name} in {where} is of type {type(found).__name__}: it must be an elasticd.Model, or a function "
            "without arguments that makes one"
        )
    return module, found


class ProfiledModule(NamedTuple):
    """A module to measure, or the model where it has one, with its batches."""

    name: str
    request: Request  #: with the tokens of its samples, or the rows of its items
    model: Model
    make_batch: MakeBatch
    loss: Loss | None = None
    precision: Precision | None = None
    items_a_sample: float = 0.0  #: of a module of items, in the mean
    rows_an_item: float = 0.0  #: likewise


def of_script(request: Request) -> list[ProfiledModule]:
    """Runs a training script up to its Job.

    The batches are made by the Job's `collate`, of one sample as often as it takes: so that all samples of a
    batch have as many tokens as the request is told. Of several modules the sample has items; modules of items
    are measured on single items of the first samples, one of each number of rows.

    Args:
        request: names the script and its arguments.

    Returns:
        What is measured of the Job's model, with its loss and its precision; the module with the loss is the
        last.

    Raises:
        CannotLoad, CannotRun: the script gives no such Job, or has no sample of so many tokens.
    """
    assert request.arguments is not None
    recipe = recipe_of(request.target, request.arguments)
    graph, dataset = recipe.model.graph, recipe.dataset
    encoders = [_encoder(request, recipe, graph, name) for name in graph.encoders] if graph is not None else []
    assert not isinstance(dataset, Stream)
    kinds = graph.items if graph is not None else frozenset[str]()
    read = [dataset[index] for index in range(min(len(dataset), _LOOKED_AT))]
    having = [index for index, sample in enumerate(read) if _has_items(sample, kinds)]
    if not having:
        raise CannotLoad(f"none of the first {len(read)} samples has all of {', '.join(sorted(kinds))}")
    tokens = {
        index: round(
            sample_tokens([without_items(read[index], kinds)], recipe.data.collate, recipe.model.reads)
        )
        for index in having
    }
    place = min(having, key=lambda index: abs(tokens[index] - (request.sample_tokens or recipe.tokens)))
    if request.sample_tokens not in (0, tokens[place]):
        raise CannotLoad(
            f"none of the first {len(tokens)} samples has {request.sample_tokens} tokens; they have "
            f"{min(tokens.values())} to {max(tokens.values())}: name --sample-tokens {tokens[place]}, or leave "
            "it out"
        )
    sample, collate = read[place], reading(recipe.reads, recipe.data.collate)
    text = without_items(sample, kinds)
    outputs = _outputs(graph, sample) if graph is not None else {}

    def make_batch(samples: int, _: int) -> Batch:
        batch = collate([text] * samples)
        return {**batch, **{key: joined(rows * samples) for key, rows in outputs.items()}} if outputs else batch

    request = msgspec.structs.replace(request, sample_tokens=tokens[place])
    name, model = (graph.own, graph.loss_module) if graph is not None else ("model", recipe.model)
    return [*encoders, ProfiledModule(name, request, model, make_batch, recipe.loss, recipe.precision)]


def _has_items(sample: Any, kinds: Collection[str]) -> bool:
    """Returns True if a sample has some of each kind."""
    return all(isinstance(sample, Mapping) and len(sample.get(kind) or ()) for kind in kinds)


def _encoder(request: Request, recipe: Recipe, graph: ModelGraph[Module], name: str) -> ProfiledModule:
    """A module of items, with an item of each of a few numbers of rows."""
    module, dataset = graph.modules[name], recipe.dataset
    counts = item_counts(dataset, module.items)
    by_rows, found = dict[int, Any](), list[int]()
    local = _whole(module)
    for index in range(min(len(counts), _LOOKED_AT)):
        assert not isinstance(dataset, Stream)
        for item in items_of(dataset[index], index, module.items, counts) if counts[index] else ():
            batch = pad([item])
            with torch.no_grad():
                sequences, length = sizes(local["embed"](batch), of_item=True)
            rows = sequences * length
            found.append(rows)
            by_rows.setdefault(rows, batch)
        if len(found) >= _LOOKED_AT:
            break
    if not by_rows:
        raise CannotLoad(
            f"none of the first {min(len(counts), _LOOKED_AT)} samples has {module.items}, on which {name} is "
            "measured: give the profile a dataset whose first samples have some"
        )
    listed = sorted(by_rows)
    if len(listed) > _ROW_COUNTS:  # from the least to the most
        listed = [listed[at * (len(listed) - 1) // (_ROW_COUNTS - 1)] for at in range(_ROW_COUNTS)]
    return ProfiledModule(
        name,
        msgspec.structs.replace(request, items=module.items, sample_tokens=1, tokens=tuple(listed), widths=()),
        module,
        lambda rows, _: by_rows[rows],
        precision=recipe.precision,
        items_a_sample=sum(map(int, counts)) / max(1, len(counts)),
        rows_an_item=sum(found) / len(found),
    )


def _whole(module: Model) -> dict[str, Callable[..., Any]]:
    """The sections of a module on the CPU, with their first values."""
    return dict(whole_model(module, Values(module, CPU, keep=False)).modules)


def _outputs(graph: ModelGraph[Module], sample: Mapping[str, Any]) -> dict[str, list[Bundle]]:
    """The outputs of modules of items for a sample, by the key under which it is taken."""
    found = {}
    for key, name in graph.loss_module.takes.items():
        module, rows = graph.modules[name], list[Bundle]()
        sections = _whole(module)
        for item in sample[module.items]:
            x: Any = pad([item])
            with torch.no_grad():
                for section in sections.values():
                    x = section(x)
            rows.append(row_of(x, 0))
        found[key] = rows
    return found


def named(module: ModuleType, name: str) -> Any:
    """An attribute of the user's module, with dots where it is deeper."""
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            here = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and n[0] != "_")[:12])
            raise CannotLoad(f"{module.__name__} has no {name!r}; it has: {here}")
        found = getattr(found, part)
    return found


def loss_of(module: ModuleType, name: str) -> Loss | None:
    """The user's loss by its name in the file; None for an empty name. Raises CannotLoad if there is none."""
    return _function(module, name, "--loss: loss(output, batch) gives (sum, count)") if name else None


def batch_of(module: ModuleType, name: str, model: Model) -> MakeBatch:
    """The user's function; else token ids in the range of the embedding's rows, as inputs and targets."""
    if name:
        return _function(module, name, "--batch: batch(samples, tokens) gives a batch")
    rows = [m.num_embeddings for m in model.sections["embed"].modules() if isinstance(m, nn.Embedding)]
    if not rows:
        raise CannotLoad(
            "the model's embed has no nn.Embedding, so that its batches are unknown: name a function of the "
            "file with --batch, batch(samples, tokens)"
        )

    def drawn(samples: int, tokens: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, min(rows), (samples, tokens), generator=generator)
        return {"inputs": ids, "targets": ids.roll(-1, 1)}

    return drawn


def _function(module: ModuleType, name: str, what: str) -> Any:
    found = named(module, name)
    if not callable(found):
        raise CannotLoad(f"{name} is of type {type(found).__name__}, no function. {what}")
    return found


def _module(where: str) -> ModuleType:
    path = Path(where)
    try:
        if path.suffix == ".py" or path.is_file():
            if not path.is_file():
                raise CannotLoad(f"there is no file {where}")
            sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
            return module
        sys.path.insert(0, "")
        return importlib.import_module(where)
    except CannotLoad:
        raise
    except ModuleNotFoundError as error:
        if error.name == where.partition(".")[0]:
            raise CannotLoad(f"there is neither a file nor a module {where!r}") from None
        raise CannotLoad(told(where, error)) from error
    except (Exception, SystemExit) as error:
        raise CannotLoad(told(where, error)) from error


def _called(function: Callable[..., Any], name: str, where: str) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise CannotLoad(f"{name} in {where} must be a function without arguments: {error}") from None
    except ValueError:  # a builtin without a signature: calling it will tell
        pass
    try:
        return function()
    except ModelError as error:
        raise CannotLoad(str(error)) from error
    except Exception as error:
        raise CannotLoad(told(f"{name} in {where}", error)) from error


def told(what: str, error: BaseException) -> str:
    """A user's error in one line: what failed, how, and where."""
    place = user_line(error)
    return f"{what} failed: {type(error).__name__}: {error}" + (f" ({place})" if place else "")
