"""Whom an agent lets in: the reasons against a client's first message, each with the remedy."""

from __future__ import annotations

from elasticd.machines.agent.state import Opened, State
from elasticd.names import name_refusal
from elasticd.wire.messages import Hello, Join, protocol_refusal


def refusal(state: State, event: Opened) -> str:
    """Why this worker or torchrun is not let in, or the empty string."""
    body, node = event.body, state.record.node
    if apart := protocol_refusal("this process's hello to its agent", body):
        return apart
    if body.pid != event.pid:
        return (
            f"process {event.pid} says that it is {body.pid}: agent and trainer must share one PID namespace "
            "(with containers, run the agent in the same one or share the host's)"
        )
    # A job that runs already, let in by release 0.1, may be called otherwise.
    runs = (isinstance(body, Hello) and body.incarnation) or body.job in state.plans
    if not runs and (why := name_refusal("the job's name (--rdzv-id)", body.job)):
        return why
    if isinstance(body, Join):
        return ""
    devices = len(state.record.devices)
    if not 0 <= body.local_rank < devices:
        return (
            f"local rank {body.local_rank} has no device: node {node!r} has {devices}; "
            f"start torchrun with --nproc-per-node={devices} at most, or 'elasticd run' with --devices "
            f"{devices} at most, and with GPUs 0 to {devices - 1} in $CUDA_VISIBLE_DEVICES"
        )
    other = state.worker_of(f"{node}/{body.local_rank}")
    # The same process may come as a new incarnation.
    if other is not None and (other.opening.pid, other.job) != (event.pid, body.job):
        return (
            f"device {other.device} is driven by process {other.opening.pid} of job {other.job!r}: a device "
            "belongs to one job at a time; end that job first, or use another node"
        )
    return ""
