"""A plugin of pytest: tests run on vgpu what they run on the CPU (`pytest -p tests.accelerators.on_vgpu`).

It takes the place of the CPU as the default of everything that computes. Ranks that are threads have a device
each, because autograd runs the backward passes of one device in one thread. It must come before anything else
that imports the runtime.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from elasticd.runtime import accelerator
from tests.accelerators import vgpu

_here = threading.local()
#: Of a test: the vgpu of each rank, the same under all its plans, since its state stays there.
_places: dict[str, int] = {}


class OfThread:
    """The accelerator of the thread that asks: `vgpu:0` unless `run_threads` started it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_mine(), name)


def _mine() -> accelerator.Accelerator:
    found: accelerator.Accelerator | None = getattr(_here, "accelerator", None)
    if found is None:
        found = _here.accelerator = accelerator.Accelerator("vgpu:0")
        found.use()
    return found


def pytest_configure() -> None:
    """Before any test is imported."""
    vgpu.load()
    accelerator.CPU = OfThread()  # type: ignore[assignment]
    from elasticd_migration import migrate as moves

    from elasticd.runtime.comm import in_memory

    migrate = moves.migrate

    def to_the_device(*args: Any, device: torch.device | None = None, **options: Any) -> moves.Moved:
        transport = args[3]
        rank = _places.setdefault(transport.members[transport.rank], len(_places))
        return migrate(*args, device=device or torch.device("vgpu", rank), **options)

    moves.migrate = to_the_device  # type: ignore[assignment]

    _of_whoever_computed_them()
    run_threads = in_memory.run_threads

    def with_devices(names: Sequence[str], worker: Callable[[Any], Any]) -> dict[str, Any]:
        for name in names:
            _places.setdefault(name, len(_places))

        def on_its_own(groups: Any) -> Any:
            _here.accelerator = accelerator.Accelerator(f"vgpu:{_places[groups.me]}")
            _here.accelerator.use()
            return worker(groups)

        return run_threads(names, on_its_own)

    in_memory.run_threads = with_devices


def _of_whoever_computed_them() -> None:
    """Ranks that are threads of one process have a device each, and tests hand their values about. So a copy to
    the host asks the device that values lie on, and an engine gets its state on its own."""
    from elasticd_migration.local_state import LocalState, LocalTensor, Shard

    from elasticd.runtime.checkpoint.staging import Piece, Staging
    from elasticd.runtime.engine.engine import Engine

    copy, adopt = Staging.copy, Engine.adopt

    def copies(self: Staging, held: Sequence[Piece]) -> list[Piece]:
        if held:
            self._accelerator = accelerator.Accelerator(held[0].values.device)
        return copy(self, held)

    def adopts(self: Engine, state: LocalState) -> None:
        device = self.accelerator.device

        def here(planes: Any) -> Any:
            return {
                key: value.to(device) if value.device.type == "vgpu" else value for key, value in planes.items()
            }

        tensors = {
            item: LocalTensor(
                shards=tuple(Shard(box=shard.box, planes=here(shard.planes)) for shard in tensor.shards),
                scalars=tensor.scalars,
            )
            for item, tensor in state.tensors.items()
        }
        adopt(self, LocalState(tensors=tensors, groups=state.groups, extras=state.extras))

    Staging.copy, Engine.adopt = copies, adopts  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _nothing_is_noted() -> Any:
    vgpu.errors()
    _places.clear()
    yield
    assert not (noted := vgpu.settled_errors()), noted
