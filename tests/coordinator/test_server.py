"""The coordinator's one port: agents over WebSocket, chaos and REST, and what is refused with a reason."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

import msgspec
import pytest
from websockets.asyncio.client import connect

from elasticd.codec.message import encode
from elasticd.coordinator.http import agent_socket
from elasticd.coordinator.http.app import STATUS
from elasticd.version import __version__
from elasticd.wire.api_types import Reason
from elasticd.wire.coordinator import together
from elasticd.wire.worker import EmulatedSpeed, StayedOnPlan, StoreAnswer, StoreCall
from tests.coordinator.agents import agent, coordinating, get, post, until
from tests.machines.cast import JOB, FakeWorker, node_record


def test_agent_is_seen_and_missed() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            async with agent(coordinator, node_record("alpha")):
                await until(lambda: "alpha" in coordinator.leading.state.nodes)
                _, found = await get(coordinator, "/v1/status")
                (node,) = found["nodes"]
                assert (node["node"], node["connected"], node["emulated"]) == ("alpha", True, True)
                assert node["devices"][0] == {
                    "name": "alpha/0",
                    "memory": 3_000_000,
                    "rate": 1.0,
                    "pace": 1.0,
                    "slowness": None,
                }
            await until(lambda: not coordinator.leading.state.nodes["alpha"].connected)
            _, found = await get(coordinator, "/v1/events")
            assert [event["kind"] for event in found["events"]] == ["node_up", "node_down"]
            _, later = await get(coordinator, f"/v1/events?after={found['events'][0]['id']}")
            assert later["events"] == found["events"][1:]
            assert abs(later["events"][0]["time"] - time.time()) < 60

    asyncio.run(body())


def test_second_agent_under_one_name_is_refused_and_harms_nobody() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as first:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            async with agent(coordinator, node_record("alpha", agent="impostor")) as second:
                await until(lambda: bool(second.rejected))
                assert "'alpha' is taken by another agent" in second.rejected
            assert coordinator.leading.state.nodes["alpha"].connected
            assert not first.closed

    asyncio.run(body())


def test_agent_that_connects_again_takes_the_place_of_its_old_connection() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as first:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            async with agent(coordinator, node_record("alpha")):
                await until(lambda: first.closed)
                assert coordinator.leading.state.nodes["alpha"].connected

    asyncio.run(body())


def test_agent_of_a_far_version_is_refused() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            async with agent(coordinator, node_record("alpha"), version=9) as old:
                await until(lambda: bool(old.rejected))
                assert "install the same release" in old.rejected
                assert f"(elasticd 9.0.0), and elasticd {__version__} here" in old.rejected
            async with agent(coordinator, node_record("alpha"), version=2):
                await until(lambda: "alpha" in coordinator.leading.state.nodes)
                alpha = coordinator.leading.state.nodes["alpha"]
                assert (alpha.release, alpha.version) == ("2.0.0", 2)

    asyncio.run(body())


def test_messages_of_a_newer_agent_are_skipped_and_those_beside_them_heard() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            worker = FakeWorker(device="alpha/0", incarnation="a")
            call = encode(worker.up(StoreCall(id=1, op="add", key="k", value=b"1")))
            await alpha.takes_part(JOB)
            newer = b'{"type": "quota-report", "version": 2}'
            inside = encode(worker.up(StayedOnPlan(number=1, step=0))).replace(
                b"stayed-on-plan", b"stayed-longer"
            )
            await alpha.socket.send(newer)
            await alpha.socket.send(inside)
            await alpha.socket.send(together([newer, call, inside]))
            await until(lambda: bool(alpha.heard))
            assert alpha.bodies("walpha/0") == [StoreAnswer(id=1, number=1)]
            assert not alpha.closed

    asyncio.run(body())


def test_an_agent_whose_first_message_is_not_known_is_told_what_is_expected() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            connect(coordinator.url.replace("http", "ws") + "/v1/agent") as socket,
        ):
            await socket.send(b'{"type": "agent-greeting"}')
            assert b"must be its hello" in await socket.recv()

    asyncio.run(body())


def test_message_that_cannot_be_read_costs_its_connection_alone() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as good:
            async with agent(coordinator, node_record("beta")) as bad:
                await until(lambda: len(coordinator.leading.state.nodes) == 2)
                await bad.socket.send(b'{"kind": "worker-lost"}')
                await until(lambda: bad.closed)
            assert not good.closed
            assert (await get(coordinator, "/readyz"))[0] == 200

    asyncio.run(body())


def test_bootstrap_store_reaches_across_nodes_and_waits() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            one = FakeWorker(device="alpha/0", incarnation="a")
            two = FakeWorker(device="beta/0", incarnation="b")
            await alpha.takes_part(JOB)
            await beta.takes_part(JOB)
            await alpha.tell(one.up(StoreCall(id=1, op="get", key="plan/1/address")))
            await alpha.tell(one.up(StoreCall(id=2, op="add", key="plan/1/count", value=b"2")))
            await until(lambda: len(alpha.heard) == 1)
            assert alpha.bodies("walpha/0") == [StoreAnswer(id=2, number=2)], "a get holds nobody up"
            await beta.tell(two.up(StoreCall(id=1, op="set", key="plan/1/address", value=b"here")))
            await until(lambda: len(alpha.heard) == 2)
            assert alpha.bodies("walpha/0")[1] == StoreAnswer(id=1, value=b"here")

    asyncio.run(body())


def test_keys_of_a_job_are_not_changed_from_a_node_that_takes_no_part_in_it() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            one = FakeWorker(device="alpha/0", incarnation="a")
            two = FakeWorker(device="beta/0", incarnation="b")
            await alpha.takes_part(JOB)
            await alpha.tell(one.up(StoreCall(id=1, op="set", key="plan/1/address", value=b"here")))
            await until(lambda: len(alpha.heard) == 1)
            for number, op in enumerate(("delete", "set", "add", "get", "check")):
                await beta.tell(two.up(StoreCall(id=number, op=op, key="plan/1/address", value=b"1")))
            await until(lambda: len(beta.heard) == 5)
            assert all("takes no part in job demo" in answer.error for answer in beta.bodies("wbeta/0"))
            await alpha.tell(one.up(StoreCall(id=2, op="get", key="plan/1/address")))
            await until(lambda: len(alpha.heard) == 2)
            assert alpha.bodies("walpha/0")[1] == StoreAnswer(id=2, value=b"here")

    asyncio.run(body())


def test_keys_that_a_node_waits_for_are_bounded_and_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_socket, "MOST_GETS", 5)

    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            one = FakeWorker(device="alpha/0", incarnation="a")
            await alpha.takes_part(JOB)
            await beta.takes_part(JOB)
            for number in range(8):
                await alpha.tell(one.up(StoreCall(id=number, op="get", key=f"plan/1/{number}", seconds=3000.0)))
            await until(lambda: len(alpha.heard) == 3)
            assert [answer.id for answer in alpha.bodies("walpha/0")] == [5, 6, 7]
            assert "waits for 5 keys" in alpha.bodies("walpha/0")[0].error
            two = FakeWorker(device="beta/0", incarnation="b")
            await beta.tell(two.up(StoreCall(id=1, op="set", key="plan/1/0", value=b"x")))
            await until(lambda: len(alpha.heard) == 4)
            assert alpha.bodies("walpha/0")[3] == StoreAnswer(id=0, value=b"x")
            await alpha.tell(one.up(StoreCall(id=9, op="get", key="plan/1/9", seconds=3000.0)))
            await alpha.tell(one.up(StoreCall(id=10, op="check", key="plan/1/9")))
            await until(lambda: len(alpha.heard) == 5)
            assert alpha.bodies("walpha/0")[4] == StoreAnswer(id=10), "there is room again"

    asyncio.run(body())


def test_chaos_reaches_the_devices_agent() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            asked = {"action": "slow", "device": "alpha/1", "factor": 3}
            assert (await post(coordinator, "/v1/chaos", asked))[0] == 200
            recover = {"action": "recover", "device": "alpha/1"}
            assert (await post(coordinator, "/v1/chaos", recover))[0] == 200
            await until(lambda: len(alpha.heard) == 2)
            assert alpha.bodies("device:alpha/1") == [EmulatedSpeed(factor=3.0), EmulatedSpeed(factor=1.0)]

    asyncio.run(body())


BAD = [
    ({"action": "slow", "device": "alpha/9", "factor": 3}, 404, "there are: alpha/0, alpha/1"),
    ({"action": "slow", "device": "alpha/1", "factor": 0.5}, 400, "at least 1"),
    ({"action": "kill", "device": "alpha/1"}, 409, "device alpha/1 has no worker to kill"),
    ({"action": "freeze", "device": "alpha/1"}, 409, "device alpha/1 has no worker to freeze"),
    ({"action": "slow", "device": "alpha/1", "factor": "nan"}, 400, "factor"),
    ({"action": "burn", "device": "alpha/1"}, 400, "one of slow, recover, kill"),
    ({"device": "alpha/1"}, 400, "action"),
    ({"action": "slow", "device": "alpha/1", "faktor": 2}, 400, "faktor"),
]


@pytest.mark.parametrize(("body", "status", "said"), BAD)
def test_chaos_that_makes_no_sense_is_refused(body: dict[str, object], status: int, said: str) -> None:
    async def ask() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            code, answer = await post(coordinator, "/v1/chaos", body)
            assert code == status, answer
            assert said in answer["error"]
            assert not alpha.heard

    asyncio.run(ask())


@pytest.mark.parametrize(("release", "status"), [("0.1.0", 409), (__version__, 200)])
def test_an_agent_that_cannot_cut_the_data_network_is_named(release: str, status: int) -> None:
    records = {
        name: msgspec.structs.replace(node_record(name), address=address)
        for name, address in (("alpha", "10.0.0.1"), ("beta", "10.0.0.2"))
    }

    async def ask() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, records["alpha"], release=__version__) as alpha,
            agent(coordinator, records["beta"], release=release),
        ):
            await until(lambda: len(coordinator.leading.state.nodes) == 2)
            body = {"action": "cut", "node": "alpha", "other": "beta", "seconds": 1.0}
            code, answer = await post(coordinator, "/v1/chaos", body)
            assert code == status
            if code == 200:
                await until(lambda: bool(alpha.heard))
            else:
                assert "the agent of node beta (elasticd 0.1.0) cannot cut the data network" in answer["error"]

    asyncio.run(ask())


def test_chaos_is_off_unless_the_configuration_turns_it_on() -> None:
    async def body() -> None:
        async with coordinating(chaos=False) as coordinator:
            asked = {"action": "slow", "device": "alpha/1", "factor": 3}
            code, answer = await post(coordinator, "/v1/chaos", asked)
            assert code == 403
            assert "[chaos]" in answer["error"]

    asyncio.run(body())


def test_wrong_requests_are_answered_with_an_error_in_json() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            assert "no job 'x'" in (await get(coordinator, "/v1/jobs/x/steps"))[1]["error"]
            assert (await get(coordinator, "/v1/jobs/x/history"))[0] == 404
            assert (await get(coordinator, "/v1/events?after=soon"))[0] == 400
            assert "there is no /v2" in (await get(coordinator, "/v2"))[1]["error"]

    asyncio.run(body())


def test_each_reason_against_a_request_has_an_http_status() -> None:
    assert STATUS.keys() == {*get_args(Reason)}
    assert len({*STATUS.values()}) == len(STATUS)
