"""Nodes that are away leave what the leader knows: once their agents ended in good order, or on request.

A node whose agent ended without a word is unreachable, and stays so: its workers may well train on. So does one
whose agent ended in good order while a job had workers there, until none has: agents are started again beside
jobs that train. A node that has been away for a day, and that no job needs, is gone for good: instances of a
cloud and nodes of Slurm come and go under ever new names. Whoever comes back says hello, and is known again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elasticd_planner.readable import readable_duration
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.machines.job.state.job_state import OVER, JobSettings, JobState, NodeState


def users(jobs: Mapping[str, JobState], node: str) -> list[str]:
    """The jobs that are not over and have workers on a node, as far as is known."""
    return [
        name
        for name, job in jobs.items()
        if job.phase not in OVER
        and any(worker.node == node and not worker.left for worker in job.workers.values())
    ]


def needed(jobs: Mapping[str, JobState], nodes: Collection[str]) -> set[str]:
    """Those of `nodes` that jobs which are not over need: workers are there, a plan names devices of them, or
    their agents keep snapshots."""
    names: set[str] = set()
    for job in jobs.values():
        if job.phase in OVER:
            continue
        names |= {worker.node for worker in job.workers.values() if not worker.left}
        names |= {node_of(device) for device in job.takeover.unmet}
        names |= {node_of(device) for plan in job.candidates for device in (*plan.members, *plan.idle)}
        names |= {node for node, sets in job.snapshots.kept.items() if sets}
    return names & {*nodes}


def gone(
    nodes: Mapping[str, NodeState], jobs: Mapping[str, JobState], settings: JobSettings, now: float
) -> dict[str, str]:
    """The nodes that are known no more, and why: their agents ended in good order and no job has workers there,
    or they have been away for too long and no job needs them, the longest first where too many are."""
    away = {name: node for name, node in nodes.items() if not node.connected}
    ended = "its agent ended in good order"
    reasons = {name: ended for name, node in away.items() if node.left and not users(jobs, name)}
    oldest = sorted((node.since, name) for name, node in away.items() if name not in reasons)
    many = len(oldest) - settings.keep_nodes
    late = {
        name: f"it was away for {readable_duration(now - since)}"
        for at, (since, name) in enumerate(oldest)
        if now - since >= settings.node_away_seconds or at < many
    }
    if late:
        kept = needed(jobs, late)
        reasons.update((name, why) for name, why in late.items() if name not in kept)
    return reasons


def note(node: str, why: str) -> CoordinatorNote:
    """The words for a node that is shown no more."""
    return CoordinatorNote(kind="node_left", text=f"node {node} has left: {why}", data={"node": node})
