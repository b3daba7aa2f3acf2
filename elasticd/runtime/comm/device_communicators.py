"""The data plane on an accelerator: communicators of a library that launches on the device, such as NCCL.

A launch returns at once, and goes on beside what the device computes. `join` makes the device's current stream
wait for it; the host waits for nothing. So the host learns that a step's communication is over where it reads
the step's loss, and not before.

A fault is the opposite: what hangs on the device is freed by an abort alone, from another thread, of all
communicators side by side. An aborted operation ends without an error and leaves garbage in its tensors. So
nothing that it wrote is believed: `PlanGroups.dead` is set before the abort begins, and whoever waited for the
device looks at it before it uses a value.

`Library` is what differs from one library to another. This file is the same for all of them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from elasticd_planner.layout.channels import Channel, Use
from torch import Tensor
from torch._C._distributed_c10d import Store

from elasticd.runtime.comm.groups import MEANWHILE, Cancelled, Group, PeerLost, PlanGroups, pause

log = logging.getLogger(__name__)

#: What the stopwatch counts the host's seconds for, by what messages are.
LABELS: dict[Use, str] = {
    "activation": "boundary",
    "gradient": "boundary",
    "state": "reduce",
    "context": "context",
    "items": "boundary",
    "experts": "tensor",
}
#: Bytes of a first sum at most: larger ones go as one of this size does.
_LARGE_BYTES = 32 << 20


class Work(Protocol):
    """A launched operation. It keeps its tensors until it is dropped."""

    def join(self) -> None:
        """The device's current stream waits for it. The host does not."""

    def over(self) -> bool:
        """Returns True if the device is done with it."""


class Communicator(Protocol):
    """A library's communicator. Members count by their rank. All launch the same operations in one order."""

    def ready(self) -> bool:
        """Returns True if it is connected with all other members."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """The sum over the members, in place."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """All members' tensors, of one shape, stacked by rank: [size, *shape]."""

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        """Messages to and from members, all side by side. A message has the size of what receives it."""


class Library(Protocol):
    """Makes communicators for the tensors of one device."""

    device: torch.device

    def connect(self, channel: Channel, me: str, store: Store) -> Communicator:
        """A communicator of the channel's members.

        The host need not wait for the other members. What it waits for in the store ends by `Cancelled` when
        the plan's groups are shut.

        Args:
            channel: its members in rank order.
            me: this one.
            store: in which the members find each other.
        """

    def abort(self, communicators: Sequence[Communicator]) -> None:
        """Ends all of them, also those that still connect, in one call and from any thread.

        The device is free for other work then, and may have garbage in the tensors of operations that were
        under way. A launch after it raises RuntimeError.
        """


class DeviceCommunicators:
    """`Communicators` of one member over a library."""

    def __init__(
        self, plan_groups: PlanGroups, channels: tuple[Channel, ...], everyone: Group, library: Library
    ) -> None:
        """
        Args:
            plan_groups: of the plan: when they are shut the communicators are aborted.
            channels: those that this member is in, in the order of all members.
            everyone: the group of all members.
            library: makes the communicators.

        Raises:
            Cancelled: the groups were shut meanwhile.
        """
        self.plan_groups, self._library, self._everyone = plan_groups, library, everyone
        self._lock, self._aborted = threading.Lock(), False
        self._made: dict[Channel, Communicator] = {}
        self._ended = threading.Event()
        self._open: dict[int, Work] = {}  # launched and not joined; they keep their tensors
        self._sent: dict[int, Work] = {}
        self._rounds: dict[int, Work] = {}  # of messages that this member only sends, by `id`
        self._count = 0
        plan_groups.ends_with(self)
        for channel in channels:
            store = plan_groups.store(f"data/{channel}")
            with self.launching(str(channel)):
                made = library.connect(channel, plan_groups.me, store)
            with self._lock:
                self._made[channel] = made
                late = self._aborted  # without this one
            if late:
                library.abort([made])
                raise Cancelled(MEANWHILE)
        if channels:
            with self.launching("the members' meeting"):
                everyone.all_gather(torch.zeros(1))  # all are there: what is awaited now takes no peer's time
            self._await(channels)

    def _await(self, channels: Sequence[Channel]) -> None:
        """Until all are connected: the first launch then waits for nobody who is not there yet."""
        for channel in channels:
            start, turns = time.monotonic(), 0
            with self.launching(str(channel)):
                while not self._made[channel].ready():
                    if self.plan_groups.dead:
                        raise Cancelled(MEANWHILE)
                    if time.monotonic() - start > self.plan_groups.seconds:
                        raise RuntimeError(f"peers did not connect within {self.plan_groups.seconds:.0f} s")
                    turns += 1
                    time.sleep(pause(turns, time.monotonic() - start))

    def first_launches(self, sums: Iterable[tuple[Channel, int, torch.dtype]]) -> None:
        """See `Communicators`.

        A library may connect members when they first launch what needs it, as NCCL does for each two that send
        each other messages, and for each algorithm that sums of some size go by. The host of each waits in that
        launch until the others have come to theirs. Within a step they may never: each could be before a launch
        that another waits in. So the first launches between stages and of sums are made here, one after the
        other, in an order that is the same on all members. What a TP group launches, and rounds, all their
        members launch at the same place in what they do.
        """
        if not self._made:
            return
        with self.launching("the members' meeting"):
            self._everyone.all_gather(torch.zeros(1))
        me = self.plan_groups.me
        for channel in self._made:
            if channel.use in ("activation", "gradient"):
                rank = channel.members.index(me)
                with self.launching(str(channel)):
                    message = [(1 - rank, torch.zeros(1, dtype=torch.uint8, device=self._library.device))]
                    sends, receives = ([], message) if rank else (message, [])
                    self.join(self.launched(self._made[channel].exchange(sends, receives)))
        for channel, count, dtype in dict.fromkeys(sums):
            with self.launching(str(channel)):
                count = min(count, _LARGE_BYTES // dtype.itemsize)
                numbers = torch.zeros(count, dtype=dtype, device=self._library.device)
                self.join(self.launched(self._made[channel].all_reduce(numbers)))

    def team(self, channel: Channel) -> DeviceTeam:
        """Those that compute sums together."""
        return DeviceTeam(self, channel, self._made.get(channel))

    def pair(self, channel: Channel) -> DevicePair:
        """Messages from the first member to the second."""
        return DevicePair(self, channel, self._made[channel])

    def mesh(self, channel: Channel) -> DeviceMesh:
        """Messages among all members."""
        return DeviceMesh(self, channel, self._made[channel])

    def received(self) -> None:
        """Drops the tensors of the messages that the device is done with."""
        self.drop([number for number, work in self._sent.items() if work.over()])
        for work in [work for work in self._rounds.values() if work.over()]:
            self.join(work)

    def taken(self) -> tuple[Callable[[list[Communicator]], None], list[Communicator]]:
        """See `DataPlane`."""
        with self._lock:
            self._aborted, first = True, not self._aborted
            return self._library.abort, list(self._made.values()) if first else []

    def ended(self) -> None:
        """See `DataPlane`."""
        self._ended.set()

    def rest(self, seconds: float) -> bool:
        """See `Communicators`. Until an abort has returned the device may write to tensors of what it ends."""
        if self._made and not self._ended.wait(seconds):
            return False
        try:
            for work in list(self._open.values()):
                self.join(work)
        except RuntimeError as error:
            log.error("the device is lost: %s", _short(error))
            return False
        self._sent.clear()
        self._rounds.clear()
        return True

    def launched(self, work: Work) -> Work:
        """Keeps an operation until it is joined."""
        self._open[id(work)] = work
        return work

    def join(self, work: Work) -> None:
        """The device's current stream waits for an operation, once."""
        if id(work) in self._open:
            work.join()
            self._rounds.pop(id(work), None)
            del self._open[id(work)]

    def sends(self, work: Work) -> Work:
        """Keeps a round of messages that this member only sends until `join` or `received`."""
        self._rounds[id(work)] = self.launched(work)
        return work

    def finish(self, work: Work | None, label: str, what: str) -> None:
        """`join`, if there is an operation; its seconds count for `label`. Raises as `launching`."""
        if work is not None:
            with self.plan_groups.stopwatch.measure(label), self.launching(what):
                self.join(work)

    @contextmanager
    def launching(self, what: str) -> Iterator[None]:
        """Around a launch.

        Raises:
            Cancelled: the plan's groups are shut.
            PeerLost: the library refuses, because a member is gone.
        """
        if self.plan_groups.dead:
            raise Cancelled("the plan's groups are shut")
        try:
            yield
        except Cancelled:
            raise
        except RuntimeError as error:
            if self.plan_groups.dead:
                raise Cancelled("shut while an operation was launched") from None
            raise PeerLost(f"{what}: {_short(error)}") from error

    def keep(self, work: Work) -> int:
        """Keeps a message until `received` or `drop`. Returns its number."""
        self._count += 1
        self._sent[self._count] = self.launched(work)
        return self._count

    def drop(self, numbers: Iterable[int]) -> None:
        """Lets go of messages that have arrived."""
        for number in numbers:
            if (work := self._sent.pop(number, None)) is not None:
                self.join(work)  # the receiver has it; this stream may not know that its memory is free


def _short(error: Exception) -> str:
    return re.sub(r"^\[[^\]]*\] ", "", str(error).splitlines()[0] if str(error) else "")[:160].rstrip(". ")


class DeviceTeam:
    """A `Team`."""

    def __init__(self, of: DeviceCommunicators, channel: Channel, communicator: Communicator | None) -> None:
        """`communicator`: None where this device is alone."""
        self._of, self._name, self._communicator = of, str(channel), communicator
        self.members, self.me = channel.members, of.plan_groups.me
        self.rank, self.size = channel.members.index(self.me), len(channel.members)
        self._label = channel.use

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Team`."""
        if self._communicator is None:
            return tensor
        tensor = tensor.contiguous()
        self.finish(self.begin_all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Team`."""
        if out is None:
            out = tensor.new_empty((self.size, *tensor.shape))
        if self._communicator is None:
            return out.copy_(tensor.unsqueeze(0))
        with self._of.launching(self._name):
            work = self._of.launched(self._communicator.all_gather(out, tensor.contiguous()))
        self.finish(work)
        return out

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        """See `Team`."""
        if self._communicator is None:
            return None
        with self._of.launching(self._name):
            return self._of.launched(self._communicator.all_reduce(tensor))

    def finish(self, work: Any) -> None:
        """The device waits for it."""
        self._of.finish(work, self._label, self._name)


class DevicePair:
    """A `Pair`. Nothing is sent of an empty tensor."""

    def __init__(self, of: DeviceCommunicators, channel: Channel, communicator: Communicator) -> None:
        self._of, self._name, self._communicator = of, str(channel), communicator
        self._peer = 1 - channel.members.index(of.plan_groups.me)
        self._label = LABELS[channel.use]

    def send(self, tensor: Tensor) -> int:
        """See `Pair`."""
        if not tensor.numel():
            return 0
        with self._of.launching(self._name):
            return self._of.keep(self._communicator.exchange([(self._peer, tensor.contiguous())], []))

    def begin_receive(self, tensor: Tensor) -> Any:
        """See `Pair`."""
        if not tensor.numel():
            return None
        with self._of.launching(self._name):
            return self._of.launched(self._communicator.exchange([], [(self._peer, tensor)]))

    def finish(self, work: Any) -> None:
        """The device waits for it."""
        self._of.finish(work, self._label, self._name)

    def arrived(self, numbers: Iterable[int]) -> None:
        """See `Pair`."""
        self._of.drop(numbers)


class DeviceMesh:
    """A `Mesh`."""

    def __init__(self, of: DeviceCommunicators, channel: Channel, communicator: Communicator) -> None:
        self._of, self._name, self._communicator = of, str(channel), communicator
        self._rank = {member: rank for rank, member in enumerate(channel.members)}
        self._label = LABELS[channel.use]

    def begin_round(self, sends: Sequence[tuple[str, Tensor]], receives: Sequence[tuple[str, Tensor]]) -> Any:
        """See `Mesh`."""
        out = [(self._rank[to], tensor.contiguous()) for to, tensor in sends if tensor.numel()]
        back = [(self._rank[source], tensor) for source, tensor in receives if tensor.numel()]
        if not out and not back:
            return None
        with self._of.launching(self._name):
            work = self._communicator.exchange(out, back)
            return self._of.launched(work) if back else self._of.sends(work)

    def finish(self, work: Any) -> None:
        """The device waits for all messages of the round, also for those that this member sends."""
        self._of.finish(work, self._label, self._name)

    def arrived(self, work: Any) -> None:
        """See `Mesh`. Nothing of a round is kept after `finish`."""
        if work is not None:
            self._of.join(work)
