"""What a world's clients were told."""

from __future__ import annotations

from elasticd.wire.worker import Closed, Rejected
from tests.machines.world import World


def refused(world: World, client: str) -> list[str]:
    """Reasons in what a client was told."""
    return [body.reason for body in world.told.get(client, []) if isinstance(body, Rejected | Closed)]
