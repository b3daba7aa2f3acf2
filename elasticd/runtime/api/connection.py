"""The connection that a Job begins with: to this node's agent, or in a process without a launcher to nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from elasticd.records import JobSpec
from elasticd.runtime.api.evaluation import HeldOut
from elasticd.runtime.api.hello import Offer, environment, hello, job_spec, leave_torch_groups
from elasticd.runtime.api.resumed_optimizer import other_optimizer
from elasticd.runtime.checkpoint.loader import longest_trained, offered
from elasticd.runtime.control import parent_death
from elasticd.runtime.control.agent_client import AgentClient
from elasticd.runtime.control.control import Control
from elasticd.runtime.control.one_process import OneProcess, plan_alone, runs_alone
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.exits import refuse_in_one_line
from elasticd.runtime.model.optimizer_check import ScriptOptimizer
from elasticd.wire.unix_socket import default_path

log = logging.getLogger(__name__)

#: The variable with the job's name, which torchrun sets.
NAME = "TORCHELASTIC_RUN_ID"
#: The name of a job that runs in one process.
_ALONE = "one-process"


class JobConnection(NamedTuple):
    """A job that was announced."""

    control: Control
    spec: JobSpec  # the record of the job
    longest: int  # [tokens] the longest sequence that its checkpoints know of (0: nothing is known)


def refuse_torch_groups() -> None:
    """Raises ValueError where the script of a launched process made torch's process group itself, and has one
    that it makes later fail at once, with the remedy."""
    if runs_alone(os.environ):
        refuse_in_one_line()
    else:
        leave_torch_groups(os.environ)


def connect(
    recipe: Recipe,
    held_out: Mapping[str, HeldOut],
    optimizer: ScriptOptimizer | None = None,
    *,
    tries: bool = True,
) -> JobConnection:
    """Announces the job to this node's agent. A process without a launcher trains alone.

    Args:
        recipe: the arguments of the Job.
        held_out: its held-out sets, by name.
        optimizer: its optimizer and scheduler as they begin, to compare with a checkpoint's; None: not known.
        tries: its modules and loss may be tried before the first step.

    Raises:
        ValueError: the job cannot start so; the message says what to change.
        ConnectionError, RuntimeError: there is no agent, or it does not take this worker.
    """
    other = partial(other_optimizer, optimizer) if optimizer is not None else lambda _: ""
    offer = partial(offered, other=other)
    if runs_alone(os.environ):
        return _alone(recipe, held_out, offer, tries)
    name = environment(NAME)
    parent_death.end_with(os.getppid())
    if remedy := parent_death.without_restarts(os.environ):
        log.warning(remedy)
    spec = job_spec(recipe, name, held_out, measures=tries)
    said = hello(spec, recipe.checkpointing.path, recipe.accelerator, offer)
    return JobConnection(AgentClient(default_path(), said), spec, said.longest)


def _alone(recipe: Recipe, held_out: Mapping[str, HeldOut], offer: Offer, tries: bool) -> JobConnection:
    spec, folder, accelerator = (
        job_spec(recipe, _ALONE, held_out, measures=tries),
        recipe.checkpointing.path,
        recipe.accelerator,
    )
    checkpoints = offer(folder, spec) if folder is not None else ()
    longest = longest_trained(folder) if folder is not None and spec.packed is not None else 0
    plan = plan_alone(spec, accelerator.total_bytes(), longest)
    return JobConnection(OneProcess(plan, checkpoints, folder, accelerator.text), spec, longest)
