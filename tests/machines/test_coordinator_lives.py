"""Whole lives of a job, driven through the coordinator's machine with the real planner."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.policy.policy import Moved, PolicySettings
from elasticd_planner.policy.stability import FREE

from elasticd.machines.job.state.events import AgentUp, Paced, Planned, Received
from elasticd.machines.job.state.job_state import TRANSITIONS, JobPhase, JobSettings
from elasticd.wire.coordinator import FromClient
from elasticd.wire.worker import Closed, EmulatedSpeed, InDoubt, Rejected, StayedOnPlan
from tests.machines.asked import refused
from tests.machines.cast import JOB, answer_to
from tests.machines.world import World


def started() -> World:
    world = World()
    world.start()
    assert world.phase is JobPhase.RUNNING
    return world


def fitted() -> World:
    """A job whose profile was fitted, and whose plan was made anew from it."""
    world = started()
    world.train(16)
    assert number(world) == 2
    assert world.phase is JobPhase.RUNNING
    return world


def slowed() -> World:
    """A job whose plan was changed because beta/1 became three times slower."""
    world = fitted()
    world.rates = {"beta/1": 3.0}
    world.train(8)
    return world


def number(world: World) -> int:
    """Of the recorded plan."""
    plan = world.plan()
    return plan.number if plan is not None else 0


def test_job_starts_when_its_nodes_are_complete_and_all_workers_said_hello() -> None:
    world = started()
    assert {name: joined.node_rank for name, joined in world.joined.items()} == {"alpha": 0, "beta": 1}
    plan = world.plan()
    assert plan is not None
    assert plan.number == 1
    assert plan.binding == {device: f"i0-{device}" for device in plan.members}
    for kind in ("job_gathered", "planning", "proposed", "prepared", "swapped", "recorded"):
        assert kind in world.kinds()
    assert world.proposal() is None, "the recorded plan took the proposal's place"


def test_join_of_a_running_job_is_refused_and_of_a_finished_one_closed() -> None:
    world = started()
    world.records["gamma"] = msgspec.structs.replace(
        world.records["alpha"], node="gamma", devices=(), agent="agent-gamma"
    )
    world.say(AgentUp(record=world.records["gamma"]))
    world.join("gamma")
    world.settle()
    assert isinstance(world.told["tgamma"][-1], Rejected)
    world.finish()
    world.settle()
    world.join("gamma")
    world.settle()
    assert isinstance(world.told["tgamma"][-1], Closed)
    assert world.phase is JobPhase.DONE


def test_torchrun_whose_join_is_repeated_by_its_agent_hears_nothing_twice() -> None:
    world = started()
    before = len(world.told["talpha"])
    world.reconnect("alpha")
    world.settle()
    assert len(world.told["talpha"]) == before
    assert world.phase is JobPhase.RUNNING


def test_slow_device_leads_to_a_plan_that_gives_it_less() -> None:
    world = slowed()
    assert number(world) == 3
    kinds = world.kinds()
    assert kinds.index("fitted") < kinds.index("slow") < len(kinds) - kinds[::-1].index("recorded")
    assert world.phase is JobPhase.RUNNING
    before = next(note for note in world.notes if note.kind == "slow")
    assert before.data["device"] == "beta/1"
    assert before.data["after"] == pytest.approx(3.0, abs=0.1)


def test_a_straggler_that_becomes_faster_and_is_one_still_has_not_recovered() -> None:
    world = slowed()
    world.rates = {"beta/1": 1.7}
    world.train(12)
    changes = {note.kind: note.data for note in world.notes if note.data.get("device") == "beta/1"}
    assert "recovered" not in changes
    assert changes["faster"]["before"] > changes["faster"]["after"] > 1.0


def test_recovered_device_gets_its_work_back() -> None:
    world = slowed()
    world.rates = {}
    world.train(12)
    assert "recovered" in world.kinds()
    assert number(world) == 4
    before, after = world.recorded[2].prediction, world.recorded[4].prediction
    assert before is not None
    assert after is not None
    assert after.step_seconds == pytest.approx(before.step_seconds), "as fast as it was before"


def test_plan_that_saves_too_little_is_not_proposed() -> None:
    world = fitted()
    world.state = msgspec.structs.replace(
        world.state, settings=JobSettings(policy=PolicySettings(minimum_saving=0.9))
    )
    world.rates = {"beta/1": 3.0}
    world.train(10)
    assert number(world) == 2
    assert world.kinds()[-1] == "kept_plan"
    assert "less than 90% saved" in world.notes[-1].text
    assert world.kinds().count("kept_plan") == 1, "decided once"


def restless(times: int, lasts: int = 9) -> World:
    """A job in which beta/1 became slow and normal again in turn, `times` times."""
    world = fitted()
    for count in range(times):
        world.rates = {"beta/1": 3.0} if count % 2 == 0 else {}
        world.train(lasts)
    return world


def test_device_that_keeps_changing_is_left_alone_and_the_event_says_why() -> None:
    world = restless(12)
    assert number(world) == 2 + FREE
    assert world.phase is JobPhase.RUNNING
    told = [note for note in world.notes if note.kind == "kept_plan" and note.data["again_in"] is not None]
    assert told
    assert "beta/1 has changed its speed 4 times in" in told[0].text
    assert "a switch pays once this lasts 25 steps" in told[0].text


def test_condition_that_lasts_after_all_is_answered_without_asking_the_planner_again() -> None:
    world = restless(8)
    before = world.kinds().count("planning")
    deferred = world.job.planning.deferred
    assert deferred is not None
    world.train(deferred.step - world.job.detection.rates.step - 1)
    assert number(world) == 2 + FREE
    world.planner_waits = True
    world.train(4)
    assert number(world) == 3 + FREE
    assert world.job.planning.deferred is None
    assert world.kinds().count("planning") == before


def test_kept_answer_is_dropped_when_another_device_changes() -> None:
    world = restless(8)
    assert world.job.planning.deferred is not None
    world.rates = {"alpha/0": 3.0}
    world.train(8)
    assert number(world) == 3 + FREE, "that device is not restless"
    assert world.job.planning.deferred is None


def test_price_of_a_switch_is_the_measured_one() -> None:
    world = slowed()
    members = world.recorded[3].members
    cost = [(moved.number, moved.bytes_lacking, moved.pause_seconds) for moved in world.job.switching.moved]
    assert cost[-1][0] == 3, "not the first plan, for which nothing moves"
    assert cost[-1][1] >= 10 * len(members)
    assert cost[-1][2] == 0.1
    world.rates = {}
    world.train(12)
    proposed = [note.text for note in world.notes if note.kind == "proposed"]
    assert "0.1 s to move" in proposed[-1]


def test_price_that_was_measured_keeps_a_plan_that_the_guess_would_change() -> None:
    world = fitted()
    job = world.job.changed("switching", moved=(Moved(number=2, bytes_lacking=1000, pause_seconds=1e4),))
    world.state = msgspec.structs.replace(world.state, jobs={**world.state.jobs, JOB: job})
    world.rates = {"beta/1": 3.0}
    world.train(8)
    assert number(world) == 2
    assert "10000.0 s to move" in world.notes[-1].text


def test_proposal_refused_by_a_member_is_aborted_and_tried_again_later() -> None:
    world = fitted()
    world.refuse = {"alpha/0"}
    world.rates = {"beta/1": 3.0}
    world.train(6)
    assert "aborted" in world.kinds()
    assert number(world) == 2, "the old plan goes on"
    assert world.phase is JobPhase.RUNNING
    world.refuse = set()
    world.train(8)
    assert number(world) > 3, "3 was aborted and is never used again"


def test_proposal_not_prepared_in_time_is_aborted_naming_who_is_late() -> None:
    world = fitted()
    world.rates = {"beta/1": 3.0}
    world.deaf = {"alpha/1"}
    world.train(16)
    aborted = next(note for note in world.notes if note.kind == "aborted")
    assert "alpha/1" in aborted.text
    assert world.phase is JobPhase.ABORTING, "alpha/1 has not said that it kept the old plan"
    worker = world.workers["alpha/1"]
    world.deaf = set()
    world.outcome(worker, StayedOnPlan(number=3, step=world.steps))
    world.settle()
    assert world.phase is JobPhase.RUNNING


def test_proposal_is_aborted_when_a_node_stays_unreachable() -> None:
    world = fitted()
    world.deaf = {"alpha/1"}
    world.rates = {"beta/1": 3.0}
    world.train(5)
    assert world.phase is JobPhase.PROPOSED
    world.disconnect("alpha")
    world.tick(2.9)
    assert world.phase is JobPhase.PROPOSED
    world.tick(0.2)
    assert world.phase is JobPhase.ABORTING
    assert "node alpha is unreachable" in world.notes[-1].text


def test_reported_swap_overrides_an_abort() -> None:
    world = fitted()
    world.rates = {"beta/1": 3.0}
    while world.phase is not JobPhase.PROPOSED:
        world.train(1)
    world._vote()  # all swapped, and nothing of it has been heard yet
    heard, world.inbox = list(world.inbox), type(world.inbox)()
    for device in ("alpha/0", "alpha/1", "beta/0", "beta/1"):
        world.deaf.add(device)
    world.disconnect("beta")
    world.tick(3.5)
    assert world.phase is JobPhase.ABORTING
    world.inbox.extend(heard)
    world.settle()
    assert number(world) == 3
    assert world.proposal() is None


def test_refused_first_plan_stops_the_job_and_says_what_to_do() -> None:
    world = World()
    world.refuse = {"beta/0"}
    world.start()
    assert world.phase is JobPhase.STOPPED
    done = world.done()
    assert done is not None
    assert "beta/0 cannot prepare it" in done.reason
    assert "the same command starts it again" in done.reason


def test_job_that_fits_nowhere_stops_with_the_planners_reason() -> None:
    world = World()
    for name, record in world.records.items():
        small = tuple(msgspec.structs.replace(device, memory=1000) for device in record.devices)
        world.records[name] = msgspec.structs.replace(record, devices=small)
        world.say(AgentUp(record=world.records[name]))
    world.start()
    assert world.phase is JobPhase.STOPPED
    assert "there is no plan for this job" in world.job.reason
    assert "does not fit" in world.job.reason


@pytest.mark.parametrize("steps", [0, 3])
def test_lost_worker_with_state_that_nobody_else_holds_stops_the_job_naming_it_and_how(steps: int) -> None:
    world = started()
    world.train(steps)
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.STOPPED
    done = world.done()
    assert done is not None
    assert "worker beta/1 (pid 100) died: killed by signal 9" in done.reason


def test_worker_lost_while_a_proposal_is_open_leaves_it_aborted() -> None:
    world = fitted()
    world.rates = {"beta/1": 3.0}
    world.deaf = {"alpha/1"}
    world.train(5)
    world.kill("alpha/1")
    world.settle()
    proposal = world.proposal()
    assert proposal is not None
    assert proposal.status == "aborted"
    assert world.phase is JobPhase.STOPPED


def test_finished_job_is_done_and_its_workers_may_end() -> None:
    world = slowed()
    world.finish()
    world.settle()
    assert world.phase is JobPhase.DONE
    for worker in world.workers.values():
        world.say(Received(node=worker.node, message=world.lost(worker, clean=True)))
    world.settle()
    done = world.done()
    assert done is not None
    assert (done.step, done.reason) == (world.steps, "")
    assert world.phase is JobPhase.DONE


def test_workers_that_all_leave_early_end_the_job_with_a_reason() -> None:
    world = started()
    for worker in world.workers.values():
        world.say(Received(node=worker.node, message=world.lost(worker, clean=True)))
    world.settle()
    assert world.phase is JobPhase.STOPPED
    assert world.job.ending.orderly
    assert world.job.reason.startswith("its workers left before the last step: exit status 0")


def test_words_of_a_former_incarnation_mean_nothing() -> None:
    world = started()
    stale = FromClient(
        client="old",
        job=JOB,
        device="alpha/0",
        incarnation="another",
        body=InDoubt(number=9, step=1, reason="?"),
    )
    world.say(Received(node="alpha", message=stale))
    world.settle()
    assert world.phase is JobPhase.RUNNING


def test_device_of_a_running_job_is_not_given_to_another() -> None:
    world = started()
    hello = world.hello(world.workers["alpha/0"])
    other = msgspec.structs.replace(hello, job="other", spec=msgspec.structs.replace(hello.spec, job="other"))
    up = FromClient(client="late", job="other", device="alpha/0", incarnation="y", body=other)
    world.say(Received(node="alpha", message=up))
    world.settle()
    assert "alpha/0: in use by job demo; a device belongs to one job at a time" in refused(world, "late")[0]
    assert world.phase is JobPhase.RUNNING


def test_answer_for_rates_that_moved_since_is_dropped_and_asked_again() -> None:
    world = fitted()
    world.rates = {"beta/1": 3.0}
    world.planner_waits = True
    while world.job.planning.asked is None:
        world.train(1)
    first = world.planning
    world.rates = {"beta/1": 6.0}
    world.train(8)
    second = world.planning
    assert first is not None
    assert second is not None
    assert second.token > first.token
    world.say(Planned(job=JOB, token=first.token, answer=answer_to(first.problem)))
    world.settle()
    assert world.numbers == [1, 2], "nothing is proposed from rates that moved"
    world.planner_waits = False
    world.settle()
    assert world.numbers == [1, 2, 3]


def test_chaos_is_sent_to_whoever_drives_the_device() -> None:
    world = started()
    world.say(Paced(device="beta/1", factor=3.0))
    world.settle()
    assert world.told["device:beta/1"] == [EmulatedSpeed(factor=3.0)]
    assert world.state.nodes["beta"].paces == {"beta/1": 3.0}


def test_every_phase_can_end_and_none_follows_an_end() -> None:
    for phase, following in TRANSITIONS.items():
        if phase in (JobPhase.DONE, JobPhase.STOPPED):
            assert not following
        else:
            assert {JobPhase.DONE, JobPhase.STOPPED} <= following


def test_profile_is_fitted_once_under_a_plan_and_again_where_a_plan_teaches_more() -> None:
    world = fitted()
    world.train(25)
    fits = [note.data["number"] for note in world.notes if note.kind == "fitted"]
    assert fits == sorted(set(fits)), "never twice from one plan"
    assert fits[0] == 1
