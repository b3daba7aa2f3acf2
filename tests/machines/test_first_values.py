"""Ranks that made other first values: refused before anything is trained, of no account afterwards."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.gather import difference
from elasticd.messages import Rejected
from tests.machines.cast import FakeWorker, spec
from tests.machines.test_coordinator_faults import running
from tests.machines.world import World


def test_a_worker_that_starts_from_other_values_is_refused_with_the_remedy() -> None:
    world = World(("alpha", "beta"))
    for name in world.records:
        world.join(name, 2, 2)
    first = world.hello
    world.hello = lambda worker, **changes: first(worker, first=worker.device, **changes)  # type: ignore[method-assign]
    world.settle()
    told = [body for bodies in world.told.values() for body in bodies if isinstance(body, Rejected)]
    assert told
    assert "call torch.manual_seed with the same seed on every rank" in told[0].reason


def test_a_worker_that_joins_later_may_start_from_any() -> None:
    world = running()
    late = FakeWorker(device="beta/1", incarnation="late")
    world.kill("beta/1")
    world.settle()
    world.workers["beta/1"] = late
    world.up("beta/1", world.hello(late, first="other"))
    world.settle()
    assert world.job.workers["beta/1"].incarnation == "late"


def test_equal_specs_do_not_differ() -> None:
    assert difference(spec(), spec()) == ""
    assert difference(spec(), msgspec.structs.replace(spec(), version=spec().version + 1)) == ""
    assert "starts from other values" in difference(spec(), msgspec.structs.replace(spec(), first="x"))
