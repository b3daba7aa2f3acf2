"""The first passes of a process, made before other ranks wait for it.

The first forward and backward pass of a process load kernels, start autograd and fill its caches; they take up
to twice as long as later ones. A device that joins a plan would delay all others by that, since they wait for
its gradients.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from elasticd_planner.spec.plan import Stage

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import kept_states

log = logging.getLogger(__name__)

#: Bytes of a block's parameters above which it is not warmed up: its step is long, and the kernels load in a
#: small part of it.
MOST_BYTES = 64 << 20
#: Tokens of the one sequence.
_TOKENS = 8


def warm(model: Model, accelerator: Accelerator = CPU) -> None:
    """Runs one forward and one backward pass of a block whose parameters are zero, and drops the results.

    A block that cannot run so is left out: one that demands sequences of a certain length, say, or that takes
    named tensors, which only a batch and the embedding make.
    """
    layer = model.layers // 2
    if sum(parameter.nbytes for parameter in model.sections[f"blocks.{layer}"].parameters()) > MOST_BYTES:
        return
    try:
        with kept_states(), _uncompiled():
            _pass(model, layer, accelerator)
    except Exception as error:  # the user's module; if it matters, the job's own step will raise it
        log.debug("no pass can be made beforehand: %s", error, exc_info=True)


def _uncompiled() -> AbstractContextManager[object]:
    """The user's compiled functions run eagerly inside: they are to be compiled for the job's own shapes."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _pass(model: Model, layer: int, accelerator: Accelerator) -> None:
    section = f"blocks.{layer}"
    stage = Stage(start=layer, stop=layer + 1, devices=("alone/0",), shares=(1,))
    local = local_model(model, stage, 0, accelerator)
    held = {name: parameter for name, (_, parameter) in local.parameters.items()} | local.buffers
    for name, values in held.items():
        if name.startswith(f"{section}."):
            values.detach().zero_()
    shape, place = (1, _TOKENS, model.width), accelerator.device
    entered = torch.zeros(shape, dtype=model.dtype, device=place, requires_grad=True)
    out = local.passes[section](entered)
    torch.autograd.backward(out, torch.ones_like(out))
