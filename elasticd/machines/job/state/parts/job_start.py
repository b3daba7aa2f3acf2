"""The start of a job: the torchruns that take part, and what comes before the first plan."""

from __future__ import annotations

import math

import msgspec
from elasticd_planner.value import Value


class Joiner(Value, frozen=True, kw_only=True):
    """A torchrun that asked to take part."""

    node: str  # its node
    client: str  # id that its agent gave it
    pid: int  # process id
    min_nodes: int  # the least of --nnodes
    max_nodes: int  # the most of --nnodes
    answered: bool = False  # it was told to start its workers, or has them


class Rehearsal(Value, frozen=True, kw_only=True):
    """All-reduces that were asked for before the first plan."""

    until: float  # when the plan is made without the answers that lack
    awaited: frozenset[str] = frozenset()  # devices that have not answered
    #: seconds by width, one from each node
    found: dict[int, tuple[float, ...]] = msgspec.field(default_factory=dict)


class JobStart(Value, frozen=True, kw_only=True):
    """The torchruns that take part, and the waits before the first plan."""

    joiners: dict[str, Joiner] = msgspec.field(default_factory=dict)  # torchruns by place: a node, or a device
    abandoned: bool = False  # its last torchrun left while it was gathering: it is about to be forgotten
    enough_since: float | None = None  # since when enough torchruns are there
    joined: tuple[str, ...] = ()  # places that take part, in rank order
    fresh: bool = False  # it begins anew: checkpoints that it did not make itself are none of its own
    world_size: int | None = None  # workers that torchrun started
    earlier: int = 0  # that of its earlier starts under this name, as far as this leader knows of any
    rehearsal: Rehearsal | None = None  # all-reduces before the first plan
    arrived: float = -math.inf  # when a worker last came, or a torchrun that the job waits for
