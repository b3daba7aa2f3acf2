"""`Control`: what a worker's runtime asks of whoever leads its job, through its agent or in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elasticd.codec.message import Message
from elasticd.runtime.comm.groups import BootstrapKeyValue
from elasticd.wire.snapshots import Held
from elasticd.wire.worker import ToWorker, Welcome


class Control(Protocol):
    """A worker's way to its leader. Training never waits for it.

    Attributes:
        welcome: the worker's device, incarnation and address.
        lost: nobody hears this worker any more.
        alone: the job is this one process: there are no other ranks that could take its state over.
        ending: the name of the signal by which this process was asked to end after its step ("": it was not).
    """

    welcome: Welcome
    lost: bool
    alone: bool
    ending: str

    def start(self, handler: Callable[[ToWorker], None]) -> None:
        """Has `handler` called with each message of the leader, from now on. It must not block."""

    def send(self, message: Message, fd: int | None = None) -> None:
        """Hands a message over without waiting, and a descriptor with it, which stays the caller's too."""

    def key_value(self) -> BootstrapKeyValue:
        """The store through which members of a group find each other."""

    def fetch(self, held: Held, seconds: float = 30.0) -> tuple[Held, int]:
        """Returns a snapshot and a memory file with it, which is the caller's. Raises OSError."""

    def renew(self) -> None:
        """Leaves this incarnation behind, and returns when there is another."""

    def close(self, farewell: Message) -> None:
        """Says goodbye."""
