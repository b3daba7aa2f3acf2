"""The process behind `elasticd check SCRIPT`: prints a line for each layout, and what is wrong.

Exit code 0: every layout gives what one process gives; 1: one does not; 2: nothing could be compared. What the
script prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from elasticd.runtime.api.script import CannotRun, recipe_of
from elasticd.runtime.checking.module_layouts import modules_compared, one_process
from elasticd.runtime.checking.verdict import findings, own_modules_agree
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.sequence_mixing import packable
from elasticd.runtime.parallel.sequence_parallel import refuse_model
from elasticd.runtime.reference import layouts
from elasticd.runtime.reference.layouts import Variation
from elasticd.runtime.reference.trial import Trial, tried

#: Samples of the step: of two replicas the second has two micro-batches.
_SAMPLES = 3


def compared(recipe: Recipe, say: Callable[[str], None]) -> bool:
    """Tries every layout; whether all are as one process. What deals samples to several micro-batches is tried
    where the rules are right, and compared with one process that takes them one by one. Samples are padded, and
    packed where that is what is tried."""
    if recipe.model.graph is not None:
        return modules_compared(recipe, say)
    asked_for = replace(recipe, data=replace(recipe.data, global_tokens=None))  # the step has a few samples
    recipe = replace(asked_for, data=replace(asked_for.data, packing=None))
    model, samples = recipe.model, min(_SAMPLES, recipe.samples)
    one = one_process(recipe, layouts.alone(model.spec, samples))
    say(f"{model.name}: {model.layers} blocks; one process has a loss of {one.loss:.6g}")
    if model.proved:
        say(f"ok    {model.proved}")
    if not own_modules_agree(recipe, samples, say):
        return False

    def right(said: str, variation: Variation, alone: Trial, outputs: bool) -> bool:
        found = findings(model, alone, tried(recipe, variation), outputs=outputs)
        wrong = list(dict.fromkeys(found))
        say(f"{'WRONG' if wrong else 'ok   '} {said}")
        for line in wrong:
            say(f"      {line}")
        return not wrong

    good = [right(said, each, one, True) for said, each in layouts.layouts(model.spec, samples).items()]
    if not all(good):
        return False
    good = [right(said, each, one, True) for said, each in layouts.others(model.spec, samples).items()]
    asked = bool(recipe.parallelism.sequence_parallel)
    for said, each in layouts.sliced(model.spec, samples).items():
        good.append(right(said, each, one, True) if asked else _may_be_sliced(recipe, one, said, each, say))
    good.append(_may_be_packed(asked_for, one, samples, say))
    if dealt := layouts.dealt(model.spec, samples):
        by_sample = one_process(recipe, layouts.by_sample(model.spec, samples))
        if apart := list(findings(model, one, by_sample, outputs=False)):
            say("note  one process gives something else where each sample is a micro-batch of its own:")
            say(f"      {apart[0]}. Do padded tokens or other samples reach what a sample gives?")
        good += [right(said, each, by_sample, False) for said, each in dealt.items()]
    return all(good)


def _may_be_sliced(
    recipe: Recipe, one: Trial, said: str, variation: Variation, say: Callable[[str], None]
) -> bool:
    """Says whether a job may ask for sequence parallelism, which this one does not. True: nothing is wrong."""
    try:
        refuse_model(recipe.model)
    except ModelError as error:
        found = [str(error)]
    else:
        found = list(findings(recipe.model, one, tried(recipe, variation), outputs=True))
    say(f"note  not for this model: {said}" if found else f"ok    {said}")
    if found:
        say(f"      {found[0]}")
    return True


def _may_be_packed(recipe: Recipe, one: Trial, samples: int, say: Callable[[str], None]) -> bool:
    """Says whether sequences can be packed; of a job that packs them, whether a step on one row is that of one
    process with padded samples. True: nothing is wrong with what the job asks for."""
    dataset: Any = recipe.dataset
    asked, model = recipe.data.packing is not None, recipe.model
    collate = None if recipe.data.collate is pad else recipe.data.collate
    untried: list[str] = []
    found = packable(model, recipe.loss, [dataset[index] for index in range(samples)], collate, untried.append)
    if untried and not asked:
        say(f"note  not tried: packed rows ({untried[0]})")
        return True
    if asked and not found:
        found = list(findings(model, one, tried(recipe, layouts.alone(model.spec, samples)), outputs=False))
    wrong = "WRONG" if asked else "note  not for this model:"
    said = "packed rows: each sequence by itself"
    say(f"{wrong} {said}" if found else f"ok    {said}")
    for line in found:
        say(f"      {line}")
    return not (found and asked)


def main() -> int:
    """Checks the script of the command line. Results go to standard output, errors to standard error.

    Returns:
        The exit code: 0, 1 or 2, as at the top of this file.
    """
    script, *arguments = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warnings.simplefilter("default", UserWarning)
    try:
        good = compared(recipe_of(script, arguments), lambda line: print(line, file=answer))
    except (CannotRun, ModelError) as error:
        print(f"elasticd: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads that the script left must not hold it up
