"""`ParallelismOptions`: sharding, precision and kept activations under every plan of a job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.engine.activation_checkpoint import Recompute, asked
from elasticd.runtime.engine.mixed_precision import Name, Precision, precision_of
from elasticd.runtime.exits import script_options


@script_options
@dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """Sharding, precision and kept activations under every plan: the argument `parallelism` of `elasticd.Job`.

    The degrees of data, tensor and pipeline parallelism are the planner's to choose, unless `plan` gives them.

    Raises:
        ValueError: a field has none of the values below, or `replicas` is given with `zero` 0.
    """

    #: Stage of ZeRO. 0: every device that computes with a parameter keeps its optimizer state; 1: the state is
    #: sharded; 2: the reduced gradients too.
    zero: Literal[0, 1, 2] = 0
    #: Devices that keep each shard of the optimizer state, on as many nodes where there are that many. With 2
    #: or more the loss of a node loses no state. Only with `zero` 1 or 2. None: 1.
    replicas: int | None = None
    #: Precision of modules: "bf16" or "fp16", under master weights in float32 ("fp16" scales the loss), or
    #: "fp32"; a `Precision` sets the types and the scale of the loss. None: the type that the modules are made
    #: of.
    precision: Name | Precision | None = None
    #: Blocks that recompute their activations in the backward pass. True: all; "plan": those of stages where
    #: memory demands it; a function says for a block's index whether that block does.
    recompute: Recompute = False
    #: Whether members of a TP group have slices of the tokens between the cut modules of a block, so that each
    #: keeps fewer activations. True: in all TP groups; "plan": in those of stages where memory demands it.
    sequence_parallel: bool | Literal["plan"] = False
    #: Whether blocks are compiled by `torch.compile`, as each device holds them, each width once in a process.
    #: Not in stages with sequence parallelism. "chunks": the consecutive blocks of a device are one graph, too,
    #: where they can be; the others are compiled one by one. "graphs", on CUDA alone: compiled blocks, and each
    #: pass of a micro-batch is launched by one call, as a CUDA graph, on devices that share no layer.
    compile: bool | Literal["chunks", "graphs"] = False
    #: The first plan: `elasticd.annotations.plan_of` makes one. None: the planner makes it. The planner puts
    #: another in its place once that is better, or one of its devices is lost.
    plan: Plan | None = None
    #: Whether a plan, the given one or the planner's, stays until one of its devices is lost or is to leave. A
    #: given plan whose devices are not all there then ends the job; without, the planner makes one near it.
    keep_plan: bool = False
    #: A file that `elasticd profile` wrote for this model: the first plan is made from the seconds in it. None:
    #: seconds are estimated from FLOPs until the job has measured its own.
    profile: str | os.PathLike[str] | None = None
    #: What each worker computes on: "cpu"; a type of device as "cuda", of which the worker's local rank is the
    #: index; or a device as "cuda:0", which several workers may then share. None: $ELASTICD_DEVICE says, else
    #: the devices that torch was built for.
    device: str | None = None

    def __post_init__(self) -> None:
        self.state  # noqa: B018  it refuses wrong values of zero and replicas
        precision_of(self.precision, 1.0)
        asked(self.recompute, 0)
        self._check_plan()
        if not isinstance(self.compile, bool) and self.compile not in ("chunks", "graphs"):
            raise ValueError(
                f'compile must be True, False, "chunks" or "graphs", not {self.compile!r}: options of '
                "torch.compile are for functions that your modules call"
            )
        if self.sequence_parallel not in (True, False, "plan"):
            raise ValueError(f'sequence_parallel must be True, False or "plan", not {self.sequence_parallel!r}')

    def refuse_device(self, accelerator: Accelerator) -> None:
        """Raises ValueError where a worker's device cannot do what is asked for."""
        if self.compile == "graphs" and not accelerator.captures:
            raise ValueError(
                f'compile="graphs" launches passes as CUDA graphs, and this worker computes on '
                f"{accelerator.text}: "
                'give ParallelismOptions(compile=True) or compile="chunks" there'
            )

    def _check_plan(self) -> None:
        if self.plan is None:
            return
        if not isinstance(self.plan, Plan):
            raise ValueError(f"plan is a {type(self.plan).__name__}: make it with elasticd.annotations.plan_of")
        if self.plan.state not in (StatePolicy(), self.state):
            raise ValueError(
                f"the plan lays out the optimizer's state with {self.plan.state}, and zero and replicas say "
                f"{self.state}: give both the same, or leave state out of plan_of"
            )
        stages = [stage for _, _, stage in self.plan.walk()]
        if any(stage.recompute for stage in stages) and not self.recompute:
            raise ValueError('the plan has stages that recompute: give recompute="plan", too')
        if any(stage.sequence_parallel for stage in stages) and not self.sequence_parallel:
            raise ValueError('the plan has sequence parallelism: give sequence_parallel="plan", too')

    @property
    def may_slice(self) -> bool | Literal["always"]:
        """The meaning of `sequence_parallel` for the planner: whether TP groups may have slices, or always
        do."""
        return "always" if self.sequence_parallel is True else self.sequence_parallel == "plan"

    @cached_property
    def state(self) -> StatePolicy:
        """The layout of master weights and optimizer state."""
        return StatePolicy(zero=self.zero, replicas=1 if self.zero and self.replicas is None else self.replicas)
