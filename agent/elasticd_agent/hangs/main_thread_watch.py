"""Which workers' main threads stand still, and where: read from the memory that each shares with its agent.

A place counts as a standstill only after longer than it can take: in a step's computation twice the longest
step of late, or ten times the longest stay at one place if that is more (a device may well become ten times as
slow, and is a straggler then), and a second more; in a wait for other ranks once the longest step and half a
second. How long the script's own code may take nobody knows, nor the loader, nor what elasticd does or calls
between two steps (the optimizer's factory, say): the leader is told after two seconds, and what to make of it
is its matter. A wait for the coordinator is no standstill. What the agent itself was late for it does not hold
against a worker.

Nor does anybody know how long the first two steps under a plan take. What comes in new shapes may be compiled,
by libraries that no stack gives away, too. A compilation takes as long as it takes, whatever a step does: no
multiple of an earlier plan's steps bounds it. So where a worker is in these steps, also in a wait, is told as a
place outside of a step is.
"""

from __future__ import annotations

import os
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass

from elasticd.wire.main_thread import FACTORIES, IDLE, WORDS, Halted, Place, Whereabouts, read
from elasticd_agent.hangs import stack_dump
from elasticd_agent.hangs.heartbeat import BEAT_SECONDS

#: Seconds beyond the longest steps of late: twice that, of computation; once, of a wait. And seconds alone.
COMPUTES, WAITS, OUTSIDE = 1.0, 0.5, 2.0
#: Seconds at one place of a plan's first steps after which that is told again, with its stack.
LOOKED_SECONDS = 10.0
#: How much slower a device that works still may suddenly be.
SLOWER = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """A worker that stands still, by its client's name; seconds: for how long it has been there; looks: whether
    its stack is to be told, too."""

    client: str
    place: Place
    seconds: float
    looks: bool


@dataclass(kw_only=True, slots=True)
class _Known:
    """A worker's memory file, the place that was read last, since when it is there, and how many times that
    was told."""

    fd: int
    signal: int
    place: Place | None = None
    since: float = 0.0
    told: int = 0


class MainThreadWatch:
    """Of the workers of one agent, by their clients' names."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._before: float | None = None

    def hear(self, client: str, body: Whereabouts, fd: int | None) -> str:
        """A worker's memory file, which is ours from now on. Why it is not taken, or nothing."""
        if fd is None:
            return "its memory file is missing"
        with suppress(OSError):  # nothing else: a read of another kind of file might block
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
                self._forget(client)
                self._known[client] = _Known(fd=fd, signal=body.signal)
                return ""
        os.close(fd)
        return "what it sends is no memory file"

    def beat(self, there: Container[str], now: float) -> tuple[list[Halt], list[str]]:
        """Of the workers that are there: those that are found to stand still, and those that were and move
        again."""
        late = 0.0 if self._before is None else max(0.0, now - self._before - 2 * BEAT_SECONDS)
        self._before = now
        halted: list[Halt] = []
        moving: list[str] = []
        for client in [name for name in self._known if name not in there]:
            self._forget(client)
        for client, known in self._known.items():
            place = _read(known.fd)
            if place is None or known.place is None or not _same(place, known.place):
                if known.told:
                    moving.append(client)
                known.place, known.since, known.told = place, now, 0
                continue
            known.since += late
            seconds, moments = now - known.since, _moments(place)
            due = sum(seconds >= moment for moment in moments)
            if due > known.told:
                known.told = due
                looks = due == len(moments) and _looks(place)
                halted.append(Halt(client=client, place=place, seconds=seconds, looks=looks))
        return halted, moving

    def outside(self) -> frozenset[str]:
        """The workers that were last in their script's own code, in their loader, or in the computation of a
        plan's first steps."""
        return frozenset(
            client
            for client, known in self._known.items()
            if known.place is not None and not (known.place.computes or known.place.waits)
        )

    def still(self, halt: Halt) -> bool:
        """Returns True if the worker has not moved since."""
        known = self._known.get(halt.client)
        return (
            known is not None and known.told > 0 and known.place is not None and _same(known.place, halt.place)
        )

    def stacks_of(self, client: str) -> tuple[int, int] | None:
        """A descriptor of the worker's memory file, the caller's to close, and the signal at which it writes
        its stacks there."""
        known = self._known.get(client)
        return (os.dup(known.fd), known.signal) if known is not None and known.signal else None

    def close(self) -> None:
        """Closes its descriptors of all workers' memory files, and forgets the workers."""
        for client in list(self._known):
            self._forget(client)

    def _forget(self, client: str) -> None:
        known = self._known.pop(client, None)
        if known is not None:
            os.close(known.fd)


def _same(one: Place, other: Place) -> bool:
    return (one.step, one.task, one.place, one.changes) == (other.step, other.task, other.place, other.changes)


def _moments(place: Place) -> tuple[float, ...]:
    """Seconds at one place after which that is told."""
    if place.computes:
        return (max(2 * place.usual, SLOWER * place.stay) + COMPUTES,)
    if place.begins:
        return (OUTSIDE, LOOKED_SECONDS)
    if place.waits and place.step is not None and place.usual:
        return (place.usual + WAITS,)
    return (OUTSIDE,) if place.place != IDLE else ()


def _looks(place: Place) -> bool:
    """Returns True if the stack of one that stays there says what else nobody knows."""
    return place.computes or place.begins or place.place in FACTORIES


def told_of(halt: Halt, stack: str) -> Halted:
    """As the leader is told, but for the worker's names. A stack may show that it compiles or is debugged."""
    place = halt.place
    busy = stack_dump.busy(stack) if place.computes or place.begins else ""
    return Halted(
        job="",
        device="",
        incarnation="",
        place=busy or place.name,
        step=place.step if place.step is not None else -1,
        rank=place.rank if place.rank is not None else -1,
        waits=place.waits,
        computes=place.computes and not busy,
        seconds=halt.seconds,
        stack=stack,
        task=place.task,
    )


def _read(fd: int) -> Place | None:
    try:
        return read(os.pread(fd, WORDS.size, 0))
    except OSError:
        return None
