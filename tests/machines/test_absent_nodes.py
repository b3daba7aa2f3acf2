"""Nodes that are away, and workers that may train on there."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.spec.cluster import Link

from elasticd.machines.coordinator import absent_nodes, machine, node_links
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CoordinatorNote,
    CoordinatorTick,
    ForgetNodeAsked,
)
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, JobState, Worker, fresh
from elasticd.machines.job.state.snapshot_sets import SnapshotSets
from elasticd.wire.coordinator import Crossed
from tests.machines.cast import node_record
from tests.machines.test_snapshot_sets import held, plan


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


DAY = 86_400.0


def away(*names: str, jobs: tuple[JobState, ...] = (), **settings: int) -> CoordinatorState:
    """A leader that knows these nodes, each away since a second after the one before."""
    state = CoordinatorState(epoch=1, settings=JobSettings(**settings), jobs={job.job: job for job in jobs})
    for at, name in enumerate(names):
        state, _ = machine.step(with_node(state, name), AgentDown(node=name), float(at))
    return state


def test_node_that_is_away_for_a_day_and_that_nobody_needs_is_forgotten() -> None:
    state = away("alpha", "beta")
    state, effects = machine.step(state, CoordinatorTick(), DAY + 0.5)
    assert {*state.nodes} == {"beta"}
    (note,) = effects
    assert isinstance(note, CoordinatorNote)
    assert (note.kind, note.text) == ("node_left", "node alpha has left: it was away for 1.0 days")
    assert {*machine.step(state, CoordinatorTick(), DAY + 2)[0].nodes} == set()
    assert {*with_node(state).nodes} == {"alpha", "beta"}, "it comes back"


def needing(what: str) -> JobState:
    """A job that needs node alpha, and has no worker that this leader knows there."""
    job = fresh("j", JobPhase.RUNNING, 0.0)
    if what == "a plan":
        return msgspec.structs.replace(job, plan=plan(["alpha/0"]))
    if what == "a snapshot":
        sets = SnapshotSets().replaced("alpha", [held("alpha/0")], ())
        return msgspec.structs.replace(job, snapshots=sets)
    return job.changed("takeover", unmet={"alpha/0": "i"})


@pytest.mark.parametrize("what", ["a plan", "a snapshot", "an unmet worker"])
def test_node_that_a_job_needs_is_known_however_long_it_is_away(what: str) -> None:
    state = msgspec.structs.replace(away("alpha", "beta"), jobs={"j": needing(what)})
    names = absent_nodes.gone(state.nodes, state.jobs, state.settings, 9 * DAY)
    assert {*names} == {"beta"}
    over = msgspec.structs.replace(state.jobs["j"], phase=JobPhase.STOPPED)
    assert {*absent_nodes.gone(state.nodes, {"j": over}, state.settings, 9 * DAY)} == {"alpha", "beta"}


def test_of_more_nodes_than_are_kept_the_longest_away_are_forgotten() -> None:
    state, _ = machine.step(away("a", "b", "c", "d", keep_nodes=2), CoordinatorTick(), 10.0)
    assert {*state.nodes} == {"c", "d"}


def test_node_that_has_left_takes_all_that_is_known_of_its_links_along() -> None:
    state = CoordinatorState(epoch=1)
    for name in ("a", "b", "c"):
        state = with_node(state, name)
    links = state.links
    for now in range(0, 400, 50):
        for source, target in (("a", "b"), ("b", "c"), ("a", "c")):
            probe = Crossed(target=target, size=1 << 20, seconds=1.0 if target == "b" else 0.01, latency=1e-4)
            links = node_links.crossed(links, source, probe, state.nodes, float(now))
        links, _ = node_links.judge(links, Link(), DetectSettings(), now + 46.0)
    links = node_links.crossed(links, "a", probe, state.nodes, 500.0)
    assert "a - b" in repr(links)
    assert "b - c" in repr(links)
    left = node_links.without(links, ["a"])
    assert "b - c" in repr(left)
    assert "a - " not in repr(left)
