"""A training script is run up to its Job, without an agent, for the recipe that it gives."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.api.job import Job
from elasticd.runtime.data.stream import Stream, first_samples
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.exits import JobStopped, without_launcher
from elasticd.system.user_line import user_line

#: Of a stream, what is tried.
_SAMPLES = 8


class CannotRun(ValueError):
    """The script cannot be run up to its Job: one message."""


class _Given(BaseException):
    """A Job was made with this recipe. No Exception, so that the script does not catch it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


def recipe_of(script: str, arguments: Sequence[str]) -> Recipe:
    """Runs the script as `python SCRIPT ARGUMENTS` until it makes its Job.

    Returns:
        The recipe of that Job; a stream is replaced by its first samples.

    Raises:
        CannotRun: the script made no Job.
    """
    if not Path(script).is_file():
        raise CannotRun(f"there is no file {script}")

    def give(job: Job, *_: object) -> None:
        raise _Given(job._recipe)

    connect, chosen, path, argv = Job._connect, Job._accelerator_of, list(sys.path), sys.argv
    # On the CPU, whatever there is: the ranks are threads here, and of one device one thread passes backward.
    Job._accelerator_of = lambda self, asked: CPU  # type: ignore[method-assign]
    Job._connect = give  # type: ignore[assignment,method-assign]
    sys.argv, sys.path[0:0] = [script, *arguments], [str(Path(script).parent.resolve())]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Given as given:
        recipe = given.recipe
        if isinstance(recipe.dataset, Stream):
            return replace(recipe, dataset=first_samples(recipe.dataset, _SAMPLES))
        return recipe
    except JobStopped as refused:
        raise CannotRun(str(refused.__cause__)) from refused
    except SystemExit as error:
        raise CannotRun(f"{script} ended before it made a Job: {error}") from None
    except Exception as error:
        if remedy := without_launcher(error):
            raise CannotRun(f"{remedy} ({user_line(error)})") from error
        raise CannotRun(
            f"{script} failed before it made a Job: {type(error).__name__}: {error} ({user_line(error)})"
        ) from error
    finally:
        Job._connect, Job._accelerator_of = connect, chosen  # type: ignore[method-assign]
        sys.argv, sys.path[:] = argv, path
    raise CannotRun(f"{script} ended without making an elasticd.Job")
