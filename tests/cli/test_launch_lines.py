"""The lines that `elasticd run` prints of events, and the devices and files that its options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elasticd.cli.app import elasticd
from elasticd.cli.worker_output import OutputLines
from elasticd.system import torchrun_launcher
from elasticd.system.launch_events import LaunchLines
from elasticd.system.output_options import OutputOptions
from elasticd.system.torchrun_launcher import CannotPlace, Launch, placed, slots
from elasticd.system.torchrun_outcome import TorchrunOutcome
from elasticd.wire.launch import Following, Happened


def told(*events: tuple[str, str, dict[str, Any]]) -> list[str]:
    lines = LaunchLines()
    return [
        line
        for kind, text, data in events
        if (line := lines.line(Happened(job="j", kind=kind, text=text, data=data)))
    ]


START = (
    ("job_gathered", "2 devices take part", {"nodes": ["a/0", "a/1"]}),
    ("proposed", "plan 1: 1 pipeline", {"number": 1}),
    ("recorded", "plan 1 is recorded", {"number": 1, "step": 0, "page": "http://h:1/jobs/j"}),
)


def test_start_switch_fault_and_end_are_a_line_each() -> None:
    assert told(
        *START,
        ("proposed", "plan 2: 2 s a step now, 1 s under the new plan", {"number": 2}),
        ("recorded", "plan 2 is recorded", {"number": 2, "step": 14}),
        ("fenced", "fence 3: worker a/1 (pid 7) died", {"number": 3, "gone": ["a/1"]}),
        ("proposed", "plan 4: worker a/1 died", {"number": 4}),
        ("recorded", "plan 4 is recorded: the job goes on", {"number": 4, "step": 143, "again": 2}),
        ("leaving", "worker a/0 drains (SIGTERM): the next plan leaves it", {}),
        ("finished", "finished after 400 steps", {"step": 400}),
    ) == [
        "job j on a/0, a/1: plan 1: 1 pipeline; http://h:1/jobs/j",
        "plan 2 from step 14 on: 2 s a step now, 1 s under the new plan",
        "worker a/1 (pid 7) died; plan 4 without a/1 goes on from step 143; 2 steps are made again",
        "worker a/0 drains (SIGTERM): the next plan leaves it",
        "job j finished after 400 steps",
    ]


def test_every_end_is_a_line() -> None:
    failed = "job j stopped: worker a/0 failed"
    assert told(("stopped", "stopped: worker a/0 failed", {"orderly": False})) == [failed]
    assert told(("stopped", "stopped: stopped by alice", {"requested": True})) == ["job j stopped by alice"]


def test_a_reason_of_another_process_cannot_forge_a_line() -> None:
    assert told(("leaving", "worker a/0\nelasticd: \x1b[2Jforged", {})) == [
        "worker a/0\\nelasticd: \\x1b[2Jforged"
    ]


def launch(devices: int = 2, gpus: tuple[str, ...] = (), **more: Any) -> Launch:
    return Launch(
        job="j",
        least=1,
        most=1,
        devices=devices,
        gpus=gpus,
        socket=None,
        max_restarts=0,
        command=("train.py",),
        **more,
    )


def following(used: dict[int, str], devices: int = 4) -> Following:
    return Following(
        devices=tuple(f"a/{index}" for index in range(devices)),
        used={f"a/{index}": job for index, job in used.items()},
    )


@pytest.mark.parametrize(
    ("what", "used", "found"),
    [
        (launch(), {}, (0, 1)),
        (launch(), {0: "other"}, (1, 2)),
        (launch(), {0: "other", 2: "more"}, (1, 3)),
        (launch(), {0: "j", 1: "j"}, (0, 1)),
        (launch(slots=(3, 0), named=True), {0: "j", 1: "other"}, (3, 0)),
        (launch(gpus=("0", "1"), spare=("2", "3")), {1: "other"}, (0, 2)),
        (launch(gpus=("4", "6")), {4: "j"}, (4, 6)),
    ],
)
def test_free_devices_are_taken_unless_the_user_names_some(
    what: Launch, used: dict[int, str], found: tuple[int, ...]
) -> None:
    assert slots(placed(what, following(used, devices=8))) == found


def test_too_few_free_devices_are_refused_with_the_remedy() -> None:
    with pytest.raises(CannotPlace, match=r"2 devices .* and 1 is free: used are a/0 by job x, .*--devices 1"):
        placed(launch(), following({0: "x", 1: "x", 2: "x"}))
    with pytest.raises(CannotPlace, match="elasticd stop"):
        placed(launch(gpus=("0", "1")), following({0: "x", 1: "x"}))
    with pytest.raises(CannotPlace, match=r"--device-ids 3,0: used are a/0 by job x: name others"):
        placed(launch(slots=(3, 0), named=True), following({0: "x"}))
    with pytest.raises(CannotPlace, match=r"--device-ids 0,1: used are a/0 by job x: name others"):
        placed(launch(gpus=("0", "1"), named=True), following({0: "x"}))
    assert slots(placed(launch(), None)) == (0, 1), "no agent says what is free"


@pytest.mark.parametrize(
    ("what", "devices", "words"),
    [
        (launch(5), 3, "--devices 5: a has 3: ask for --devices 3 at most"),
        (launch(1, slots=(7,), named=True), 3, "--device-ids 7: a has 0 to 2"),
        (launch(2, slots=(0, 1), named=True), 1, "--device-ids 1: a has 0 alone"),
        (launch(2, gpus=("6", "7"), named=True), 4, "--device-ids 6,7: a has 0 to 3"),
        (launch(1, gpus=("5",)), 4, "GPU 5: a has 0 to 3"),
    ],
)
def test_devices_that_the_node_has_not_are_refused_whatever_is_free(
    what: Launch, devices: int, words: str
) -> None:
    for used in ({}, {0: "x", 1: "x"}):
        with pytest.raises(CannotPlace) as refusal:
            placed(what, following(used, devices))
        assert str(refusal.value) == words


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), OutputOptions(label=True)),
        (("--no-label",), OutputOptions()),
        (("--log-dir", "."), OutputOptions(label=True, folder=str(Path.cwd()), filed=3)),
        (("--log-dir", ".", "-r", "3"), OutputOptions(label=True, folder=str(Path.cwd()), filed=3, shown=0)),
        (("--log-dir", ".", "-r", "1"), OutputOptions(label=True, folder=str(Path.cwd()), filed=1, shown=2)),
        (
            ("--log-dir", ".", "-r", "3", "-t", "2"),
            OutputOptions(label=True, folder=str(Path.cwd()), filed=3, shown=2),
        ),
    ],
)
def test_options_say_where_output_goes(
    options: tuple[str, ...], expected: OutputOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr("elasticd.system.torchrun_launcher.launch", launched.append)
    command = ["run", "--job", "j", "--devices", "2", *options, __file__]
    CliRunner(env={"ELASTICD_DEVICE": "cpu"}).invoke(elasticd, command)
    assert [what.output for what in launched] == [expected]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tee", "3"), "say where by --log-dir"),
        (("--log-dir", "x", "--tee", "4"), "must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
        (("--device-ids", "1,x"), "must be numbers of different devices"),
        (("--device-ids", "1,1"), "must be numbers of different devices"),
        (("--device-ids", "1", "--devices", "2"), "leave one out"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options: tuple[str, ...], said: str) -> None:
    result = CliRunner(env={"ELASTICD_DEVICE": "cpu"}).invoke(
        elasticd, ["run", "--job", "j", *options, __file__]
    )
    assert result.exit_code
    assert said in result.output


def test_output_is_shown_as_lines_of_which_a_progress_bar_is_its_last_state() -> None:
    lines = OutputLines()
    assert lines.take("one\n 1%\r 2%\r10") == ["one"]
    assert lines.take("0%\n\x1b[31mred\x1b[0m\x07\r\nhal") == ["100%", "red\\x07"]
    assert lines.rest() == "hal"


@pytest.mark.parametrize(("orderly", "code"), [(True, 0), (False, 1)])
def test_exit_code_is_a_failure_where_the_job_was_not_stopped_in_good_order(
    orderly: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where workers that stood by ended with 0."""
    outcomes = {index: TorchrunOutcome() for index in range(2)}
    ended = torchrun_launcher._Ended(codes={0: 1, 1: 0}, outcomes=outcomes)
    monkeypatch.setattr(torchrun_launcher, "_run", lambda *of_launch: ended)
    monkeypatch.setattr(torchrun_launcher, "LaunchLink", lambda *of_link: None)
    news = torchrun_launcher._News(launch())
    news._take(Happened(job="job", kind="stopped", text="stopped: by alice", data={"orderly": orderly}))
    assert torchrun_launcher._launched(launch(), news)[0] == code
