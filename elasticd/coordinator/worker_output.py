"""The output of workers, for readers: the leader keeps none of it, and asks the worker's agent."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from elasticd_planner.spec.cluster import node_of

from elasticd.coordinator.connections import Connections
from elasticd.wire.api_types import ApiError
from elasticd.wire.launch import OutputPart, ReadOutput

#: Seconds for an agent's answer.
ANSWER_SECONDS = 5.0
#: Readers that may wait for agents at once.
MOST_READERS = 256
#: Bytes of one answer.
ANSWER_BYTES = 64 << 10


@dataclass(frozen=True)
class _Question:
    node: str
    answer: asyncio.Future[OutputPart]


class WorkerOutputs:
    """Questions to agents for what their workers wrote. On the running loop."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._ids = itertools.count(1)
        self._asked: dict[int, _Question] = {}

    async def read(self, device: str, job: str, after: int, most: int) -> OutputPart:
        """A part of what the worker of a device wrote (`ReadOutput`). Raises ApiError."""
        node = node_of(device)
        record = self._connections.record(node)
        if record is None:
            raise ApiError("unknown", f"node {node} has no agent here: what its workers wrote is there")
        if len(self._asked) >= MOST_READERS:
            raise ApiError("unavailable", f"{MOST_READERS} readers of workers' output wait already: ask again")
        number = next(self._ids)
        question = _Question(node, asyncio.get_running_loop().create_future())
        self._asked[number] = question
        try:
            self._connections.ask(
                node, ReadOutput(id=number, device=device, job=job, after=after, most=min(most, ANSWER_BYTES))
            )
            async with asyncio.timeout(ANSWER_SECONDS):
                part = await question.answer
        except TimeoutError:
            raise ApiError(
                "unavailable",
                f"the agent of node {node} does not answer: it may be of a release that keeps no output",
            ) from None
        finally:
            self._asked.pop(number, None)
        if part.error:
            raise ApiError("unknown", part.error)
        return part

    def heard(self, node: str, part: OutputPart) -> None:
        """An agent's answer; one that nobody waits for any more is dropped, and one that was not asked for."""
        question = self._asked.get(part.id)
        if question is not None and question.node == node and not question.answer.done():
            question.answer.set_result(part)
