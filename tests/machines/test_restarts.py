"""The leader's part in restart mode: whom it finds slow, and when going on without a node is faster."""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.machines.coordinator.restart_jobs import (
    SILENT_SECONDS,
    Effects,
    RestartJob,
    attended,
    lap,
    lap_refusal,
    restored,
    state_refusal,
    stop_asked,
    stop_due,
    verdict,
)
from elasticd.machines.job.state.events import CoordinatorNote, CoordinatorSend, Write
from elasticd.records import OutRecord, RestartEndRecord
from elasticd.wire.coordinator import End
from elasticd.wire.rendezvous import AtWork, Lap, StepTime, TorchrunState, Watching, WorkerFailure
from tests.sizes import examples

DETECT, POLICY = DetectSettings(), PolicySettings()


class Leader:
    """One job's rounds, step by step."""

    def __init__(self, nodes: int = 3, least: int = 1) -> None:
        self.job = RestartJob(job="j")
        self.nodes, self.least = nodes, least
        self.now = 0.0
        self.effects: list[CoordinatorNote | Write] = []

    def hear(self, node: int, step: int, seconds: float, wall: float, number: int = 0) -> None:
        by = Watching(
            job="j",
            torchrun=f"t{node}",
            local_rank=0,
            pid=1,
            round=number,
            world=self.nodes,
            nodes=self.nodes,
            least=self.least,
        )
        heard = StepTime(device=f"n{node}/0", by=by, lap=Lap(step=step, seconds=seconds, wall=wall))
        self.job, effects = lap(self.job, heard, DETECT, POLICY, 7, self.now)
        self.effects += effects

    def train(self, seconds: list[float], steps: int, number: int = 0, start: int = 1) -> None:
        wall = max(seconds) + 0.05
        for step in range(start, start + steps):
            self.now += wall
            for node, own in enumerate(seconds):
                self.hear(node, step, own, wall, number)

    def kinds(self) -> list[str]:
        return [effect.kind if isinstance(effect, CoordinatorNote) else "out" for effect in self.effects]


def test_slow_node_is_named_and_put_out_once_by_one_fenced_record() -> None:
    leader = Leader()
    leader.train([0.1, 0.1, 1.0], 30)
    assert leader.kinds() == ["slow", "out"]
    write = leader.effects[1]
    assert isinstance(write, Write)
    assert [note.kind for note in write.notes] == ["excluded"]
    (record,) = write.records
    assert isinstance(record, OutRecord)
    assert (record.torchrun, record.epoch) == ("t2", 7)
    assert "n2/0 takes" in record.reason
    leader.train([0.1, 0.1, 1.0], 30, start=31)
    assert leader.kinds() == ["slow", "out"]


def test_least_number_of_nodes_is_kept() -> None:
    leader = Leader(least=3)
    leader.train([0.1, 0.1, 1.0], 30)
    assert leader.kinds() == ["slow"]
    found = verdict(leader.job, POLICY)
    assert found is not None
    assert found.saving_seconds > found.price_seconds
    assert found.reason.endswith("but there must be 3 nodes")


def test_node_that_holds_the_others_up_by_less_than_it_works_stays() -> None:
    leader = Leader()
    leader.train([0.1, 0.1, 0.14], 30)
    assert leader.kinds() == ["slow"]
    found = verdict(leader.job, POLICY)
    assert found is not None
    assert not found.exclude


def test_restart_that_costs_more_than_it_saves_is_not_made() -> None:
    leader = Leader()
    leader.train([0.01, 0.01, 0.1], 30)  # 200 steps save about 15 s
    assert leader.kinds() == ["slow"]


def test_seconds_of_silence_between_rounds_are_the_price_of_the_next_restart_and_rates_begin_anew() -> None:
    leader = Leader()
    leader.train([0.01, 0.01, 0.1], 30)
    leader.now += 4.0
    leader.train([0.01, 0.01, 0.1], 3, number=1)
    assert leader.job.rates.rates == {}
    assert 4.0 <= leader.job.restart_seconds < 4.5
    leader.train([0.01, 0.01, 0.1], 30, number=1, start=4)
    assert leader.kinds() == ["slow", "slow", "out"]


def test_moments_of_noise_put_nobody_out() -> None:
    leader = Leader()
    for start in range(1, 200, 20):
        leader.train([0.1, 0.1, 0.1], 12, start=start)
        leader.train([0.1, 0.1, 3.0], 8, start=start + 12)
    assert "out" not in leader.kinds()
    assert "slow" in leader.kinds()


def test_step_is_judged_once_all_have_reported_it_and_laps_of_old_rounds_are_not_heard() -> None:
    leader = Leader()
    leader.train([0.1, 0.1, 0.1], 1, number=3)
    leader.hear(0, 2, 0.1, 0.2, 3)
    leader.hear(1, 2, 0.1, 0.2, 3)
    assert leader.job.step == 1
    leader.hear(2, 2, 9.0, 9.0, 2)
    assert leader.job.step == 1
    leader.hear(2, 2, 0.1, 0.2, 3)
    assert leader.job.step == 2


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0.01, 3.0), min_size=2, max_size=6), st.integers(1, 6))
def test_nobody_is_put_out_below_the_least_or_at_a_loss(seconds: list[float], least: int) -> None:
    leader = Leader(nodes=len(seconds), least=least)
    leader.train(seconds, 24)
    for effect in leader.effects:
        if isinstance(effect, Write):
            assert len(seconds) > least
            (note,) = effect.notes
            assert note.data["saving"] > note.data["price"]


# -- what agents tell of torchruns -----------------------------------------------------------------------------


def told(name: str, phase: str, status: str = "here", **work: object) -> TorchrunState:
    at_work = AtWork(phase=phase, workers=2, world=4, **work)  # type: ignore[arg-type]
    return TorchrunState(job="j", torchrun=name, status=status, at_work=at_work)  # type: ignore[arg-type]


def notes_of(effects: Effects) -> list[CoordinatorNote]:
    notes = []
    for effect in effects:
        notes += (
            effect.notes
            if isinstance(effect, Write)
            else [effect]
            if isinstance(effect, CoordinatorNote)
            else []
        )
    return notes


def test_life_of_a_job_in_restart_mode_is_told_in_words_and_in_events() -> None:
    job, kinds = RestartJob(job="j"), []

    def hear(node: str, state: TorchrunState, now: float) -> None:
        nonlocal job
        job, effects = attended(job, node, state, 7, now)
        kinds.extend(note.kind for note in notes_of(effects))

    hear("a", told("t1", "waits"), 0.0)
    assert job.phase(0.0) == "gathering"
    for name, node in (("t1", "a"), ("t2", "b")):
        hear(node, told(name, "runs", round=0), 1.0)
        hear(node, told(name, "runs", round=0), 2.0)  # said again
    assert job.sentence(2.0) == "4 workers on a, b; no steps heard (elasticd.watch())"
    killed = WorkerFailure(text="ended by signal SIGKILL", code=-9)
    hear("b", told("t2", "waits", round=0, failure=killed), 3.0)
    for name, node in (("t1", "a"), ("t2", "b")):
        hear(node, told(name, "runs", round=1, restarts=1, failure=killed if name == "t2" else None), 4.0)
    assert "its workers were started again 1 time" in job.sentence(4.0)
    for name, node in (("t1", "a"), ("t2", "b")):
        hear(node, told(name, "finished", status="left", round=1), 5.0)
    assert job.phase(5.0) == "finished"
    assert kinds == ["job_gathered", "worker_lost", "job_gathered", "finished"]
    hear("a", told("t3", "waits"), 6.0)
    assert {*job.torchruns} == {"t3"}, "it was started again: nothing of its last life is shown"


def test_each_failure_is_an_event_and_what_ends_the_job_is_its_reason_alone() -> None:
    """Also one that is as the one before it, and not what was told again of it."""
    job, notes = RestartJob(job="j"), []

    def hear(state: TorchrunState, now: float) -> None:
        nonlocal job
        job, effects = attended(job, "a", state, 7, now)
        notes.extend(notes_of(effects))

    killed = WorkerFailure(text="ended by signal SIGKILL", code=-9)
    for number in (1, 2):
        hear(told("t1", "runs", round=number, restarts=number - 1), 1.0 * number)
        for _ in range(2):
            hear(told("t1", "waits", round=number, failure=killed, failures=number), 1.0 * number)
    assert [note.kind for note in notes].count("worker_lost") == 2
    work = {"round": 3, "restarts": 2, "failure": killed, "failures": 2}
    hear(told("t1", "runs", **work), 3.0)
    hear(told("t1", "runs", ended_by="SIGINT", **work), 4.0)
    assert job.phase(4.0) == "running", "its workers are being ended"
    hear(told("t1", "runs", status="died", ended_by="SIGINT", **work), 5.0)
    assert job.phase(5.0) == "stopped"
    assert notes[-1].text == job.sentence(5.0) == "stopped by SIGINT; its workers were started again 2 times"
    assert notes[-1].data["orderly"] is True


def test_torchrun_that_ended_without_a_signal_is_not_said_to_be_stopped_by_one() -> None:
    job, _ = attended(RestartJob(job="j"), "a", told("t1", "runs", round=0), 7, 1.0)
    job, effects = attended(job, "a", told("t1", "runs", status="died", round=0), 7, 2.0)
    notes = notes_of(effects)
    assert job.sentence(2.0) == "its torchruns ended"
    assert notes[-1].data["orderly"] is False


def test_torchrun_of_which_no_agent_tells_any_more_counts_as_gone() -> None:
    job, _ = attended(RestartJob(job="j"), "a", told("t1", "runs", round=0), 7, 1.0)
    assert job.lives(1.0 + SILENT_SECONDS - 1)
    assert job.phase(1.0 + SILENT_SECONDS) == "stopped"


def after(*states: tuple[str, TorchrunState], job: RestartJob | None = None) -> tuple[RestartJob, Effects]:
    """A job of which agents tell this, one after the other, and what the last word led to."""
    job = job or RestartJob(job="j")
    effects: Effects = ()
    for node, state in states:
        job, effects = attended(job, node, state, 7, 1.0)
    return job, effects


def test_end_of_a_job_is_kept_for_the_next_leader_until_it_is_started_again() -> None:
    wrong = WorkerFailure(kind="KeyError", text="'x'", traceback="Traceback ...")
    job, effects = after(
        ("a", told("t1", "runs", round=0)), ("a", told("t1", "failed", round=0, restarts=2, failure=wrong))
    )
    (write,) = (effect for effect in effects if isinstance(effect, Write))
    (record,) = write.records
    assert isinstance(record, RestartEndRecord)
    later = restored("j", record)
    for shown in (job, later):
        assert (shown.phase(9.0), shown.nodes, shown.restarts) == ("failed", ("a",), 2)
        assert (shown.failure, "KeyError: 'x'" in shown.sentence(9.0)) == ("Traceback ...", True)
    assert after(("a", told("t1", "failed")), job=job)[1] == (), "said again"
    assert after(("a", told("t1", "failed", status="died")), job=later) == (later, ())
    again, _ = after(("a", told("t2", "waits")), job=later)
    assert (again.phase(1.0), again.failure, again.ended) == ("gathering", "", None)


def test_agent_that_was_away_while_its_torchrun_ran_on_shows_that_the_job_has_not_ended() -> None:
    running = told("t1", "runs", round=0), told("t2", "runs", round=0)
    job, _ = after(("a", running[0]), ("b", running[1]))
    job, _ = attended(job, "b", told("t2", "runs", status="died"), 7, 1.0 + SILENT_SECONDS)
    assert job.phase(1.0 + SILENT_SECONDS) == "stopped"
    job, _ = attended(job, "a", running[0], 7, 2.0 + SILENT_SECONDS)
    assert (job.phase(2.0 + SILENT_SECONDS), job.ended) == ("running", None)


def ends(effects: Effects) -> list[tuple[str, bool]]:
    """The nodes whose agents are to end torchruns, and whether at once."""
    sent = (effect for effect in effects if isinstance(effect, CoordinatorSend))
    return [(one.node, one.message.at_once) for one in sent if isinstance(one.message, End)]


def test_user_who_stops_a_job_has_its_torchruns_ended_and_those_that_come_later() -> None:
    job, _ = after(("a", told("t1", "runs", round=0)), ("b", told("t2", "runs", round=0)))
    job, effects = stop_asked(job, "alice", 60.0, 2.0)
    assert [note.kind for note in notes_of(effects)] == ["stopping"]
    assert ends(effects) == [("a", False), ("b", False)]
    job, effects = attended(job, "c", told("t3", "waits"), 7, 3.0)
    assert ends(effects) == [("c", False)]
    for node, name in (("a", "t1"), ("b", "t2")):
        job, effects = attended(job, node, told(name, "runs", status="died"), 7, 4.0)
    assert ends(stop_due(job, 61.0)[1]) == []
    job, effects = stop_due(job, 62.0 - 30.0)
    assert (ends(effects), job.over(4.0)) == ([], False)
    again, effects = stop_due(msgspec.structs.replace(job, stop_at=5.0), 5.0)
    assert ends(effects) == [("c", True)]
    job, effects = attended(again, "c", told("t3", "waits", status="died"), 7, 6.0)
    (note,) = notes_of(effects)
    assert (note.kind, note.text, note.data["orderly"]) == ("stopped", "stopped by alice", True)
    (record,) = (record for effect in effects if isinstance(effect, Write) for record in effect.records)
    assert isinstance(record, RestartEndRecord)
    assert (record.phase, record.stopped_by) == ("stopped", "alice")


def state(torchrun: str, number: int = 0, workers: int = 1, world: int = 2) -> TorchrunState:
    work = AtWork(phase="runs", workers=workers, world=world, round=number)
    return TorchrunState(job="j", torchrun=torchrun, status="here", at_work=work)


def step_of(torchrun: str, number: int = 0, world: int = 2) -> StepTime:
    by = Watching(job="j", torchrun=torchrun, local_rank=0, pid=1, round=number, world=world, nodes=2, least=1)
    return StepTime(device="x/0", by=by, lap=Lap(step=1, seconds=1.0, wall=1.0))


def test_a_node_speaks_for_the_torchruns_alone_that_its_own_agent_told_of() -> None:
    job = RestartJob(job="j")
    assert lap_refusal(job, "mallory", step_of("t0", 9)) == "", "agents of 0.1 tell of no torchruns"
    for node, torchrun in (("alpha", "t0"), ("beta", "t1")):
        job, _ = attended(job, node, state(torchrun), 7, 0.0)
    assert lap_refusal(job, "alpha", step_of("t0")) == ""
    assert lap_refusal(job, "beta", step_of("t1", 1)) == "", "a round begins before its agents tell of it"
    assert lap_refusal(job, "mallory", step_of("t0")) == "node mallory has no torchrun t0 in job j"
    assert lap_refusal(job, "beta", step_of("t0")) == "node beta has no torchrun t0 in job j"
    assert lap_refusal(job, "mallory", step_of("t9")) == "node mallory has no torchrun t9 in job j"
    assert lap_refusal(job, "alpha", step_of("t0", 2)) == "round 2 of job j does not follow round 0"
    assert lap_refusal(job, "alpha", step_of("t0", 2**62)) != ""
    assert lap_refusal(job, "alpha", step_of("t0", world=1)) == "round 0 of job j has 2 processes, not 1"


def test_a_node_cannot_take_another_nodes_torchrun_while_its_agent_tells_of_it() -> None:
    job, _ = attended(RestartJob(job="j"), "alpha", state("t0"), 7, 0.0)
    assert state_refusal(job, "alpha", state("t0"), 1.0) == ""
    assert state_refusal(job, "mallory", state("t0"), 1.0) == "torchrun t0 of job j is of node alpha"
    assert state_refusal(job, "mallory", state("t1"), 1.0) == ""
    assert state_refusal(job, "gamma", state("t0"), SILENT_SECONDS) == "", "a node may have another name now"
