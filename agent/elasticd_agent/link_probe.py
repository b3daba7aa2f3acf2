"""The link to another node, probed now and again while neither this node nor that one has work.

Each idle node probes the next idle one in a ring, so that n nodes make n probes in a round, whatever n is. A
probe goes the way that snapshots go, over TLS: it finds links that are slower than a processor encrypts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.agent.state import AgentState
from elasticd.records import NodeRecord
from elasticd.wire.coordinator import Crossed
from elasticd_agent.snapshots.port import StreamFailed

#: Bytes of a probe.
PROBE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class LinkProbe:
    """On one event loop. Every `seconds` (0: never) a probe to one of `ring`, told by `tell`; `state` is what
    the agent knows. `cross` probes, as `SnapshotSender.cross`; it blocks, and is called on a thread."""

    def __init__(
        self,
        seconds: float,
        cross: Callable[[str, str, int], tuple[float, float]],
        ring: Callable[[], Sequence[NodeRecord]],
        state: Callable[[], AgentState],
        tell: Callable[[Crossed], None],
    ) -> None:
        self._seconds, self._cross, self._ring = seconds, cross, ring
        self._state, self._tell = state, tell

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._seconds:
            await asyncio.sleep(self._seconds)
            await self.probe()

    async def probe(self) -> None:
        """One probe, where there is anybody to probe to."""
        target = next_idle(self._state(), self._ring())
        if target is None:
            return
        try:
            seconds, latency = await asyncio.to_thread(
                self._cross, target.snapshots, target.certificate, PROBE_BYTES
            )
        except (StreamFailed, msgspec.MsgspecError) as error:
            _log.debug("the link to node %s was not probed: %s", target.node, error)
            return
        if next_idle(self._state(), [target]) is not None:  # else it shared the link with work
            self._tell(Crossed(target=target.node, size=PROBE_BYTES, seconds=seconds, latency=latency))


def next_idle(state: AgentState, ring: Sequence[NodeRecord]) -> NodeRecord | None:
    """The first of the ring that has no work, if this node has none either."""
    busy = _busy(state)
    if state.record.node in busy:
        return None
    return next((record for record in ring if record.node not in busy), None)


def _busy(state: AgentState) -> set[str]:
    """The nodes that a plan uses, in force or open."""
    members = [record.plan.members for job, record in state.plans.items() if job not in state.done]
    proposals = [state.open_proposal(job) for job in state.proposals if job not in state.done]
    members += [tuple(proposal.plan.binding) for proposal in proposals if proposal is not None]
    return {node_of(device) for devices in members for device in devices}
