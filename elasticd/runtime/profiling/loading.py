"""The user's model, loss and batches: by name in the user's file, or those of a training script's Job."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import nn

from elasticd.runtime.api.script import recipe_of
from elasticd.runtime.data.collate import Batch
from elasticd.runtime.data.loader import reading, sample_tokens
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.model.model import Loss, Model, ModelError
from elasticd.system.user_line import user_line
from elasticd.wire.profiler import Request

#: Samples of a script's dataset among which one is taken.
_LOOKED_AT = 64

#: (samples, tokens of each) to a batch, as the model's embed takes it.
MakeBatch = Callable[[int, int], Batch]


class CannotLoad(ValueError):
    """What was named is not there or not what it should be: one message for the user."""


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


def of_script(request: Request) -> tuple[Request, Model, MakeBatch, Loss, Precision | None]:
    """Runs a training script up to its Job.

    The batches are made by the Job's `collate`, of one sample as often as it takes: so that all samples of a
    batch have as many tokens as the request is told.

    Args:
        request: names the script and its arguments.

    Returns:
        The request with the tokens of a sample in it, the Job's model, its batches, its loss and its precision.

    Raises:
        CannotLoad, CannotRun: the script gives no such Job, or has no sample of so many tokens.
    """
    assert request.arguments is not None
    recipe = recipe_of(request.target, request.arguments)
    dataset: Any = recipe.dataset
    tokens = [
        round(sample_tokens([dataset[index]], recipe.data.collate, recipe.model.reads))
        for index in range(min(len(dataset), _LOOKED_AT))
    ]
    place = min(
        range(len(tokens)), key=lambda index: abs(tokens[index] - (request.sample_tokens or recipe.tokens))
    )
    if request.sample_tokens not in (0, tokens[place]):
        raise CannotLoad(
            f"none of the first {len(tokens)} samples has {request.sample_tokens} tokens; they have "
            f"{min(tokens)} to {max(tokens)}: name --sample-tokens {tokens[place]}, or leave it out"
        )
    sample, collate = dataset[place], reading(recipe.reads, recipe.data.collate)
    request = msgspec.structs.replace(request, sample_tokens=tokens[place])
    return request, recipe.model, lambda samples, _: collate([sample] * samples), recipe.loss, recipe.precision


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
