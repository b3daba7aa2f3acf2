"""A process's first passes, made before anybody waits for them.

The first forward and backward pass of a process load kernels, start autograd and fill its caches: they take up
to twice what later ones do. A device that joins a plan would take that time from all others, which wait for its
gradients.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from elasticd_planner.spec.plan import Stage

from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import Model

log = logging.getLogger(__name__)

#: Bytes of a block's parameters above which it is left cold: a step is long there, and what loads is small.
MOST_BYTES = 64 << 20
#: Tokens of the one sequence.
_TOKENS = 8


def warm(model: Model) -> None:
    """One pass of a block of zeros there and back, alone, of which nothing stays. A block that cannot be passed
    so (one that wants sequences of a certain length) is left cold."""
    layer = model.layers // 2
    if sum(parameter.nbytes for parameter in model.sections[f"blocks.{layer}"].parameters()) > MOST_BYTES:
        return
    try:
        with torch.random.fork_rng(devices=[]), _uncompiled():
            _pass(model, layer)
    except Exception as error:  # the user's module; where it matters, the job's own step will say so
        log.debug("no pass can be made beforehand: %s", error, exc_info=True)


def _uncompiled() -> AbstractContextManager[object]:
    """Functions that the user compiles are to be compiled for shapes that come. Who compiled any has loaded
    what does."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _pass(model: Model, layer: int) -> None:
    section = f"blocks.{layer}"
    stage = Stage(start=layer, stop=layer + 1, devices=("alone/0",), shares=(1,))
    local = local_model(model, stage, 0)
    held = {name: parameter for name, (_, parameter) in local.parameters.items()} | local.buffers
    for name, values in held.items():
        if name.startswith(f"{section}."):
            values.detach().zero_()
    entered = torch.zeros(1, _TOKENS, model.width, dtype=model.dtype, requires_grad=True)
    out = local.modules[section](entered)
    torch.autograd.backward(out, torch.ones_like(out))
