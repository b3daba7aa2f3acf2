"""Transport of bytes from rank to rank while state moves: over a torch process group, or in memory.

The contract, for every implementation:

1. `send` returns at once and never blocks. The tensor must stay as it is until a later message from the
   receiver, or a collective that it entered later, proves that it has arrived; `drain` then lets go of it.
2. Messages from one rank to another on one channel arrive in the order of sending; channels are apart.
3. `receive` gives a handle, whose `wait` returns when the tensor is filled, or raises. Receives take the
   messages in the order in which they were posted, whatever the order of waiting.
4. Tensors are contiguous and travel as bytes: both ends must agree on their number.
5. Nobody sends to itself.
6. The messages of a `round` go on side by side. All ranks begin the rounds that they are in in one order. Their
   tensors lie on `device`, those of `send` and `receive` on the host.

What gloo does under faults shaped this: a send is never waited for (its end cannot be polled, and nothing
wakes it), a receive is waited for plainly (closing its socket wakes it), and how small tensors are
gathered is the matter of the group's owner, who injects it.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup, Work

#: Bytes of a payload that go with its length in an all-gather's first collective, and of the length.
_SHORT, _LENGTH = 4096, 8
#: The channel of rounds.
ROUNDS = 0


class Handle(Protocol):
    """A receive that was started."""

    def wait(self) -> None:
        """Return when the tensor is filled. Raises RuntimeError when it cannot be any more."""


class Transport(Protocol):
    """`members` are device names by rank; `device` is where the tensors of rounds lie.

    `bytes_sent` counts what was given to `send` and in rounds; collectives are not in it.
    """

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def members(self) -> tuple[str, ...]:
        """The ranks' device names, by rank."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors of rounds."""

    @property
    def bytes_sent(self) -> int:
        """Bytes given to `send` and in rounds so far."""

    def round(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> tuple[list[int], list[Handle]]:
        """Start the messages of a round: the tickets of those sent, and the handles of those that come.

        Args:
            sends: to which rank, and what. Of two to one rank the first is the first that is received.
            receives: from which rank, and into what: a contiguous tensor of the size that is sent.
        """

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        """Start to send; the ticket is for `drain`."""

    def receive(self, source: int, tensor: torch.Tensor, *, channel: int = 0) -> Handle:
        """Start to receive into a contiguous tensor; a channel keeps the order of its sends."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order; they may differ in length."""

    def drain(self, tickets: Iterable[int] | None = None) -> None:
        """Let go of the tensors of these sends, or of all: their receipt is proved."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as flat uint8. Raises ValueError where the tensor is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} is not contiguous: send a copy")
    flat = tensor.detach().view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


class _Endpoint:
    """The part that both transports share: the ranks, what is kept until receipt, and how much was sent."""

    device = torch.device("cpu")

    def __init__(self, members: Sequence[str], me: str) -> None:
        if len(set(members)) != len(members) or me not in members:
            raise ValueError(f"members {list(members)} must be distinct and contain {me!r}")
        self.members = tuple(members)
        self.rank = self.members.index(me)
        self.bytes_sent = 0
        self._tickets = 0
        self._kept: dict[int, object] = {}

    @property
    def size(self) -> int:
        return len(self.members)

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        raise NotImplementedError

    def receive(self, source: int, tensor: torch.Tensor, *, channel: int = 0) -> Handle:
        raise NotImplementedError

    def round(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> tuple[list[int], list[Handle]]:
        """Messages on a channel of their own, receives first."""
        handles = [self.receive(source, tensor, channel=ROUNDS) for source, tensor in receives]
        return [self.send(rank, tensor, channel=ROUNDS) for rank, tensor in sends], handles

    def drain(self, tickets: Iterable[int] | None = None) -> None:
        for ticket in tuple(self._kept) if tickets is None else tickets:
            self._kept.pop(ticket, None)

    def _keep(self, tensor: torch.Tensor, *more: object) -> int:
        self._tickets += 1
        self._kept[self._tickets] = (tensor, *more)
        self.bytes_sent += tensor.numel()
        return self._tickets

    def _peer(self, rank: int) -> int:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} cannot exchange messages with rank {rank}")
        return rank


class ProcessGroupTransport(_Endpoint):
    """Over a torch process group, which need not be the default one nor known to torch's world.

    group: made by its members, in the order of `members`; None for one that is alone. gather: how the owner
    gathers a small tensor from all, by rank, so that a fault can end it.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        members: Sequence[str],
        me: str,
        gather: Callable[[torch.Tensor], Iterable[torch.Tensor]],
    ) -> None:
        super().__init__(members, me)
        if group is None and self.size > 1:
            raise ValueError(f"{me} is one of {self.size}: they need a group")
        if group is not None and (group.size(), group.rank()) != (self.size, self.rank):
            raise ValueError(
                f"{me} is rank {group.rank()} of {group.size()} in the group, "
                f"but {self.rank} of {self.size} by name"
            )
        self._group: Any = group
        self._gather = gather

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        """Starts to send. The tensor must not change until its ticket was given to `drain`."""
        raw = as_bytes(tensor)
        work = self._group.send([raw], self._peer(destination), channel)
        return self._keep(raw, work)

    def receive(self, source: int, tensor: torch.Tensor, *, channel: int = 0) -> Handle:
        """Starts to receive into a contiguous tensor."""
        raw = as_bytes(tensor)
        return _Received(self._group.recv([raw], self._peer(source), channel), raw)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Short payloads in one collective; of longer ones the rest follows, once all know how long it is."""
        if self.size == 1:
            return [payload]
        head = torch.zeros(_LENGTH + _SHORT, dtype=torch.uint8)
        _fill(head, len(payload).to_bytes(_LENGTH, "little") + payload[:_SHORT])
        heads = [row.numpy().tobytes() for row in self._gather(head)]
        lengths = [int.from_bytes(row[:_LENGTH], "little") for row in heads]
        rows = [row[_LENGTH : _LENGTH + length] for row, length in zip(heads, lengths, strict=True)]
        if (longest := max(lengths)) <= _SHORT:
            return rows
        rest = torch.zeros(longest - _SHORT, dtype=torch.uint8)
        _fill(rest, payload[_SHORT:])
        rests = (row.numpy().tobytes() for row in self._gather(rest))
        return [
            row + more[: max(0, length - _SHORT)]
            for row, more, length in zip(rows, rests, lengths, strict=True)
        ]


def _fill(tensor: torch.Tensor, payload: bytes) -> None:
    """Bytes at the start of a tensor."""
    if payload:
        tensor[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)


class _Received:
    """A receive of a process group; keeps the buffer while the backend writes to it."""

    def __init__(self, work: Work, buffer: torch.Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> None:
        self._work.wait()


#: Sender, receiver and channel.
_Box = tuple[int, int, int]


class _Wire:
    """The state that the ends of a `MemoryTransport` share: messages by box and number, how many were sent into
    each box and asked for, and gatherings."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.mail: dict[_Box, dict[int, torch.Tensor]] = defaultdict(dict)
        self.sent: Counter[_Box] = Counter()
        self.asked: Counter[_Box] = Counter()
        self.gatherings: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.closed = ""

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait with the condition held."""
        if not self.changed.wait_for(lambda: ready() or self.closed, self.timeout):
            raise RuntimeError(f"{what}: nothing for {self.timeout:g} s")
        if not ready():
            raise RuntimeError(f"{what}: {self.closed}")


class MemoryTransport(_Endpoint):
    """Between threads of one process: for tests, simulations, and moves inside one process."""

    def __init__(self, wire: _Wire, members: Sequence[str], me: str) -> None:
        super().__init__(members, me)
        self._wire = wire
        self._gathered = 0

    @classmethod
    def connect(cls, members: Sequence[str], *, timeout: float = 30.0) -> tuple[MemoryTransport, ...]:
        """The ends of one wire, by rank. timeout: seconds that a wait lasts before it raises."""
        wire = _Wire(len(members), timeout)
        return tuple(cls(wire, members, me) for me in members)

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        """Puts the tensor's own memory into the mail: what is read later is what it has then."""
        raw, wire, box = as_bytes(tensor), self._wire, (self.rank, self._peer(destination), channel)
        with wire.changed:
            wire.mail[box][wire.sent[box]] = raw
            wire.sent[box] += 1
            wire.changed.notify_all()
        return self._keep(raw)

    def receive(self, source: int, tensor: torch.Tensor, *, channel: int = 0) -> Handle:
        """Takes the next number of the sender's mail on this channel; its `wait` copies."""
        raw, wire, box = as_bytes(tensor), self._wire, (self._peer(source), self.rank, channel)
        with wire.changed:
            number = wire.asked[box]
            wire.asked[box] += 1
        return _Mail(wire, box, number, raw)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Waits until all ends of the wire have given their payload."""
        wire, number = self._wire, self._gathered
        self._gathered += 1
        with wire.changed:
            rows = wire.gatherings[number]
            rows[self.rank] = payload
            wire.changed.notify_all()
            wire.until(lambda: len(rows) == wire.size, f"rank {self.rank}, all-gather {number}")
            wire.gatherings.pop(number - 1, None)  # all have read it: they are in this one
            return [rows[rank] for rank in range(wire.size)]

    def close(self, why: str) -> None:
        """As if this rank died: whoever waits for what has not been sent gets RuntimeError."""
        with self._wire.changed:
            self._wire.closed = self._wire.closed or why
            self._wire.changed.notify_all()


class _Mail:
    """A receive from a mailbox: the message of one number."""

    def __init__(self, wire: _Wire, box: _Box, number: int, buffer: torch.Tensor) -> None:
        self._wire, self._box, self._number, self._buffer = wire, box, number, buffer

    def wait(self) -> None:
        source, rank, channel = self._box
        with self._wire.changed:
            waiting = self._wire.mail[self._box]
            what = f"rank {rank} from rank {source}, channel {channel}"
            self._wire.until(lambda: self._number in waiting, what)
            raw = waiting.pop(self._number)
        if raw.numel() != self._buffer.numel():
            raise RuntimeError(f"rank {source} sent {raw.numel()} bytes, not {self._buffer.numel()}")
        self._buffer.copy_(raw)
