"""What the coordinator shows of itself: its state as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from elasticd.machines.coordinator import State
from elasticd.machines.job.state import LIVE, JobState, NodeState
from elasticd.machines.restarts import RestartJob


def status(state: State, cluster: str, name: str, url: str) -> dict[str, Any]:
    """The body of `GET /v1/status`."""
    return {
        "cluster": cluster,
        "leader": {"name": name, "url": url, "epoch": state.epoch},
        "nodes": [_node(state, node) for _, node in sorted(state.nodes.items())],
        "jobs": [_job(job) for _, job in sorted(state.jobs.items())],
        "links": [
            {
                "link": name,
                "bandwidth": probe.bandwidth,
                "latency": probe.latency,
                "rate": state.links.rate(name),
            }
            for name, probe in sorted(state.links.probes.items())
        ],
    }


def restarting(jobs: Iterable[RestartJob], now: float) -> list[dict[str, Any]]:
    """The jobs in restart mode that report laps, as its key `restarts`."""
    return [
        {
            "job": job.job,
            "round": job.round,
            "step": job.step,
            "step_seconds": job.wall,
            "silent_seconds": max(0.0, now - job.heard),
            "devices": {
                device: {"seconds": known.lap.seconds, "ratio": job.rates.ratio(device)}
                for device, known in sorted(job.laps.items())
            },
            "out": job.out,
        }
        for job in jobs
    ]


def _node(state: State, node: NodeState) -> dict[str, Any]:
    rates = {device: rate for job in state.jobs.values() for device, rate in job.rates.rates.items()}
    record = node.record
    return {
        "node": record.node,
        "connected": node.connected,
        "address": record.address,
        "emulated": record.emulated,
        "draining": record.draining,
        "members": _members_on(state, record.node),
        "health": msgspec.to_builtins(node.health) if node.health is not None else None,
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


def _members_on(state: State, node: str) -> int:
    """The devices of a node that plans use, in force or proposed."""
    jobs = [job for job in state.jobs.values() if job.phase in LIVE]
    used = {device for job in jobs for plan in job.candidates for device in plan.members}
    return sum(device.rpartition("/")[0] == node for device in used)


def _job(job: JobState) -> dict[str, Any]:
    return {
        "job": job.job,
        "phase": job.phase.value,
        "reason": job.reason,
        "plan": msgspec.to_builtins(job.plan) if job.plan is not None else None,
        "proposal": job.proposal.number if job.proposal is not None else None,
        "step": job.progress.step,
        "snapshot": job.snapshots.whole.step if job.snapshots.whole is not None else None,
        "loss": job.progress.loss,
        "tokens_per_second": job.progress.tokens_per_second,
        "members": [
            {"device": worker.device, "incarnation": worker.incarnation, "pid": worker.pid}
            for _, worker in sorted(job.workers.items())
        ],
    }
