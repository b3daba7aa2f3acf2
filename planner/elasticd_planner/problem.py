"""A planning problem and its answer: all that the planner reads, and all that it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.cluster import Cluster, Node, check_rates
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import Value, refuse


class Freedom(Value, frozen=True, kw_only=True):
    """What the search may choose besides the layout, and what of the layout is fixed."""

    micro_batches: tuple[int, ...] = ()  # sizes of a micro-batch in samples; empty: the problem's alone
    states: tuple[StatePolicy, ...] = (StatePolicy(),)  # in the order of preference
    # Whether stages may recompute activations in the backward pass where memory demands it, or must ("always").
    recompute: bool | Literal["always"] = False
    interleave: int = 1  # the most chunks of layers of a stage, where that takes less time
    tp: int | None = None  # the TP size on nodes whose devices are all normal; None: searched
    dp: int | None = None  # the number of pipelines; None: searched

    def __post_init__(self) -> None:
        if not self.states:
            refuse("freedom: states must name one state policy at least")
        if any(size < 1 for size in self.micro_batches):
            refuse(f"freedom: sizes of micro-batches must be positive, not {self.micro_batches}")
        if self.interleave < 1:
            refuse(f"freedom: interleave {self.interleave} must be at least 1: chunks of layers of a stage")
        if any(pin is not None and pin < 1 for pin in (self.tp, self.dp)):
            refuse(f"freedom: tp {self.tp} and dp {self.dp} must be positive where they are pinned")


class Problem(Value, frozen=True, kw_only=True):
    """Plan `profile`'s model on `cluster` at `rates` (device name to how many times slower than normal;
    a dead device is left out of the cluster). `current` is the running plan, which near-equal plans are
    compared with. The profile's bytes and units come from the model's spec."""

    cluster: Cluster
    profile: ModelProfile
    global_batch: int
    micro_batch: int
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    current: Plan | None = None
    freedom: Freedom = Freedom()

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.global_batch < 1 or self.global_batch % self.micro_batch:
            refuse(f"global_batch {self.global_batch} does not divide into micro-batches of {self.micro_batch}")
        odd = [size for size in self.freedom.micro_batches if self.global_batch % size]
        if odd:
            refuse(f"freedom: global_batch {self.global_batch} does not divide into micro-batches of {odd[0]}")
        check_rates(self.rates, self.cluster)


class Answer(Value, frozen=True, kw_only=True):
    """The best plan (its prediction and reason inside), or why there is none: what does not fit, by how
    much, and what would help. `current_seconds` is the current plan's step time at the problem's rates, None
    where it cannot run: it is of another problem, or does not fit any more."""

    plan: Plan | None
    refusal: str = ""
    current_seconds: float | None = None
    candidates: int = 0


def without(problem: Problem, device: str) -> Problem:
    """The same problem with one device gone."""
    problem.cluster.device(device)  # refuses a name that is not there
    nodes = (
        Node(name=node.name, devices=tuple(d for d in node.devices if d.name != device))
        for node in problem.cluster.nodes
    )
    left = tuple(node for node in nodes if node.devices)
    if not left:
        refuse(f"device {device} is the only one of the cluster")
    return msgspec.structs.replace(
        problem,
        cluster=msgspec.structs.replace(problem.cluster, nodes=left),
        rates={name: rate for name, rate in problem.rates.items() if name != device},
    )


def ideal_ratio(rates: Iterable[float]) -> float:
    """N / sum(1 / x) over the rates of all devices: how much longer a step would take if the work could be
    divided perfectly. A yardstick, not a bound."""
    listed = list(rates)
    return len(listed) / sum(1 / rate for rate in listed)
