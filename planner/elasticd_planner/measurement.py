"""What one worker measured in one step: the only thing that detection and the fit of a profile read."""

from __future__ import annotations

from elasticd_planner.value import Value


class Measurement(Value, frozen=True, kw_only=True):
    """Times in seconds, over the whole step, by clocks on one device.

    block_seconds is computation alone (communication taken out); block_work what it was spent on, in
    tokens x layers x share of the layer; so block_seconds / block_work compares devices and plans.
    tensor_seconds is the time in the TP group's collectives, waiting for slower members included;
    boundary_seconds in receiving from neighbour stages, bubbles included; reduce_seconds in the gradients'
    reduction; vote_seconds in the vote. The step's wall time is step_seconds; tokens counts the tokens of
    this rank's pipeline.
    """

    device: str
    plan: int
    step: int
    tokens: int
    block_seconds: float
    block_work: float
    embed_seconds: float = 0.0
    head_seconds: float = 0.0
    tensor_seconds: float = 0.0
    boundary_seconds: float = 0.0
    reduce_seconds: float = 0.0
    vote_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    step_seconds: float = 0.0
    micro_batches: int = 0
