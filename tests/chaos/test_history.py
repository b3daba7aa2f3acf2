"""The checker of records: a real history is right, and each forbidden record is found."""

from __future__ import annotations

import msgspec
import pytest

from elasticd.records import DoneRecord, Fence, MemberRecord, PlanRecord, Proposal, encode
from elasticd.simulator.run import Simulation
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import WatchEvent
from tests.soak.fault_script import Faults
from tests.soak.history import History, JobHistory, unrecorded
from tests.soak.simulated import KEYS, cluster, play, scenario

SCRIPT = Faults().kill("n0/0", 20.0).at_step(12).takeover().at_step(20).slow("n1/0", 3.0).at_step(24)


@pytest.fixture(scope="module")
def real() -> list[WatchEvent]:
    """What a simulated job's leaders wrote, through a death, a takeover and a replan."""
    seen: list[WatchEvent] = []
    simulation = Simulation(scenario(SCRIPT, cluster(3, 1), seed=1))
    MemoryStore(simulation.server).watch(KEYS.root, 1, seen.append)  # type: ignore[arg-type]
    simulation.run()
    return seen


def wrong(events: list[WatchEvent]) -> list[str]:
    history = History(KEYS)
    history.read(events)
    return history.wrong


def test_a_history_of_faults_is_right(real: list[WatchEvent]) -> None:
    history = History(KEYS)
    history.read(real)
    assert history.wrong == []
    job = history.jobs["job"]
    assert len(history.leaders) == 2
    assert len(job.gone) == 1
    assert len(job.plans) >= 2
    assert job.over


def test_the_process_behind_a_fenced_incarnation_is_known(real: list[WatchEvent]) -> None:
    history = History(KEYS)
    history.read(real)
    job = history.jobs["job"]
    ((number, gone),) = job.gone.items()
    (incarnation,) = gone.values()
    member = MemberRecord(device="n0/0", incarnation=incarnation, pid=4711)
    put = _again(real, "fence", member)[-1]
    item = msgspec.structs.replace(put.item, key=KEYS.member("job", "n0/0"))
    history.read([msgspec.structs.replace(put, item=item)])
    assert job.fenced_off == {4711: number}


def _last(real: list[WatchEvent], part: str) -> int:
    return max(i for i, event in enumerate(real) if event.kind == "put" and event.key.endswith(f"/{part}"))


def _again(real: list[WatchEvent], part: str, record: msgspec.Struct) -> list[WatchEvent]:
    """The same history up to that part's last record, and then this one."""
    at = _last(real, part)
    item = msgspec.structs.replace(real[at].item, value=encode(record))
    return [*real[: at + 1], msgspec.structs.replace(real[at], item=item)]


def test_another_plan_under_the_same_number_is_found(real: list[WatchEvent]) -> None:
    record = msgspec.json.decode(real[_last(real, "proposal")].item.value, type=Proposal)
    other = msgspec.structs.replace(record.plan, binding={**record.plan.binding, "n1/0": "another"})
    found = wrong(_again(real, "proposal", msgspec.structs.replace(record, plan=other)))
    assert any("has two plans" in one for one in found), found


def test_a_record_of_a_leader_that_was_replaced_is_found(real: list[WatchEvent]) -> None:
    record = msgspec.json.decode(real[_last(real, "plan")].item.value, type=PlanRecord)
    found = wrong(_again(real, "plan", msgspec.structs.replace(record, epoch=record.epoch - 1)))
    assert any("was written while" in one for one in found), found


def test_a_fence_below_a_number_that_was_given_is_found(real: list[WatchEvent]) -> None:
    record = msgspec.json.decode(real[_last(real, "fence")].item.value, type=Fence)
    found = wrong(_again(real, "fence", record))
    assert any(f"number {record.number} is not above" in one for one in found), found


def test_a_plan_that_goes_back_is_found(real: list[WatchEvent]) -> None:
    record = msgspec.json.decode(real[_last(real, "plan")].item.value, type=PlanRecord)
    found = wrong(_again(real, "plan", msgspec.structs.replace(record, step=0)))
    assert any("goes on at step 0" in one for one in found), found


def test_a_plan_that_nobody_proposed_is_found(real: list[WatchEvent]) -> None:
    record = msgspec.json.decode(real[_last(real, "plan")].item.value, type=PlanRecord)
    plan = msgspec.structs.replace(record.plan, number=900)
    found = wrong(_again(real, "plan", msgspec.structs.replace(record, plan=plan)))
    assert any("never was proposed" in one for one in found), found


def test_what_is_written_after_the_end_is_found(real: list[WatchEvent]) -> None:
    assert msgspec.json.decode(real[_last(real, "done")].item.value, type=DoneRecord).reason == ""
    found = wrong([*real[: _last(real, "done") + 1], real[_last(real, "plan")]])
    assert any("the job was over" in one for one in found), found


def test_a_play_that_goes_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak finds what a machine that gives a number twice writes."""
    from elasticd.machines.job.lifecycle import fence

    original = fence.fault

    def forgetful(turn, gone, why):  # type: ignore[no-untyped-def]
        turn.set(highest=0)
        original(turn, gone, why)

    for module in ("lost_workers", "recovery"):
        monkeypatch.setattr(f"elasticd.machines.job.{module}.fault", forgetful)
    result = play(scenario(SCRIPT, cluster(3, 1), seed=1))
    assert any("is not above" in one for one in result.wrong), result


def test_a_recovery_that_was_closed_before_its_record_was_in_force_if_the_next_goes_on_from_it() -> None:
    """Plan 7 made steps 86 to 92; fence 8 closed it, recovery 9 was closed likewise, and 11 went on at 93."""
    job = JobHistory(plans=[(5, 59)], recoveries={7: (86, 5), 9: (93, 7), 11: (93, 7)})
    assert unrecorded(job, 11) == [(7, 86)]
    job.recoveries = {7: (86, 5), 9: (93, 7), 11: (95, 9)}
    assert unrecorded(job, 11) == [(7, 86), (9, 93)]
    job.recoveries = {7: (86, 5), 9: (86, 5)}
    assert unrecorded(job, 9) == [], "nobody made a step under 7"


def test_a_recovery_that_was_closed_before_its_record_was_in_force_if_the_job_is_over_then() -> None:
    """Plan 7 made steps 39 to 85 while nobody led; fence 8 closed it, and by then its members had finished."""
    job = JobHistory(
        plans=[(4, 10)], digests=dict.fromkeys((4, 7), ""), recoveries={7: (39, 4)}, fenced=8, over=True
    )
    assert job.runs(7, 39)
    assert job.runs(4, 38)
    assert not job.runs(7, 38), "before the step at which it goes on"
    assert not job.runs(6, 39), "the store has no such proposal"
    job.fenced = 6
    assert not job.runs(7, 39), "nothing closed it: its leader is to record it"
    job.fenced, job.over = 8, False
    assert not job.runs(7, 39), "a job that goes on records a plan, which tells from whose state"


def test_a_switch_that_nobody_heard_of_was_in_force_if_the_job_is_over_then() -> None:
    """Members of plan 5 switched while nobody led; fence 6 closed it, and by then they had finished."""
    job = JobHistory(plans=[(1, 0), (4, 15)], digests=dict.fromkeys((1, 4, 5), ""), fenced=6, over=True)
    assert job.runs(5, 36)
    assert job.runs(4, 35)
    assert not job.runs(5, 14), "before the plan that it follows"
    assert not job.runs(3, 36), "no such proposal"
    job.over = False
    assert not job.runs(5, 36), "a job that goes on records a plan, which tells from whose state"


def test_a_step_under_a_first_plan_that_nobody_proposed_is_found() -> None:
    assert not JobHistory().runs(1, 0)
    assert JobHistory(digests={1: ""}).runs(1, 0), "its leader died before the record"
