"""Process groups made by their members alone, and every private torch API that this takes.

`PlanGroups` are the groups of one plan (or of one transition) on one gloo device of their own, so that shutting
its sockets spares the groups of other plans. Their bootstrap store is any `BootstrapKeyValue`. `shut` frees the
threads that are blocked in one of them: a thread that polls a collective sees the mark `dead` and raises
`Cancelled`, and a thread that waits for a message is woken by its shut socket. The old groups are parked then:
dropped in a daemon thread, because destroying one that still holds a payload can block. Small collectives are
exchanges of messages, which take less time than gloo's own.

Facts about gloo that shape this file: abort has no effect on a blocked operation; a work's `is_completed`
tells the truth for collectives, not for isend and irecv; irecv is woken by a shut socket, unless a part of its
message has come; an isend is never waited for, its tensor is kept until a later collective proves that it was
received.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from elasticd_planner.spec.cluster import node_of
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from elasticd.runtime.comm.sockets import Address, listeners, polled, tcp_sockets, wait_until_quiet
from elasticd.runtime.telemetry.comm_timer import Stopwatch

#: The largest tensors, in bytes, whose collectives are one exchange of messages. Between members of one node a
#: message goes into a socket at once; between nodes its segments leave together, without a wait for the other
#: end. (A message that a death cuts in two would keep its receiver waiting.) And the most bytes that one member
#: sends to all others together.
AT_ONCE, A_FLIGHT, TOGETHER = 1 << 14, 1 << 13, 1 << 16
#: The tag of those messages: no boundary of two stages has it, nor what `parallel.zero` sends.
TERMS = 1 << 25
#: The tag of the messages of `Group.meet`.
MEET = 1 << 27
#: Seconds that payloads have to arrive before the sockets of a plan's groups are shut.
_DRAIN_SECONDS = 0.2


class Cancelled(RuntimeError):
    """The plan's groups were shut while this operation waited."""


class PeerLost(RuntimeError):
    """A member of the group is gone, or its connection is."""


class BootstrapKeyValue(Protocol):
    """The key-value store through which members of a group find each other."""

    def set(self, key: str, value: bytes) -> None:
        """Stores a value, in place of an earlier one."""

    def get(self, key: str, seconds: float) -> bytes:
        """Waits until the key is there.

        Args:
            key: its name.
            seconds: the longest wait.

        Raises:
            TimeoutError: the key did not come in time.
        """

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """As `get`, for all of these keys in about the time that one takes."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a whole number, which begins at 0, and returns the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys are there. It does not wait."""


#: Seconds between two looks at what is waited for, at most. Tests of whole jobs, whose devices sleep most of
#: the time, look less often.
LONGEST_PAUSE_SECONDS = 5e-4
#: Keys that a rank waits for at once; the leader bounds those of a node.
_GETS_AT_ONCE = 32
#: The message of `Cancelled` where another thread shuts the plan's groups, or lets them go, while one is made.
MEANWHILE = "shut while a group was being made"


class _BootstrapStore(Store):
    """A torch Store over a `BootstrapKeyValue`, whose waits end when the plan's groups are shut."""

    def __init__(self, base: BootstrapKeyValue, prefix: str, dead: Callable[[], bool], seconds: float) -> None:
        super().__init__()
        self._base, self._prefix, self._dead, self._seconds = base, prefix, dead, seconds
        self._expected: tuple[str, ...] = ()
        self._known: dict[str, bytes] = {}

    def expect(self, keys: Iterable[str]) -> None:
        """Has these keys fetched together once one of them is asked for. Each is set once. Keys that were
        expected before are forgotten."""
        self._expected, self._known = tuple(keys), {}

    def set(self, key: str, value: Any) -> None:
        self._base.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        expected = self._expected
        if key not in expected:
            return self.get_all((key,))[0]
        if key not in self._known:
            self._known = dict(zip(expected, self.get_all(expected), strict=True))
        return self._known[key]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for these keys, a few dozen at once.

        Raises:
            RuntimeError: one did not come in time.
            Cancelled: the plan's groups were shut.
        """
        deadline = time.monotonic() + self._seconds
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self._get_some(keys[len(values) : len(values) + _GETS_AT_ONCE], deadline)
        return values

    def _get_some(self, keys: Sequence[str], deadline: float) -> list[bytes]:
        while not self._dead():
            left = deadline - time.monotonic()
            slice_ends = time.monotonic() + min(0.5, left)
            try:
                return self._base.get_all([self._prefix + key for key in keys], max(0.0, min(0.5, left)))
            except TimeoutError:
                if left <= 0.5:
                    late = f"{keys[0]} .. {keys[-1]}" if len(keys) > 1 else keys[0]
                    raise RuntimeError(f"peers did not arrive within {self._seconds:.0f} s ({late})") from None
                time.sleep(max(0.0, slice_ends - time.monotonic()))  # it may fail at once: the agent is gone
        raise Cancelled(MEANWHILE)

    def add(self, key: str, amount: int) -> int:
        return self._base.add(self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._base.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Begun(NamedTuple):
    """A collective or message that is under way: gloo's work, and where it goes on a device beside the host."""

    work: Any
    here: Tensor
    there: Tensor | None = None

    def land(self) -> None:
        """Copies payloads that came to the host on to the device."""
        if self.there is not None:
            self.there.copy_(self.here)


class Group:
    """One group of a plan; ranks count within `members`. All times go to the stopwatch of its `PlanGroups`.

    Gloo moves memory of the host: tensors of an accelerator are copied there and back."""

    def __init__(
        self, plan_groups: PlanGroups, members: tuple[str, ...], me: str, label: str, apart: str = ""
    ) -> None:
        self.plan_groups, self.members, self.me, self.label = plan_groups, members, me, label
        self._apart = apart
        self.rank, self.size = members.index(me), len(members)
        self._sent: dict[int, tuple[Any, Tensor, int]] = {}  # gloo's work, message and tag, by number
        self._numbers = itertools.count(1)
        self._exchanged: list[int] = []
        self._awaited: list[tuple[Any, Tensor]] = []
        self._meeting: list[Any] = []
        self._met: list[int] = []  # messages of the last meeting
        nodes = {node_of(member) for member in members}
        self._limit = min(AT_ONCE if len(nodes) == 1 else A_FLIGHT, TOGETHER // max(1, self.size - 1))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Group cannot be copied, and so a Job cannot train a module that holds one: call redistribute "
            "without group, which then is of the devices that run the module"
        )

    def wait(self, work: Any) -> None:
        """Polls a collective until it is complete; the pause grows with the time waited."""
        start = time.perf_counter()
        turns = 0
        while not work.is_completed():
            if self.plan_groups.dead:
                raise Cancelled("its connections were closed meanwhile")
            turns += 1
            time.sleep(pause(turns, time.perf_counter() - start))
        with self._translated():
            work.wait()

    def completed(self, work: Any) -> bool:
        """Returns True if what `begin_all_reduce` or `begin_all_to_all` started is complete. It does not wait.

        Raises as `all_reduce`."""
        if work.work.is_completed():
            with self._translated():
                work.work.wait()
            return True
        if self.plan_groups.dead:
            raise Cancelled("its connections were closed meanwhile")
        return False

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Gloo's errors in a few words: `Cancelled` after `shut`, else `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            if self.plan_groups.dead:
                raise Cancelled("its connections were closed meanwhile") from None
            raise PeerLost(f"{self.label} among {', '.join(self.members)}: {first_sentence(error)}") from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the group, the same to the bit on every member.

        Args:
            tensor: this member's term. Do not use it afterwards: its memory may be that of the sum, or of a
                message that is still to be sent.

        Raises:
            PeerLost: a member is gone.
            Cancelled: `shut` was called meanwhile.
        """
        if self.size == 1:
            return tensor
        if tensor.device.type != "cpu":
            return self.all_reduce(tensor.cpu()).to(tensor.device)
        with self.plan_groups.stopwatch.measure(self.label):
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
        return tensor.nbytes <= self._limit

    def _exchange(self, mine: Tensor, terms: Sequence[Tensor]) -> None:
        """Every member sends a small tensor to all others, and receives theirs into `terms`, by rank.

        It takes the time of one message. A collective of gloo takes several, handed from thread to thread.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        backend, sent = self.backend, list[int]()
        with self._translated():
            # Kept also where one fails: a message that finds its receive gone would never leave the socket.
            self._awaited = [(backend.recv([terms[rank]], rank, TERMS), terms[rank]) for rank in others]
            for rank in others:
                sent.append(next(self._numbers))
                self._sent[sent[-1]] = (backend.send([mine], rank, TERMS), mine, TERMS)
            for work, _ in self._awaited:
                work.wait()
        self._awaited = []
        self.arrived(self._exchanged)  # a member that sends a term has received those of the exchange before
        self._exchanged = sent

    def meet(self, number: int) -> list[int]:
        """Every member's number, by rank. Its messages are apart from all others of the group: members that
        are at something else are waited for, where a collective would be taken for theirs. A thread may meet
        while another one of this process uses the group for anything else.

        Args:
            number: this member's, of 64 bits.

        Raises:
            PeerLost: a member is gone.
            Cancelled: `shut` was called meanwhile.
        """
        numbers = [torch.tensor([number]) for _ in self.members]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._meeting = [self.post(numbers[rank], rank, MEET) for rank in others]  # kept where one fails
        sent = [self.send(numbers[self.rank], rank, MEET, self.label) for rank in others]
        for work, rank in zip(self._meeting, others, strict=True):
            self.take(work, self.label, rank)
        self._meeting = []
        self.arrived(self._met)  # a member that meets again has received the numbers of the meeting before
        self._met = sent
        return [int(each) for each in numbers]

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        """Starts an all-reduce in place, which runs while the caller computes. Returns the work for `finish`.

        All members start the collectives of a group in the same order.
        """
        here = tensor.cpu()  # the same where it lies there
        with self._translated():
            work = self.backend.allreduce([here])
        return _Begun(work, here, tensor if here is not tensor else None)

    def begin_all_to_all(self, tensor: Tensor, out: Tensor) -> Any:
        """Starts to send each member its slice of a tensor. Returns the work for `completed`.

        Args:
            tensor: on the host, a slice for each rank: [size, *shape].
            out: where the slices come that are for this rank, by the rank that they are from: [size, *shape].
        """
        with self._translated():
            work = self.backend.alltoall_base(_raw(out), _raw(tensor), [], [])
        return _Begun(work, out, None)

    def finish(self, work: Any) -> None:
        """Waits for a collective that `begin_all_reduce` started. Raises as `all_reduce`."""
        with self.plan_groups.stopwatch.measure(self.label):
            self.wait(work.work)
        work.land()

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Every member's tensor, stacked by rank. Raises as `all_reduce`.

        Args:
            tensor: of the same shape on every member. It may be written to when this returns.
            out: where the result goes: [size, *shape]; None: a new tensor.
        """
        if out is None:
            out = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            out[0] = tensor
            return out
        if tensor.device.type != "cpu":
            return out.copy_(self.all_gather(tensor.cpu()))
        with self.plan_groups.stopwatch.measure(self.label):
            if self._at_once(tensor):
                out[self.rank] = tensor
                self._exchange(tensor.clone(memory_format=torch.contiguous_format), out.unbind())
            else:
                self.wait(self.backend._allgather_base(out, tensor.unsqueeze(0)))
        return out

    def send(self, tensor: Tensor, to: int, tag: int, label: str = "boundary") -> int:
        """Starts to send a message, and keeps its tensor until it is known to have arrived.

        Args:
            tensor: the message. Do not write to it before it has arrived.
            to: the rank that receives it.
            tag: the number of the message; the receiver asks for it.
            label: what the stopwatch counts the seconds for.

        Returns:
            A number for `arrived`. After `received` all messages have arrived.
        """
        here = tensor.cpu()
        with self.plan_groups.stopwatch.measure(label), self._translated():
            number = next(self._numbers)  # another thread may be at a meeting
            self._sent[number] = (self.backend.send([here], to, tag), here, tag)
        return number

    def post(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Starts to receive a message. Returns the work for `take`.

        Args:
            tensor: where it goes, at least as large as the message.
            source: the rank that sends it.
            tag: its number.
        """
        here = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        with self._translated():
            work = self.backend.recv([here], source, tag)
        return _Begun(work, here, tensor if here is not tensor else None)

    def take(self, work: Any, label: str = "boundary", source: int | None = None) -> None:
        """Waits until a posted message is here. Raises as `receive`.

        Args:
            work: what `post` returned.
            label: what the stopwatch counts the wait for.
            source: the rank that sends it, for the report of where the main thread is.
        """
        with self.plan_groups.stopwatch.measure(label, source), self._translated():
            work.work.wait()
        work.land()

    def receive(self, tensor: Tensor, source: int, tag: int, label: str = "boundary") -> Tensor:
        """Receives into a tensor that is at least as large as what comes, and waits for it.

        Args:
            tensor: where the message goes; its first bytes are overwritten.
            source: the rank that sends it.
            tag: the number of the message.
            label: what the stopwatch counts the wait for.

        Raises:
            PeerLost: the sender is gone.
            Cancelled: `shut` was called meanwhile.
        """
        self.take(self.post(tensor, source, tag), label, source)
        return tensor

    def arrived(self, numbers: Iterable[int]) -> None:
        """Drops the tensors of messages that have arrived, by the numbers that `send` returned."""
        for number in numbers:
            self._sent.pop(number, None)

    def received(self) -> None:
        """Drops the tensors of all messages. Call it after a collective that proves their arrival.

        Tensors of the last exchange stay, because that exchange may have been the collective; and those of
        meetings, because another thread may be at one.
        """
        for number, (_, _, tag) in list(self._sent.items()):
            if number not in self._exchanged and tag != MEET:
                self._sent.pop(number, None)

    @property
    def backend(self) -> Any:
        """The torch process group, for a transport of migration; None where this rank is alone. Only
        `PlanGroups` keeps it, to let it go."""
        if self.size == 1:
            return None
        backend = self.plan_groups.backends.get((self._apart, self.members))
        if backend is None:
            raise Cancelled("the plan's groups were let go")
        return backend


class Helper(Protocol):
    """A user of a plan's groups that ends once they are `dead`, such as a thread."""

    def is_alive(self) -> bool:
        """Returns True until it has ended."""

    def join(self) -> None:
        """Waits until it has ended."""


class DataPlane(Protocol):
    """Communicators of a plan on an accelerator, which end with its groups."""

    def taken(self) -> tuple[Callable[[list[Any]], None], list[Any]]:
        """Returns a function that ends communicators, all in one call, and those to end; none if this was
        called before."""

    def ended(self) -> None:
        """Called once that call has returned."""


class PlanGroups:
    """All process groups of one plan or of one transition, on one gloo device."""

    planes: list[DataPlane]  #: that end with them
    #: Whether devices of one node reach each other over quicker links than those of two.
    near_and_far = True

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
        """
        Args:
            name: of the plan or transition, the same on all members; the prefix of its keys in the store.
            me: this device.
            address: of the network interface that gloo listens at.
            store: through which members find each other.
            seconds: the longest wait for the other members when a group is made.
            patience: the longest wait of a collective for a peer that lives, in seconds; more than any step
                takes. A peer that dies is noticed at once.
        """
        self.name, self.me, self.dead, self.seconds = name, me, False, seconds
        self.stopwatch = Stopwatch()
        self._patience = patience
        self._store = _BootstrapStore(store, f"{name}/", lambda: self.dead, seconds)
        self._peers: set[Address] = set()
        self._met: set[str] = set()  # members whose addresses are in `_peers`
        self.backends: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._helpers: list[Helper] = []
        self._users: list[object] = []
        self.planes = []
        self._device, self._listener = _gloo_device(address)

    def group(self, members: Sequence[str], label: str) -> Group:
        """The group of these members, which is made at the first call. Each of them must call this.

        All ranks make groups in the same global order, because each call waits for the other members.

        Args:
            members: devices in the order of their ranks in the group.
            label: what the stopwatch counts the waits in this group for.

        Raises:
            RuntimeError: a member did not come in time.
            Cancelled: `shut` or `park` was called meanwhile.
        """
        return self._group(tuple(members), label, "")

    def group_apart(self, members: Sequence[str], label: str, name: str) -> Group:
        """A further group of the same members, with connections of its own: members start the collectives of
        one group in the same order, and those of two groups in any. Otherwise as `group`.

        Args:
            members, label: as of `group`.
            name: of this group among those of the same members.
        """
        return self._group(tuple(members), label, name)

    def torch_backend(self, members: tuple[str, ...], name: str) -> Any:
        """The backend of a group of torch's own tables, on the plan's gloo device. Each member calls it.

        Args:
            members: devices in the order of their ranks in the group.
            name: of this group among those of the same members.
        """
        if len(members) > 1:
            return self._group(members, "user", name).backend
        if (name, members) not in self.backends:
            self.backends[name, members] = self._make(members, name)
        return self.backends[name, members]

    def _group(self, names: tuple[str, ...], label: str, apart: str) -> Group:
        if self.dead:
            raise Cancelled("the plan's groups are shut")
        if len(names) > 1 and (apart, names) not in self.backends:
            self._meet(names)
            self.backends[apart, names] = self._make(names, apart)
            if self.dead:
                raise Cancelled(MEANWHILE)
        return Group(self, names, self.me, label, apart)

    def _meet(self, members: tuple[str, ...]) -> None:
        """Tells the others where our gloo listens, and learns where theirs does: for `shut` alone."""
        if not self._met:
            self._store.set(f"at/{self.me}", f"{self._listener[0]} {self._listener[1]}")
        missing = [member for member in members if member not in self._met]
        for member, at in zip(missing, self._store.get_all([f"at/{each}" for each in missing]), strict=True):
            host, port = at.decode().split()
            self._peers.add((host, int(port)))
            self._met.add(member)

    def _make(self, members: tuple[str, ...], apart: str) -> Any:
        rank, device = members.index(self.me), self._device
        if device is None:  # gloo does not look, and the process would die
            raise Cancelled(MEANWHILE)
        name = "_".join(members) + (f"/{apart}" if apart else "")
        store = PrefixStore(f"group/{name}", self._store)
        # gloo asks for each rank's address twice, one after the other (torch 2.13: context 0 of a group).
        self._store.expect(f"group/{name}/0/{each}" for each in range(len(members)))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._patience)
        options._devices = [device]
        options._threads = 1
        backend = ProcessGroupGloo(store, rank, len(members), options)
        backend._set_sequence_number_for_group()
        return backend

    def store(self, prefix: str) -> Store:
        """A store in which members of the plan find each other. Its waits end with `Cancelled` at `shut`."""
        return PrefixStore(prefix, self._store)

    def ends_with(self, plane: DataPlane) -> None:
        """Has `shut` and `park` end communicators of the plan, too."""
        self.planes.append(plane)

    def shut(self) -> None:
        """Frees every thread and device that waits in one of these groups; from any thread.

        Who polls leaves at once. The sockets are shut once no payload moves in them, `_DRAIN_SECONDS` seconds
        later at
        most: gloo never wakes an operation whose payload was cut in the middle, and what it holds (threads,
        descriptors, memory) then stays until `patience` ends, as it does where a peer is frozen."""
        shut([self])

    def shut_sockets(self) -> None:
        """The half of `shut` that is gloo's."""
        mine = self._sockets()
        wait_until_quiet(mine, _DRAIN_SECONDS)
        for sock in mine:
            with sock, suppress(OSError):  # it may be gone already
                sock.shutdown(socket.SHUT_RDWR)

    def _sockets(self) -> list[socket.socket]:
        """Duplicates of the connections of these groups; the caller closes them."""
        mine = []
        for _, listening, local, peer, sock in tcp_sockets():
            if not listening and (local == self._listener or peer in self._peers):
                mine.append(sock)
            else:
                sock.close()
        return mine

    def keep(self, user: object) -> None:
        """Keeps an object that holds a group until the groups are let go.

        The thread that drops the last reference to a group destroys it, which may block.
        """
        self._users.append(user)

    def helped_by(self, helper: Helper) -> None:
        """Has the groups let go only after a user of them has ended."""
        self._helpers = [other for other in self._helpers if other.is_alive()] + [helper]

    def park(self) -> threading.Thread:
        """Destroys the groups in a thread, because that takes long, or blocks on a stuck payload.

        Returns:
            The thread.
        """
        held: list[Any] = [self._users, self.backends, self._device]
        self._users, self.backends, self._device, self.dead = [], {}, None, True
        planes, self.planes = self.planes, []
        args = held, planes, self._helpers
        thread = threading.Thread(target=_let_go, args=args, name=f"park-{self.name}", daemon=True)
        thread.start()
        return thread


def shut(listed: Sequence[PlanGroups]) -> None:
    """`PlanGroups.shut` of several. All are marked dead before the first is shut, which takes time: a thread
    that polls leaves at once. The communicators of all of them end side by side, on threads of their own: where
    one of them is ended after the other, the first may wait for the device, which waits for the second."""
    for groups in listed:
        groups.dead = True
    planes = [plane for groups in listed for plane in groups.planes]
    if planes:
        threading.Thread(target=_end, args=(planes,), name="abort", daemon=True).start()
    for groups in listed:
        groups.shut_sockets()


def _end(planes: Iterable[DataPlane]) -> None:
    """A plan's that still connect may end late. Those of the plan in force are not to wait for them."""
    threads = [
        threading.Thread(target=_end_one, args=(plane, end, communicators), name="abort", daemon=True)
        for plane, (end, communicators) in [(plane, plane.taken()) for plane in planes]
        if communicators
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_one(plane: DataPlane, end: Callable[[list[Any]], None], communicators: list[Any]) -> None:
    end(communicators)
    plane.ended()


def pause(turns: int, waited: float) -> float:
    """Seconds that a poll pauses: none at first, then longer with the seconds waited, to at most
    `LONGEST_PAUSE_SECONDS`."""
    return 0 if turns < 20 else min(LONGEST_PAUSE_SECONDS, max(5e-5, waited / 50))


def _raw(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's bytes, for what is moved and not added up."""
    return tensor.view(-1).view(torch.uint8)


def _let_go(held: list[Any], planes: Iterable[DataPlane], helpers: Sequence[Helper]) -> None:
    """Drops the groups and returns their memory to the system.

    Each group had threads, whose buffers glibc keeps in arenas of their own. A process that regroups often
    would grow by hundreds of megabytes.
    """
    _end(planes)
    for helper in helpers:
        helper.join()
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


def first_sentence(error: Exception) -> str:
    """The event that gloo tells of, without its place in gloo's source and without what it could be due to."""
    text = re.sub(r"^\[[^\]]*\] ", "", (str(error).splitlines() or [""])[0])
    return re.split(r"\.\s", text, maxsplit=1)[0].rstrip(". ")
