"""The live feed of a real leader: all that is known, then what changes; free while nobody listens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from elasticd_planner.placement.expert_forecast import ExpertForecast

from elasticd import client
from elasticd.client import ApiClient, CannotReach
from elasticd.codec import decoding
from elasticd.config.credentials import Credentials
from elasticd.coordinator import live_feed
from elasticd.coordinator.daemon import Coordinator
from elasticd.dashboard.known import ClusterNow
from elasticd.machines.coordinator.restart_jobs import RestartJob
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.parts.expert_rows import ExpertRows
from elasticd.records import Proposal
from elasticd.wire import live_types as live
from elasticd.wire.api_types import ApiError, LeaderStatus, Settings
from elasticd.wire.node_health import Health
from tests.cli.support import call
from tests.coordinator.agents import agent, coordinating, get, until
from tests.machines.cast import node_record
from tests.machines.world import World
from tests.releases.samples import sample


class Listening:
    """A client of the feed on a thread of its own."""

    def __init__(self, url: str, after: str = "") -> None:
        self.heard: list[Any] = []
        self.error = ""
        self._api = ApiClient(url, Credentials())
        self._thread = threading.Thread(target=self._listen, args=(after,), daemon=True)
        self._thread.start()

    def _listen(self, after: str) -> None:
        try:
            for news in self._api.live(after):
                self.heard.append(news)
        except CannotReach as error:
            self.error = str(error)
        except Exception as error:
            self.error = repr(error)

    def of(self, kind: type) -> list[Any]:
        return [news for news in self.heard if isinstance(news, kind)]

    def values(self, kind: str) -> list[Any]:
        return values(self.heard, kind)

    def close(self) -> None:
        with suppress(Exception):
            self._api.close()


def values(news: Iterable[Any], kind: str) -> list[Any]:
    """The values of lines of this kind."""
    return [one.value for one in news if isinstance(one, live.Valued) and one.kind == kind]


@contextmanager
def listening(coordinator: Coordinator, after: str = "") -> Iterator[Listening]:
    client = Listening(coordinator.url, after)
    try:
        yield client
    finally:
        client.close()


def running(body: Callable[[], Any]) -> None:
    asyncio.run(body())


def test_a_listener_hears_all_that_is_known_and_then_each_event_once() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")):
            await until(lambda: "alpha" in coordinator.leading.state.nodes, 30.0)
            with listening(coordinator) as client:
                await until(lambda: bool(client.of(live.Whole)), 30.0)
                hello = client.heard[0]
                assert isinstance(hello, live.LiveHello)
                assert hello.leader.url == coordinator.url
                assert hello.store == "1", "of the store in memory"
                assert [node.node for node in client.values("node")] == ["alpha"]
                assert hello.newest_event == coordinator.leading.journal.newest_id
                for number in range(3):
                    coordinator.leading.record(CoordinatorNote(kind="chaos", text=f"told {number}"))
                await until(lambda: len(client.values("event")) == 3, 30.0)
                assert [event.text for event in client.values("event")] == ["told 0", "told 1", "told 2"]
                ids = [news.id for news in client.heard if not isinstance(news, live.LiveHello)]
                epoch = coordinator.leading.state.epoch
                assert all(each.startswith(f"{epoch}:") for each in ids)
                assert client.of(live.LeaderPulse)

    running(body)


def test_a_change_of_a_node_is_told_and_its_health_apart() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes, 30.0)
            with listening(coordinator) as client:
                await until(lambda: bool(client.of(live.Whole)), 30.0)
                before = len(client.values("node"))
                await alpha.tell(Health(stolen=0.25))
                await until(lambda: bool(client.values("health")), 30.0)
                assert client.values("health")[-1].stolen == 0.25
                assert len(client.values("node")) == before, "its record has not changed"
                coordinator.commands.pace("alpha/0", 3.0)
                await until(lambda: len(client.values("node")) > before, 30.0)
                assert client.values("node")[-1].devices[0].pace == 3.0

    running(body)


def known_of(world: World) -> live_feed.FeedSource:
    return live_feed.FeedSource(
        store="e",
        state=world.state,
        cluster="test",
        leader=LeaderStatus(name="c", url="http://c", epoch=1),
        settings=Settings(values={}, changed={}, history=()),
        times={},
        speeds={},
        restarts=(),
        clock=0.0,
        newest_event=0,
        store_away=False,
        chaos=True,
        at=world.now,
        now=1.0,
    )


def running_world() -> World:
    world = World(("alpha", "beta"), memory=60_000_000)
    world.start()
    world.settle()
    world.train(3)
    return world


def test_nothing_is_noted_or_made_while_nobody_listens() -> None:
    async def body() -> None:
        made: list[object] = []
        with patch.object(live_feed, "_made", lambda *given: made.append(given) or ([], 0.0)):
            async with coordinating() as coordinator:
                feed = coordinator.leading.feed
                assert not feed
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="told"))
                await asyncio.sleep(3 * live_feed.ROUND)
                assert not made
                assert not feed._noted.events

    running(body)


def test_the_last_listener_that_goes_ends_the_work() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            feed = coordinator.leading.feed
            with listening(coordinator) as client:
                await until(lambda: bool(client.of(live.Whole)), 30.0)
                assert feed
            await until(lambda: not feed, 30.0)
            with listening(coordinator) as client:
                await until(lambda: bool(client.of(live.Whole)), 30.0)

    running(body)


def test_who_comes_back_goes_on_after_the_last_id_and_hears_no_hello() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            with listening(coordinator) as stays, listening(coordinator) as goes:
                await until(lambda: bool(stays.of(live.Whole) and goes.of(live.LeaderPulse)), 30.0)
                last = goes.heard[-1].id
                goes.close()
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="meanwhile"))
                await until(lambda: bool(stays.values("event")), 30.0)
                with listening(coordinator, last) as back:
                    await until(lambda: bool(back.values("event")), 30.0)
                    assert not back.of(live.LiveHello)
                with listening(coordinator, "1:5") as stranger:
                    await until(lambda: bool(stranger.heard), 30.0)
                    assert isinstance(stranger.heard[0], live.LiveHello), "that id is another leader's"

    running(body)


def test_a_listener_that_lags_begins_anew_and_its_queue_is_bounded() -> None:
    listener = live_feed._Listener()
    line = b"x" * 1000
    for _ in range(100_000):
        listener.put([line])
        assert listener.size <= live_feed.MOST_WAITING
    assert listener.lags
    assert not listener.lines


def test_a_lagging_listener_gets_a_hello() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            feed = coordinator.leading.feed
            with listening(coordinator) as client:
                await until(lambda: len(client.of(live.Whole)) == 1, 30.0)
                for listener in feed._listeners:
                    listener.lag()
                await until(lambda: len(client.of(live.Whole)) == 2, 30.0)
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="after"))
                await until(lambda: bool(client.values("event")), 30.0)

    running(body)


def test_only_so_many_may_listen() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            with patch.object(live_feed, "MOST_LISTENERS", 1), listening(coordinator) as first:
                await until(lambda: bool(first.of(live.Whole)), 30.0)
                status, answer = await get(coordinator, "/v1/live")
                assert status == 503
                assert "elasticd dashboard" in answer["error"]

    running(body)


def test_viewers_that_sleep_leave_places_for_operators() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            feed, known = coordinator.leading.feed, coordinator.listening

            async def beside(work: Any, *given: Any) -> Any:
                return work(*given)

            streams = []
            for _ in range(live_feed.MOST_LISTENERS - live_feed.FOR_OPERATORS):
                streams.append(feed.listen("", known, beside, operator=False))
                await anext(streams[-1])
            with pytest.raises(ApiError, match="12 listen to this leader already"):
                feed.listen("", known, beside, operator=False)
            for _ in range(live_feed.FOR_OPERATORS):
                streams.append(feed.listen("", known, beside))
                await anext(streams[-1])
            with pytest.raises(ApiError, match="16 listen to this leader already"):
                feed.listen("", known, beside)
            for stream in streams:
                await stream.aclose()

    running(body)


def test_a_defect_in_a_round_costs_a_hello_and_not_the_leader() -> None:
    async def body() -> None:
        made = live_feed._made
        broken = [True]

        def once(*given: Any) -> Any:
            if broken:
                broken.clear()
                raise RuntimeError("a defect")
            return made(*given)

        async with coordinating() as coordinator:
            with patch.object(live_feed, "_made", once), listening(coordinator) as client:
                await until(lambda: bool(client.of(live.LeaderPulse)) and not broken, 30.0)
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="after"))
                await until(lambda: bool(client.values("event")), 30.0)
            assert not coordinator.ready()

    running(body)


def test_what_float32_does_not_hold_is_shown_as_the_largest_that_it_does() -> None:
    world = running_world()
    plan = world.plan()
    assert plan is not None
    largest = float(np.finfo(np.float32).max)
    for name, value, shown in (
        ("step_seconds", 1e300, largest),
        ("block_seconds", -1e39, -largest),
        ("memory_bytes", 10**400, largest),
    ):
        found = {each: world.report(plan, each).measurement for each in plan.members}
        found[plan.members[0]] = msgspec.structs.replace(found[plan.members[0]], **{name: value})
        news = live_feed.measurements(world.job, plan, found)
        assert news is not None
        table = np.frombuffer(news.numbers, "<f4").reshape(len(plan.members), len(news.columns))
        assert table[0, news.columns.index(name)] == shown
        other = getattr(found[plan.members[1]], name)
        assert table[1, news.columns.index(name)] == pytest.approx(other)


@pytest.mark.parametrize("noise", [b"\xff{", b"[" * 3000, b'{"type":"\xff"}'])
def test_a_client_of_the_feed_skips_what_it_does_not_know_with_one_line(
    noise: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From a newer leader; what is no message at all ends the feed, as a connection that breaks does."""
    monkeypatch.setattr(decoding, "_logged", set())
    monkeypatch.setattr(decoding, "_next_look", {})
    pulse = msgspec.json.encode(sample(live.LeaderPulse))
    newest = pulse[:-1] + b',"newest":1}'
    unknown, malformed = b'{"type":"quota","share":%d}', b'{"type":"event","id":"%d"}'
    lines = [unknown % 1, newest, malformed % 1, unknown % 2, malformed % 2, pulse, noise, pulse]
    monkeypatch.setattr(client, "_lines", lambda answer: iter(lines))
    heard: list[Any] = []

    def hear(api: ApiClient) -> None:
        for news in api.live():
            heard.append(news)

    async def body() -> None:
        async with coordinating() as coordinator:
            api = ApiClient(coordinator.url, Credentials())
            with pytest.raises(CannotReach, match="is gone"):
                await asyncio.to_thread(hear, api)
            api.close()

    running(body)
    assert heard == [sample(live.LeaderPulse)] * 2
    told = [record.getMessage() for record in caplog.records if record.name == "elasticd.codec.decoding"]
    assert [sum(word in line for line in told) for word in ("'quota'", "'newest'", "'event'")] == [1, 1, 1]


def test_what_members_measured_is_in_columns_in_rank_order() -> None:
    world = running_world()
    job, plan = world.job, world.plan()
    assert plan is not None
    silent = plan.members[1]
    found = {name: world.report(plan, name).measurement for name in plan.members if name != silent}
    news = live_feed.measurements(job, plan, found)
    assert news is not None
    table = np.frombuffer(news.numbers, "<f4").reshape(len(plan.members), len(news.columns))
    assert np.isnan(table[1, : len(live.MEASURED)]).all()
    others = np.delete(table, 1, axis=0)
    for name in live.MEASURED:
        expected = [getattr(each, name) for each in found.values()]
        assert others[:, news.columns.index(name)] == pytest.approx(expected)
    assert news.step == max(each.step for each in found.values())
    assert table[:, news.columns.index("slowdown")] == pytest.approx(1.0, abs=0.2)
    assert not news.lengths, "the sequences that the silent one reads are not known yet"


def test_lengths_are_those_of_all_pipelines_with_their_sum_and_their_extremes() -> None:
    world = running_world()
    job, plan = world.job, world.plan()
    assert plan is not None
    found = {
        name: msgspec.structs.replace(
            world.report(plan, name).measurement,
            lengths={24: 2, 28: 1},
            sequence_tokens=64 + 70 + 131,
            shortest=64,
            longest=131,
        )
        for name in plan.members
    }
    news = live_feed.measurements(job, plan, found)
    assert news is not None
    readers = len(plan.by_lane)
    assert news.lengths == {24: 2 * readers, 28: readers}
    assert (news.sequence_tokens, news.shortest, news.longest) == (265 * readers, 64, 131)


def test_rounds_tell_plans_members_and_slowdowns_of_a_job() -> None:
    world = running_world()
    told, number = live_feed._Told(), iter(range(1000))
    known = known_of(world)
    first = list(live_feed._changes(known, told, lambda: f"1:{next(number)}"))
    (job,) = values(first, "job")
    assert job.job.phase == "running"
    assert values(first, "plan") == [world.plan()]
    (members,) = values(first, "members")
    assert {member.device for member in members} == set(world.workers)
    assert not list(live_feed._changes(known, told, lambda: "")), "nothing has changed"
    world.rates["alpha/0"] = 3.0
    world.train(6)
    later = list(live_feed._changes(known_of(world), told, lambda: f"1:{next(number)}"))
    (slow,) = values(later, "slowdowns")
    assert slow.rates["alpha/0"] > 2
    assert not values(later, "members")


def test_plans_that_a_job_has_no_more_are_dropped_with_their_measurements() -> None:
    world, published = running_world(), live_feed._Told()
    known = known_of(world)
    cluster = ClusterNow()

    def rounds(job: JobState) -> list[tuple[str, str, str]]:
        state = msgspec.structs.replace(known.state, jobs={job.job: job})
        source = msgspec.structs.replace(known, state=state)
        lines = list(live_feed._changes(source, published, lambda: ""))
        for line in lines:
            cluster.apply(line)  # type: ignore[arg-type]
        return [(type(one).__name__, one.kind, one.key) for one in lines if isinstance(one, live.Drop)]

    job, plan = world.job, world.plan()
    assert plan is not None
    assert rounds(job) == []
    proposal = Proposal(number=plan.number + 1, epoch=1, plan=plan, old=plan)
    assert rounds(msgspec.structs.replace(job, proposal=proposal)) == []
    assert job.job in cluster.proposed
    assert rounds(job) == [("Drop", "proposed", job.job)]
    assert job.job not in cluster.proposed
    cluster.expert_rows[job.job] = {0: (1.0,)}
    again = msgspec.structs.replace(job, plan=None)
    assert rounds(again) == [("Drop", "plan", job.job)]
    assert not cluster.plans
    assert not cluster.expert_rows, "the load is that of a plan's experts"
    assert job.job in cluster.jobs


def test_the_load_of_experts_is_told_whenever_it_is_another() -> None:
    world, told = running_world(), live_feed._Told()

    def heard(rows: dict[int, tuple[float, ...]]) -> list[Any]:
        known = known_of(world)
        job = world.job.changed("learned", expert_rows=ExpertRows(forecast=ExpertForecast().after(rows)))
        state = msgspec.structs.replace(known.state, jobs={**known.state.jobs, job.job: job})
        changes = live_feed._changes(msgspec.structs.replace(known, state=state), told, lambda: "")
        return values(changes, "experts")

    first, second = {0: (3.0, 1.0)}, {0: (1.0, 3.0)}
    assert heard({}) == []
    assert heard(first) == [first]
    assert heard(first) == []
    assert heard(second) == [second]


def test_messages_are_read_back_as_they_were() -> None:
    settings = msgspec.json.Decoder(live.LINES)
    pulse = live.LeaderPulse(id="1:2", at=1.5, store_away=False, paused=True)
    assert settings.decode(msgspec.json.encode(pulse)) == pulse


def test_jobs_in_restart_mode_are_told_once_a_second_and_only_where_something_came() -> None:
    world = running_world()
    job = RestartJob(job="ddp", round=1, step=3, wall=0.5, heard=90.0)
    known = msgspec.structs.replace(known_of(world), restarts=(job,), clock=100.0, now=1000.0)
    told = live_feed._Told()
    first = list(live_feed._changes(known, told, lambda: ""))
    ((restart,),) = values(first, "restarts")
    assert restart.heard == 990.0
    later = msgspec.structs.replace(known, clock=110.0, now=1010.0)
    assert not list(live_feed._changes(later, told, lambda: "")), "a silence that grows is no news"
    stepped = msgspec.structs.replace(later, restarts=(msgspec.structs.replace(job, step=4, heard=109.0),))
    assert not list(live_feed._changes(stepped, told, lambda: "", restarts=False)), "not in each round"
    ((restart,),) = values(live_feed._changes(stepped, told, lambda: ""), "restarts")
    assert (restart.step, restart.heard) == (4, 1009.0)


def test_status_as_json_goes_on_with_what_changes() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")):
            await until(lambda: "alpha" in coordinator.leading.state.nodes, 30.0)
            options = ("status", "--json", "--follow", "--coordinator", coordinator.url)
            following = asyncio.create_task(asyncio.to_thread(call, *options))
            await until(lambda: bool(coordinator.leading.feed), 30.0)
            coordinator.leading.record(CoordinatorNote(kind="chaos", text="told"))
            await asyncio.sleep(1.0)  # it hears that before the end
            await coordinator.stop()
            done = await following
        lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
        kinds = [line["type"] for line in lines]
        assert kinds[0] == "hello"
        assert {"node", "whole", "pulse", "event"} <= {*kinds}
        assert done.exit_code == 1
        assert "is gone" in done.output

    running(body)
