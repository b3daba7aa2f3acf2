"""torchrun's entry point: `torchrun --rdzv-backend=elasticd --rdzv-id=JOB ...` finds `get_handler` here.

torch loads it while it imports its own rendezvous modules, so nothing of torch's may be imported before a
handler is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator

__all__ = ["get_handler"]


def get_handler() -> RendezvousHandlerCreator:
    """Returns the factory of handlers, for the entry point in the group `torchrun.handlers`."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from elasticd.rendezvous.handler import create_handler

    return create_handler(parameters)
