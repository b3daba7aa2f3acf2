"""Who is let in: by a token of his own alone, as long as the leader knows it, and for so many streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticd.config.security import SecuritySection
from elasticd.config.tree import Config, with_overrides
from elasticd.coordinator.auth import Authorizer
from elasticd.coordinator.daemon import Coordinator
from elasticd.dashboard import stream, viewer_requests
from elasticd.dashboard.daemon import Dashboard
from elasticd.dashboard.session import IDLE, LONGEST, Session, Sessions
from elasticd.dashboard.viewer_requests import CANNOT_CHECK
from elasticd.machines.job.state.events import CoordinatorNote
from tests import sizes
from tests.certificates import Authority
from tests.coordinator.agents import coordinating, until
from tests.coordinator.secured import OPERATOR, VIEWER, private, secured, tokens
from tests.dashboard.serving import SOON, Page, configured, serving, streaming


def running(body: Any) -> None:
    asyncio.run(body())


async def heard(config: Config, coordinator: Coordinator) -> Dashboard:
    """A dashboard that has heard the leader."""
    dashboard = Dashboard(config, coordinator.url)
    await dashboard.start()
    await until(lambda: dashboard.board.known.cluster.leader.epoch > 0, SOON)
    return dashboard


def at_home(dashboard: Dashboard) -> Page:
    """A browser of this machine, where the dashboard serves all addresses."""
    return Page(f"http://127.0.0.1:{dashboard.url.rpartition(':')[2]}")


@pytest.mark.parametrize(
    "token",
    sizes.beside(
        ["", "short", "é" * 20], ["", " ", "short", "two words-0123456789", "x" * 16 + "\n.", "é" * 20]
    ),
)
def test_nobody_is_the_dashboard_by_showing_no_token_of_his_own(token: str, tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        pair, mine = authority.server(), authority.client("dashboard", "operator")
        theirs = msgspec.structs.replace(tokens(tmp_path), cert=pair.cert, key=pair.key, client_ca=authority.ca)
        own = SecuritySection(ca=authority.ca, client_cert=mine.cert, client_key=mine.key)
        async with secured(theirs) as coordinator:
            config = msgspec.structs.replace(configured(tmp_path), security=own)
            dashboard = await heard(config, coordinator)
            try:
                async with Page(dashboard.url) as page:
                    answer = await page.post("/session", {"token": token})
                    assert answer.status_code == 401, answer.text
                    assert "16 or more letters" in answer.json()["error"]
                    assert (await page.get("/api/cluster")).status_code == 401
                    # By his own token a viewer is a viewer, whatever the dashboard's certificate may do.
                    assert (await page.post("/session", {"token": VIEWER})).json()["role"] == "viewer"
                    assert (await page.post("/api/act/pause", {})).status_code == 403
            finally:
                await dashboard.stop()

    running(body)


def test_a_request_in_a_viewers_name_shows_nothing_of_the_dashboards(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        pair, mine = authority.server(), authority.client("dashboard", "operator")
        theirs = msgspec.structs.replace(tokens(tmp_path), cert=pair.cert, key=pair.key, client_ca=authority.ca)
        own = SecuritySection(
            ca=authority.ca,
            client_cert=mine.cert,
            client_key=mine.key,
            token_file=private(tmp_path / "own-token", OPERATOR),
        )
        async with secured(theirs) as coordinator:
            dashboard = await heard(msgspec.structs.replace(configured(tmp_path), security=own), coordinator)
            try:
                asked = viewer_requests.ViewerRequests(dashboard)
                assert dashboard.asks
                with pytest.raises(viewer_requests.Failure, match="sign in"):
                    await asked.passed_on("/v1/config", None, {"values": {}, "by": "x"})
                ca = Path(authority.ca)
                ca.rename(ca.with_suffix(".away"))  # as while it is replaced
                with pytest.raises(viewer_requests.Failure, match="name a PEM file") as away:
                    await asked.signed_in(VIEWER, "192.0.2.1")
                assert away.value.status == 503
                ca.with_suffix(".away").rename(ca)
                dashboard._asks = False  # also where nothing is asked for here
                with pytest.raises(viewer_requests.Failure) as refused:
                    await asked.passed_on("/v1/config", None, {"values": {}, "by": "x"})
                assert refused.value.status == 401, "the leader took him for the dashboard"
            finally:
                await dashboard.stop()

    running(body)


def test_wrong_tokens_of_an_address_are_looked_at_more_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_requests, "WRONG_A_SECOND", 0.01)

    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            dashboard = await heard(configured(tmp_path, token=VIEWER), coordinator)
            try:
                async with Page(dashboard.url) as page:
                    asked = [await page.post("/session", {"token": "wrong-0123456789abcdef"}) for _ in range(8)]
                    assert [answer.status_code for answer in asked] == [401] * 6 + [429] * 2
                    assert "wait some seconds" in asked[-1].json()["error"]
                    assert (await page.post("/session", {"token": VIEWER})).status_code == 429
            finally:
                await dashboard.stop()

    running(body)


def test_a_leader_without_tokens_lets_nobody_in_where_other_machines_reach_the_dashboard(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            open_to_all = with_overrides(configured(tmp_path, token=VIEWER), {"dashboard.host": "0.0.0.0"})
            dashboard = await heard(open_to_all, coordinator)
            try:
                async with at_home(dashboard) as page:
                    assert (await page.get("/api/cluster")).status_code == 401
                    assert (await page.post("/api/act/pause", {})).status_code == 401
                    answer = await page.post("/session", {"token": OPERATOR})
                    assert (answer.status_code, answer.json()["error"]) == (503, CANNOT_CHECK)
            finally:
                await dashboard.stop()

    running(body)


def test_a_leader_without_tokens_after_one_with_them_opens_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        section = tokens(tmp_path)
        async with (
            secured(section) as coordinator,
            serving(coordinator, tmp_path, secured=True) as dashboard,
            Page(dashboard.url) as page,
            Page(dashboard.url) as stranger,
        ):
            await page.post("/session", {"token": VIEWER})
            coordinator.access = Authorizer.read(SecuritySection())
            dashboard._url = ""  # as with each new leader
            await asyncio.to_thread(lambda: dashboard._connect().__enter__().close())
            assert (await stranger.get("/api/cluster")).status_code == 401
            assert (await stranger.post("/session", {"token": OPERATOR})).status_code == 503
            viewer = (await page.json("/api/cluster"))["viewer"]
            assert viewer["role"] == "viewer"

    running(body)


def test_a_dashboard_that_lost_its_token_does_not_open_its_history(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            async with serving(coordinator, tmp_path, secured=True) as dashboard, Page(dashboard.url) as page:
                await page.post("/session", {"token": VIEWER})
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="confidential"))
                await page.until("/api/events?kind=chaos", lambda found: found["events"])
            dashboard = Dashboard(configured(tmp_path), coordinator.url)
            await dashboard.start()
            try:
                async with Page(dashboard.url) as page:
                    assert (await page.get("/api/events")).status_code == 401
                    assert (await page.get("/api/live")).status_code == 401
                    await until(lambda: bool(dashboard.board.known.trouble), SOON)  # the leader refuses it
                    assert (await page.get("/api/events")).status_code == 401
                    # Viewers have tokens of their own; nobody leads as far as the dashboard knows.
                    assert (await page.post("/session", {"token": VIEWER})).status_code == 503
            finally:
                await dashboard.stop()

    running(body)


def test_a_token_that_is_withdrawn_loses_its_open_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_requests, "RECHECK_SECONDS", 0.2)
    monkeypatch.setattr(viewer_requests, "SESSION_CHECK_SECONDS", 0.1)

    async def body() -> None:
        section = tokens(tmp_path)
        async with (
            secured(section) as coordinator,
            serving(coordinator, tmp_path, secured=True) as dashboard,
            Page(dashboard.url) as page,
            Page(dashboard.url) as other,
        ):
            await page.post("/session", {"token": OPERATOR})
            await other.post("/session", {"token": VIEWER})
            with (
                streaming(dashboard.url, cookies=page.cookies) as mine,
                streaming(dashboard.url, cookies=other.cookies) as others,
            ):
                await until(lambda: bool(mine.of("hello") and others.of("hello")), SOON)
                Path(section.operators or "").write_text("bob another-0123456789abcdef\n")
                coordinator.access = Authorizer.read(section)
                await until(lambda: not mine._thread.is_alive(), SOON)
                coordinator.leading.record(CoordinatorNote(kind="chaos", text="after"))
                await until(lambda: bool(others.of("event")), SOON)
                assert not mine.of("event")
            await until(lambda: not len(dashboard.board.streams), SOON)

    running(body)


def test_sessions_end_when_idle_or_old_and_an_open_stream_is_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("elasticd.dashboard.session.time.monotonic", lambda: now[0])
    sessions = Sessions()
    idle, watching = sessions.begin("a", "", "viewer"), sessions.begin("b", "", "viewer")
    streams = stream.Streams(1)
    (session,) = (found for found in [sessions.find(watching)] if found is not None)
    browser = streams.admit(session)
    now[0] += IDLE * 0.75
    assert sessions.watched() == [(watching, session)]
    now[0] += IDLE * 0.75
    assert sessions.find(idle) is None
    assert sessions.find(watching) is session
    for _ in range(int(LONGEST / IDLE) + 1):
        now[0] += IDLE * 0.9
        sessions.watched()
    assert session.ended, "however much it is used"
    streams.leave(browser)
    assert session.streams == 0


def _session(role: Any) -> Session:
    return Session(token="t", name="", role=role, began=0.0, used=0.0, checked=0.0)


def test_streams_are_counted_by_session_and_some_are_left_for_operators() -> None:
    streams, operator = stream.Streams(1), _session("operator")
    viewers = [_session("viewer") for _ in range(stream.MOST_BROWSERS)]
    for _ in range(stream.MOST_OF_SESSION):
        assert not streams.refusal(viewers[0])
        first = streams.admit(viewers[0])
    assert "close some of them" in streams.refusal(viewers[0])
    streams.leave(first)
    streams.leave(first)
    assert not streams.refusal(viewers[0])
    admitted = 0
    for viewer in viewers[1:]:
        if not streams.refusal(viewer):
            streams.admit(viewer)
            admitted += 1
    assert len(streams) == stream.MOST_BROWSERS - stream.FOR_OPERATORS
    assert streams.refusal(viewers[-1])
    assert not streams.refusal(operator)


def test_one_viewers_unread_streams_leave_room_for_an_operator(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            secured(tokens(tmp_path)) as coordinator,
            serving(coordinator, tmp_path, secured=True) as dashboard,
            Page(dashboard.url) as page,
            Page(dashboard.url) as other,
        ):
            await page.post("/session", {"token": VIEWER})
            await other.post("/session", {"token": OPERATOR})
            cookie = "; ".join(f"{name}={value}" for name, value in dict(page.cookies).items())
            port = int(dashboard.url.rpartition(":")[2])
            asked = f"GET /api/live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n".encode()
            unread = []
            for _ in range(20):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(asked)
                unread.append(writer)
            await until(lambda: len(dashboard.board.streams) == stream.MOST_OF_SESSION, SOON)
            with streaming(dashboard.url, cookies=other.cookies) as mine:
                await until(lambda: bool(mine.of("hello")), SOON)
            assert (await page.get("/api/live")).status_code == 503
            for writer in unread:
                writer.close()
            await until(lambda: not len(dashboard.board.streams), SOON)

    running(body)
