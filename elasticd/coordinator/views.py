"""What the coordinator shows of itself: its state as plain JSON values."""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd.machines.coordinator import State
from elasticd.machines.job.state import JobState, NodeState


def status(state: State, cluster: str, name: str, url: str) -> dict[str, Any]:
    """The body of `GET /v1/status`."""
    return {
        "cluster": cluster,
        "leader": {"name": name, "url": url, "epoch": state.epoch},
        "nodes": [_node(state, node) for _, node in sorted(state.nodes.items())],
        "jobs": [_job(job) for _, job in sorted(state.jobs.items())],
    }


def _node(state: State, node: NodeState) -> dict[str, Any]:
    rates = {device: rate for job in state.jobs.values() for device, rate in job.rates.rates.items()}
    record = node.record
    return {
        "node": record.node,
        "connected": node.connected,
        "address": record.address,
        "emulated": record.emulated,
        "devices": [
            {
                "name": device.name,
                "memory": device.memory,
                "rate": rates.get(device.name, 1.0),
                "pace": node.paces.get(device.name, 1.0),
            }
            for device in record.devices
        ],
    }


def _job(job: JobState) -> dict[str, Any]:
    return {
        "job": job.job,
        "phase": job.phase.value,
        "reason": job.reason,
        "plan": msgspec.to_builtins(job.plan) if job.plan is not None else None,
        "proposal": job.proposal.number if job.proposal is not None else None,
        "step": job.progress.step,
        "loss": job.progress.loss,
        "tokens_per_second": job.progress.tokens_per_second,
        "members": [
            {"device": worker.device, "incarnation": worker.incarnation, "pid": worker.pid}
            for _, worker in sorted(job.workers.items())
        ],
    }
