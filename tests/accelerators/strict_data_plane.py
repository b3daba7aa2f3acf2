"""The data plane of a plan on strict communicators, one for each channel, as on NCCL; and its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.launch_order import Join, Launch
from torch import Tensor

from elasticd.runtime.comm.groups import Group, PlanGroups
from tests.accelerators.strict_communicator import Communicator, LaunchLog, Work


class StrictTeam:
    """A `Team`."""

    def __init__(self, communicator: Communicator, me: str) -> None:
        self._communicator, self.me = communicator, me
        self.members, self.rank, self.size = communicator.members, communicator.rank, communicator.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._communicator.all_reduce(tensor).wait()
        return tensor

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        out = tensor.new_empty((self.size, *tensor.shape)) if out is None else out
        self._communicator.all_gather(out, tensor).wait()
        return out

    def begin_all_reduce(self, tensor: Tensor) -> Work:
        return self._communicator.all_reduce(tensor)

    def finish(self, work: Work) -> None:
        work.wait()


class StrictPair:
    """A `Pair`."""

    def __init__(self, communicator: Communicator, sent: dict[int, Work]) -> None:
        self._communicator, self._peer, self._sent = communicator, 1 - communicator.rank, sent

    def send(self, tensor: Tensor) -> int:
        work = self._communicator.send(tensor, self._peer)
        assert work is not None
        number = max(self._sent, default=0) + 1
        self._sent[number] = work  # which keeps the tensor
        return number

    def begin_receive(self, tensor: Tensor) -> Work:
        work = self._communicator.recv(tensor, self._peer)
        assert work is not None
        return work

    def finish(self, work: Work) -> None:
        work.wait()

    def arrived(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._sent.pop(number).wait()


class StrictMesh:
    """A `Mesh`."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def begin_round(
        self, sends: Sequence[tuple[str, Tensor]], receives: Sequence[tuple[str, Tensor]]
    ) -> list[Work]:
        rank = self._communicator.members.index
        with self._communicator.batch() as works:
            for to, tensor in sends:
                self._communicator.send(tensor, rank(to))
            for source, tensor in receives:
                self._communicator.recv(tensor, rank(source))
        return works

    def finish(self, work: list[Work]) -> None:
        for each in work:
            each.wait()


class StrictCommunicators:
    """`Communicators` of one rank, with the log of all that it launched."""

    def __init__(
        self, channels: Sequence[Channel], me: str, device: torch.device, groups: Callable[[str], PlanGroups]
    ) -> None:
        """
        Args:
            channels: of this rank, in the order of all ranks.
            me: this rank's device in the plan.
            device: where tensors lie.
            groups: makes the gloo groups of one use, which nobody else uses.
        """
        self.log, self._me = LaunchLog(), me
        self._sent: dict[int, Work] = {}
        by_use = {use: groups(use) for use in sorted({channel.use for channel in channels})}
        self._made = {
            channel: Communicator(
                str(channel),
                by_use[channel.use].group(channel.members, channel.use).backend,
                channel.members,
                me,
                device,
                self.log,
            )
            for channel in channels
        }

    def team(self, channel: Channel) -> StrictTeam:
        return StrictTeam(self._made[channel], self._me)

    def pair(self, channel: Channel) -> StrictPair:
        return StrictPair(self._made[channel], self._sent)

    def mesh(self, channel: Channel) -> StrictMesh:
        return StrictMesh(self._made[channel])

    def received(self) -> None:
        for number in [number for number, work in self._sent.items() if work.is_completed()]:
            self._sent.pop(number).wait()


def connected(store: Any, device: torch.device, made: list[StrictCommunicators]) -> Any:
    """A `Connect` that makes strict communicators, and adds them to the list."""

    def connect(plan_groups: PlanGroups, channels: tuple[Channel, ...], everyone: Group) -> StrictCommunicators:
        def groups(use: str) -> PlanGroups:
            return PlanGroups(f"{plan_groups.name}/{use}", plan_groups.me, "127.0.0.1", store)

        made.append(StrictCommunicators(channels, plan_groups.me, device, groups))
        return made[-1]

    return connect


def told(log: Iterable[Launch | Join]) -> list[str]:
    """Where a rank launched, in its order, but for the collectives inside of sections: the model's rules alone
    say how many those are."""
    return [
        entry.communicator
        for entry in log
        if isinstance(entry, Launch) and not entry.communicator.startswith("tensor ")
    ]
