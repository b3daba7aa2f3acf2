"""A planning problem and its answer: all that the planner reads, and all that it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, NamedTuple

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.cluster import Cluster, check_rates
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.mesh import AllowedMesh, MeshPlan
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import StoredValue, Value, refuse

#: What a plan is searched for: the least seconds of a step, or of its steady state, in which pipelines neither
#: fill nor drain.
Objective = Literal["step", "steady"]


class SearchSpace(Value, frozen=True, kw_only=True):
    """The choices of the search besides the layout, and the fixed parts of the layout. Stored as "freedom",
    with the fixed sizes as "tp" and "dp"."""

    micro_batches: tuple[int, ...] = ()  # sizes of a micro-batch in samples; empty: the problem's alone
    states: tuple[StatePolicy, ...] = (StatePolicy(),)  # in the order of preference
    # Whether stages may recompute activations in the backward pass where memory demands it, or must ("always").
    recompute: bool | Literal["always"] = False
    # Whether TP groups may have slices of the tokens between cut modules where memory demands it, or must.
    sequence_parallel: bool | Literal["always"] = False
    interleave: int = 1  # the most chunks of layers of a stage, where that takes less time
    lanes: int = 1  # the most lanes of a pipeline, where pipelines of equal borders can be joined
    # The TP size on nodes whose devices are all normal, and the number of pipelines; None: searched.
    fixed_tp: int | None = msgspec.field(default=None, name="tp")
    fixed_dp: int | None = msgspec.field(default=None, name="dp")

    def __post_init__(self) -> None:
        if not self.states:
            refuse("search space: states must name one state policy at least")
        if any(size < 1 for size in self.micro_batches):
            refuse(f"search space: sizes of micro-batches must be positive, not {self.micro_batches}")
        if self.interleave < 1:
            refuse(f"search space: interleave {self.interleave} must be at least 1: chunks of a stage")
        if self.lanes < 1:
            refuse(f"search space: lanes {self.lanes} must be at least 1: lanes of a pipeline")
        if any(size is not None and size < 1 for size in (self.fixed_tp, self.fixed_dp)):
            refuse(
                f"search space: fixed_tp {self.fixed_tp} and fixed_dp {self.fixed_dp} must be positive or None"
            )


class ModuleProblem(Value, frozen=True, kw_only=True):
    """A module of items beside the module with the loss: an encoder of images, with what samples bring it."""

    name: str
    profile: ModelProfile  # micro-batches of any size: its items are sized by `rows_an_item`
    items: str  # what it takes of a sample: "images"
    items_a_sample: float  # in the mean
    rows_an_item: float  # [tokens] that its blocks work on, in the mean
    # [bytes] what its head gives of an item in the mean (0: as many as an activation between its blocks)
    output_bytes: float = 0.0
    trained: bool = True  # False: it runs forward alone, and has neither gradients nor optimizer state

    def __post_init__(self) -> None:
        if not self.name or not self.items:
            refuse("module of items: it needs a name, and the name of the items that it takes")
        if not 0 < self.items_a_sample < math.inf or not 0 < self.rows_an_item < math.inf:
            refuse(
                f"module {self.name}: items_a_sample and rows_an_item are means, and must be positive, not "
                f"{self.items_a_sample} and {self.rows_an_item}"
            )

    @property
    def output_row_bytes(self) -> float:
        """Bytes that a row of an item brings to the module with the loss, on average."""
        return self.output_bytes / self.rows_an_item or self.profile.boundary_bytes


class Problem(StoredValue, frozen=True, kw_only=True, tag="planner-problem"):
    """Plan `profile`'s model on `cluster` at `rates` (device name to how many times slower than normal;
    a dead device is left out of the cluster). `current` is the running plan, which near-equal plans are
    compared with. The profile's bytes and units come from the model's spec. `given` is a plan to answer with in
    place of a search, and `only_given` says that no other will do. `packed`: the sequences of a step, where
    they are packed in rows; the plan is made for them, and no pipeline is bound to a number of samples.
    `modules`: those of items that feed the module with the loss, which `module` names; `profile` is that one's.
    `experts`: the load by which those of TP groups are placed; None: they are divided by shares, in order.
    `objective`: what the plan has least of; a problem of several modules has that of a step.

    A planner refuses a problem of a newer version than its own, and skips fields that it does not know: a new
    field without which a plan would be wrong comes with a new version (`newest`)."""

    newest: ClassVar[int] = 2  # 2: modules of items

    cluster: Cluster
    profile: ModelProfile
    global_batch: int
    micro_batch: int
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    current: Plan | None = None
    search_space: SearchSpace = msgspec.field(default=SearchSpace(), name="freedom")
    given: Plan | None = None
    only_given: bool = False
    packed: PackedSequences | None = None
    module: str = "model"
    modules: tuple[ModuleProblem, ...] = ()
    experts: ExpertLoad | None = None
    objective: Objective = "step"

    def __post_init__(self) -> None:
        if self.version <= self.newest:  # the least that says all that is in it
            msgspec.structs.force_setattr(self, "version", 2 if self.modules else 1)
        if self.modules:
            self._check_modules()
        if self.micro_batch < 1 or self.global_batch < 1 or self.global_batch % self.micro_batch:
            refuse(f"global_batch {self.global_batch} does not divide into micro-batches of {self.micro_batch}")
        odd = [size for size in self.search_space.micro_batches if self.global_batch % size]
        if odd:
            refuse(
                f"search space: global_batch {self.global_batch} is no multiple of micro-batches of {odd[0]}"
            )
        check_rates(self.rates, self.cluster)

    def _check_modules(self) -> None:
        names = [self.module, *(module.name for module in self.modules)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            refuse(f"modules: two are named {twice[0]!r}; give each a name of its own")


class MeshProblem(StoredValue, frozen=True, kw_only=True, tag="mesh-problem"):
    """Choose a mesh for a job on `cluster`, its devices, and the samples of a step that each lane takes, at
    `rates` (device name to how many times slower than normal). `current` is the running plan."""

    cluster: Cluster
    meshes: tuple[AllowedMesh, ...]  # that the job may have, preferred first
    global_batch: int
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    current: MeshPlan | None = None
    sample_seconds: float = 0.0  # that a normal device takes for a sample (0: not measured yet)
    other_seconds: float = 0.0  # of a step beside its slowest lane's computation

    def __post_init__(self) -> None:
        if not self.meshes or self.global_batch < 1:
            refuse("mesh problem: it needs a mesh that the job may have, and a sample in a step")
        check_rates(self.rates, self.cluster)


#: Causes of a refusal that callers give advice for: state or activations need more memory than there is.
RefusalCause = Literal["", "memory"]


class Refusal(NamedTuple):
    """The reason for which a problem has no plan."""

    text: str  # for people
    cause: RefusalCause = ""  # for callers


class Answer(StoredValue, frozen=True, kw_only=True, tag="planner-answer"):
    """The best plan (its prediction and reason inside), or why there is none: what does not fit, by how
    much, and what would help. `current_seconds` is the current plan's step time at the problem's rates, None
    where it cannot run: it is of another problem, or does not fit any more."""

    plan: Plan | None
    refusal: str = ""
    cause: RefusalCause = ""  # of the refusal
    current_seconds: float | None = None
    candidates: int = 0

    @classmethod
    def refused(cls, refusal: Refusal, *, current_seconds: float | None = None, candidates: int = 0) -> Answer:
        """Returns the answer that there is no plan."""
        return cls(
            plan=None,
            refusal=refusal.text,
            cause=refusal.cause,
            current_seconds=current_seconds,
            candidates=candidates,
        )


class MeshAnswer(StoredValue, frozen=True, kw_only=True, tag="mesh-answer"):
    """The plan of a mesh, or why there is none: see `Answer`."""

    plan: MeshPlan | None
    refusal: str = ""
    current_seconds: float | None = None
    candidates: int = 0


#: What a planner is given: a model to cut, or a mesh to choose; and its answer.
JobProblem = Problem | MeshProblem
JobAnswer = Answer | MeshAnswer


def without(problem: Problem, device: str) -> Problem:
    """The same problem with one device gone."""
    problem.cluster.device(device)  # refuses a name that is not there
    cluster = problem.cluster.without([device])
    if cluster is None:
        refuse(f"device {device} is the only one of the cluster")
    rates = {name: rate for name, rate in problem.rates.items() if name != device}
    return msgspec.structs.replace(problem, cluster=cluster, rates=rates)


def with_current(problem: Problem, change: Callable[[Plan], Plan]) -> Problem:
    """The same problem near another plan, which is made of the running one, if there is one."""
    current = problem.current
    return problem if current is None else msgspec.structs.replace(problem, current=change(current))


def ideal_ratio(rates: Iterable[float]) -> float:
    """N / sum(1 / x) over the rates of all devices: how much longer a step would take if the work could be
    divided perfectly. A yardstick, not a bound."""
    listed = list(rates)
    return len(listed) / sum(1 / rate for rate in listed)
