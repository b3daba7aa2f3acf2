"""Ranks that made other first values: refused before anything is trained, of no account afterwards."""

from __future__ import annotations

import re

import msgspec
import pytest

from elasticd.codec.message import PEERS_VERSION
from elasticd.machines.job.assembly import difference, with_known_bytes
from elasticd.records import JobSpec, ModuleSpec
from elasticd.wire.worker import Rejected
from tests.machines.cast import FakeWorker, spec
from tests.machines.test_recovery import running
from tests.machines.world import World


def test_a_worker_that_starts_from_other_values_is_refused_with_the_remedy() -> None:
    world = World(("alpha", "beta"))
    for name in world.records:
        world.join(name, 2, 2)
    first = world.hello
    world.hello = lambda worker, **changes: first(worker, first=worker.device, **changes)  # type: ignore[method-assign]
    world.settle()
    assert "call torch.manual_seed with the same seed on every rank" in refusals(world)[0]


def test_a_worker_that_joins_later_may_start_from_any() -> None:
    world = running()
    late = FakeWorker(device="beta/1", incarnation="late")
    world.kill("beta/1")
    world.settle()
    world.workers["beta/1"] = late
    world.up("beta/1", world.hello(late, first="other"))
    world.settle()
    assert world.job.workers["beta/1"].incarnation == "late"


def refusals(world: World) -> list[str]:
    return [body.reason for said in world.told.values() for body in said if isinstance(body, Rejected)]


@pytest.mark.parametrize("peers", [PEERS_VERSION - 1, PEERS_VERSION + 1])
def test_a_worker_that_exchanges_another_version_with_its_peers_joins_no_running_job(peers: int) -> None:
    world = running()
    late = FakeWorker(device="beta/1", incarnation="late")
    world.kill("beta/1")
    world.settle()
    world.workers["beta/1"] = late
    hello = msgspec.structs.replace(world.hello(late, peers=peers), release="9.8.0")
    world.up("beta/1", hello)
    world.settle()
    assert "beta/1" not in world.job.workers
    assert any(
        re.search(rf"9\.8\.0\) exchanges version {peers} .* job .* version {PEERS_VERSION}: install", text)
        for text in refusals(world)
    )


def test_a_job_whose_workers_exchange_different_versions_does_not_start() -> None:
    world = World(("alpha", "beta"))
    for name in world.records:
        world.join(name, 2, 2)
    first = world.hello
    numbers = iter(range(PEERS_VERSION, PEERS_VERSION + 99))
    world.hello = lambda worker, **changes: first(worker, peers=next(numbers), **changes)  # type: ignore[method-assign]
    world.settle()
    assert world.job.plan is None
    assert any(f"version {PEERS_VERSION + 1} of votes and state" in text for text in refusals(world))


def test_equal_specs_do_not_differ() -> None:
    assert difference(spec(), spec()) == ""
    assert difference(spec(), msgspec.structs.replace(spec(), version=spec().version + 1)) == ""
    assert "starts from other values" in difference(spec(), msgspec.structs.replace(spec(), first="x"))


def test_rows_of_an_item_may_differ_and_no_more_of_a_module() -> None:
    """They may be drawn with each reading; the first worker's count. The difference names the module."""

    def modules(rows: float = 3.0, items: float = 1.5, kind: str = "images") -> JobSpec:
        vision = ModuleSpec(
            name="vision", model=spec().model, items=kind, items_a_sample=items, rows_an_item=rows
        )
        own = ModuleSpec(name="language", model=spec().model, takes={"images": "vision"})
        return msgspec.structs.replace(spec(), modules=(vision, own))

    assert difference(modules(), modules(4.0)) == ""
    assert with_known_bytes(modules(4.0), modules()) == modules()
    assert difference(modules(), modules(items=2.0)) == "module vision differs in items_a_sample: 2.0, not 1.5"
    assert difference(modules(), modules(kind="clips")) == "module vision differs in items: clips, not images"
    assert difference(modules(), spec()) == "its modules are , not vision, language"
