"""A job of one process, as `python train.py` starts it: no agent, no coordinator, no other ranks.

The worker's runtime is the same as under an agent. `OneProcess` takes the place of its agent and of the job's
leader: it proposes one plan, of this process's device, and publishes each checkpoint at once. So a run that was
begun alone goes on under `elasticd run` from its checkpoints, and the other way round.

Ctrl-C, SIGTERM and SIGHUP end a run that keeps checkpoints after the step under way, with a last checkpoint
(`EndSignals`). Without a folder for checkpoints there is nothing to keep, and signals are left as they are.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from elasticd_planner.cost.model_profile import GUESSED_FLOPS
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search import planner
from elasticd_planner.spec.cluster import Cluster, Device, Node, node_of
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid

from elasticd.codec.message import Message
from elasticd.machines.job.replan import first_profile, loss_module, module_problems, remedy
from elasticd.records import JobSpec, Proposal
from elasticd.runtime.comm.groups import BootstrapKeyValue
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.system.end_signals import ENDING
from elasticd.system.logs import say
from elasticd.wire.snapshots import Held
from elasticd.wire.worker import (
    DrainNotice,
    PeersLost,
    Propose,
    Published,
    Refused,
    Saved,
    Shutdown,
    StayedOnPlan,
    Switched,
    ToWorker,
    Welcome,
)

log = logging.getLogger(__name__)

#: The one device's name.
DEVICE = "local/0"
#: The incarnation of its worker.
INCARNATION = "one-process"
_PLAN = 1


def runs_alone(environment: Mapping[str, str]) -> bool:
    """Returns True if nobody started this process as one worker of several, or as a worker of torchrun."""
    return "TORCHELASTIC_RUN_ID" not in environment and environment.get("WORLD_SIZE", "1") == "1"


def plan_alone(spec: JobSpec, memory: int, longest: int = 0) -> Plan:
    """The best plan of one device: one stage, and recomputation where the job allows it and memory demands it.

    A plan that the script gives names devices of a cluster, and is not used.

    Args:
        spec: the record of the job.
        memory: bytes of the device.
        longest: [tokens] the longest sequence that checkpoints of a job that packs know of.

    Raises:
        ValueError: there is none, because the model does not fit; the message says what would help.
    """
    node = Node(name=node_of(DEVICE), devices=(Device(name=DEVICE, memory=memory),))
    packed = spec.packed
    if packed is not None:
        packed = msgspec.structs.replace(packed, likely=max(packed.likely, longest))
    try:
        problem = Problem(
            cluster=Cluster(nodes=(node,)),
            profile=first_profile(spec, GUESSED_FLOPS),
            global_batch=spec.global_batch,
            micro_batch=spec.micro_batch,
            packed=packed,
            module=loss_module(spec),
            modules=module_problems(spec, GUESSED_FLOPS),
            search_space=SearchSpace(
                states=(spec.state,), recompute=spec.recompute, sequence_parallel=spec.sequence_parallel
            ),
        )
        answer = planner.plan(problem, _PLAN)
    except Invalid as error:
        raise ValueError(f"this job cannot be planned: {error}") from error
    if answer.plan is None:
        raise ValueError(
            f"one process cannot train this job: {answer.refusal}{remedy(spec, answer.cause)}; "
            "several devices may: elasticd run --job NAME SCRIPT"
        )
    return msgspec.structs.replace(answer.plan, binding={DEVICE: INCARNATION})


class OneProcess:
    """The `Control` of a job of one process.

    Args:
        plan: the plan that it trains under.
        checkpoints: names of the checkpoints to start from, the newest first.
        folder: where checkpoints lie; None: the job keeps none.
        computes_on: the device, for people.
    """

    lost = False
    alone = True

    def __init__(
        self, plan: JobPlan, checkpoints: tuple[str, ...], folder: Path | None, computes_on: str
    ) -> None:
        self.welcome = Welcome(device=DEVICE, incarnation=INCARNATION, address="127.0.0.1")
        self.ending = ""
        self._proposal = Proposal(number=plan.number, epoch=1, plan=plan, old=None, checkpoints=checkpoints)
        self._folder, self._computes_on = folder, computes_on
        self._newest = checkpoints[0] if checkpoints else "no checkpoint"
        self._handler: Callable[[ToWorker], None] = lambda message: None

    def start(self, handler: Callable[[ToWorker], None]) -> None:
        """Proposes the plan."""
        self._handler = handler
        handler(Propose(proposal=self._proposal))

    def send(self, message: Message, fd: int | None = None) -> None:
        """Answers as a leader does whose job has this one worker; the answer comes before this returns."""
        match message:
            case Switched(step=step, checkpoint=name):
                begins = f"continues from step {step} of {self._folder}" if name else f"begins at step {step}"
                say(f"one process on {self._computes_on}, without an agent; {begins}")
            case Saved(name=name):
                self._newest = name
                self._handler(Published(name=name))
            case DrainNotice():
                self._handler(Shutdown(reason=f"ended by {self.ending}; {self._folder} has {self._newest}"))
            case PeersLost(reason=reason) | Refused(reason=reason) | StayedOnPlan(reason=reason):
                self._handler(Shutdown(reason=f"this process cannot train on: {reason}"))

    def key_value(self) -> BootstrapKeyValue:
        """A store in this process, for groups of which this rank is the one member."""
        return TorchStore(torch.distributed.HashStore())  # type: ignore[attr-defined]

    def fetch(self, held: Held, seconds: float = 30.0) -> tuple[Held, int]:
        """Raises OSError: nobody keeps snapshots."""
        raise OSError("a job of one process has no snapshots")

    def renew(self) -> None:
        """Nothing: nobody fences this worker off."""

    def close(self, farewell: Message) -> None:
        """Nothing: nobody hears it."""


class EndSignals:
    """From `install` to `restore`, the first of `ENDING` has `control` end after the step under way; the next
    one does what it did before."""

    def __init__(self, control: OneProcess) -> None:
        self._control = control
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Nothing outside of the main thread, which alone may set handlers; an ignored signal stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Leaves the signals as they were."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._control.ending = signal.Signals(number).name
        self.restore()
        text = "Ctrl-C" if number == signal.SIGINT else self._control.ending
        os.write(2, f"elasticd: {text}: ends after this step, with a checkpoint; again: at once\n".encode())


def ended(name: str, reason: str) -> BaseException:
    """The end of a script that a signal asked for: KeyboardInterrupt in an interactive session, which goes back
    to its prompt or notebook; else SystemExit with the exit code that a shell gives the signal."""
    if hasattr(sys, "ps1") and name == "SIGINT":
        return KeyboardInterrupt(reason)
    say(reason.removeprefix("elasticd: "))
    return SystemExit(128 + signal.Signals[name])
