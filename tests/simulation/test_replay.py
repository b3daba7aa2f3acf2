"""A recorded run is decided again: the same by the same settings, by others as far as anybody can know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import msgspec
import pytest
from click.testing import CliRunner
from elasticd_planner.detection.device_rates import DeviceRate, Devices
from elasticd_planner.detection.stragglers import RateState
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.step_measurements import NONE_REPORTED, Step

from elasticd import recording
from elasticd.cli.app import elasticd
from elasticd.config.credentials import Credentials
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import AgentUp, Event
from elasticd.machines.job.state.job_state import JobPhase, fresh
from elasticd.recording import Line, RecordingError
from elasticd.simulator.cluster.leader import SimulatedLeader
from elasticd.simulator.planning import Planner
from elasticd.simulator.replay import Replayed, replay
from elasticd.simulator.run import Simulation
from elasticd.simulator.scenarios.scenario import Times, parse
from tests.coordinator.agents import coordinating, until
from tests.machines.cast import node_record

SCENARIO = """
steps = 70
[cluster]
nodes = 2
devices = 2
[model]
layers = 8
width = 512
heads = 8
hidden = 1024
tokens = 512
global_batch = 8
[times]
noise = 0.005
[[fault]]
kind = "slow"
device = "n1/0"
factor = 3
step = 25
[[fault]]
kind = "recover"
device = "n1/0"
step = 50
"""


@contextmanager
def recorded(lines: list[bytes]) -> Iterator[None]:
    """Every leader of a simulation is recorded, as a coordinator records itself."""
    apply = SimulatedLeader.apply
    seen: set[int] = set()

    def recording_apply(self: SimulatedLeader, event: Event) -> None:
        now, before = self._engine.now(), self.state
        if id(self) not in seen:
            seen.add(id(self))
            lines.append(recording.began(before, now, now))
        at = len(lines)
        told = self._tell
        notes: list[bytes] = []
        self._tell = lambda note: (notes.append(recording.told(note, now, now)), told(note))[1]
        try:
            apply(self, event)
        finally:
            self._tell = told
        lines[at:at] = [recording.heard(event, now, now), *notes]

    SimulatedLeader.apply = recording_apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimulatedLeader.apply = apply  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def run() -> list[bytes]:
    lines: list[bytes] = []
    with recorded(lines):
        Simulation(parse(SCENARIO, "test")).run()
    return lines


def again(lines: list[bytes], **settings: object) -> Replayed:
    return replay(recording.read(lines, "test"), Planner(Times()), **settings)  # type: ignore[arg-type]


def kinds(found: Replayed) -> list[str]:
    return [decision.kind for decision in found.decisions]


def test_a_replay_decides_as_the_recorded_run_did(run: list[bytes]) -> None:
    found = again(run)
    assert found.differs is None, (found.decisions, found.recorded)
    assert {"planning", "proposed", "slow", "recovered", "recorded"} <= set(kinds(found))
    assert found.decisions == found.recorded
    assert found.ended == ""


def test_a_recording_may_begin_while_the_job_runs(run: list[bytes]) -> None:
    """From the middle on: the state, as it was then, is all that is needed."""
    lines = recording.read(run, "test")
    middle = len(lines) // 2
    while lines[middle].what != "heard":
        middle += 1
    state, at = _state_at(lines, middle)
    rest = [recording.began(state, at, at), *run[middle:]]
    found = again(rest)
    assert found.decisions == found.recorded
    assert 0 < len(found.decisions) < len(again(run).decisions)


def _state_at(lines: list[Line], index: int) -> tuple[recording.CoordinatorState, float]:
    from elasticd.machines.coordinator import machine

    state = lines[0].state()
    for line in lines[1:index]:
        if line.what == "heard":
            state, _ = machine.step(state, line.event(), line.at)
    return state, lines[index].at


def test_other_thresholds_decide_otherwise_and_the_replay_ends_where_nobody_knows(run: list[bytes]) -> None:
    settings = recording.read(run, "test")[0].state().settings
    deaf = msgspec.structs.replace(settings.detect, slow=5.0)
    found = again(run, detect=deaf)
    assert "slow" not in kinds(found)
    assert found.differs is not None
    paused = again(run, policy=msgspec.structs.replace(settings.policy, paused=True))
    assert "slow" in kinds(paused) or paused.ended


def test_a_recording_that_was_damaged_is_refused_and_one_that_was_cut_off_is_read(run: list[bytes]) -> None:
    whole = recording.read(run, "x")
    assert len(recording.read([*run[:-1], run[-1][:20]], "x")) == len(whole) - 1
    with pytest.raises(RecordingError, match="x:2"):
        recording.read([run[0], b"{}\n", *run[1:]], "x")
    with pytest.raises(RecordingError, match="no recording"):
        recording.read([], "x")


def test_the_command_says_whether_it_decides_the_same(run: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(run))
    same = CliRunner().invoke(elasticd, ["simulate", "--recorded", str(file)])
    assert same.exit_code == 0, same.output
    assert "the same decisions" in same.output
    other = tmp_path / "other.toml"
    other.write_text("[detect]\nslow = 5.0\n")
    found = CliRunner().invoke(elasticd, ["simulate", "--recorded", str(file), "--config", str(other)])
    assert found.exit_code == 0, found.output
    assert "differs" in found.output


def test_a_coordinator_is_recorded_from_any_moment_and_the_recording_ends_with_it() -> None:
    async def body() -> list[bytes]:
        lines: list[bytes] = []
        async with httpx2.AsyncClient(trust_env=False, timeout=60, verify=Credentials().verifying()) as client:
            async with coordinating() as machine:
                machine.leading.apply(AgentUp(record=node_record("alpha")))

                async def record() -> None:
                    async with client.stream("GET", machine.url + "/v1/record") as answer:
                        async for line in answer.aiter_lines():
                            lines.append(line.encode())

                recorder = asyncio.create_task(record())
                await until(lambda: len(lines) == 1)
                machine.leading.apply(AgentUp(record=node_record("beta")))
                await until(lambda: len(lines) >= 3)
            await asyncio.wait_for(recorder, 60)
        return lines

    lines = recording.read(asyncio.run(body()), "x")
    assert set(lines[0].state().nodes) == {"alpha"}
    assert lines[1].event() == AgentUp(record=node_record("beta"))
    assert lines[2].note().kind == "node_up"


def test_a_recording_has_what_was_measured_of_a_large_job() -> None:
    """Which is in columns, and packed."""
    measured = Measurement(
        device="a/0",
        plan=1,
        step=3,
        tokens=5,
        block_seconds=0.1,
        block_work=1.0,
        squares=25.0,
        longest=5,
        lengths={9: 1},
    )
    rates = RateState(devices=Devices.of({"a/0": DeviceRate(rate=1.5, residuals=(0.4,), spikes=(2,))}))
    steps = (Step.of([measured]),)
    job = fresh("job", JobPhase.RUNNING, 0.0).changed("detection", rates=rates)
    job = job.changed("steps", gathered={4: NONE_REPORTED.after(measured)}, last_steps=steps)
    job = job.changed("learned", sampled=steps)
    state = CoordinatorState(epoch=1, jobs={"job": job})
    (line,) = recording.read([recording.began(state, 1.0, 2.0)], "the test")
    assert line.state() == state
    # Releases before had other names for measurements that are not packed: rates are kept of them.
    older = msgspec.json.decode(line.body)
    before = [msgspec.to_builtins(measured)]
    named = {
        "partial": {"4": {"count": 1, "nodes": {"a": {"a/0": before[0]}}}},
        "recent": [before],
        "samples": [before],
    }
    kept = {
        name: value
        for name, value in older["jobs"]["job"].items()
        if name not in ("gathered", "last_steps", "sampled")
    }
    older["jobs"]["job"] = kept | named
    read = msgspec.structs.replace(line, body=msgspec.Raw(msgspec.json.encode(older))).state()
    without = job.changed("steps", gathered={}, last_steps=()).changed("learned", sampled=())
    assert read.jobs["job"] == without
