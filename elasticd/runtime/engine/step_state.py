"""The state of a step's passes on one device, between its acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticd_planner.layout.pass_order import Act
from elasticd_planner.spec.item_batch import GroupId
from torch import Tensor

from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.engine.captured_passes import PassSlot
from elasticd.runtime.model.bundle import Bundle
from elasticd.runtime.model.section_passes import GraphSegment
from elasticd.runtime.parallel.expert_pairs import Pairs


@dataclass
class MicroBatchState:
    """The values of a micro-batch's forward pass through a chunk that its backward pass needs."""

    ids: Sequence[int]  #: what the ledger has of it, as it came with the activation
    tokens: int = 0
    samples: int = 0
    length: int = 0  #: of its samples, in tokens; of a packed row, of all its pieces
    squares: float = 0.0  #: the sum over its tokens of the length of their sequence
    start: float = 0.0  #: when the pass of a block began, by perf_counter
    pairs: dict[str, Pairs | None] = field(default_factory=dict)  #: by section, where passes are paced
    received: Bundle | None = None  #: of the stage before; None: the chunk begins with the embedding
    segments: list[GraphSegment] = field(default_factory=list)
    #: What other modules made of the items that the embedding takes, as leaves.
    items: dict[GroupId, Bundle] = field(default_factory=dict)
    loss: Tensor | None = None  #: sum over targets; None: not the last stage
    of_samples: Tensor | None = None  #: targets of each sample, where a balance loss asks for them
    targets: float | Tensor = 0
    entered: Any = None  #: where passes may be captured: with what the forward pass was called
    slot: PassSlot | None = None  #: whose graphs its passes are; None: they are eager

    @property
    def output(self) -> Bundle:
        """The output of the last section."""
        return self.segments[-1].out if self.slot is None else self.slot.output


@dataclass
class StepState:
    """The state of a step between its acts."""

    micro_batches: Sequence[Any]
    expected: Sequence[Sequence[int]]  #: of each micro-batch what the ledger has of it
    order: list[Act]  #: its passes
    last: dict[int, Act] = field(default_factory=dict)  #: by chunk the pass after which sums may begin
    passed: int = 0  #: passes so far
    batches: dict[tuple[int, int], Any] = field(default_factory=dict)  #: read for a pass, by chunk and index
    alive: dict[tuple[int, int], MicroBatchState] = field(default_factory=dict)
    received: list[int] = field(default_factory=list)
    unexpected: list[int] = field(default_factory=list)
    stood_in: set[int] = field(default_factory=set)  #: micro-batches of which something could not be read
    losses: list[Tensor] = field(default_factory=list)
    counts: list[float | Tensor] = field(default_factory=list)
    tokens: int = 0
    #: What other modules made of items, whose gradients are there and not sent.
    taken: dict[GroupId, Bundle] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The forward and backward passes of a step on one rank."""

    loss: float | Tensor  #: sum over targets, perhaps still on the device; 0 on ranks that compute no loss
    count: float | Tensor  #: targets, likewise; 0 on ranks that compute no loss
    tokens: int  #: counted where the pipeline begins, else 0
    samples: int  #: hash of the sample ids that were seen
    balance: float | Tensor = 0.0  #: balance losses times targets, perhaps still on the device
    failure: SampleError | None = None  #: a sample that could not be read here; another one stood in for it
