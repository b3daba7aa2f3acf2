"""Nodes that are away, and workers that may train on there."""

from __future__ import annotations

import msgspec

from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import AgentDown, AgentUp, CoordinatorTick, ForgetNodeAsked
from elasticd.machines.job.state.job_state import JobPhase, JobState, Worker, fresh
from tests.machines.cast import node_record


def with_node(state: CoordinatorState, name: str = "alpha") -> CoordinatorState:
    return machine.step(state, AgentUp(record=node_record(name)), 0.0)[0]


def job_on(device: str) -> JobState:
    worker = Worker(device=device, incarnation="i", pid=1, node=device.partition("/")[0], client="c")
    return msgspec.structs.replace(fresh("j", JobPhase.RUNNING, 0.0), workers={device: worker})


def test_node_whose_workers_may_train_on_stays_until_none_is_there() -> None:
    state = with_node(CoordinatorState(epoch=1))
    state = msgspec.structs.replace(state, jobs={"j": job_on("alpha/0")})
    state, _ = machine.step(state, AgentDown(node="alpha", left=True), 1.0)
    assert not state.nodes["alpha"].connected
    over = msgspec.structs.replace(state.jobs["j"], phase=JobPhase.STOPPED)
    state = msgspec.structs.replace(state, jobs={"j": over})
    state, effects = machine.step(state, CoordinatorTick(), 2.0)
    assert (state.nodes, [effect.kind for effect in effects]) == ({}, ["node_left"])


def test_node_that_comes_back_before_that_has_not_left() -> None:
    state = with_node(CoordinatorState(epoch=1))
    state = msgspec.structs.replace(state, jobs={"j": job_on("alpha/0")})
    state, _ = machine.step(state, AgentDown(node="alpha", left=True), 1.0)
    state = with_node(state)
    state = msgspec.structs.replace(state, jobs={})
    state, _ = machine.step(state, CoordinatorTick(), 2.0)
    assert state.nodes["alpha"].connected
    assert not state.nodes["alpha"].left
    state, effects = machine.step(state, ForgetNodeAsked(node="alpha", by="alice"), 3.0)
    assert ({*state.nodes}, effects) == ({"alpha"}, ())
