"""The process that measures: a Request or Describe on its standard input, its answers on its output.

What the user's file prints goes to standard error.
"""

from __future__ import annotations

import os
from typing import BinaryIO

import msgspec
import torch
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.value import Invalid

from elasticd.runtime.accelerator import NoDevice, placed
from elasticd.runtime.api.script import CannotRun
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.model.model import Loss, Model, ModelError
from elasticd.runtime.profiling import collectives
from elasticd.runtime.profiling.loading import CannotLoad, MakeBatch, batch_of, load, loss_of, of_script, told
from elasticd.runtime.profiling.measure import measure, with_widths
from elasticd.runtime.profiling.parent_pipe import end_at_eof
from elasticd.wire.profiler import Describe, Described, Done, Failed, Progress, Request

#: The advice where a pass fails on batches that nobody named.
_GUESSED = (
    '; the batches were {"inputs": ids, "targets": ids}: name a function that makes yours with --batch, or '
    "profile the training script, whose Job has them: elasticd profile SCRIPT"
)

_decoder = msgspec.json.Decoder(Request | Describe)


def run(request: Request, answer: BinaryIO) -> Done | Failed:
    """Measures; user's errors become one message."""

    def progress(part: float) -> None:
        answer.write(msgspec.json.encode(Progress(part=part)) + b"\n")

    try:
        torch.set_num_threads(request.threads)
        accelerator = placed(request.device, {})
        accelerator.use()
        request, model, make_batch, loss, precision = _loaded(request)
        request = with_widths(model, request)
        among = collectives.measure(model, request) if request.collectives else ()
        samples = measure(model, request, accelerator, make_batch, loss, progress, among, precision)
        return Done(samples=samples)
    except (CannotLoad, CannotRun, Invalid, ModelError, NoDevice, collectives.CannotMeasure) as error:
        return Failed(reason=str(error))
    except Exception as error:
        guessed = request.arguments is None and not request.batch
        return Failed(reason=told("measuring", error) + (_GUESSED if guessed else ""))


def _loaded(request: Request) -> tuple[Request, Model, MakeBatch, Loss | None, Precision | None]:
    """The request with what its target says, the model, its batches, its loss and its precision."""
    if request.arguments is not None:
        return of_script(request)
    module, model = load(request.target)
    return request, model, batch_of(module, request.batch, model), loss_of(module, request.loss), None


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
