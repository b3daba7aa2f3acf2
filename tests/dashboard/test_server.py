"""The dashboard before a real coordinator: pages, policy, sessions, acts, streams, and what it survives."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from elasticd.config.tree import ConfigError, with_overrides
from elasticd.coordinator import leader
from elasticd.coordinator.daemon import Coordinator
from elasticd.dashboard import stream
from elasticd.dashboard.app import HEADERS, PAGES, Assets
from elasticd.dashboard.daemon import Dashboard
from elasticd.dashboard.session import Session
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.store.memory import MemoryServer, MemoryStore
from tests.coordinator.agents import PLANNER, agent, config, coordinating, lead, until
from tests.coordinator.secured import AGENT, OPERATOR, VIEWER, secured, tokens
from tests.dashboard.serving import SOON, Page, configured, serving, streaming
from tests.machines.cast import node_record

NASTY = "<img src=x onerror=alert(1)>"


def running(body: Any) -> None:
    asyncio.run(body())


def event_ids(page: Any) -> list[int]:
    return [event["id"] for event in page["events"]]


def test_every_answer_has_the_policy_and_the_page_is_one_for_all_paths(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            paths = [re.sub(r"{\w+}", "x", path) for path in PAGES]
            answers = [await page.get(path) for path in (*paths, "/api/cluster", "/nowhere", "/api/jobs/none")]
            for answer in answers:
                for name, value in HEADERS.items():
                    assert answer.headers[name] == value, answer.url
            assert {answer.content for answer in answers[: len(paths)]} == {answers[0].content}
            assert [answer.status_code for answer in answers[len(paths) :]] == [200, 404, 404]
            assert "there is no job 'none'" in answers[-1].json()["error"]
            assert "unsafe" not in HEADERS["content-security-policy"]

    running(body)


def test_assets_have_a_hash_and_stay_for_ever_and_another_hash_does_not(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            index = (await page.get("/")).text
            assert "/static/HASH/" not in index
            linked = re.findall(r'(?:src|href)="(/static/[^"]+)"', index)
            assert linked
            for path in linked:
                answer = await page.get(path)
                assert answer.status_code == 200, path
                assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            old = linked[0].replace(Assets().hash, "0" * 16)
            assert (await page.get(old)).headers["cache-control"] == "no-cache"
            assert (await page.get("/static/x/../app.py")).status_code == 404
            assert (await page.get("/static/x/%2e%2e/app.py")).status_code == 404

    running(body)


def test_the_cluster_is_shown_as_the_leader_has_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")),
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            found = await page.until("/api/cluster", lambda view: len(view["nodes"]) == 1)
            assert found["leader"]["url"] == coordinator.url
            assert found["leader"]["reachable"] is True
            assert found["etcd"]["reachable"] is True
            assert [cell["name"] for cell in found["nodes"][0]["devices"]] == ["alpha/0", "alpha/1"]
            assert found["counts"] == {"unused": 2}
            assert found["viewer"] == {"signed_in": True, "asks": False, "name": "", "role": "operator"}
            coordinator.commands.pace("alpha/1", 3.0)
            await page.until("/api/cluster", lambda view: view["nodes"][0]["devices"][1].get("pace") == 3.0)
            device = await page.until("/api/devices/alpha/1", lambda view: view["events"])
            assert device["events"][0]["kind"] == "chaos"
            assert device["use"] == "no job uses it"
            assert (await page.get("/api/devices/alpha/9")).status_code == 404

    running(body)


def test_a_node_that_goes_is_shown_as_unreachable_and_in_the_table(tmp_path: Path) -> None:
    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            async with agent(coordinator, node_record("alpha")), Page(dashboard.url) as page:
                await page.until("/api/cluster", lambda view: view["nodes"])
            async with Page(dashboard.url) as page:
                # The event, which says since when, comes after the node's own news.
                found = await page.until(
                    "/api/cluster", lambda view: any(r.get("since") for r in view["abnormal"])
                )
                assert found["counts"] == {"unreachable": 2}
                (row,) = found["abnormal"]
                assert (row["what"], row["name"], row["state"]) == ("node", "alpha", "unreachable")

    running(body)


def test_browsers_hear_each_event_once_and_go_on_after_the_last_id(tmp_path: Path) -> None:
    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            with streaming(dashboard.url) as first:
                await until(lambda: bool(first.of("hello")), SOON)
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="one"))
                await until(lambda: bool(first.of("event")), SOON)
                last = first.heard[-1][0]
            await until(lambda: not len(dashboard.board.streams), SOON)
            coordinator.leading.record(CoordinatorNote(kind="chaos", text="two"))
            with streaming(dashboard.url, last=last) as back:
                await until(lambda: bool(back.of("event")), SOON)
                assert [event["text"] for event in back.of("event")] == ["two"]
                assert not back.of("hello")
            with streaming(dashboard.url, last="1:1") as stranger:
                await until(lambda: bool(stranger.of("hello")), SOON)

    running(body)


def test_a_browser_that_sleeps_gets_a_hello_and_costs_no_more_than_its_bound() -> None:
    async def body() -> None:
        streams = stream.Streams(7)
        me = Session(token=None, name="", role="viewer", began=0.0, used=0.0, checked=0.0)
        lines = streams.listen(streams.admit(me), "", lambda: msgspec.structs.replace(PULSE), lambda: False)
        assert await anext(lines) == b"retry: 1000\n\n"
        assert b"event: hello" in await anext(lines)
        (browser,) = streams._browsers
        big = msgspec.structs.replace(PULSE, trouble="x" * 100_000)
        for _ in range(200):
            streams.tell("leader", big)
            assert browser.size <= stream.MOST_WAITING
        assert sum(len(line) for _, line in streams._kept) <= stream.MOST_KEPT
        assert b"event: hello" in await anext(lines)
        streams.tell("leader", PULSE)
        assert b"event: leader" in await anext(lines)
        await lines.aclose()
        assert not len(streams)

    running(body)


class _Pulse(msgspec.Struct, frozen=True):
    trouble: str = ""


PULSE = _Pulse()


def test_texts_of_others_are_data_and_break_no_event(tmp_path: Path) -> None:
    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            with streaming(dashboard.url) as browser:
                await until(lambda: bool(browser.of("hello")), SOON)
                text = f"{NASTY}\r\n\r\nevent: hello\ndata: {{}}\u2028"
                coordinator.leading.record(CoordinatorNote(kind="chaos", text=text, data={"node": NASTY}))
                await until(lambda: bool(browser.of("event")), SOON)
                assert browser.of("event")[0]["text"] == text
                assert len(browser.of("hello")) == 1
            async with Page(dashboard.url) as page:
                found = await page.json("/api/events")
                assert found["events"][0]["text"] == text
                answer = await page.get("/api/events")
                assert answer.headers["content-type"] == "application/json"

    running(body)


@pytest.mark.parametrize(
    "query",
    ["before=x", "since=yesterday", "limit=ten", "id=9" * 30, "until=nan"],
)
def test_a_wrong_query_is_refused_with_one_message(query: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            answer = await page.get(f"/api/events?{query}")
            assert answer.status_code == 400
            assert "must be" in answer.json()["error"] or "too large" in answer.json()["error"]

    running(body)


def test_events_are_filtered_paged_and_have_permalinks(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            for number in range(25):
                kind = "chaos" if number % 2 else "configured"
                note = CoordinatorNote(kind=kind, text=f"{number}", data={"node": f"n{number % 3}"})
                coordinator.leading.record(note)
            await page.until("/api/events", lambda found: len(found["events"]) >= 25)
            first = await page.json("/api/events?limit=10&kind=chaos,configured")
            second = await page.json(f"/api/events?limit=10&kind=chaos,configured&before={first['before']}")
            third = await page.json(f"/api/events?limit=10&kind=chaos,configured&before={second['before']}")
            assert third["before"] is None
            ids = event_ids(first) + event_ids(second) + event_ids(third)
            assert ids == sorted(ids, reverse=True)
            assert len(set(ids)) == 25
            chaos = await page.json("/api/events?kind=chaos&node=n1")
            assert {event["node"] for event in chaos["events"]} == {"n1"}
            assert {event["kind"] for event in chaos["events"]} == {"chaos"}
            assert first["nodes"] == ["n0", "n1", "n2"]
            one = await page.json(f"/api/events?id={ids[3]}")
            assert event_ids(one) == [ids[3]]

    running(body)


# -- who may -------------------------------------------------------------------------------------------------


def test_without_a_session_nothing_is_shown_and_a_wrong_token_says_what_is_wrong(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            secured(tokens(tmp_path)) as coordinator,
            serving(coordinator, tmp_path, secured=True) as dashboard,
            Page(dashboard.url) as page,
        ):
            paths = ("cluster", "jobs/j", "jobs/j/steps", "events", "config", "act", "live", "devices/a/0")
            for path in paths:
                assert (await page.get(f"/api/{path}")).status_code == 401, path
            assert (await page.post("/api/act/pause", {})).status_code == 401
            assert (await page.get("/")).status_code == 200, "the page itself, which asks for a token"
            viewer = await page.json("/api/viewer")
            assert viewer == {"signed_in": False, "asks": True, "name": "", "role": ""}
            wrong = await page.post("/session", {"token": "wrong-0123456789abcdef"})
            assert wrong.status_code == 401
            assert "does not know this token" in wrong.json()["error"]
            assert (await page.post("/session", {"token": AGENT})).status_code == 403
            assert (await page.post("/session", {"token": "two words"})).status_code == 401
            assert (await page.post("/session", {"tok": 1})).status_code == 400
            assert not page.cookies

    running(body)


def test_a_session_is_a_cookie_that_no_script_reads_and_the_token_is_nowhere_else(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            secured(tokens(tmp_path)) as coordinator,
            serving(coordinator, tmp_path, secured=True) as dashboard,
            Page(dashboard.url) as page,
        ):
            answer = await page.post("/session", {"token": OPERATOR})
            assert answer.json() == {"signed_in": True, "asks": True, "name": "alice", "role": "operator"}
            cookie = answer.headers["set-cookie"]
            assert "HttpOnly" in cookie
            assert "samesite=strict" in cookie.lower()
            assert OPERATOR not in cookie
            assert OPERATOR not in answer.text
            assert (await page.json("/api/cluster"))["viewer"]["name"] == "alice"
            with streaming(dashboard.url, cookies=page.cookies) as mine:
                await until(lambda: bool(mine.of("hello")), SOON)
                await page.delete("/session")
                await until(lambda: not mine._thread.is_alive(), SOON)
            assert (await page.get("/api/cluster")).status_code == 401
        kept = b"".join(path.read_bytes() for path in tmp_path.glob("history.db*"))
        assert OPERATOR.encode() not in kept
        assert VIEWER.encode() not in kept

    running(body)


def test_a_viewer_cannot_act_and_an_operators_act_is_in_the_audit_with_his_name(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            secured(tokens(tmp_path)) as coordinator,
            serving(coordinator, tmp_path, secured=True) as dashboard,
            Page(dashboard.url) as page,
        ):
            await page.post("/session", {"token": VIEWER})
            acts = (await page.json("/api/act"))["acts"]
            assert not any(act["allowed"] for act in acts)
            assert all(act["why_not"] for act in acts)
            refused = await page.post("/api/act/pause", {})
            assert refused.status_code == 403
            await page.post("/session", {"token": OPERATOR})
            by_name = {act["name"]: act for act in (await page.json("/api/act"))["acts"]}
            assert by_name["pause"]["allowed"]
            assert not by_name["resume"]["allowed"]
            assert "not paused" in by_name["resume"]["why_not"]
            assert by_name["checkpoint"]["allowed"]
            done = await page.post("/api/act/pause", {})
            assert done.status_code == 200, done.text
            assert done.json()["command"] == "elasticd pause"
            await page.until("/api/cluster", lambda view: view["paused"])
            found = await page.until("/api/events?kind=asked", lambda view: view["events"])
            assert found["events"][0]["by"] == "dashboard (alice)"
            assert "policy.paused" in found["events"][0]["text"]
            config = await page.json("/api/config")
            assert config["history"][0]["set"] == {"policy.paused": True}
            assert config["history"][0]["by"] == "dashboard (alice)"

    running(body)


def test_the_leaders_own_refusal_is_passed_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            answer = await page.post("/api/act/drain", {"node": "ghost"})
            assert answer.status_code == 404
            assert "there is no node 'ghost'" in answer.json()["error"]
            assert (await page.post("/api/act/drain", {})).status_code == 400
            assert (await page.post("/api/act/fly", {})).status_code == 404
            assert (await page.post("/api/act/config", {"key": "detect.slow", "value": 0.5})).status_code == 400
            unconfirmed = await page.post("/api/act/chaos-kill", {"device": "alpha/0"})
            assert unconfirmed.status_code == 400
            assert "confirm" in unconfirmed.json()["error"]

    running(body)


def test_a_page_of_another_site_changes_nothing_and_no_strange_name_is_answered(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
                answer = await page.post("/api/act/pause", {}, headers=headers)
                assert answer.status_code == 403
            rebound = await page.get("/api/cluster", headers={"host": "evil.example"})
            assert rebound.status_code == 403
            form = await page._client.post(
                "/api/act/pause", content="{}", headers={"content-type": "text/plain"}
            )
            assert form.status_code == 400

    running(body)


def test_a_host_for_all_without_tokens_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async def body() -> None:
        open_to_all = with_overrides(configured(tmp_path), {"dashboard.host": "0.0.0.0"})
        with pytest.raises(ConfigError, match="set tokens in section"):
            await Dashboard(open_to_all, "http://127.0.0.1:1").start()

    running(body)


# -- what it survives ------------------------------------------------------------------------------------------


def test_over_a_leaders_death_no_event_is_lost_or_doubled_and_history_stays(tmp_path: Path) -> None:
    async def body() -> None:
        server = MemoryServer()
        stores = [MemoryStore(server) for _ in range(2)]
        first = Coordinator(config(), stores[0], planner=PLANNER)
        await lead(first)
        second = Coordinator(config(), stores[1], planner=PLANNER)
        standing_by = asyncio.create_task(lead(second))
        with patch("elasticd.dashboard.daemon.leader_url", lambda settings: leader[0]):
            leader = [first.url]
            dashboard = Dashboard(configured(tmp_path))
            await dashboard.start()
            try:
                await until(lambda: not dashboard.asks, SOON)
                async with Page(dashboard.url) as page:
                    await page.until("/api/cluster", lambda view: view["leader"]["reachable"])
                    with streaming(dashboard.url) as browser:
                        await until(lambda: bool(browser.of("hello")), SOON)
                        for number in range(5):
                            first.leading.record(CoordinatorNote(kind="chaos", text=f"before {number}"))
                        await until(lambda: len(browser.of("event")) == 5, SOON)
                        await first.stop()
                        await until(lambda: not dashboard.board.known.reachable, SOON)
                        shown = await page.json("/api/cluster")
                        assert shown["leader"]["reachable"] is False
                        assert shown["leader"]["trouble"]
                        await standing_by
                        second.leading.record(CoordinatorNote(kind="chaos", text="while nobody heard"))
                        leader[0] = second.url
                        await page.until("/api/cluster", lambda view: view["leader"]["url"] == second.url)
                        second.leading.record(CoordinatorNote(kind="chaos", text="after"))
                        await until(
                            lambda: any(event["text"] == "after" for event in browser.of("event")), SOON
                        )
                        texts = [event["text"] for event in browser.of("event")]
                        wanted = [*(f"before {n}" for n in range(5)), "while nobody heard", "after"]
                        assert [text for text in texts if text in wanted] == wanted
                        assert any(not pulse["leader"]["reachable"] for pulse in browser.of("leader"))
                    found = await page.json("/api/events?kind=chaos")
                    assert [event["text"] for event in found["events"]] == wanted[::-1]
            finally:
                await dashboard.stop()
                await second.stop()
                for store in stores:
                    store.close()

    running(body)


def test_a_restart_of_the_dashboard_keeps_its_history_also_while_nobody_leads(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")),
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            coordinator.leading.record(CoordinatorNote(kind="chaos", text="kept"))
            await page.until("/api/events?kind=chaos", lambda found: found["events"])
            await page.until("/api/cluster", lambda view: view["nodes"])
        dashboard = Dashboard(configured(tmp_path), coordinator.url)
        await dashboard.start()
        try:
            async with Page(dashboard.url) as page:
                found = await page.json("/api/events?kind=chaos")
                assert [event["text"] for event in found["events"]] == ["kept"]
                shown = await page.json("/api/cluster")
                assert shown["leader"]["reachable"] is False
                assert [node["node"] for node in shown["nodes"]] == ["alpha"]
                assert 0 < shown["heard"] < shown["now"]
                answer = await page.post("/api/act/pause", {})
                assert answer.status_code == 503
        finally:
            await dashboard.stop()

    running(body)


def test_etcd_away_is_shown_and_data_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With for how long etcd has not taken what is shown."""
    monkeypatch.setattr(leader, "UNWRITTEN_SECONDS", 0.05)

    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")),
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            await page.until("/api/cluster", lambda view: view["nodes"])
            server.outage(True)
            coordinator.leading.record(CoordinatorNote(kind="chaos", text="to be written"))
            shown = await page.until("/api/cluster", lambda view: not view["etcd"]["reachable"])
            assert shown["nodes"]
            refused = {act["name"]: act for act in (await page.json("/api/act"))["acts"]}["pause"]
            assert "etcd does not answer" in refused["why_not"]
            await page.until("/api/cluster", lambda view: view["etcd"]["unwritten_seconds"] > 0.05)
            server.outage(False)
            await page.until("/api/cluster", lambda view: view["etcd"]["reachable"])
            await page.until("/api/cluster", lambda view: view["etcd"]["unwritten_seconds"] == 0)

    running(body)
