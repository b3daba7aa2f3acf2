"""A reader of an engine's state beside training, as a snapshot's copy is."""

from __future__ import annotations

import torch

from elasticd.runtime.engine.engine import Engine


class StateReader:
    """Reads the state until the engine waits for it: from its making on to that wait no value may change."""

    def __init__(self, engine: Engine) -> None:
        self._planes = [
            plane
            for tensor in engine.state().tensors.values()
            for shard in tensor.shards
            for plane in shard.planes.values()
        ]
        self._values = [plane.clone() for plane in self._planes]
        self.waited_for = False
        engine.copied = self

    def __call__(self) -> None:
        if not self.waited_for:
            assert self._planes
            assert not self.changed()
        self.waited_for = True

    def changed(self) -> bool:
        """Whether a value is another by now."""
        return not all(map(torch.equal, self._planes, self._values))
