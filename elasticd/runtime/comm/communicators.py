"""The data plane of one member of a plan: the communicators over which tensors of the model go.

Which there are follows from the plan (`layout/channels`), and so does the order in which a rank launches on
them (`layout/pass_order`, `layout/gradient_buckets`). A communicator carries out a rank's operations one after
the other. A message has exactly the size of the tensor that receives it, and no tag. These are NCCL's rules,
and gloo can keep them, too. Votes, headers and other words of the host are no data: they go over `Group`s of
the host.

This file has the seam, and its implementation over gloo. `device_communicators` has the one on a device, whose
library `nccl` is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from elasticd_planner.layout.channels import Channel, Use
from elasticd_planner.layout.two_level_sums import two_levels
from torch import Tensor

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm import nccl
from elasticd.runtime.comm.device_communicators import LABELS
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.comm.two_level_sums import ProgressThread, TwoLevelTeam


class Team(Protocol):
    """Devices that compute sums and gathers together: a TP group, or a set of holders of a gradient."""

    members: tuple[str, ...]
    me: str
    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the members, the same to the bit on each. It may be in the memory of `tensor`."""

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """All members' tensors, of one shape, stacked by rank: [size, *shape]; in `out`, if it is given."""

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        """Launches an all-reduce in place, which runs beside computation. Returns the work for `finish`."""

    def finish(self, work: Any) -> None:
        """Waits for an all-reduce that `begin_all_reduce` launched."""


class Pair(Protocol):
    """Messages from one device to another, in order. The one end only sends, the other only receives."""

    def send(self, tensor: Tensor) -> int:
        """Launches a message, and keeps its tensor until it is known to have arrived.

        Returns:
            A number for `arrived`.
        """

    def begin_receive(self, tensor: Tensor) -> Any:
        """Launches the receipt of the next message into a tensor of its size. Returns the work for `finish`."""

    def finish(self, work: Any) -> None:
        """Waits for a message that `begin_receive` launched."""

    def arrived(self, numbers: Iterable[int]) -> None:
        """Drops the tensors of messages that have arrived."""


class Mesh(Protocol):
    """Messages among any members, in rounds. All messages of a round go on side by side; of two between the
    same members the first that is sent is the first that is received."""

    def begin_round(self, sends: Sequence[tuple[str, Tensor]], receives: Sequence[tuple[str, Tensor]]) -> Any:
        """Launches a round.

        Args:
            sends: to whom, and what; it is kept until it is known to have arrived.
            receives: from whom, and where to: tensors of the sizes that are sent.

        Returns:
            The work for `finish`.
        """

    def finish(self, work: Any) -> None:
        """Waits for the messages that this device receives in a round."""

    def arrived(self, work: Any) -> None:
        """Drops the tensors of what this device sent in a round, which has arrived."""


class Communicators(Protocol):
    """All communicators of one member of a plan."""

    def team(self, channel: Channel) -> Team:
        """Those that compute sums together."""

    def pair(self, channel: Channel) -> Pair:
        """Messages from the first member to the second."""

    def mesh(self, channel: Channel) -> Mesh:
        """Messages among all members."""

    def first_launches(self, sums: Iterable[tuple[Channel, int, torch.dtype]]) -> None:
        """Connects members, so that launches of messages between stages and of such sums wait for nobody. All
        members of the plan call it together, while none of them trains under another one.

        Args:
            sums: their channels, the numbers of their elements and their types, in an order that is the same on
                all members.

        Raises:
            Cancelled, PeerLost: as launches do.
        """

    def received(self) -> None:
        """Drops the tensors of all messages, after a collective that proves that they have arrived."""

    def rest(self, seconds: float) -> bool:
        """After the plan's groups were shut: returns when nothing that was launched goes on any more.

        Returns:
            Whether it came to that within so many seconds.
        """


#: Makes the communicators of one member: called with those that it is in, in an order that is the same on all
#: members, with the group of all members of the plan, and with what it computes on.
Connect = Callable[[PlanGroups, tuple[Channel, ...], Group, Accelerator], Communicators]


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The communicators of one member of a plan with the others."""

    everyone: Group  #: all members, for the words of the host
    communicators: Communicators  #: for tensors of the model
    channels: tuple[Channel, ...]  #: that these are of

    @property
    def me(self) -> str:
        """This device."""
        return self.everyone.me


#: Tags of the messages of each use among those of the group of all members.
_TAGS: dict[Use, int] = {
    "activation": (1 << 24) + 1,
    "gradient": (1 << 24) + 2,
    "state": (1 << 24) + 3,
    "context": (1 << 24) + 4,
    "items": (1 << 24) + 5,
    "experts": (1 << 24) + 6,
}


class GlooCommunicators:
    """Communicators over gloo: teams are groups, and pairs are messages in the group of all members, told
    apart by tags. Gradients are summed in two levels where a set has as many devices on each of its nodes
    (`TwoLevelTeam`). Tensors of an accelerator go by way of the host."""

    def __init__(
        self,
        plan_groups: PlanGroups,
        channels: tuple[Channel, ...],
        everyone: Group,
        accelerator: Accelerator = CPU,
    ) -> None:
        self._plan_groups, self._everyone = plan_groups, everyone
        progress = ProgressThread(plan_groups)
        self._two_level: dict[Channel, TwoLevelTeam] = {}
        for channel in channels:
            nodes = two_levels(channel.members) if plan_groups.near_and_far else None
            if channel.use == "reduce" and nodes is not None:
                self._two_level[channel] = TwoLevelTeam(plan_groups, nodes, channel.use, progress)
            elif channel.use in ("tensor", "reduce"):
                plan_groups.group(channel.members, channel.use)

    def team(self, channel: Channel) -> Team:
        """The group of its members; of one alone, which no plan lists, one that does nothing."""
        return self._two_level.get(channel) or self._plan_groups.group(channel.members, channel.use)

    def pair(self, channel: Channel) -> GlooPair:
        """Costs nothing until it is used."""
        return GlooPair(self._everyone, channel)

    def mesh(self, channel: Channel) -> GlooMesh:
        """Costs nothing until it is used."""
        return GlooMesh(self._everyone, channel.use)

    def first_launches(self, sums: Iterable[tuple[Channel, int, torch.dtype]]) -> None:
        """Groups are connected when they are made."""

    def received(self) -> None:
        """See `Group.received`."""
        self._everyone.received()

    def rest(self, seconds: float) -> bool:
        """Nothing of gloo's touches a device, and what it has of the host's memory is not reused."""
        return True


class _Round(NamedTuple):
    """The operations that were launched: the receipts and from whom, and the numbers of what was sent."""

    receipts: list[tuple[Any, int]]
    sent: list[int]


class GlooMesh:
    """A `Mesh` in the group of all members."""

    def __init__(self, everyone: Group, use: Use) -> None:
        self._everyone, self._tag, self._label = everyone, _TAGS[use], LABELS[use]

    def begin_round(
        self, sends: Sequence[tuple[str, Tensor]], receives: Sequence[tuple[str, Tensor]]
    ) -> _Round:
        """See `Group.send` and `Group.post`."""
        rank = self._everyone.members.index
        sent = [self._everyone.send(tensor, rank(to), self._tag, self._label) for to, tensor in sends]
        receipts = [
            (self._everyone.post(tensor, rank(source), self._tag), rank(source)) for source, tensor in receives
        ]
        return _Round(receipts, sent)

    def finish(self, work: _Round) -> None:
        """See `Group.take`."""
        for posted, source in work.receipts:
            self._everyone.take(posted, self._label, source)

    def arrived(self, work: _Round) -> None:
        """See `Group.arrived`."""
        self._everyone.arrived(work.sent)


class GlooPair:
    """A `Pair` in the group of all members. Gloo delivers messages of one tag in the order of launches."""

    def __init__(self, everyone: Group, channel: Channel) -> None:
        source, to = map(everyone.members.index, channel.members)
        self._everyone, self._peer = everyone, to if source == everyone.rank else source
        self._tag, self._label = _TAGS[channel.use], LABELS[channel.use]

    def send(self, tensor: Tensor) -> int:
        """See `Group.send`. Nothing is sent of an empty tensor."""
        if not tensor.numel():
            return 0
        return self._everyone.send(tensor, self._peer, self._tag, self._label)

    def begin_receive(self, tensor: Tensor) -> Any:
        """See `Group.post`."""
        if not tensor.numel():
            return None
        return self._everyone.post(tensor, self._peer, self._tag)

    def finish(self, work: Any) -> None:
        """See `Group.take`."""
        if work is not None:
            self._everyone.take(work, self._label, self._peer)

    def arrived(self, numbers: Iterable[int]) -> None:
        """See `Group.arrived`."""
        self._everyone.arrived(numbers)


#: What makes the communicators of a type of device, by `torch.device.type`. Tensors of others go over gloo.
BY_DEVICE: dict[str, Connect] = {"cuda": nccl.nccl_communicators} if nccl.available() else {}


def agreed(everyone: Group, accelerator: Accelerator) -> Connect:
    """The function that makes the communicators of all members: that of their type of device, if they are of
    one type and each has its device for itself, as NCCL wants it; else gloo. All members call it together."""
    mine = accelerator.device.type if not accelerator.shared else ""
    word = zlib.crc32(mine.encode()) if mine in BY_DEVICE else 0
    words = everyone.all_gather(torch.tensor([word]))
    return BY_DEVICE[mine] if word and bool((words == word).all()) else GlooCommunicators


def settle(accelerator: Accelerator) -> None:
    """Before a device is used: sets what its library wants in the environment."""
    if accelerator.device.type == "cuda" and nccl.available() and not accelerator.shared:
        nccl.settle_environment()
