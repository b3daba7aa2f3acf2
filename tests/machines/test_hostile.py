"""A node that says anything of itself ends no leader, and no job but its own."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from elasticd.codec.message import encode
from elasticd.machines.coordinator import machine, message_checks, restart_jobs
from elasticd.machines.job.state.events import (
    CoordinatorNote,
    CoordinatorSend,
    CoordinatorTick,
    Received,
    Write,
)
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import encode as record
from elasticd.wire.coordinator import AgentHello
from elasticd.wire.rendezvous import StepTime
from tests import sizes
from tests.machines.hostile import Hostile
from tests.machines.test_recovery import running

MESSAGES = sizes.number(full=20_000, quick=1_500)


@pytest.mark.parametrize("round_", range(sizes.number(full=8, quick=2)))
def test_whatever_a_node_says_is_heard_or_skipped(round_: int, seed: int) -> None:
    """Its job may end by it; what is to be done then can be written and sent."""
    world = running()
    state, now = world.state, world.now
    incarnations = [
        worker.incarnation for worker in world.workers.values() if worker.device.startswith("alpha")
    ]
    hostile = Hostile(seed * 100 + round_, ("alpha/0", "alpha/1"), ("demo",), incarnations)
    restarting = restart_jobs.RestartJob(job="demo")
    heard = Counter[str]()
    for number, message in enumerate(hostile.messages(MESSAGES)):
        if message_checks.refusal(world.records["alpha"], message, state.jobs):
            heard["refused"] += 1
            continue
        if isinstance(message, AgentHello):
            continue  # a connection's first word
        if isinstance(message, StepTime):  # of a job in restart mode, which another machine leads
            restarting, effects = restart_jobs.lap(
                restarting, message, state.settings.detect, state.settings.policy, 1, now
            )
        else:
            state, effects = machine.step(state, Received(node="alpha", message=message), now)
        heard["heard"] += 1
        if number % 20 == 0:
            now += 0.5
            state, more = machine.step(state, CoordinatorTick(), now)
            effects = (*effects, *more)
        for effect in effects:
            if isinstance(effect, Write):
                assert all(len(record(each)) < 1 << 17 for each in effect.records)
            elif isinstance(effect, CoordinatorSend):
                encode(effect.message)
            elif isinstance(effect, CoordinatorNote):
                msgspec.json.encode(effect.data)
                assert len(effect.text) < 20_000
        if state.jobs["demo"].phase in (JobPhase.DONE, JobPhase.STOPPED):
            state = msgspec.structs.replace(state, jobs={**state.jobs, "demo": world.state.jobs["demo"]})
            heard["ended"] += 1
    assert heard["heard"] > MESSAGES / 4, heard
