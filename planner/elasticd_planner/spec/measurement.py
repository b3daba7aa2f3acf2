"""Measurements of one worker in one step: the only thing that detection and the fit of a profile read."""

from __future__ import annotations

import msgspec

from elasticd_planner.spec.batch import BatchSummary
from elasticd_planner.value import Value


class ModuleMeasurement(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Times of a device in one module of items in a step, in seconds, as `Measurement` has them of the module
    with the loss."""

    block_seconds: float = 0.0  # of computation, without communication
    block_work: float = 0.0  # tokens x layers x share of the layer
    tokens: int = 0  # of all items that its lane took
    items: int = 0  # that its lane took
    squares: float = 0.0  # the sum over items of their tokens, squared
    forward_seconds: float = 0.0  # of block_seconds; and below
    backward_seconds: float = 0.0
    again_seconds: float = 0.0
    embed_seconds: float = 0.0
    head_seconds: float = 0.0
    tensor_seconds: float = 0.0  # in the module's TP group
    reduce_seconds: float = 0.0  # in the reduction of its gradients
    # How many 64ths of the planned time its lane takes for a row, by which it gets its share of items;
    # 0: shares do not follow.
    slowdown: int = 0

    @property
    def compute_seconds(self) -> float:
        """Seconds of computation of all its sections."""
        return self.block_seconds + self.again_seconds + self.embed_seconds + self.head_seconds


class Measurement(Value, frozen=True, kw_only=True):
    """Times in seconds, over the whole step, by clocks on one device.

    block_seconds is computation alone (communication taken out); block_work what it was spent on, in
    tokens x layers x share of the layer; so block_seconds / block_work compares devices and plans. Of
    block_seconds, forward_seconds and backward_seconds are those of the passes (0 where they were not told
    apart); what blocks took that made their activations again comes on top, in again_seconds. tensor_seconds
    is the time in the TP group's collectives, waiting for slower members included; boundary_seconds in
    receiving from neighbour stages, bubbles included; reduce_seconds in the gradients' reduction; vote_seconds
    in the vote; input_seconds in waiting for the data; context_seconds in the exchange of keys of
    sequences that are cut over lanes. The step's wall time is step_seconds; memory_bytes the most memory that
    was in use (0: not known).

    tokens counts the tokens of this rank's pipeline, as computed (padding included), in sequences of which
    `squares` is the sum of squared lengths, `longest` the longest, `shortest` the shortest, and `lengths` a
    histogram: how many by `sequence_lengths.bucket` (empty, and 0: not known). sequence_tokens counts the
    tokens of these sequences, without what fills a packed row up (0: not known). modalities counts what the
    batches name of them, on devices that read the data (empty: nothing).

    Of a model of several modules `modules` has those of items that the device computes with. Computation, work,
    tensor_seconds and reduce_seconds are those of the module with the loss then; all else is the device's.
    """

    device: str
    plan: int
    step: int
    tokens: int
    block_seconds: float
    block_work: float
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    again_seconds: float = 0.0
    embed_seconds: float = 0.0
    head_seconds: float = 0.0
    tensor_seconds: float = 0.0
    boundary_seconds: float = 0.0
    reduce_seconds: float = 0.0
    vote_seconds: float = 0.0
    input_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    step_seconds: float = 0.0
    micro_batches: int = 0
    squares: float = 0.0
    longest: int = 0
    shortest: int = 0
    sequence_tokens: int = 0
    lengths: dict[int, int] = msgspec.field(default_factory=dict)
    memory_bytes: int = 0
    modalities: dict[str, int] = msgspec.field(default_factory=dict)
    context_seconds: float = 0.0
    # How many 64ths of a normal lane's time its lane takes for the same work, by which the lane gets its share
    # of tokens; 0: shares do not follow.
    slowdown: int = 0
    batch: BatchSummary | None = None  # the packed batch of the step; from the first rank alone
    longest_so_far: int = 0  # [tokens] the longest sequence of any step that this worker knows of
    modules: dict[str, ModuleMeasurement] = msgspec.field(default_factory=dict)  # of items, by name
    # The rows of its lane that went to each expert, by block: in every tenth step, of the first device of each
    # TP group.
    expert_rows: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
