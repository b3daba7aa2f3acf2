"""A training script run up to its Job: what it gave, without an agent."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from elasticd.runtime.api import job as jobs
from elasticd.runtime.api.options import Options
from elasticd.runtime.checking.trial import Subject
from elasticd.runtime.data.stream import Stream, first_samples
from elasticd.runtime.model.validation import ModelError

#: Of a stream, what is tried.
_SAMPLES = 8


class CannotCheck(ValueError):
    """The script cannot be run up to its Job: one message."""


class _Given(BaseException):
    """What a Job was made of. No Exception, so that the script does not catch it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def subject_of(script: str, arguments: Sequence[str]) -> Subject:
    """Runs the script as `python SCRIPT ARGUMENTS` until it makes its Job."""
    if not Path(script).is_file():
        raise CannotCheck(f"there is no file {script}")
    signature = inspect.signature(jobs.Job.__init__)

    class Recorder:
        def __init__(self, *args: Any, **given: Any) -> None:
            bound = signature.bind(self, *args, **given)
            bound.apply_defaults()
            raise _Given(dict(bound.arguments))

    real, path, argv = jobs.Job, list(sys.path), sys.argv
    jobs.Job = Recorder  # type: ignore[assignment,misc]
    sys.argv, sys.path[0:0] = [script, *arguments], [str(Path(script).parent.resolve())]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Given as given:
        return _subject(given.arguments)
    except SystemExit as error:
        raise CannotCheck(f"{script} ended before it made a Job: {error}") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise CannotCheck(
            f"{script} failed before it made a Job: {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno})"
        ) from error
    finally:
        jobs.Job, sys.argv, sys.path[:] = real, argv, path  # type: ignore[misc]
    raise CannotCheck(f"{script} ended without making an elasticd.Job")


def _subject(arguments: Mapping[str, Any]) -> Subject:
    """Raises CannotCheck where the Job would refuse its arguments."""
    try:
        options = Options(**{each.name: arguments[each.name] for each in fields(Options)})
        model, precision = options.trained, options.numbers
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        raise CannotCheck(str(error)) from error
    dataset = options.dataset
    return Subject(
        model=model,
        loss=options.loss,
        dataset=first_samples(dataset, _SAMPLES) if isinstance(dataset, Stream) else dataset,
        collate=options.collate,
        seed=options.seed,
        optimizer=options.optimizer,
        precision=precision,
    )
