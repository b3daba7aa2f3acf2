"""Nodes that are away leave what the leader knows: once their agents ended in good order, or on request.

A node whose agent ended without a word is unreachable, and stays so: its workers may well train on. So does one
whose agent ended in good order while a job had workers there, until none has: agents are started again beside
jobs that train. Whoever comes back says hello, and is known again.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.machines.job.state.job_state import OVER, JobState, NodeState


def users(jobs: Mapping[str, JobState], node: str) -> list[str]:
    """The jobs that are not over and have workers on a node, as far as is known."""
    return [
        name
        for name, job in jobs.items()
        if job.phase not in OVER
        and any(worker.node == node and not worker.left for worker in job.workers.values())
    ]


def gone(nodes: Mapping[str, NodeState], jobs: Mapping[str, JobState]) -> list[str]:
    """The nodes whose agents have left, and that no job has workers on."""
    left = [name for name, node in nodes.items() if node.left and not node.connected]
    return [name for name in left if not users(jobs, name)]


def note(node: str, by: str = "") -> CoordinatorNote:
    """The words for a node that is shown no more; by: the user who had it forgotten."""
    how = f"{by} had it forgotten" if by else "its agent ended in good order"
    return CoordinatorNote(kind="node_left", text=f"node {node} has left: {how}", data={"node": node})
