"""A `Transport` whose rounds go from device to device, over a communicator; seals and receipts go over gloo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from elasticd_migration.transport import Handle, ProcessGroupTransport, as_bytes
from torch import Tensor

from elasticd.runtime.comm.communicators import Mesh


class DeviceTransport:
    """State stays on the devices while it moves. The messages of a round are one launch."""

    def __init__(self, control: ProcessGroupTransport, mesh: Mesh, device: torch.device) -> None:
        """
        Args:
            control: among the same members, for words of the host.
            mesh: among them, for tensors.
            device: on which those lie.
        """
        self._control, self._mesh, self.device = control, mesh, device
        self.rank, self.size, self.members = control.rank, control.size, control.members
        self._sent = 0
        self._tickets = 0
        self._rounds: dict[int, _Round] = {}

    @property
    def bytes_sent(self) -> int:
        """See `Transport`."""
        return self._sent + self._control.bytes_sent

    def round(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[list[int], list[Handle]]:
        """See `Transport`."""
        out = [(self.members[rank], as_bytes(tensor)) for rank, tensor in sends]
        back = [(self.members[rank], as_bytes(tensor)) for rank, tensor in receives]
        if not out and not back:
            return [], []
        began = _Round(self._mesh, self._mesh.begin_round(out, back))
        self._sent += sum(tensor.numel() for _, tensor in out)
        tickets = [-(self._tickets + number) for number in range(1, len(out) + 1)]  # the others count upwards
        self._tickets += len(out)
        self._rounds |= dict.fromkeys(tickets, began)
        return tickets, [began for _ in back]

    def send(self, destination: int, tensor: Tensor, *, channel: int = 0) -> int:
        """See `Transport`."""
        return self._control.send(destination, tensor, channel=channel)

    def receive(self, source: int, tensor: Tensor, *, channel: int = 0) -> Handle:
        """See `Transport`."""
        return self._control.receive(source, tensor, channel=channel)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """See `Transport`."""
        return self._control.all_gather(payload)

    def drain(self, tickets: Iterable[int] | None = None) -> None:
        """See `Transport`."""
        listed = None if tickets is None else list(tickets)
        for ticket in tuple(self._rounds) if listed is None else listed:
            if (began := self._rounds.pop(ticket, None)) is not None:
                began.wait()  # the receiver has it; this device may not know that its memory is free
        self._control.drain(listed)


class _Round:
    """The messages of one round."""

    def __init__(self, mesh: Mesh, work: object) -> None:
        self._mesh, self._work = mesh, work

    def wait(self) -> None:
        """The device waits for them."""
        work, self._work = self._work, None
        if work is not None:
            self._mesh.finish(work)
