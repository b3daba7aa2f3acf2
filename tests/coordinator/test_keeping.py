"""What agents say that they keep reaches the leader's machine, and its word on what is whole reaches them."""

from __future__ import annotations

import asyncio

from elasticd.wire.coordinator import FromClient
from elasticd.wire.rendezvous import Join
from elasticd.wire.snapshots import SnapshotInventory, SnapshotSetComplete
from tests.coordinator.agents import agent, coordinating, get, until
from tests.machines.cast import JOB, node_record
from tests.machines.test_vaults import NOW, held, plan

DEVICES = ["alpha/0", "beta/0"]


def test_a_whole_set_is_told_to_all_that_keep_it_and_shown() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha", snapshots="alpha:1")) as alpha,
            agent(coordinator, node_record("beta", snapshots="beta:1")) as beta,
        ):
            join = Join(job=JOB, min_nodes=2, max_nodes=2, pid=7)
            await alpha.tell(FromClient(client="t", job=JOB, device="", incarnation="", body=join))
            snapshots = tuple(held(device) for device in DEVICES)
            await alpha.tell(SnapshotInventory(job=JOB, snapshots=snapshots, plans=(plan(DEVICES),)))
            await until(lambda: JOB in coordinator.leading.state.jobs)
            await until(lambda: "alpha" in coordinator.leading.state.jobs[JOB].snapshots.kept)
            _, found = await get(coordinator, "/v1/status")
            assert found["jobs"][0]["snapshot"] is None, "beta may die"
            await beta.tell(SnapshotInventory(job=JOB, snapshots=snapshots))
            whole = SnapshotSetComplete(job=JOB, plan=NOW.plan, step=NOW.step)
            await until(lambda: whole in alpha.heard and whole in beta.heard, 60.0)
            _, found = await get(coordinator, "/v1/status")
            assert found["jobs"][0]["snapshot"] == NOW.step
            _, events = await get(coordinator, "/v1/events")
            (told,) = [event for event in events["events"] if event["kind"] == "snapshot"]
            assert told["text"] == f"the state of step {NOW.step} is kept in memory on alpha, beta"

    asyncio.run(body())
