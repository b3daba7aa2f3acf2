"""A real coordinator on a free port: agents over WebSocket, REST, the planner's child, a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from elasticd_planner.spec.measurement import Measurement

from elasticd.codec import decoding
from elasticd.codec.message import encode
from elasticd.config.tree import with_overrides
from elasticd.coordinator import bootstrap_stores, daemon, write_shares
from elasticd.coordinator.bootstrap_stores import LARGEST_RANK
from elasticd.coordinator.daemon import Coordinator, run, serve
from elasticd.coordinator.election import CannotLead
from elasticd.coordinator.http import agent_socket
from elasticd.machines.job.state.job_state import JobPhase, fresh
from elasticd.records import DoneRecord, Keys, PlanRecord, Proposal, decode
from elasticd.store.leader import ElectedLeader, read_leader
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Limits, WatchEvent
from elasticd.store.state_file import Mark, StateFile
from elasticd.version import __version__
from elasticd.wire.coordinator import MOST_TOGETHER, FromClient, WorkerLost, together
from elasticd.wire.rendezvous import Join, Joined, Lap, StepTime, Watching
from elasticd.wire.worker import Finished, Prepared, Rejected, Report, Saved, StoreAnswer, StoreCall, Switched
from tests.cli.support import call
from tests.coordinator.agents import PLANNER, Agent, agent, config, coordinating, get, post, until
from tests.machines.cast import JOB, FakeWorker, node_record
from tests.machines.world import World

KEYS = Keys(cluster="test")


def test_leader_can_be_found_in_the_store_and_gives_its_key_back() -> None:
    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        async with coordinating(server) as coordinator:
            leader = read_leader(store, KEYS.leader)
            assert leader is not None
            assert (leader.name, leader.value) == ("c0", coordinator.url)
            status, found = await get(coordinator, "/v1/status")
            assert status == 200
            assert found["leader"] == {"name": "c0", "url": coordinator.url, "epoch": leader.term}
            assert (found["cluster"], found["nodes"], found["jobs"]) == ("test", [], [])
            assert (await get(coordinator, "/livez"))[0] == 200
            assert (await get(coordinator, "/readyz"))[0] == 200
        assert read_leader(store, KEYS.leader) is None

    asyncio.run(body())


async def trains(this: Agent, worker: FakeWorker, store: MemoryStore) -> None:
    """A worker's answers to the store's orders, as in the machine's world; it ends with the job's plan."""
    watch = store.watch(KEYS.jobs, 1)
    try:
        while True:
            item = await asyncio.to_thread(watch.get, 0.2)
            if not isinstance(item, WatchEvent) or item.kind != "put" or not item.key.endswith("/proposal"):
                continue
            number = decode(item.item.value, Proposal).number
            await this.tell(worker.up(Prepared(number=number)))
            swapped = Switched(
                number=number, step=0, pause_seconds=0.0, bytes_sent=0, bytes_lacking=1, bytes_state=2
            )
            await this.tell(worker.up(swapped))
            return
    finally:
        watch.cancel()


async def joined(this: Agent) -> None:
    node = this.record.node
    body = Join(job=JOB, min_nodes=2, max_nodes=2, pid=1)
    await this.tell(FromClient(client=f"t{node}", job=JOB, device="", incarnation="", body=body))
    await until(lambda: bool(this.bodies(f"t{node}")))
    assert isinstance(this.bodies(f"t{node}")[0], Joined)


async def started(server: MemoryServer, agents: list[Agent]) -> list[FakeWorker]:
    """A job of two nodes with four workers, under the plan that the real planner made for it."""
    await asyncio.gather(*(joined(this) for this in agents))
    world = World()
    pairs = [
        (this, FakeWorker(device=device.name, incarnation=f"i-{device.name}"))
        for this in agents
        for device in this.record.devices
    ]
    for this, worker in pairs:
        await this.tell(worker.up(world.hello(worker)))
    await asyncio.gather(*(trains(this, worker, MemoryStore(server)) for this, worker in pairs))
    return [worker for _, worker in pairs]


def record_of(server: MemoryServer) -> PlanRecord:
    item = MemoryStore(server).get(KEYS.job(JOB, "plan"))
    assert item is not None
    return decode(item.value, PlanRecord)


def test_job_lives_from_its_join_to_its_end() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            workers = await started(server, [alpha, beta])
            await until(lambda: MemoryStore(server).get(KEYS.job(JOB, "plan")) is not None)
            plan = record_of(server).plan
            assert plan.binding == {device: f"i-{device}" for device in plan.members}
            first = next(worker for worker in workers if worker.device == plan.members[0])
            measured = Measurement(
                device=first.device,
                plan=1,
                step=4,
                tokens=512,
                block_seconds=1,
                block_work=1,
                step_seconds=0.5,
            )
            this = alpha if first.node == "alpha" else beta
            await this.tell(first.up(Report(measurement=measured, loss=2.5, tokens=512)))
            await until(lambda: coordinator.leading.state.jobs[JOB].steps.progress.step == 5)
            _, found = await get(coordinator, "/v1/status")
            (job,) = found["jobs"]
            assert (job["phase"], job["plan"]["number"], job["proposal"]) == ("running", 1, None)
            assert (job["loss"], job["tokens_per_second"]) == (2.5, 1024.0)
            assert {member["device"] for member in job["members"]} == {worker.device for worker in workers}
            _, steps = await get(coordinator, f"/v1/jobs/{JOB}/steps")
            assert [(step["step"], step["plan"]) for step in steps["steps"]] == [(4, 1)]
            _, history = await get(coordinator, f"/v1/jobs/{JOB}/history")
            assert history["history"][0]["problem"]["global_batch"] == 8
            await this.tell(first.up(Finished(step=5)))
            await until(lambda: MemoryStore(server).get(KEYS.job(JOB, "done")) is not None)
            journal = coordinator.leading.journal
            await until(lambda: "finished" in {event.kind for event in journal.events(0)})
            _, events = await get(coordinator, "/v1/events")
            kinds = [event["kind"] for event in events["events"]]
            assert {"job_gathered", "planning", "proposed", "swapped", "recorded", "finished"} <= {*kinds}

    asyncio.run(body())


def test_stopping_a_job_says_which_nodes_agents_are_too_old_to_tell_their_workers() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha"), release=__version__) as alpha,
            agent(coordinator, node_record("beta"), release="0.1.0") as beta,
        ):
            await started(server, [alpha, beta])
            await until(lambda: coordinator.leading.state.jobs[JOB].phase is JobPhase.RUNNING)
            stop = ("stop", JOB, "--wait", "1", "--coordinator", coordinator.url)
            done = await asyncio.to_thread(call, *stop)
            assert "cannot tell their workers to go: beta (elasticd 0.1.0). The workers there" in done.stderr
            assert "'elasticd stop --now" in done.stderr
            assert "is stopped: stopped by" in done.stdout

    asyncio.run(body())


def test_a_leader_whose_etcd_is_found_to_be_an_old_copy_ends_and_names_the_file(tmp_path: Path) -> None:
    """Its revision has passed the one remembered, so that a job's plan alone tells."""
    memory = StateFile(str(tmp_path), "test", "coordinator", "c0")

    async def body() -> None:
        store = MemoryStore(MemoryServer())
        coordinator = Coordinator(config(), store, planner=PLANNER, memory=memory)
        try:
            await coordinator.start()
            store.put(KEYS.job(JOB, "plan"), b"as it was a while ago")
            memory.note(marks={KEYS.job(JOB, "plan"): Mark(created=2, modified=10_000, changes=9)})
            job = msgspec.structs.replace(fresh(JOB, JobPhase.RUNNING, 0.0), highest=1)
            state = coordinator.leading.state
            coordinator.leading.runner.state = msgspec.structs.replace(state, jobs={JOB: job})
            with pytest.raises(CannotLead, match=r"restored from an old copy.*delete that file"):
                await asyncio.wait_for(coordinator.ended(), 60)
        finally:
            await coordinator.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon, "NOTE_SECONDS", 0.01)
        asyncio.run(body())


def test_job_that_is_over_can_be_forgotten_and_one_that_runs_cannot() -> None:
    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            path, by = f"/v1/jobs/{JOB}/forget", {"by": "alice"}
            assert (await post(coordinator, path, by))[0] == 404
            workers = await started(server, [alpha, beta])
            await until(lambda: store.get(KEYS.job(JOB, "plan")) is not None)
            status, answer = await post(coordinator, path, by)
            assert (status, "elasticd stop" in answer["error"]) == (409, True)
            first = workers[0]
            this = {"alpha": alpha, "beta": beta}
            measured = Measurement(
                device=first.device, plan=1, step=4, tokens=5, block_seconds=1, block_work=1, step_seconds=0.5
            )
            await this[first.node].tell(first.up(Report(measurement=measured, loss=2.5, tokens=5)))
            await this[first.node].tell(first.up(Finished(step=5)))
            await until(lambda: store.get(KEYS.job(JOB, "done")) is not None)
            record = store.get(KEYS.job(JOB, "done"))
            assert record is not None
            assert abs(decode(record.value, DoneRecord).at - time.time()) < 60
            status, answer = await post(coordinator, path, by)
            assert (status, "has not ended yet" in answer["error"]) == (409, True)
            for worker in workers:
                gone = WorkerLost(
                    job=JOB, device=worker.device, incarnation=worker.incarnation, clean=True, how="over"
                )
                await this[worker.node].tell(gone)
            await until(lambda: not coordinator.leading.state.jobs[JOB].workers)
            assert (await post(coordinator, path, by))[0] == 200
            await until(lambda: not store.snapshot(KEYS.jobs).items)
            leading = coordinator.leading
            assert (leading.state.jobs, leading.journal.steps(JOB), len(leading.stores)) == ({}, [], 0)
            await until(lambda: leading.journal.events(0)[-1].kind == "forgotten")

    asyncio.run(body())


def test_rounds_of_a_job_in_restart_mode_are_cleared_in_time_or_by_a_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        for job in ("old", "older"):
            store.put(KEYS.rendezvous(job) + "state", b"{}")
        async with coordinating(server) as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            by = Watching(job="laps", torchrun="t", local_rank=0, pid=1, round=1, world=2, nodes=2, least=1)
            store.put(KEYS.rendezvous("laps") + "state", b"{}")
            await alpha.tell(StepTime(device="alpha/0", by=by, lap=Lap(step=1, seconds=1.0, wall=1.0)))
            await until(lambda: "laps" in coordinator.leading.restarting.jobs)
            status, answer = await post(coordinator, "/v1/jobs/laps/forget", {"by": "alice"})
            assert (status, "stop its torchruns" in answer["error"]) == (409, True)
            assert (await post(coordinator, "/v1/jobs/old/forget", {"by": "alice"}))[0] == 200
            await until(lambda: store.get(KEYS.rendezvous("old") + "state") is None)
            leading, now = coordinator.leading, time.monotonic()
            for seconds in (-100, 100):
                later = now + leading.state.settings.keep_seconds + seconds
                for clocked in (leading, leading.restarting):
                    monkeypatch.setattr(clocked, "_clock", lambda later=later: later)
                leading.clear()
            await until(lambda: not store.snapshot(KEYS.jobs).items)
            assert leading.restarting.jobs == {}

    asyncio.run(body())


def test_new_coordinator_goes_on_with_the_jobs_of_the_last() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            workers = await started(server, [alpha, beta])
            await until(lambda: MemoryStore(server).get(KEYS.job(JOB, "plan")) is not None)
        async with coordinating(server) as second, agent(second, node_record("alpha")) as alpha:
            assert second.leading.state.jobs[JOB].phase.value == "running"
            worker = workers[0]
            await alpha.tell(worker.up(World().hello(worker)))
            await until(lambda: worker.device in second.leading.state.jobs[JOB].workers)
            body = Join(job=JOB, min_nodes=2, max_nodes=2, pid=99)
            await alpha.tell(FromClient(client="t1", job=JOB, device="", incarnation="", body=body))
            await until(lambda: "alpha" in second.leading.state.jobs[JOB].start.joiners)
            assert not alpha.bodies("t1"), "a torchrun that had joined before is told nothing"

    asyncio.run(body())


def test_leader_whose_key_is_gone_ends_loudly() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server, lease_seconds=6) as coordinator:
            item = MemoryStore(server).get(KEYS.leader)
            assert item is not None
            MemoryStore(server).revoke(item.lease)
            with pytest.raises(CannotLead, match="does not lead any longer"):
                await asyncio.wait_for(coordinator.ended(), 60)
            assert (await get(coordinator, "/readyz"))[0] == 503

    asyncio.run(body())


def test_second_coordinator_stands_by_and_leads_when_the_first_ends() -> None:
    async def body() -> None:
        server = MemoryServer()
        store, told = MemoryStore(server), list[ElectedLeader]()
        second = Coordinator(config(), store, planner=PLANNER, standing_by=told.append)
        async with coordinating(server) as first:
            starting = asyncio.create_task(second.start())
            await until(lambda: [leader.value for leader in told] == [first.url])
        try:
            await asyncio.wait_for(starting, 60)
            leader = await asyncio.to_thread(read_leader, store, KEYS.leader)
            assert leader is not None
            assert (leader.value, leader.term > told[0].term) == (second.url, True)
            assert (await get(second, "/readyz"))[0] == 200
        finally:
            await second.stop()

    asyncio.run(body())


def test_who_stands_by_ends_when_told_also_while_the_store_is_away() -> None:
    async def body() -> None:
        server, told = MemoryServer(), list[ElectedLeader]()
        async with coordinating(server):
            second = Coordinator(config(), MemoryStore(server), planner=PLANNER, standing_by=told.append)
            starting = asyncio.create_task(second.start())
            await until(lambda: bool(told))
            server.outage(True)
            starting.cancel()
            await asyncio.wait({starting}, timeout=30)
            assert starting.cancelled()
            server.outage(False)

    asyncio.run(body())


def test_replaced_leader_stands_by_again(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def output() -> str:
        nonlocal printed
        printed += "".join(capsys.readouterr())
        return printed

    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        running = asyncio.create_task(run(config(), MemoryStore(server)))

        def leader() -> ElectedLeader | None:
            return read_leader(store, KEYS.leader)

        # Not only until the key is there: one that loses it before it leads tries again without a word.
        await until(lambda: "leading test as c0" in output())
        first = leader()
        assert first is not None
        item = store.get(KEYS.leader)
        assert item is not None
        store.revoke(item.lease)
        await until(lambda: (now := leader()) is not None and now.term > first.term, 30)
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 60)
        assert leader() is None

    asyncio.run(body())
    assert "standing by again" in output()


@pytest.mark.parametrize("key", ["job/spec", "job/ranks/a:b"])
def test_record_that_cannot_be_read_is_named_and_the_key_given_back(key: str) -> None:
    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        store.put(KEYS.jobs + key, b"{}")
        with pytest.raises(CannotLead, match=r"records under .* cannot be read"):
            await Coordinator(config(), MemoryStore(server)).start()
        assert read_leader(store, KEYS.leader) is None

    asyncio.run(body())


def test_port_that_is_taken_is_named_with_the_remedy() -> None:
    async def body() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(CannotLead, match=rf"127\.0\.0\.1:{port} .*\[coordinator\]"):
                await Coordinator(config(port=port), MemoryStore()).start()

    asyncio.run(body())


def test_etcd_that_is_not_there_is_one_message_and_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers, nobody else takes it
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        assert serve(lambda: with_overrides(config(), {"etcd.endpoints": (endpoint,)})) == 1
    said = capfd.readouterr().err
    assert f"no etcd answers at {endpoint}" in said
    assert "endpoints" in said
    assert "Traceback" not in said


SERVE = """
import asyncio, sys
from elasticd.coordinator import election
from elasticd.coordinator.daemon import run
from elasticd.store.memory import MemoryStore
from tests.coordinator.agents import config
asyncio.run(run(config(), MemoryStore()))
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_daemon_cleanly(number: signal.Signals) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("leading test as c0 at http://127.0.0.1:")
            os.kill(process.pid, number)
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out, err) == (0, "ended\n", "")
        finally:
            process.kill()


#: The planner, once there is a file of this name.
WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, "-m", "elasticd_planner"])
"""


def test_leader_answers_all_while_a_plan_is_made(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server, planner=(sys.executable, "-c", WAITS, str(gate))) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            starting = asyncio.create_task(started(server, [alpha, beta]))
            await until(
                lambda: (job := coordinator.leading.state.jobs.get(JOB)) and job.phase is JobPhase.PLANNING
            )
            for number in range(5):
                assert (await get(coordinator, "/readyz"))[0] == 200
                call = StoreCall(id=number, op="set", key=f"plan/1/{number}", value=b"x")
                await beta.tell(FakeWorker(device="beta/0", incarnation="i-beta/0").up(call))
                await until(lambda number=number: StoreAnswer(id=number) in beta.bodies("wbeta/0"))
            assert coordinator.leading.state.jobs[JOB].phase is JobPhase.PLANNING
            assert not starting.done()
            gate.touch()
            await starting

    asyncio.run(body())


def test_value_that_the_store_does_not_take_is_refused_to_its_sender_and_harms_nobody() -> None:
    def told(number: int, key: str, size: int) -> FromClient:
        call = StoreCall(id=number, op="set", key=key, value=b"x" * size, seconds=5.0)
        return FromClient(client="t", job=JOB, device="", incarnation="", body=call)

    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            server.limits = Limits(request_bytes=100_000)
            await alpha.takes_part(JOB)
            for number, size in ((0, 3_000_000), (1, 100_000), (2, 10)):
                await alpha.tell(told(number, f"rdzv/{number}", size))
            await alpha.tell(told(3, f"plan/{'9' * 5000}/x", 1))
            await until(lambda: len(alpha.bodies("t")) == 4)
            answers = {answer.id: answer.error for answer in alpha.bodies("t")}
            assert answers.keys() == {0, 1, 2, 3}
            assert "a value of 3000000 bytes: at most 1048576 are taken" in (answers[0] or "")
            assert "set of rdzv/1: a request of" in (answers[1] or "")
            assert "more than the store takes: 100,000 are the most" in (answers[1] or "")
            assert answers[2] is None
            assert "a key of 5007 characters" in (answers[3] or "")
            check = StoreCall(id=4, op="check", key="rdzv/1", seconds=5.0)
            await alpha.tell(FromClient(client="t", job=JOB, device="", incarnation="", body=check))
            await until(lambda: len(alpha.bodies("t")) == 5)
            assert alpha.bodies("t")[-1].number == 0, "nobody goes on as if it were there"
            writer = coordinator.leading.writer
            assert writer is not None
            await asyncio.wait_for(writer.drained(), 60)
            assert not writer.away
            assert coordinator.ready() == ""
        found = MemoryStore(server).snapshot(KEYS.job(JOB, "ranks/")).items
        assert [item.key.rpartition("/")[2] for item in found] == ["rdzv:2"]

    asyncio.run(body())


def test_one_agents_long_frames_keep_no_other_agent_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one says at once is dealt with message by message, and no faster than an agent may speak."""
    monkeypatch.setattr(agent_socket, "MESSAGES_PER_SECOND", 200.0)

    def check(number: int) -> FromClient:
        call = StoreCall(id=number, op="check", key="k")
        return FromClient(client="t", job=JOB, device="", incarnation="", body=call)

    async def body() -> None:
        async with (
            coordinating(MemoryServer()) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            await alpha.takes_part(JOB)
            await beta.takes_part(JOB)
            said = [encode(check(number)) for number in range(11 * MOST_TOGETHER)]
            for at in range(0, len(said), MOST_TOGETHER):
                await alpha.socket.send(together(said[at : at + MOST_TOGETHER]))
            await until(lambda: bool(alpha.bodies("t")))
            await beta.tell(check(1))
            await until(lambda: bool(beta.bodies("t")))
            assert len(alpha.bodies("t")) < len(said), "it is not all dealt with yet"
            await until(lambda: len(alpha.bodies("t")) == len(said))

    asyncio.run(body())


def test_what_is_skipped_counts_among_the_messages_of_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_socket, "MESSAGES_PER_SECOND", 20.0)

    async def body() -> None:
        async with (
            coordinating(MemoryServer()) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
        ):
            await alpha.takes_part(JOB)
            await alpha.socket.send(together([b'{"type": "quota-report"}'] * MOST_TOGETHER))
            leader, slowed = coordinator.leading, b'reason="rate"}'
            await until(lambda: slowed in leader.exposition())

    asyncio.run(body())


def test_a_worker_that_sets_its_ranks_again_and_again_does_not_fill_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap_stores, "RANKS_AT_ONCE", 5 * LARGEST_RANK)

    def told(number: int) -> FromClient:
        call = StoreCall(id=number, op="set", key="rdzv/1", value=bytes(LARGEST_RANK - 10), seconds=5.0)
        return FromClient(client="t", job=JOB, device="", incarnation="", body=call)

    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            asked = 10
            await alpha.takes_part(JOB)
            await beta.takes_part(JOB)
            for number in range(asked):
                await alpha.tell(told(number))
            await until(lambda: len(alpha.bodies("t")) == asked)
            errors = [answer.error for answer in alpha.bodies("t")]
            taken = errors.index(next(filter(None, errors)))
            assert taken == 5
            assert "node alpha write more than" in (errors[taken] or "")
            await beta.tell(told(1))
            await until(lambda: len(beta.bodies("t")) == 1)
            assert beta.bodies("t")[0].error is None, "the other node's share is its own"

    asyncio.run(body())


def test_a_node_whose_words_have_too_much_written_is_heard_more_slowly_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that says of ever new checkpoints has a list written each time."""
    monkeypatch.setattr(write_shares, "WRITES_AT_ONCE", 100_000)
    monkeypatch.setattr(write_shares, "WRITES_A_SECOND", 1.0)

    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            workers = await started(server, [alpha, beta])
            await until(lambda: coordinator.leading.state.jobs[JOB].phase is JobPhase.RUNNING)
            here = {worker.device: worker for worker in workers}
            writer = coordinator.leading.writer
            assert writer is not None

            async def says(number: int) -> str:
                name = f"step-{number:08d}.plan-1.{'x' * 40}"
                await alpha.tell(here["alpha/0"].up(Saved(name=name, step=number, plan=1)))
                return name

            def published() -> list[str]:
                return [one.name for one in coordinator.leading.state.jobs[JOB].checkpoints.published]

            said = 0
            while not coordinator.leading.shares.wait(
                "alpha"
            ):  # lists that wait for each other are written as one
                name, said = await says(said), said + 1
                await until(lambda name=name: name in published())
                await asyncio.wait_for(writer.drained(), 60)
            unheard = await says(said)
            assert coordinator.leading.shares.wait("beta") == 0
            await beta.tell(here["beta/0"].up(StoreCall(id=1, op="set", key="plan/1/x", value=b"x")))
            await until(lambda: beta.bodies("wbeta/0") == [StoreAnswer(id=1)])
            await asyncio.wait_for(writer.drained(), 60)
            assert unheard not in published(), "it is not heard yet"
            assert not alpha.closed

    asyncio.run(body())


@pytest.mark.parametrize("name", ["", "team-a/run1"])
def test_a_job_whose_name_cannot_be_a_key_is_refused_and_the_next_leader_leads(name: str) -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            join = Join(job=name, min_nodes=1, max_nodes=1, pid=1)
            call = StoreCall(id=1, op="set", key="rdzv/1", value=b"x")
            for told in (join, call):
                await alpha.tell(FromClient(client="t", job=name, device="", incarnation="", body=told))
            await until(lambda: len(alpha.bodies("t")) == 2)
            refused, answer = alpha.bodies("t")
            assert isinstance(refused, Rejected)
            assert "the job's name" in refused.reason
            assert answer == StoreAnswer(id=1, error=refused.reason)
            await alpha.tell(FromClient(client="t", job="good", device="", incarnation="", body=join))
        async with coordinating(server) as second:
            assert second.ready() == ""

    asyncio.run(body())


@pytest.mark.parametrize("name", ["members/n0:0", "9" * 5000, "9" * 19, "\N{SUPERSCRIPT TWO}", ""])
def test_a_new_leader_leads_whatever_stands_in_the_place_of_history(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Release 0.1 let a job be called "x/history": its agent wrote jobs/x/history/members/n0:0."""

    async def body() -> None:
        server = MemoryServer()
        MemoryStore(server).put(KEYS.job("x", "history/") + name, b"{}")
        async with coordinating(server) as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            assert coordinator.ready() == ""
            assert dict(coordinator.leading.state.jobs) == {}
            assert await coordinator.history("x", -1) == []
            join = Join(job="x", min_nodes=1, max_nodes=1, pid=1)
            await alpha.tell(FromClient(client="t", job="x", device="", incarnation="", body=join))
            await until(lambda: "x" in coordinator.leading.state.jobs)

    decoding._logged.clear()
    asyncio.run(body())
    assert sum("jobs/JOB/history/" in record.getMessage() for record in caplog.records) == 1


def test_plans_below_the_number_that_is_asked_for_are_not_decoded() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as coordinator:
            MemoryStore(server).put(KEYS.history("x", 1), b"no record")
            assert await coordinator.history("x", 1) == []
            with pytest.raises(msgspec.DecodeError):
                await coordinator.history("x", 0)

    asyncio.run(body())


def test_write_that_the_store_refuses_ends_its_job_and_no_other() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with (
            coordinating(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            await asyncio.gather(*(joined(this) for this in (alpha, beta)))
            # From here on there is room for the end of a job, and for little else.
            server.limits = Limits(request_bytes=1200)
            world = World()
            worker = FakeWorker(device="alpha/0", incarnation="a")
            await alpha.tell(worker.up(world.hello(worker)))
            await until(lambda: MemoryStore(server).get(KEYS.job(JOB, "done")) is not None)
            item = MemoryStore(server).get(KEYS.job(JOB, "done"))
            assert item is not None
            assert decode(item.value, DoneRecord).reason.startswith(
                "the store does not take its job-spec: a request"
            )
            assert coordinator.ready() == ""
            writer = coordinator.leading.writer
            assert writer is not None
            assert not writer.away

    asyncio.run(body())
