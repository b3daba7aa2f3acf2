"""Groups among threads of one process: what `PlanGroups` gives, without sockets.

For tests and for `elasticd check`: a plan's members are threads of one process, and a member that fails frees
the others. Sums are in rank order, so that every member has the same bits. Messages are bytes, as with gloo.
Where gloo would read a tensor as another type, or would end the process, an error is raised here.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from elasticd.runtime.comm.groups import Cancelled, DataPlane, Group, PeerLost, PlanGroups
from elasticd.runtime.telemetry.comm_timer import Stopwatch

T = TypeVar("T")
Members = tuple[str, ...]


#: Members, the ranks of sender and receiver among them, and a tag.
_Box = tuple[Members, int, int, int]


class MemoryWorld:
    """Carries messages and collectives between threads. An operation waits at most `patience` seconds."""

    def __init__(self, patience: float = 300.0) -> None:
        self._lock = threading.Lock()
        self._news: dict[Hashable, threading.Condition] = {}  # of what is awaited
        self._patience, self._broken = patience, False
        self._given: dict[tuple[Members, int], dict[int, Tensor]] = {}
        self._mail: dict[_Box, dict[int, Tensor]] = defaultdict(dict)  # by the number of the message
        self._sent: dict[_Box, int] = defaultdict(int)
        self._awaited: dict[_Box, int] = defaultdict(int)

    def break_off(self) -> None:
        """Makes all that wait raise PeerLost, because a member failed."""
        with self._lock:
            self._broken = True
            for news in self._news.values():
                news.notify_all()

    def give(self, members: Members, number: int, rank: int, tensor: Tensor) -> None:
        """Hands in a copy of one rank's tensor for the collective `number` of these members."""
        copied = _copied(tensor)
        with self._lock:
            given = self._given.setdefault((members, number), {})
            given[rank] = copied
            if len(given) == len(members):
                self._came((members, number))

    def taken(self, members: Members, number: int) -> list[Tensor]:
        """Waits for every member's tensor of the collective `number`, and returns them by rank.

        Raises:
            RuntimeError: the tensors differ in dtype or shape.
            PeerLost: another member failed, or did not come in time.
        """
        given = self._given[members, number]
        self._wait((members, number), lambda: len(given) == len(members), members)
        tensors = [given[rank] for rank in range(len(members))]
        kinds = {(tensor.dtype, tensor.shape) for tensor in tensors}
        if len(kinds) > 1:
            raise RuntimeError(
                f"a collective among {', '.join(members)} has tensors of {sorted(map(str, kinds))}"
            )
        return tensors

    def post(self, members: Members, source: int, to: int, tag: int, tensor: Tensor) -> None:
        """Puts a copy of a message into the mail from rank `source` to rank `to`."""
        copied = _copied(tensor)
        with self._lock:
            box = members, source, to, tag
            self._mail[box][self._sent[box]] = copied
            self._sent[box] += 1
            self._came(box)

    def awaited(self, members: Members, source: int, to: int, tag: int) -> int:
        """The number of the next message with this tag from rank `source` to rank `to` that nobody awaits."""
        with self._lock:
            box = members, source, to, tag
            self._awaited[box] += 1
            return self._awaited[box] - 1

    def fetch(self, members: Members, source: int, to: int, tag: int, number: int) -> Tensor:
        """Waits for the message of a number with this tag from rank `source` to rank `to`.

        Raises:
            PeerLost: another member failed, or nothing came in time.
        """
        box = members, source, to, tag
        mail = self._mail[box]
        self._wait(box, lambda: number in mail, members)
        return mail.pop(number)

    def _came(self, what: Hashable) -> None:
        if what in self._news:
            self._news[what].notify_all()

    def _wait(self, what: Hashable, there: Callable[[], bool], members: Members) -> None:
        with self._lock:
            news = self._news.setdefault(what, threading.Condition(self._lock))
            came = news.wait_for(lambda: self._broken or there(), self._patience)
            self._news.pop(what, None)  # others that wait for it were told, too
            if not came:
                raise PeerLost(f"nothing came among {', '.join(members)} for {self._patience:.0f} s")
            if not there():
                raise PeerLost(f"another member of {', '.join(members)} failed")


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host, which threads of other devices can read."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class MemoryGroup(Group):
    """A `Group` of a `MemoryPlanGroups`."""

    plan_groups: MemoryPlanGroups

    def begin_all_reduce(self, tensor: Tensor) -> tuple[int, Tensor]:
        """Hands in this member's term. Waits for nobody."""
        number = self.plan_groups.number(self.members)
        self.plan_groups.world.give(self.members, number, self.rank, tensor)
        return number, tensor

    def finish(self, work: tuple[int, Tensor]) -> None:
        """Waits for all terms and writes their sum, in rank order, into the tensor that was handed in."""
        with self.plan_groups.stopwatch.measure(self.label):
            number, tensor = work
            total, *terms = self.plan_groups.world.taken(self.members, number)
            for term in terms:
                total = total + term
            tensor.copy_(total)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the group, in place, the same to the bit on every member."""
        self.finish(self.begin_all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Every member's tensor, stacked by rank: [size, *shape]; in `out`, if it is given."""
        number, _ = self.begin_all_reduce(tensor)
        with self.plan_groups.stopwatch.measure(self.label):
            stacked = torch.stack(self.plan_groups.world.taken(self.members, number)).to(tensor.device)
            return stacked if out is None else out.copy_(stacked)

    def send(self, tensor: Tensor, to: int, tag: int, label: str = "boundary") -> int:
        """Posts a copy, so that nobody need keep the tensor. Returns 0, which `arrived` does not know."""
        self.plan_groups.world.post(self.members, self.rank, to, tag, tensor)
        return 0

    def post(self, tensor: Tensor, source: int, tag: int) -> tuple[Tensor, int, int, int]:
        """Notes what is to be received, in the order of messages. Nothing is received before `take`."""
        number = self.plan_groups.world.awaited(self.members, source, self.rank, tag)
        return tensor, source, tag, number

    def take(
        self, work: tuple[Tensor, int, int, int], label: str = "boundary", source: int | None = None
    ) -> None:
        """Waits for the message and copies its bytes to the begin of the posted tensor's memory.

        Raises:
            RuntimeError: the message is larger than that memory.
            PeerLost: another member failed, or nothing came in time.
        """
        with self.plan_groups.stopwatch.measure(label, source):
            tensor, source, tag, number = work
            came = self.plan_groups.world.fetch(self.members, source, self.rank, tag, number)
            raw, room = _bytes(came), _bytes(tensor)
            if raw.numel() > room.numel():
                raise RuntimeError(f"{raw.numel()} bytes came where {room.numel()} were to be received")
            room[: raw.numel()].copy_(raw)


def _bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory."""
    return tensor.view(-1).view(torch.uint8)


class MemoryPlanGroups(PlanGroups):
    """The `PlanGroups` of one thread: all groups of one plan that its device is a member of.

    Nothing of them is to be shut or parked.
    """

    near_and_far = False

    def __init__(self, world: MemoryWorld, me: str) -> None:
        self.world, self.me, self.dead = world, me, False
        self.stopwatch = Stopwatch()
        self._numbers: dict[Members, int] = defaultdict(int)

    def group(self, members: Sequence[str], label: str) -> MemoryGroup:
        """The group of these members. Nobody is waited for: threads find each other by their messages."""
        return MemoryGroup(self, tuple(members), self.me, label)

    def ends_with(self, plane: DataPlane) -> None:
        """Nothing ends these groups, and so nothing ends with them."""

    def number(self, members: Members) -> int:
        """The number of the next collective among these members, the same on all of them."""
        self._numbers[members] += 1
        return self._numbers[members]


def _core() -> int | None:
    """The core for all threads of this process that share Python's lock all the time: to pass it from core to
    core takes up to as long again as what they compute. None where a thread cannot be kept on a core, and where
    torch computes on several: threads of its own that it begins from these would be on that core, too."""
    if not hasattr(os, "sched_setaffinity") or torch.get_num_threads() > 1:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[os.getpid() % len(cores)]


def run_threads(names: Sequence[str], worker: Callable[[MemoryPlanGroups], T]) -> dict[str, T]:
    """Calls `worker` in a thread for each device, all on one core where torch computes on one.

    No garbage is collected meanwhile: it could stop all of them for ever, see `rng.STATES`.

    Args:
        names: the devices.
        worker: called with the groups of its device.

    Returns:
        The results by device.

    Raises:
        BaseException: the first one that a worker raised, if possible no PeerLost or Cancelled, which another
            worker's failure causes.
    """
    world, results, failures = MemoryWorld(), {}, list[BaseException]()
    core = _core()

    def work(name: str) -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})  # of this thread
        try:
            results[name] = worker(MemoryPlanGroups(world, name))
        except BaseException as error:
            failures.append(error)
            world.break_off()

    threads = [threading.Thread(target=work, args=(name,), name=name, daemon=True) for name in names]
    with _without_collections():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerLost | Cancelled)), failures[0])
    return results


@contextmanager
def _without_collections() -> Iterator[None]:
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class Unpaced:
    """A pace of `StageRunner` that slows nothing down."""

    emulates = False

    def __call__(self, *_: Any) -> float:
        """Returns the time at which it is called."""
        return time.perf_counter()


unpaced = Unpaced()
