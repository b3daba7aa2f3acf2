"""Groups among threads of one process: what `Fabric` gives, without sockets.

For tests and for `elasticd check`: whole layouts run in one process, and whoever fails frees the others. Sums
are made in rank order, so that every member has the same bits. Tensors are bytes on the way, as over gloo: what
gloo would read as another type, or die of, is refused here.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.telemetry.comm_timer import Stopwatch

T = TypeVar("T")
Members = tuple[str, ...]


class MemoryWorld:
    """The wire between threads. patience: seconds that an operation waits for the others."""

    def __init__(self, patience: float = 300.0) -> None:
        self._changed = threading.Condition()
        self._patience, self._broken = patience, False
        self._given: dict[tuple[Members, int], dict[int, Tensor]] = {}
        self._mail: dict[tuple[Members, int, int, int], deque[Tensor]] = defaultdict(deque)

    def break_off(self) -> None:
        """Frees whoever waits: a member failed."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def give(self, members: Members, number: int, rank: int, tensor: Tensor) -> None:
        with self._changed:
            self._given.setdefault((members, number), {})[rank] = tensor.detach().clone()
            self._changed.notify_all()

    def taken(self, members: Members, number: int) -> list[Tensor]:
        """Every member's tensor of its collective `number`, by rank. Raises RuntimeError where they differ in
        type or in shape."""
        given = self._given[members, number]
        self._wait(lambda: len(given) == len(members), members)
        tensors = [given[rank] for rank in range(len(members))]
        kinds = {(tensor.dtype, tensor.shape) for tensor in tensors}
        if len(kinds) > 1:
            raise RuntimeError(
                f"a collective among {', '.join(members)} has tensors of {sorted(map(str, kinds))}"
            )
        return tensors

    def post(self, members: Members, source: int, to: int, tag: int, tensor: Tensor) -> None:
        with self._changed:
            self._mail[members, source, to, tag].append(
                tensor.detach().clone(memory_format=torch.contiguous_format)
            )
            self._changed.notify_all()

    def fetch(self, members: Members, source: int, to: int, tag: int) -> Tensor:
        box = self._mail[members, source, to, tag]
        self._wait(lambda: len(box) > 0, members)
        return box.popleft()

    def _wait(self, there: Callable[[], bool], members: Members) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._broken or there(), self._patience):
                raise PeerLost(f"nothing came among {', '.join(members)} for {self._patience:.0f} s")
            if not there():
                raise PeerLost(f"another member of {', '.join(members)} failed")


class MemoryGroup:
    """A `Group` of a `MemoryFabric`."""

    def __init__(self, fabric: MemoryFabric, members: Members, label: str) -> None:
        self.fabric, self.members, self.me, self.label = fabric, members, fabric.me, label
        self.rank, self.size = members.index(fabric.me), len(members)

    def begin_all_reduce(self, tensor: Tensor) -> tuple[int, Tensor]:
        number = self.fabric.number(self.members)
        self.fabric.world.give(self.members, number, self.rank, tensor)
        return number, tensor

    def finish(self, work: tuple[int, Tensor]) -> None:
        with self.fabric.stopwatch.measure(self.label):
            number, tensor = work
            total, *terms = self.fabric.world.taken(self.members, number)
            for term in terms:
                total = total + term
            tensor.copy_(total)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.finish(self.begin_all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        number, _ = self.begin_all_reduce(tensor)
        with self.fabric.stopwatch.measure(self.label):
            return torch.stack(self.fabric.world.taken(self.members, number), out=out)

    def send(self, tensor: Tensor, to: int, tag: int, label: str = "boundary") -> int:
        self.fabric.world.post(self.members, self.rank, to, tag, tensor)
        return 0

    def post(self, tensor: Tensor, source: int, tag: int) -> tuple[Tensor, int, int]:
        return tensor, source, tag

    def take(self, work: tuple[Tensor, int, int], label: str = "boundary", source: int | None = None) -> None:
        with self.fabric.stopwatch.measure(label, source):
            tensor, source, tag = work
            came = self.fabric.world.fetch(self.members, source, self.rank, tag)
            raw, room = _bytes(came), _bytes(tensor)
            if raw.numel() > room.numel():
                raise RuntimeError(f"{raw.numel()} bytes came where {room.numel()} were to be received")
            room[: raw.numel()] = raw

    def receive(self, tensor: Tensor, source: int, tag: int, label: str = "boundary") -> Tensor:
        self.take(self.post(tensor, source, tag), label)
        return tensor

    def arrived(self, numbers: Iterable[int]) -> None:
        pass

    def received(self) -> None:
        pass


def _bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory."""
    return tensor.view(-1).view(torch.uint8)


class MemoryFabric:
    """All groups of one plan that one thread is in."""

    def __init__(self, world: MemoryWorld, me: str) -> None:
        self.world, self.me, self.dead = world, me, False
        self.stopwatch = Stopwatch()
        self._numbers: dict[Members, int] = defaultdict(int)

    def group(self, members: Sequence[str], label: str) -> MemoryGroup:
        return MemoryGroup(self, tuple(members), label)

    def number(self, members: Members) -> int:
        """The number of the next collective among these members, the same on all of them."""
        self._numbers[members] += 1
        return self._numbers[members]


def run_threads(names: Sequence[str], worker: Callable[[MemoryFabric], T]) -> dict[str, T]:
    """Calls `worker` in a thread for each name, and gives the results. Raises what the first failed with."""
    world, results, failures = MemoryWorld(), {}, list[BaseException]()

    def work(name: str) -> None:
        try:
            results[name] = worker(MemoryFabric(world, name))
        except BaseException as error:
            failures.append(error)
            world.break_off()

    threads = [threading.Thread(target=work, args=(name,), name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerLost | Cancelled)), failures[0])
    return results


def unpaced(*_: Any) -> float:
    """A pace that holds nothing up."""
    return time.perf_counter()
