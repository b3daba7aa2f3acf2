"""What a worker wrote, asked for over HTTP: from its agent, for viewers, and by the dashboard in their name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elasticd.coordinator import worker_output
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.wire.launch import FollowJob, Happened, OutputPart, ReadOutput
from tests.coordinator.agents import Agent, agent, coordinating, get, until
from tests.dashboard.serving import Page, serving
from tests.machines.cast import node_record

WRITTEN = "a line\nein Zähler 10%\r20%\n".encode()
PATH = "/v1/nodes/alpha/devices/1/output"


def answering(there: Agent, data: bytes = WRITTEN) -> None:
    """Lets an agent answer as one does that keeps this output of job j."""

    async def answer(message: Any) -> None:
        if not isinstance(message, ReadOutput):
            return
        if message.job not in ("", "j"):
            await there.tell(OutputPart(id=message.id, error="no output of alpha/1 is kept"))
            return
        begin = max(0, len(data) + message.after if message.after < 0 else message.after)
        part = data[begin : begin + message.most]
        await there.tell(OutputPart(id=message.id, job="j", begin=begin, end=begin + len(part), data=part))

    there.on_down = answer


def test_output_comes_in_parts_that_break_no_character() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as there:
            answering(there)
            text, after = "", 0
            while True:
                status, part = await get(coordinator, f"{PATH}?after={after}&most=3")
                assert (status, part["job"], part["device"]) == (200, "j", "alpha/1")
                if part["begin"] == part["end"]:
                    break
                assert part["begin"] == after
                text, after = text + part["text"], part["end"]
            assert text.encode() == WRITTEN
            status, part = await get(coordinator, f"{PATH}?after=-4")
            assert part["text"] == "20%\n"
            status, refused = await get(coordinator, f"{PATH}?job=other")
            assert (status, refused["error"]) == (404, "no output of alpha/1 is kept")

    asyncio.run(body())


def test_an_agent_that_is_away_or_silent_is_told_of_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_output, "ANSWER_SECONDS", 0.05)

    async def body() -> None:
        async with coordinating() as coordinator:
            status, refused = await get(coordinator, PATH)
            assert (status, "no agent" in refused["error"]) == (404, True)
            async with (
                agent(coordinator, node_record("alpha")),
                agent(coordinator, node_record("beta")) as other,
            ):
                status, refused = await get(coordinator, PATH)
                assert (status, "does not answer" in refused["error"]) == (503, True)
                await other.tell(OutputPart(id=1, job="j", end=3, data=b"one"))
                assert (await get(coordinator, "/livez"))[0] == 200

    asyncio.run(body())


def test_another_nodes_agent_cannot_answer_in_its_place() -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")) as there,
            agent(coordinator, node_record("beta")) as other,
        ):

            async def answer(message: Any) -> None:
                if isinstance(message, ReadOutput):
                    await other.tell(OutputPart(id=message.id, job="j", end=6, data=b"forged"))
                    await asyncio.sleep(0.1)
                    await there.tell(OutputPart(id=message.id, job="j", end=4, data=b"true"))

            there.on_down = answer
            assert (await get(coordinator, PATH))[1]["text"] == "true"

    asyncio.run(body())


def test_launchers_hear_of_the_jobs_that_they_follow_with_the_page_of_a_dashboard(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            agent(coordinator, node_record("alpha")) as there,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            answering(there)
            await there.tell(FollowJob(job="j"))
            connections = coordinator.leading.connections
            await until(lambda: "j" in next(iter(connections._live.values())).follows)
            for job, kind in (("other", "recorded"), ("j", "fitted"), ("j", "recorded")):
                note = CoordinatorNote(kind=kind, job=job, text=f"{kind} of {job}", data={"number": 1})
                coordinator.leading.record(note)
            await until(lambda: any(isinstance(message, Happened) for message in there.heard))
            (event,) = [message for message in there.heard if isinstance(message, Happened)]
            assert (event.job, event.kind, event.text) == ("j", "recorded", "recorded of j")
            assert event.data == {"number": 1, "page": f"{dashboard.url}/jobs/j"}

            shown = await page.json("/api/devices/alpha/1/output?after=0")
            assert (shown["job"], shown["text"]) == ("j", WRITTEN.decode())
        assert coordinator.leading.pages_shown.of("j") == "", "the dashboard has ended"

    asyncio.run(body())
