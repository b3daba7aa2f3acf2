"""Which nodes take part in a job: so that others have no say in it.

A torchrun joins from a place: its node, or a device of it. The places that take part are settled before the
workers start. A leader that took over knows them from the torchruns, which join again, and from the plans in
the store.
"""

from __future__ import annotations

from elasticd.machines.job.state.job_state import JobState
from elasticd.records import NodeRecord


def joins(job: JobState, node: str, device: str) -> bool:
    """Whether a job that has not begun waits for this worker: the torchrun of its node, or of its device, takes
    part. While torchruns still come, each that has asked counts."""
    places = job.joined or job.joiners
    return node in places or device in places


def joined_from(job: JobState, of: NodeRecord) -> bool:
    """Whether a torchrun of this node has asked to take part."""
    return of.node in job.joiners or any(device.name in job.joiners for device in of.devices)


def takes_part(job: JobState, of: NodeRecord) -> bool:
    """Whether a torchrun of this node has joined, or a worker on one of its devices is known, or bound by a
    plan."""
    if of.node in job.joined or joined_from(job, of):
        return True
    return any(
        device.name in job.joined
        or device.name in job.workers
        or any(device.name in plan.binding for plan in job.plans)
        for device in of.devices
    )
