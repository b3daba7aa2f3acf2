"""Why a torchrun takes no part in a job, or no longer: errors that end it without a traceback."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError


class RendezvousRefusal(RendezvousError, SystemExit):
    """Taking part is impossible. A RendezvousError to a program; uncaught, it ends torchrun with its message
    and without a traceback."""

    def __init__(self, reason: str) -> None:
        self.code = f"elasticd: {reason}"
        super().__init__(self.code)


class RendezvousOver(RendezvousClosedError, SystemExit):
    """The job has ended. Not torch's RendezvousGracefulExitError: after that one at its first rendezvous
    torchrun 2.13 fails on an AttributeError. Uncaught, this ends torchrun in good order, with code 0."""

    def __init__(self, reason: str) -> None:
        self.code = 0
        super().__init__(reason)


class ModeSwitch(RendezvousRefusal):
    """The script makes no `elasticd.Job`, and `elasticd run` may start it in restart mode: it does so next."""
