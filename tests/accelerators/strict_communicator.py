"""A communicator with NCCL's rules, over gloo, for tensors of any device.

What NCCL refuses raises here, and what would hang it hangs here. `abort` frees the host at once, as NCCL's
does: with no error, and with garbage in the tensors.

Theory of operation. Operations are in a queue: one begins when the one before it is over. A communicator has a
queue of its own, or shares one with the other communicators of its rank, as a device may that does not run
their streams side by side. A member that begins an operation tells the others what it is and sends what it
contributes; a message is over when its receiver has begun to receive it and has said so (larger messages of
NCCL wait for their receiver; here all do). A thread reads what comes from the others, and a thread runs each
queue. The host never waits but in `Work.wait`, where NCCL's would let the stream wait alone: the kernels of the
devices used here run when they are launched, so values must be there by then.

Members that are in different operations at the same time, where NCCL would hang or mix up bytes, all raise
`Mismatch`: so a test says what was wrong. Two members that both receive first, or both send first, hang.

On vgpu a launch claims its tensors on the communicator's stream, so that a kernel that uses them without a
`wait` in between is found to be a race; it reads and writes them behind the host's back.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.planner.launch_order import Join, Launch, Operation

T = TypeVar("T")

#: Tags of gloo's messages: what is said, and the bytes that belong to it.
_HEAD, _BODY = 1, 2
#: Bytes of a head.
_ROOM = 192
#: What NCCL can send, by `ncclDataType_t`; torch sends bool as uint8.
# fmt: off
DTYPES = frozenset({
    torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint32, torch.uint64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
})
# fmt: on
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Refused(ValueError):
    """NCCL would not take this."""


class Mismatch(RuntimeError):
    """The members are in different operations: NCCL would hang, or mix up bytes."""


class Aborted(RuntimeError):
    """The communicator was aborted before this operation was launched."""


class LaunchLog:
    """What one rank's host launched and joined, in its order, over all its communicators."""

    entries: list[Launch | Join]

    def __init__(self) -> None:
        self.entries = []
        self.lock = threading.Lock()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Around each launch. Raises Refused where another thread is at it: NCCL has one launching thread a
        device."""
        if not self.lock.acquire(blocking=False):
            raise Refused("two threads launch at the same time")
        try:
            yield
        finally:
            self.lock.release()


class Work:
    """A launch of operations that go on side by side."""

    def __init__(
        self, communicator: Communicator, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ):
        self._communicator, self._name = communicator, name
        self.reads, self.writes = list(reads), list(writes)  # kept until joined
        self.over = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether the operations are over, or were aborted."""
        return self.over.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Lets the current stream wait; the host waits too, because kernels run here when they are launched.

        After an abort it returns, and the tensors hold garbage.

        Raises:
            Mismatch: members were in different operations.
            TimeoutError: the operations were not over after `seconds`. NCCL's would wait on.
        """
        if not self.over.wait(seconds):
            raise TimeoutError(f"{self._name} is not over after {seconds} s")
        if self.error is not None:
            raise self.error
        self._communicator.joined(self._name)
        self.reads, self.writes = [], []


@dataclass(frozen=True, slots=True)
class _Message:
    sends: bool
    tensor: Tensor
    peer: int

    @property
    def signature(self) -> str:
        return f"{self.tensor.dtype} of {self.tensor.numel()}"


@dataclass(slots=True)
class _Said:
    """What a member said, with the bytes that it contributes."""

    kind: str  # "collective", "message", "received" or "mismatch"
    text: str
    body: Tensor


@dataclass(slots=True)
class _Mail:
    """What came from one member and was not used yet."""

    operations: deque[_Said] = field(default_factory=deque)
    received: int = 0  # of our messages


class Line:
    """A queue of operations, and the thread that runs them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"{name}: _run", daemon=True).start()

    def put(self, operation: Callable[[], None]) -> None:
        """The operation begins when those before it are over."""
        self._queue.put(operation)

    def end(self) -> None:
        """No operation comes any more."""
        self._queue.put(None)

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation()
            del operation  # its tensors must not be kept until the next one


class _Stopped(Exception):
    """The communicator was aborted while the operation ran, or a member is gone: what waits for it hangs."""


class Communicator:
    """One member's end of a communicator."""

    def __init__(
        self,
        name: str,
        gloo: Any,
        members: Sequence[str],
        me: str,
        device: torch.device | str,
        log: LaunchLog | None = None,
        line: Line | None = None,
    ) -> None:
        """
        Args:
            name: the same at all members, and of no other communicator; in the log.
            gloo: a gloo backend of the same members, in the same order, that nobody else uses.
            members: their names, in the log.
            me: this member's name.
            device: on which all tensors must lie.
            log: of all communicators of this rank; None: one of its own.
            line: the queue of all communicators of this rank; None: one of its own.
        """
        self.name, self.members, self.rank, self.size = (
            name,
            tuple(members),
            list(members).index(me),
            len(members),
        )
        self.device = torch.empty(0, device=device).device  # with its index
        self.log = LaunchLog() if log is None else log
        self._gloo = gloo
        self._stream = None if self.device.type == "cpu" else torch.Stream(device=self.device)
        self._line, self._line_is_mine = Line(name) if line is None else line, line is None
        self._news = threading.Condition()  # guards the rest
        self._mail: dict[int, _Mail] = defaultdict(_Mail)
        self._open: list[Work] = []
        self._dead, self._mismatch = False, ""
        self._batch: list[_Message] | None = None
        self._collectives, self._messages = 0, Counter[tuple[int, int]]()
        threading.Thread(target=self._read, name=f"{name}: _read", daemon=True).start()

    # -- what a rank calls -----------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> Work:
        """The reduction of all members' tensors, in place: sum, avg, product, min or max."""
        self._check("all_reduce", tensor)
        self._check_reduction("all_reduce", tensor, reduction)
        return self._collective(f"all_reduce {reduction}", tensor, tensor, reduction_of(reduction))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """All members' tensors, by rank, into `out`."""
        self._check("all_gather", out, tensor)
        self._check_sizes("all_gather", large=out, small=tensor)
        return self._collective(
            "all_gather", tensor, out, lambda parts: torch.cat([each.flatten() for each in parts])
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor, reduction: str = "sum") -> Work:
        """This rank's part of the reduction of all members' tensors, into `out`."""
        self._check("reduce_scatter", out, tensor)
        self._check_reduction("reduce_scatter", tensor, reduction)
        self._check_sizes("reduce_scatter", large=tensor, small=out)
        reduced = reduction_of(reduction)

        def mine(parts: Sequence[Tensor]) -> Tensor:
            return reduced(parts).flatten().chunk(self.size)[self.rank]

        return self._collective(f"reduce_scatter {reduction}", tensor, out, mine)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """The tensor of the member `root`, into those of all others."""
        self._check("broadcast", tensor)
        return self._collective(f"broadcast from {root}", tensor, tensor, lambda parts: parts[root])

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work | None:
        """Sends to a member; inside of `batch` there is no work of its own."""
        return self._message(_Message(True, tensor, to), tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work | None:
        """Receives from a member as many elements as it sends."""
        return self._message(_Message(False, tensor, source), tag)

    @contextmanager
    def batch(self) -> Iterator[list[Work]]:
        """Sends and receives inside of the block go on side by side, as between ncclGroupStart and
        ncclGroupEnd.

        After the block the list has their work.
        """
        if self._batch is not None:
            raise Refused("a batch inside of a batch")
        self._batch, works = [], list[Work]()
        try:
            yield works
            messages = self._batch
        finally:
            self._batch = None
        if messages:
            works.append(self._launch_messages(messages))

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        with self._news:
            return any(not work.over.is_set() for work in self._open)

    def abort(self) -> None:
        """Frees whoever waits, here alone, from any thread: the other members must abort, too."""
        with self._news:
            if self._dead:
                return
            self._dead = True
            self._news.notify_all()
            for work in self._open:
                if not work.over.is_set():
                    for tensor in work.writes:
                        _spoil(tensor)
                    work.over.set()
            self._open = []
        if self._line_is_mine:
            self._line.end()

    def joined(self, operation: str) -> None:
        """The current stream waits for an operation. `Work.wait` calls it."""
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)
        self.log.entries.append(Join(operation))

    # -- launching -------------------------------------------------------------------------------------------

    def _check(self, what: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            shape = f"{what}: a tensor of shape {list(tensor.shape)}"
            if tensor.device != self.device:
                raise Refused(f"{shape} on {tensor.device}: the communicator is of {self.device}")
            if tensor.layout != torch.strided:
                raise Refused(f"{shape} is not dense ({tensor.layout})")
            if not tensor.is_contiguous():
                raise Refused(f"{shape} is not contiguous: its strides are {list(tensor.stride())}")
            if tensor.dtype not in DTYPES:
                raise Refused(f"{shape} has {tensor.dtype}: NCCL has no such type")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise Refused(f"{what}: tensors of {' and '.join(str(tensor.dtype) for tensor in tensors)}")

    def _check_sizes(self, what: str, *, large: Tensor, small: Tensor) -> None:
        if large.numel() != self.size * small.numel():
            raise Refused(
                f"{what}: {large.numel()} elements are not {self.size} times {small.numel()}; NCCL's are even"
            )

    def _check_reduction(self, what: str, tensor: Tensor, reduction: str) -> None:
        if reduction not in _REDUCTIONS:
            raise Refused(f"{what}: there is no reduction {reduction!r}")
        if reduction == "avg" and not tensor.is_floating_point():
            raise Refused(f"{what}: no average of {tensor.dtype}")

    def _message(self, message: _Message, tag: int) -> Work | None:
        what = "send" if message.sends else "recv"
        self._check(what, message.tensor)
        if tag:
            raise Refused(f"{what} with tag {tag}: NCCL has none, and pairs messages in their order")
        if not 0 <= message.peer < self.size:
            raise Refused(f"{what}: there is no rank {message.peer} among {self.size}")
        if self._batch is not None:
            self._batch.append(message)
            return None
        if message.peer == self.rank:
            raise Refused(f"{what}: to itself a rank sends in a batch alone")
        return self._launch_messages([message])

    def _launch_messages(self, messages: list[_Message]) -> Work:
        operations = []
        for message in messages:
            ends = (self.rank, message.peer) if message.sends else (message.peer, self.rank)
            if message.sends or message.peer != self.rank:  # one to itself has one name, and one member
                self._messages[ends] += 1
                source, to = (self.members[end] for end in ends)
                name = f"{self.name}: {source} to {to}, {self._messages[ends]}"
                operations.append(Operation(name, (source, to) if source != to else (source,)))
        reads = [message.tensor for message in messages if message.sends]
        writes = [message.tensor for message in messages if not message.sends]
        return self._launch(operations, reads, writes, lambda: self._exchange(messages))

    def _collective(
        self, what: str, tensor: Tensor, out: Tensor, result: Callable[[Sequence[Tensor]], Tensor]
    ) -> Work:
        if self._batch is not None:
            raise Refused(f"{what} in a batch: a batch has messages alone")
        self._collectives += 1
        operation = Operation(f"{self.name}: {self._collectives}", self.members)
        text = f"{what}, {tensor.dtype} of {tensor.numel()}"
        reads = [tensor] if tensor is not out else []
        return self._launch([operation], reads, [out], lambda: self._run_collective(text, tensor, out, result))

    def _launch(
        self,
        operations: Sequence[Operation],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[], None],
    ) -> Work:
        with self.log.launching():
            if self._dead:
                raise Aborted(f"{operations[0].name}: the communicator was aborted")
            work = Work(self, operations[0].name, reads, writes)
            if self._stream is not None:
                self._stream.wait_stream(torch.accelerator.current_stream(self.device))
            with self._on_stream():
                for tensor in reads:
                    _claim(tensor, writes=False)
                for tensor in writes:
                    _claim(tensor, writes=True)
            with self._news:
                self._open = [each for each in self._open if not each.over.is_set()] + [work]
                if self._dead:  # meanwhile
                    for tensor in writes:
                        _spoil(tensor)
                    work.over.set()
            self.log.entries.append(Launch(self.name, tuple(operations)))
            self._line.put(partial(self._run, work, run))
        return work

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        # An object of its own: two threads must not enter the same one.
        of = self._stream
        return torch.Stream(stream_id=of.stream_id, device_index=of.device_index, device_type=of.device_type)

    # -- in the thread that runs the queue -------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, work: Work, run: Callable[[], None]) -> None:
        if self._dead:
            return
        try:
            if self._mismatch:  # what it said now, others would take for what they wait for
                raise Mismatch(self._mismatch)
            with self._on_stream():
                run()
        except _Stopped:
            with self._news:
                while not self._dead:  # a member is gone: all that comes after it hangs, too
                    self._news.wait()
            return
        except Exception as error:
            work.error = error
        work.over.set()

    def _run_collective(
        self, text: str, tensor: Tensor, out: Tensor, result: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        mine = _read(tensor)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._spoil(out)
        for rank in others:
            self._say(rank, "collective", text, mine)
        parts = {self.rank: mine}
        for rank in others:
            said = self._await(self._next_of(rank))
            if (said.kind, said.text) != ("collective", text):
                self._disagree(text, rank, said)
            parts[rank] = said.body.view(mine.dtype).reshape(mine.shape)
        self._write(out, result([parts[rank] for rank in range(self.size)]).reshape(out.shape))

    def _exchange(self, messages: Sequence[_Message]) -> None:
        """Sends all; takes what comes from each member in its order, and says so; waits for theirs."""
        awaited: dict[int, deque[_Message]] = defaultdict(deque)
        unconfirmed = Counter[int]()
        bodies = [_read(message.tensor) for message in messages]
        for message, body in zip(messages, bodies, strict=True):
            if message.sends:
                unconfirmed[message.peer] += 1
                self._say(message.peer, "message", message.signature, body)
            else:
                self._spoil(message.tensor)
                awaited[message.peer].append(message)

        def next_message() -> tuple[int, _Said] | None:
            for peer, expected in awaited.items():
                if expected and self._mail[peer].operations:
                    return peer, self._mail[peer].operations.popleft()
            return None

        for _ in range(sum(map(len, awaited.values()))):
            peer, said = self._await(next_message)
            message = awaited[peer].popleft()
            if (said.kind, said.text) != ("message", message.signature):
                self._disagree(f"a receive of {message.signature}", peer, said)
            self._write(message.tensor, said.body.view(message.tensor.dtype).reshape(message.tensor.shape))
            self._say(peer, "received", "", None)

        def confirmed() -> bool | None:
            if any(self._mail[peer].received < count for peer, count in unconfirmed.items()):
                return None
            for peer, count in unconfirmed.items():
                self._mail[peer].received -= count
            return True

        self._await(confirmed)

    def _next_of(self, rank: int) -> Callable[[], _Said | None]:
        def taken() -> _Said | None:
            operations = self._mail[rank].operations
            return operations.popleft() if operations else None

        return taken

    def _await(self, found: Callable[[], T | None]) -> T:
        with self._news:
            while True:
                if self._dead:
                    raise _Stopped
                if self._mismatch:
                    raise Mismatch(self._mismatch)
                if (value := found()) is not None:
                    return value
                self._news.wait()

    def _disagree(self, mine: str, rank: int, said: _Said) -> None:
        theirs = f"a send of {said.text}" if said.kind == "message" else said.text
        text = f"{self.name}: {self.members[self.rank]} is in {mine}; {self.members[rank]} is in {theirs}"
        with self._news:
            self._mismatch = text
        for other in range(self.size):
            if other != self.rank:
                self._say(other, "mismatch", text, None)
        raise Mismatch(text)

    def _write(self, tensor: Tensor, values: Tensor) -> None:
        """Nothing is written after an abort has returned: the tensor may be somebody else's by then."""
        with self._news:
            if self._dead:
                raise _Stopped
            _write(tensor, values)

    def _spoil(self, tensor: Tensor) -> None:
        with self._news:
            if self._dead:
                raise _Stopped
            _spoil(tensor)

    # -- over gloo -------------------------------------------------------------------------------------------

    def _say(self, rank: int, kind: str, text: str, body: Tensor | None) -> None:
        content = torch.empty(0, dtype=torch.uint8) if body is None else body.flatten().view(torch.uint8)
        if rank == self.rank:
            self._hear(rank, _Said(kind, text, content.clone()))
            return
        head = f"{kind}\n{text}\n{content.numel()}".encode()
        if len(head) > _ROOM:
            head = f"{kind}\n{text[: _ROOM - 60]}\n{content.numel()}".encode()
        said = torch.frombuffer(bytearray(head.ljust(_ROOM)), dtype=torch.uint8)
        try:
            self._gloo.send([said], rank, _HEAD).wait()
            if content.numel():
                self._gloo.send([content], rank, _BODY).wait()
        except RuntimeError:
            raise _Stopped from None

    def _read(self) -> None:
        """In a thread: everything that the others say, until gloo's sockets are shut."""
        head = torch.empty(_ROOM, dtype=torch.uint8)
        try:
            while True:
                work = self._gloo.recv_anysource([head], _HEAD)
                work.wait()
                rank = work._source_rank()
                kind, text, size = bytes(head.tolist()).decode().rstrip().split("\n")
                body = torch.empty(int(size), dtype=torch.uint8)
                if body.numel():
                    self._gloo.recv([body], rank, _BODY).wait()
                self._hear(rank, _Said(kind, text, body))
        except RuntimeError:
            return  # NCCL would not notice either: what waits hangs until it is aborted

    def _hear(self, rank: int, said: _Said) -> None:
        with self._news:
            if said.kind == "mismatch":
                self._mismatch = self._mismatch or said.text
            elif said.kind == "received":
                self._mail[rank].received += 1
            else:
                self._mail[rank].operations.append(said)
            self._news.notify_all()


def reduction_of(reduction: str) -> Callable[[Sequence[Tensor]], Tensor]:
    """A function of all members' tensors, by rank: their reduction, the same to the bit at each."""
    fold = _REDUCTIONS[reduction]

    def reduced(parts: Sequence[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = fold(total, part)
        return total / len(parts) if reduction == "avg" else total

    return reduced


# -- memory of a device: on vgpu without the host's knowledge, as a kernel of the communicator would ----------


def _claim(tensor: Tensor, *, writes: bool) -> None:
    if tensor.device.type == "vgpu":
        torch.ops.vgpu.claim(tensor.detach(), writes)


def _read(tensor: Tensor) -> Tensor:
    if tensor.device.type == "vgpu":
        read: Tensor = torch.ops.vgpu.peek(tensor.detach())
        return read
    return tensor.detach().cpu().clone()


def _write(tensor: Tensor, values: Tensor) -> None:
    if tensor.device.type == "vgpu":
        torch.ops.vgpu.poke(tensor.detach(), values)
    else:
        tensor.detach().copy_(values)


def _spoil(tensor: Tensor) -> None:
    """What is in a tensor while an operation runs, and after an abort."""
    garbage = torch.nan if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 77
    _write(tensor, torch.full(tensor.shape, garbage, dtype=tensor.dtype))
