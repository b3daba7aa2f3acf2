"""A process group that is called as torch's ProcessGroupNCCL is, and has NCCL's rules: by strict communicators.

As a device may, it runs the operations of all its communicators strictly one after the other, in the order of
their launches: CUDA does not say which streams run side by side. And the host waits in the first launch of a
kernel, in which the driver loads it, until the device has nothing under way.

As NCCL does, it connects two members for messages when they first launch one, and all members for sums of about
a size when they first launch such a sum: the host of each waits in that launch until the others are in theirs.

The product's own code for NCCL (`elasticd.runtime.comm.nccl`) runs on it, on a device that is not a GPU.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from elasticd_planner.layout.channels import Channel
from torch import Tensor
from torch._C._distributed_c10d import Store

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import BY_DEVICE, Connect
from elasticd.runtime.comm.device_communicators import DeviceCommunicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.comm.nccl import NcclLibrary
from tests.accelerators import vgpu
from tests.accelerators.strict_communicator import Communicator, LaunchLog, Line, Mismatch, Work
from tests.planner.launch_order import Join, Launch

#: What was wrong with launches, of all communicators of this process.
wrong: list[str] = []
_standing: weakref.WeakSet[Communicator] = weakref.WeakSet()
_lines: dict[torch.device, Line] = {}
_lock = threading.Lock()


def _line(device: torch.device) -> Line:
    """The queue of a device of this process."""
    with _lock:
        if device not in _lines:
            _lines[device] = Line(str(device))
        return _lines[device]


def _load(kernel: bytes) -> None:
    """Returns when the device has nothing under way."""
    while any(communicator.busy for communicator in list(_standing)):
        time.sleep(0.0005)


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=1, max_ctas=None)
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.group_name = ""


class StrictWork:
    """As torch's Work."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def synchronize(self) -> None:
        """The host waits, too: kernels run here when they are launched."""
        for work in self._works:
            try:
                work.wait()
            except Mismatch as error:
                wrong.append(str(error))
                raise

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class KeyValue:
    """A torch store, as members of a group of gloo's find each other by it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, seconds: float) -> bytes:
        return self._store.get(key)

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        return [self._store.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))


class StrictProcessGroup:
    """One member's end. It connects in a thread; a launch before that waits, as NCCL's does."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options,
        log: LaunchLog,
        before: Callable[[str], None],
        one_queue: bool,
    ) -> None:
        assert options.config.blocking == 0, "an abort would not find a communicator that connects"
        assert options.is_high_priority_stream, "it would be queued behind computation"
        use, *members = options.group_name.split()
        assert len(members) == size
        assert (options.config.max_ctas is None) == (use not in ("activation", "gradient"))
        self._name, self._members, self._me = options.group_name, tuple(members), members[rank]
        self._store, self._log, self._before, self._one_queue = store, log, before, one_queue
        self._made: Communicator | None = None
        self._groups: PlanGroups | None = None
        self._ready, self._aborted = threading.Event(), False
        self._batch: Any = None
        self._works: list[Work] = []
        self._peers: list[tuple[str, list[str]]] = []  # of the messages of a batch
        self._connected: set[str] = set()

    def eager_connect_single_device(self, device: torch.device) -> None:
        threading.Thread(target=self._connect, args=(device,), daemon=True).start()

    def _connect(self, device: torch.device) -> None:
        self._before(f"connect {self._name}")
        try:
            self._groups = PlanGroups("strict", self._me, "127.0.0.1", KeyValue(self._store))
            if self._aborted:
                self._groups.shut()
            gloo = self._groups.group(self._members, "strict").backend
        except RuntimeError:  # a peer did not come, or an abort
            return
        line = _line(device) if self._one_queue else None
        self._made = Communicator(self._name, gloo, self._members, self._me, device, self._log, line)
        _standing.add(self._made)
        self._ready.set()

    def _comm_ptr(self) -> int:
        """Waits until it is connected, or was aborted."""
        self._ready.wait()
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        return id(self)

    def _communicator(self, what: str) -> Communicator:
        self._before(f"{what} {self._name}")
        self._ready.wait()  # as the first launch of NCCL's does
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        assert self._made is not None
        return self._made

    def _together(self, *kinds: tuple[str, Sequence[str]]) -> None:
        """Returns when all of these members are in their first launch of each kind, if it is ours."""
        first = [(kind, peers) for kind, peers in kinds if kind not in self._connected]
        self._connected.update(kind for kind, _ in first)
        for kind, _ in first:
            self._store.set(f"first/{kind}/{self._me}", b"")  # type: ignore[arg-type]
        for kind, peers in first:
            for peer in peers:
                while not self._store.check([f"first/{kind}/{peer}"]):
                    if self._aborted:
                        raise RuntimeError("NCCL communicator was aborted")
                    time.sleep(0.001)

    def _way(self, to: int | None = None, source: int | None = None) -> tuple[str, list[str]]:
        """A message of ours, as `_together` takes it."""
        ends = (self._me, self._members[to]) if to is not None else (self._members[source or 0], self._me)
        return " to ".join(ends), [end for end in ends if end != self._me]

    def allreduce(self, tensors: list[Tensor]) -> StrictWork:
        (tensor,) = tensors
        communicator = self._communicator("all_reduce")
        self._together((f"{tensor.dtype} sums of 2^{tensor.nbytes.bit_length()} bytes", self._members))
        return StrictWork([communicator.all_reduce(tensor)])

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> StrictWork:
        communicator = self._communicator("all_gather")
        self._together(("gathers", self._members))
        return StrictWork([communicator.all_gather(out, tensor)])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> StrictWork | None:
        (tensor,) = tensors
        communicator = self._communicator("send")
        self._launches(self._way(to=to))
        work = communicator.send(tensor, to, tag)
        return None if work is None else StrictWork([work])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> StrictWork | None:
        (tensor,) = tensors
        communicator = self._communicator("recv")
        self._launches(self._way(source=source))
        work = communicator.recv(tensor, source, tag)
        return None if work is None else StrictWork([work])

    def _launches(self, way: tuple[str, list[str]]) -> None:
        """Of a batch all messages connect side by side when it ends."""
        if self._batch is None:
            self._together(way)
        else:
            self._peers.append(way)

    def _start_coalescing(self) -> None:
        self._batch = self._communicator("batch").batch()
        self._works = self._batch.__enter__()

    def _end_coalescing(self) -> StrictWork:
        batch, self._batch = self._batch, None
        peers, self._peers = self._peers, []
        self._together(*peers)
        batch.__exit__(None, None, None)
        return StrictWork(self._works)

    def abort(self) -> None:
        self._aborted = True
        self._ready.set()
        if self._made is not None:
            self._made.abort()
        if self._groups is not None:
            self._groups.shut()
            self._groups.park()


class Logged(DeviceCommunicators):
    """Whose log has what is launched in steps alone."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._forget()

    def first_launches(self, sums: Any) -> None:
        super().first_launches(sums)
        self._forget()

    def _forget(self) -> None:
        self._library._make.log.entries.clear()  # type: ignore[attr-defined]


class StrictGroups:
    """In the place of the class ProcessGroupNCCL: all process groups of one rank, with the log of all that it
    launches."""

    Options = Options

    def __init__(self, before: Callable[[str], None] = lambda what: None, *, one_queue: bool = True) -> None:
        """
        Args:
            before: called with each launch and each connection before it: "all_reduce tensor a/0 a/1".
            one_queue: a device's communicators run one operation at a time; otherwise all run side by side.
        """
        self.log, self._before, self._one_queue = LaunchLog(), before, one_queue
        self.made = 0

    def __call__(self, store: Store, rank: int, size: int, options: Options) -> StrictProcessGroup:
        self.made += 1
        return StrictProcessGroup(store, rank, size, options, self.log, self._before, self._one_queue)


def connected(made: list[StrictGroups], before: Callable[[str], None] = lambda what: None) -> Connect:
    """A `Connect` over strict process groups; each plan's are added to the list."""

    def connect(
        plan_groups: PlanGroups, channels: tuple[Channel, ...], everyone: Group, accelerator: Accelerator
    ) -> DeviceCommunicators:
        if accelerator.device.type == vgpu.NAME:
            vgpu.on_load(_load)
        made.append(StrictGroups(before))
        library = NcclLibrary(accelerator.device, made[-1])
        return Logged(plan_groups, channels, everyone, library)

    return connect


def told(log: Iterable[Launch | Join]) -> list[str]:
    """Where a rank launched, in its order, but for the collectives inside of sections: the model's rules alone
    say how many those are."""
    return [
        entry.communicator
        for entry in log
        if isinstance(entry, Launch) and not entry.communicator.startswith("tensor ")
    ]


def struck(what: str, count: int, how: int) -> Callable[[str], None]:
    """A `before` that sends this process a signal before its count-th launch that begins so, or that is on a
    communicator of this use."""
    left, lock = [count], threading.Lock()

    def before(launch: str) -> None:
        verb, use, *_ = launch.split()
        if launch.startswith(what) or (use == what and verb != "connect"):
            with lock:
                left[0] -= 1
                strikes = left[0] == 0
            if strikes:
                os.kill(os.getpid(), how)

    return before


def take_place(drill: tuple[str, int, int] | None = None) -> None:
    """From now on jobs of this process on vgpu communicate over strict process groups, as those on GPUs over
    NCCL's. `drill`: see `struck`."""
    before = struck(*drill) if drill is not None else lambda what: None
    BY_DEVICE["vgpu"] = connected([], before)
