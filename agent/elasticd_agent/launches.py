"""Launches of this node: the newest output of its workers for whoever reads it, and events for their launchers.

Output lies in memory files that torchruns share (`elasticd.system.output_ring`). This agent holds them beyond
the end of their torchrun, the newest `MOST_KEPT` of them, so that the last words of a job can be read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import msgspec

from elasticd.machines.agent.state import Event, LinkUp
from elasticd.records import NodeRecord
from elasticd.system import output_ring
from elasticd.wire.launch import (
    FollowEvents,
    Following,
    FollowJob,
    Happened,
    KeepOutput,
    OfLaunch,
    OutputKept,
    OutputPart,
    ReadOutput,
)
from elasticd.wire.worker import Rejected

#: Workers of which the output is kept, and bytes of one answer.
MOST_KEPT, MOST_READ = 128, 64 << 10

_log = logging.getLogger(__name__)


class Launches:
    """Takes what torchruns and launchers say of their launches, and what the leader asks and tells. On the
    running loop.

    Args:
        record: gives this node's record.
        used: gives the devices that have a worker or a torchrun, each with its job.
        say: sends a message to a client.
        tell: sends a message to the leader, if there is one.
    """

    def __init__(
        self,
        record: Callable[[], NodeRecord],
        used: Callable[[], dict[str, str]],
        say: Callable[[str, OutputKept | Following | Happened | Rejected], None],
        tell: Callable[[FollowJob | OutputPart], None],
    ) -> None:
        self._record, self._used, self._say, self._tell = record, used, say, tell
        self._rings: dict[tuple[str, str], int] = {}
        self._writers: dict[tuple[str, str], str] = {}  # of the rings that are still written to, the clients
        self._launchers: dict[str, FollowEvents] = {}

    def hear(self, client: str, body: OfLaunch, fd: int | None) -> None:
        """Takes a client's message, with the descriptor that came with it."""
        if isinstance(body, KeepOutput):
            self._keep(client, body, fd)
            return
        _close(fd)
        self._launchers.pop(client, None)
        used = {**self._reserved(), **self._used()}
        if all(used.get(device, body.job) == body.job for device in self._devices(body)):
            self._launchers[client] = body
        else:
            self._launchers[client] = msgspec.structs.replace(body, slots=())
        devices = tuple(device.name for device in self._record().devices)
        self._say(client, Following(devices=devices, used=used))
        self._tell(FollowJob(job=body.job))

    def gone(self, client: str) -> None:
        """A client hung up: what its torchrun shared is kept."""
        self._launchers.pop(client, None)
        self._writers = {key: writer for key, writer in self._writers.items() if writer != client}

    def observe(self, event: Event) -> None:
        """Takes an event of the agent's machine: a new leader is told which jobs launchers follow."""
        if isinstance(event, LinkUp):
            for job in sorted({launcher.job for launcher in self._launchers.values()}):
                self._tell(FollowJob(job=job))

    def happened(self, message: Happened) -> None:
        """Passes an event of the leader's on."""
        for client, launcher in list(self._launchers.items()):  # one that does not read is gone by that
            if launcher.job == message.job:
                self._say(client, message)

    def read(self, message: ReadOutput) -> None:
        """Answers the leader."""
        kept = [key for key in self._rings if key[0] == message.device and message.job in ("", key[1])]
        if not kept:
            whose = f" in job {message.job}" if message.job else ""
            why = (
                f"no output of {message.device}{whose} is kept: 'elasticd run' must have started its worker "
                "since this node's agent runs"
            )
            self._tell(OutputPart(id=message.id, error=why))
            return
        key = kept[-1]
        part = output_ring.read(self._rings[key], message.after, min(message.most, MOST_READ))
        self._tell(OutputPart(id=message.id, job=key[1], begin=part.begin, end=part.end, data=part.data))

    def close(self) -> None:
        """Forgets all output."""
        for fd in self._rings.values():
            os.close(fd)
        self._rings.clear()

    def _devices(self, launcher: FollowEvents) -> list[str]:
        """The devices that a launcher wants, or has."""
        return [f"{self._record().node}/{slot}" for slot in launcher.slots]

    def _reserved(self) -> dict[str, str]:
        """The devices that launchers have, each with its job: their workers may not be there yet."""
        return {device: one.job for one in self._launchers.values() for device in self._devices(one)}

    def _keep(self, client: str, body: KeepOutput, fd: int | None) -> None:
        if fd is None or not output_ring.is_ring(fd):
            _close(fd)
            self._say(client, Rejected(reason="no memory file for output came with this message"))
            return
        device = f"{self._record().node}/{body.index}"
        _close(self._rings.pop((device, body.job), None))
        self._rings[device, body.job] = fd
        self._writers[device, body.job] = client
        while len(self._rings) > MOST_KEPT:
            oldest = next((key for key in self._rings if key not in self._writers), next(iter(self._rings)))
            _close(self._rings.pop(oldest))
            self._writers.pop(oldest, None)
        self._say(client, OutputKept(index=body.index, device=device))


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
