"""What agents say that they keep reaches the leader's machine, and its word on what is whole reaches them."""

from __future__ import annotations

import asyncio

import msgspec

from elasticd.wire.coordinator import AgentHello, FromClient
from elasticd.wire.rendezvous import Join
from elasticd.wire.snapshots import SnapshotInventory, SnapshotSetComplete
from tests.coordinator.agents import agent, coordinating, get, until
from tests.machines.cast import JOB, node_record
from tests.machines.test_snapshot_sets import NOW, held, plan

DEVICES = ["alpha/0", "beta/0"]


def test_a_whole_set_is_told_to_all_that_keep_it_and_shown() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha", snapshots="alpha:1")) as alpha,
            agent(coordinator, node_record("beta", snapshots="beta:1")) as beta,
        ):
            join = Join(job=JOB, min_nodes=2, max_nodes=2, pid=7)
            for node in (alpha, beta):
                await node.tell(FromClient(client="t", job=JOB, device="", incarnation="", body=join))
            await until(
                lambda: JOB in (jobs := coordinator.leading.state.jobs) and len(jobs[JOB].start.joined) == 2
            )
            snapshots = tuple(held(device) for device in DEVICES)
            await alpha.tell(SnapshotInventory(job=JOB, snapshots=snapshots, plans=(plan(DEVICES),)))
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


def test_node_without_a_part_in_a_job_has_no_say_in_its_snapshots() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha", snapshots="alpha:1")) as alpha,
            agent(coordinator, node_record("mallory", snapshots="mallory:1")) as mallory,
        ):
            join = Join(job=JOB, min_nodes=1, max_nodes=1, pid=7)
            await alpha.tell(FromClient(client="t", job=JOB, device="", incarnation="", body=join))
            await until(
                lambda: JOB in (jobs := coordinator.leading.state.jobs) and bool(jobs[JOB].start.joined)
            )
            await mallory.tell(FromClient(client="t", job=JOB, device="", incarnation="", body=join))
            claimed = tuple(held(device) for device in ["alpha/0"])
            await mallory.tell(SnapshotInventory(job=JOB, snapshots=claimed, plans=(plan(["alpha/0"]),)))
            await mallory.tell(AgentHello(record=node_record("mallory", memory=7, snapshots="mallory:1")))
            await until(lambda: coordinator.leading.state.nodes["mallory"].record.devices[0].memory == 7)
            sets = coordinator.leading.state.jobs[JOB].snapshots
            assert (sets.kept, sets.plans, sets.whole) == ({}, {}, None)
            another = tuple(msgspec.structs.replace(one, job="another") for one in claimed)
            await alpha.tell(SnapshotInventory(job=JOB, snapshots=another, plans=(plan(["alpha/0"]),)))
            await until(lambda: "alpha" in coordinator.leading.state.jobs[JOB].snapshots.kept)
            assert coordinator.leading.state.jobs[JOB].snapshots.kept == {"alpha": {}}

    asyncio.run(body())
