"""The TP group whose devices run the modules of this thread, for modules that communicate by themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OneDevice:
    """A group of one device, which exchanges nothing."""

    rank, size, label = 0, 1, "tensor"

    def __init__(self, me: str) -> None:
        self.me, self.members = me, (me,)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensor alone: [1, *shape]."""
        return tensor[None]


class Alone:
    """The group of a member whose peers are left out: shapes are right, and nothing is exchanged."""

    label = "tensor"

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank
        self.members = tuple(f"alone/{each}" for each in range(size))
        self.me = self.members[rank]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself, as if all other members had zeros."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensor in the place of every member's, [size, *shape]."""
        return torch.stack([tensor] * self.size)


class AloneMesh:
    """A mesh of a member whose peers are left out: what comes from them is zero, and nothing is sent."""

    def begin_round(self, sends: Sequence[tuple[str, Tensor]], receives: Sequence[tuple[str, Tensor]]) -> None:
        """Fills what is to be received."""
        for _, tensor in receives:
            tensor.zero_()

    def finish(self, work: None) -> None:
        """Nothing is under way."""

    def arrived(self, work: None) -> None:
        """Nothing was sent."""


#: The name of the one device of a process in which no job runs.
HERE = "here"

_of_thread = threading.local()


@contextmanager
def running(group: Any) -> Iterator[None]:
    """Lets `running_group` be this group meanwhile."""
    before = getattr(_of_thread, "group", None)
    _of_thread.group = group
    try:
        yield
    finally:
        _of_thread.group = before


def running_group() -> Any:
    """The group of the devices that run this forward or backward pass together; where no job runs, one of one
    device."""
    group = getattr(_of_thread, "group", None)
    if group is None:
        group = _of_thread.group = OneDevice(HERE)
    return group
