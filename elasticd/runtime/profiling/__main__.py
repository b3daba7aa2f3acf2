"""The process that measures: a Request or Describe on its standard input, its answers on its output.

What the user's file prints goes to standard error.
"""

from __future__ import annotations

import os
from typing import BinaryIO

import msgspec
import torch
from elasticd_planner.profiling.samples import Samples
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.value import Invalid

from elasticd.runtime.accelerator import NoDevice, placed
from elasticd.runtime.api.script import CannotRun
from elasticd.runtime.model.model import ModelError
from elasticd.runtime.profiling import collectives
from elasticd.runtime.profiling.loading import (
    CannotLoad,
    ProfiledModule,
    batch_of,
    load,
    loss_of,
    of_script,
    told,
)
from elasticd.runtime.profiling.measure import measure, with_widths
from elasticd.runtime.profiling.parent_pipe import end_at_eof
from elasticd.wire.profiler import Describe, Described, Done, Failed, ItemSamples, Progress, Request

#: The advice where a pass fails on batches that nobody named.
_GUESSED = (
    '; the batches were {"inputs": ids, "targets": ids}: name a function that makes yours with --batch, or '
    "profile the training script, whose Job has them: elasticd profile SCRIPT"
)

_decoder = msgspec.json.Decoder(Request | Describe)


def run(request: Request, answer: BinaryIO) -> Done | Failed:
    """Measures; user's errors become one message."""

    try:
        torch.set_num_threads(request.threads)
        accelerator = placed(request.device, {})
        accelerator.use()
        listed = _loaded(request)
        found = []
        for number, each in enumerate(listed):

            def progress(part: float, number: int = number) -> None:
                far = Progress(part=(number + part) / len(listed))
                answer.write(msgspec.json.encode(far) + b"\n")

            own = with_widths(each.model, each.request)
            among = collectives.measure(each.model, own) if own.collectives else ()
            batches = each.make_batch, each.loss
            found.append(measure(each.model, own, accelerator, *batches, progress, among, each.precision))
        *encoders, last = zip(listed, found, strict=True)
        return Done(
            samples=last[1],
            module=last[0].name,
            modules=tuple(_of_items(each, samples) for each, samples in encoders),
        )
    except (CannotLoad, CannotRun, Invalid, ModelError, NoDevice, collectives.CannotMeasure) as error:
        return Failed(reason=str(error))
    except Exception as error:
        guessed = request.arguments is None and not request.batch
        return Failed(reason=told("measuring", error) + (_GUESSED if guessed else ""))


def _of_items(module: ProfiledModule, samples: Samples) -> ItemSamples:
    return ItemSamples(
        name=module.name,
        items=module.request.items,
        items_a_sample=module.items_a_sample,
        rows_an_item=module.rows_an_item,
        trained=any(parameter.kind == "trained" for parameter in module.model.spec.parameters.values()),
        samples=samples,
    )


def _loaded(request: Request) -> list[ProfiledModule]:
    """The modules that the target names; the module with the loss is the last."""
    if request.arguments is not None:
        return of_script(request)
    module, model = load(request.target)
    if model.graph is not None:
        raise CannotLoad(
            f"{model.name} has the modules {', '.join(model.graph.modules)}, which are measured on the samples "
            "of a job: profile its training script, elasticd profile SCRIPT"
        )
    make_batch, loss = batch_of(module, request.batch, model), loss_of(module, request.loss)
    return [ProfiledModule("model", request, model, make_batch, loss)]


def describe(request: Describe) -> Described | Failed:
    """Describes a model; user's errors become one message."""
    try:
        specs = load(request.target)[1].specs
        return Described(modules={"model": specs} if isinstance(specs, ModelSpec) else dict(specs))
    except (CannotLoad, Invalid, ModelError) as error:
        return Failed(reason=str(error))
    except Exception as error:
        return Failed(reason=told("describing the model", error))


def main() -> None:
    """Answers the request on standard input with a line of JSON on standard output, and ends the process."""
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request = _decoder.decode(stdin.readline())
    try:
        end_at_eof(0)
        found = describe(request) if isinstance(request, Describe) else run(request, answer)
        answer.write(msgspec.json.encode(found) + b"\n")
    except (KeyboardInterrupt, BrokenPipeError):  # nobody waits for the answer
        os._exit(1)
    os._exit(0)  # threads that the user's file left must not hold it up


if __name__ == "__main__":
    main()
