"""Process groups made by their members alone, and every private torch API that this takes.

A `Fabric` is the groups of one plan (or of one transition) on one gloo device of its own, so that shutting
its sockets spares all others. Its bootstrap store is any `BootstrapKeyValue`. `shut` frees who is blocked:
it marks the fabric dead, so that who polls a collective leaves with `Cancelled`, and shuts its sockets,
which wakes who waits for a message. The old groups are parked then: dropped in a daemon thread, because
destroying one that still holds a payload can block. Small collectives are exchanges of messages, sooner over
than gloo's own.

Facts about gloo that shape this file: abort has no effect on a blocked operation; a work's `is_completed`
tells the truth for collectives, not for isend and irecv; irecv is woken by a shut socket, unless a part of its
message has come; an isend is never waited for, its tensor is kept until a later collective proves that it was
received.
"""

from __future__ import annotations

import ctypes
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from elasticd_planner.spec.cluster import node_of
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from elasticd.runtime.comm.sockets import Address, listeners, polled, tcp_sockets, wait_until_quiet
from elasticd.runtime.telemetry.comm_timer import Stopwatch

#: Bytes of a tensor up to which its collectives are one exchange of messages: between members of one node,
#: where they go into a socket at once, and between nodes, where the segments of one leave together, without a
#: wait for the other end (one that a death cuts in two would keep who waits for it). And bytes up to which one
#: member sends to all others together.
AT_ONCE, A_FLIGHT, TOGETHER = 1 << 14, 1 << 13, 1 << 16
#: The tag of those messages: no boundary of two stages has it, nor what `parallel.zero` sends.
TERMS = 1 << 25
#: Seconds that payloads have to arrive before the sockets of a fabric are shut.
_DRAIN = 0.2


class Cancelled(RuntimeError):
    """The fabric was shut while this operation waited."""


class PeerLost(RuntimeError):
    """A member of the group is gone, or its connection is."""


class BootstrapKeyValue(Protocol):
    """What bootstrap needs: `get` waits until the key is there or `seconds` passed (TimeoutError)."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, seconds: float) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: Sequence[str]) -> bool: ...


#: Whoever makes a group is told so where another thread shuts the fabric, or lets it go.
MEANWHILE = "shut while a group was being made"


class _BootstrapStore(Store):
    """A torch Store over a `BootstrapKeyValue`, whose waits end when the fabric is shut."""

    def __init__(self, base: BootstrapKeyValue, prefix: str, dead: Callable[[], bool], seconds: float) -> None:
        super().__init__()
        self._base, self._prefix, self._dead, self._seconds = base, prefix, dead, seconds

    def set(self, key: str, value: Any) -> None:
        self._base.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._seconds
        while not self._dead():
            left = deadline - time.monotonic()
            slice_ends = time.monotonic() + min(0.5, left)
            try:
                return self._base.get(self._prefix + key, max(0.0, min(0.5, left)))
            except TimeoutError:
                if left <= 0.5:
                    raise RuntimeError(f"peers did not arrive within {self._seconds:.0f} s ({key})") from None
                time.sleep(max(0.0, slice_ends - time.monotonic()))  # it may fail at once: the agent is gone
        raise Cancelled(MEANWHILE)

    def add(self, key: str, amount: int) -> int:
        return self._base.add(self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._base.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False


class Group:
    """One group of a fabric; ranks count within `members`. All times go to the fabric's stopwatch."""

    def __init__(self, fabric: Fabric, members: tuple[str, ...], me: str, label: str) -> None:
        self.fabric, self.members, self.me, self.label = fabric, members, me, label
        self.rank, self.size = members.index(me), len(members)
        self._sent: dict[int, tuple[Any, Tensor]] = {}
        self._count = 0
        self._exchanged: list[int] = []
        self._awaited: list[tuple[Any, Tensor]] = []
        nodes = {node_of(member) for member in members}
        self._limit = min(AT_ONCE if len(nodes) == 1 else A_FLIGHT, TOGETHER // max(1, self.size - 1))

    def wait(self, work: Any) -> None:
        """Polls a collective until it is complete; the pause grows with the time waited, to at most 0.5 ms."""
        start = time.perf_counter()
        turns = 0
        while not work.is_completed():
            if self.fabric.dead:
                raise Cancelled("shut while waiting for a collective")
            turns += 1
            waited = time.perf_counter() - start
            time.sleep(0 if turns < 20 else min(5e-4, max(5e-5, waited / 50)))
        with self._told():
            work.wait()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Gloo's errors in a few words: a shut fabric, or a peer that is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.fabric.dead:
                raise Cancelled("shut while waiting for the others") from None
            text = re.sub(r"^\[[^\]]*\] ", "", str(error).splitlines()[0])[:120].rstrip(". ")
            raise PeerLost(f"{self.label} among {', '.join(self.members)}: {text}") from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the group, the same to the bit on every member. `tensor` is given away: its memory may
        be that of the sum, or on its way still."""
        if self.size == 1:
            return tensor
        with self.fabric.stopwatch.measure(self.label):
            if not self._at_once(tensor):
                self.wait(self.backend.allreduce([tensor]))
                return tensor
            terms = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.members]
            terms[self.rank] = tensor.contiguous()
            self._exchange(terms[self.rank], terms)
        total = terms[0] + terms[1]
        for term in terms[2:]:
            total += term
        return total

    def _at_once(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= self._limit and not tensor.is_cuda

    def _exchange(self, mine: Tensor, terms: Sequence[Tensor]) -> None:
        """Every member sends a small tensor to all others, and receives theirs into `terms`, by rank: in the
        time of one message, where gloo's collectives take several, handed from thread to thread."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        backend, sent = self.backend, list[int]()
        with self._told():
            # Kept also where one fails: a message that finds its receive gone would never leave the socket.
            self._awaited = [(backend.recv([terms[rank]], rank, TERMS), terms[rank]) for rank in others]
            for rank in others:
                self._count += 1
                self._sent[self._count] = (backend.send([mine], rank, TERMS), mine)
                sent.append(self._count)
            for work, _ in self._awaited:
                work.wait()
        self._awaited = []
        self.arrived(self._exchanged)  # who sends a term has had those of the exchange before
        self._exchanged = sent

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        """Starts to sum in place over the group, beside whatever else runs: `finish` waits. All members start
        their collectives of a group in one order."""
        with self._told():
            return self.backend.allreduce([tensor])

    def finish(self, work: Any) -> None:
        """Waits for a collective that was started."""
        with self.fabric.stopwatch.measure(self.label):
            self.wait(work)

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Every member's tensor, all of one shape, stacked by rank: in `out`, if it is given. `tensor` may be
        written to when this returns."""
        if out is None:
            out = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            out[0] = tensor
            return out
        with self.fabric.stopwatch.measure(self.label):
            if self._at_once(tensor):
                out[self.rank] = tensor
                self._exchange(tensor.clone(memory_format=torch.contiguous_format), out.unbind())
            else:
                self.wait(self.backend._allgather_base(out, tensor.unsqueeze(0)))
        return out

    def send(self, tensor: Tensor, to: int, tag: int, label: str = "boundary") -> int:
        """Starts to send. The tensor is kept until `received` says that all have arrived, or `arrived` that
        this one has, by the number that is returned."""
        with self.fabric.stopwatch.measure(label), self._told():
            self._count += 1
            self._sent[self._count] = (self.backend.send([tensor], to, tag), tensor)
        return self._count

    def post(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Starts to receive into a tensor that is at least as large as what comes; `take` waits for it."""
        with self._told():
            return self.backend.recv([tensor], source, tag)

    def take(self, work: Any, label: str = "boundary", source: int | None = None) -> None:
        """Waits until it is here; `source`: the rank that it comes from."""
        with self.fabric.stopwatch.measure(label, source), self._told():
            work.wait()

    def receive(self, tensor: Tensor, source: int, tag: int, label: str = "boundary") -> Tensor:
        self.take(self.post(tensor, source, tag), label, source)
        return tensor

    def arrived(self, numbers: Iterable[int]) -> None:
        """Something else proved that these were received: lets their tensors go."""
        for number in numbers:
            self._sent.pop(number, None)

    def received(self) -> None:
        """A collective over this group completed after all sends were received: lets their tensors go, but for
        those of the last exchange, which may have been that collective."""
        self._sent = {number: self._sent[number] for number in self._exchanged if number in self._sent}

    @property
    def backend(self) -> Any:
        """The torch process group, for a transport of migration; None where this rank is alone. Only the fabric
        keeps it, to let it go."""
        if self.size == 1:
            return None
        backend = self.fabric.backends.get(self.members)
        if backend is None:
            raise Cancelled("the fabric of this group was let go")
        return backend


class Fabric:
    """All groups of one plan or one transition, on one gloo device at `address`."""

    def __init__(
        self,
        name: str,
        me: str,
        address: str,
        store: BootstrapKeyValue,
        *,
        seconds: float = 60.0,
        patience: float = 600.0,
    ) -> None:
        """`seconds` is how long the making of a group waits for its members; `patience` how long a collective
        waits for a peer that lives, longer than any step takes (one that dies is noticed at once)."""
        self.name, self.me, self.dead = name, me, False
        self.stopwatch = Stopwatch()
        self._patience = patience
        self._store = _BootstrapStore(store, f"{name}/", lambda: self.dead, seconds)
        self._peers: set[Address] = set()
        self.backends: dict[tuple[str, ...], Any] = {}
        self._users: list[object] = []
        self._open(address)

    def _open(self, address: str) -> None:
        self._device, self._listener = _gloo_device(address)

    def group(self, members: Sequence[str], label: str) -> Group:
        """Makes (once) the group of exactly these members; each of them must call this.

        Calls must come in one global order on all ranks (sorted by members, say), as each waits for all."""
        names = tuple(members)
        if self.dead:
            raise Cancelled("the fabric is shut")
        if len(names) > 1 and names not in self.backends:
            self._meet(names)
            self.backends[names] = self._make(names)
            if self.dead:
                raise Cancelled(MEANWHILE)
        return Group(self, names, self.me, label)

    def _meet(self, members: tuple[str, ...]) -> None:
        """Tells the others where our gloo listens, and learns where theirs does: for `shut` alone."""
        self._store.set(f"at/{self.me}", f"{self._listener[0]} {self._listener[1]}")
        for member in members:
            host, port = self._store.get(f"at/{member}").decode().split()
            self._peers.add((host, int(port)))

    def _make(self, members: tuple[str, ...]) -> Any:
        rank, device = members.index(self.me), self._device
        if device is None:  # gloo does not look, and the process would die
            raise Cancelled(MEANWHILE)
        store = PrefixStore("group/" + "_".join(members), self._store)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._patience)
        options._devices = [device]
        options._threads = 1
        backend = ProcessGroupGloo(store, rank, len(members), options)
        backend._set_sequence_number_for_group()
        return backend

    def shut(self) -> int:
        """Frees whoever waits in this fabric; from any thread. Returns how many connections were cut.

        Who polls leaves at once. The sockets are shut once no payload moves in them, `_DRAIN` seconds later at
        most: gloo never wakes an operation whose payload was cut in the middle, and what it holds (threads,
        descriptors, memory) then stays until the fabric's patience ends, as it does where a peer is frozen."""
        self.dead = True
        return self._cut()

    def _cut(self) -> int:
        mine = self._sockets()
        wait_until_quiet(mine, _DRAIN)
        shut = 0
        for sock in mine:
            with sock:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                    shut += 1
                except OSError:  # already gone
                    pass
        return shut

    def _sockets(self) -> list[socket.socket]:
        """Duplicates of the connections of this fabric; the caller closes them."""
        mine = []
        for _, listening, local, peer, sock in tcp_sockets():
            if not listening and (local == self._listener or peer in self._peers):
                mine.append(sock)
            else:
                sock.close()
        return mine

    def keep(self, user: object) -> None:
        """Is let go with the groups, which it holds: whoever lets the last holder go destroys them."""
        self._users.append(user)

    def park(self) -> threading.Thread:
        """Lets the groups go, in a thread of their own: destroying one takes long, or blocks on a stuck
        payload."""
        held: list[Any] = [self._users, self.backends, self._device]
        self._users, self.backends, self._device, self.dead = [], {}, None, True
        thread = threading.Thread(target=_let_go, args=(held,), name=f"park-{self.name}", daemon=True)
        thread.start()
        return thread


def _let_go(held: list[Any]) -> None:
    """And hands the memory back. Each group had threads, whose buffers glibc keeps in arenas of their own:
    a process that regroups often would grow by hundreds of megabytes that nobody uses."""
    held.clear()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


_making_a_device = threading.Lock()
#: Times to make a device where the user's own threads begin to listen at the same moment.
_TRIES = 50


def _gloo_device(address: str) -> tuple[Any, Address]:
    """A gloo device and where it listens: the one new listening socket that an epoll waits for. The user's
    threads may open others meanwhile; where one of those is polled too, another device is made."""
    for _ in range(_TRIES):
        with _making_a_device:
            before = listeners()
            device = ProcessGroupGloo.create_device(hostname=address)
            now = listeners()
            new = (now.keys() - before.keys()) & polled()
        if len(new) == 1:
            return device, now[new.pop()]
    raise RuntimeError(f"gloo's listening socket at {address} cannot be told apart: {len(new)} are new")
