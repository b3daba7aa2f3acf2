"""The process that measures: a Request or Describe on its standard input, its answers on its output.

What the user's file prints goes to standard error.
"""

from __future__ import annotations

import os
from typing import BinaryIO

import msgspec
import torch
from elasticd_planner.value import Invalid

from elasticd.runtime.accelerator import NoDevice, placed
from elasticd.runtime.model.model import ModelError
from elasticd.runtime.profiling import collectives
from elasticd.runtime.profiling.loading import CannotLoad, batch_of, load, loss_of, told
from elasticd.runtime.profiling.measure import measure
from elasticd.runtime.profiling.parent_pipe import end_at_eof
from elasticd.wire.profiler import Describe, Described, Done, Failed, Progress, Request

_decoder = msgspec.json.Decoder(Request | Describe)


def run(request: Request, answer: BinaryIO) -> Done | Failed:
    """Measures; user's errors become one message."""

    def progress(part: float) -> None:
        answer.write(msgspec.json.encode(Progress(part=part)) + b"\n")

    try:
        torch.set_num_threads(request.threads)
        accelerator = placed(request.device, {})
        accelerator.use()
        module, model = load(request.target)
        make_batch, loss = batch_of(module, request.batch, model), loss_of(module, request.loss)
        among = collectives.measure(model, request) if request.collectives else ()
        return Done(samples=measure(model, request, accelerator, make_batch, loss, progress, among))
    except (CannotLoad, Invalid, ModelError, NoDevice, collectives.CannotMeasure) as error:
        return Failed(reason=str(error))
    except Exception as error:
        return Failed(reason=told("measuring", error))


def describe(request: Describe) -> Described | Failed:
    """Describes a model; user's errors become one message."""
    try:
        return Described(model=load(request.target)[1].spec)
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
