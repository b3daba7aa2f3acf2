"""Every command and both daemons without extras, a cluster or a readable file: none shows a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from elasticd_agent.command import command as agent

from elasticd.checkpoints.manifest import MANIFEST
from elasticd.cli.app import elasticd
from elasticd.extras import install
from tests.cli.support import call, refused

#: The arguments of each command that asks a coordinator.
ASKING: dict[str, tuple[str, ...]] = {
    "status": (),
    "top": ("--once",),
    "why": (),
    "history": (),
    "logs": (),
    "jobs": (),
    "checkpoint now": ("job\n",),
    "stop": ("job\n",),
    "adopt": ("job\n",),
    "forget": ("job\n",),
    "record": ("{folder}/run.jsonl",),
    "drain": ("alpha\n",),
    "pause": (),
    "resume": (),
    "config get": (),
    "config set": ("policy.horizon_steps", "5"),
    "config unset": ("policy.horizon_steps",),
    "config history": (),
    "plan": (),
    "chaos slow": ("a/0", "3"),
    "chaos recover": ("a/0",),
    "chaos kill": ("a/0",),
    "chaos freeze": ("a/0",),
    "chaos thaw": ("a/0",),
    "chaos cut": ("a",),
    "chaos heal": ("a",),
}
#: Each of the others with what it needs and does not find, and a part of what it says.
OTHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "up": (("--folder", "{folder}/file/x"), "name another folder with --folder"),
    "run": (("--job", "j", "--devices", "1", "{folder}/none.py"), "is not there"),
    "coordinator": (
        ("--etcd", "127.0.0.1:1", "--port", "0", "--host", "nowhere.invalid"),
        "no etcd answers at",
    ),
    "dashboard": (("--port", "0", "--host", "nowhere.invalid"), "set tokens in section"),
    "report": (("--out", "{folder}/run.html", "job"), "there is no job 'job'"),
    "demo": (("--out", "{folder}/file"), "name another folder with --out"),
    "simulate": (("{folder}/none.toml",), "cannot read the scenario"),
    "profile": (("{folder}/none.py:model", "--out", "{folder}/none/p.json"), "cannot write"),
    "check": (("{folder}/none.py",), "is not there"),
    "checkpoint list": (("{folder}/none",), "does not exist"),
    "checkpoint verify": (("{folder}",), "no checkpoint in"),
    "checkpoint export": (("{folder}/none", "{folder}/x"), "does not exist"),
    "completion": (("csh",), "is not one of"),
    "security init": (("{folder}",), "is there and not empty, and nothing in it is overwritten"),
    "security renew": (("{folder}",), "has no authority to sign with"),
}
#: The command that looks for what is missing tells of it in its table.
DOCTOR = "doctor"
#: Files that are no configuration, and a part of what is said of each.
WRONG: dict[str, tuple[bytes, str]] = {
    "binary": (b"\xff\xfe\x00", "it is not text in UTF-8"),
    "no TOML": (b"x = [", "is not TOML"),
    "deep": (b"x = " + b"[" * 20_000, "is not TOML"),
    "long": (b"x = " + b"9" * 20_000, "is not TOML"),
    "section": (b"[agents]\n", "did you mean 'agent'?"),
    "key": (b"[log]\nlevels = 'info'\n", "did you mean 'level'?"),
    "type": (b"[log]\nlevel = 3\n", "[log] level = 3"),
    "value": (b"[coordinator]\nport = 70000\n", "must be between 0 and 65535"),
    "authority": (b"[security]\nca = '~nobody-of-this-name/ca.pem'\n", "name a PEM file"),
    "etcd's": (b"[etcd]\nca = '~nobody-of-this-name/ca.pem'\n", "name a PEM file"),
}


#: What gives programs JSON: all that reads. The others change something, or run until they are ended.
READING = {
    *("status", "jobs", "top", "why", "history", "logs", "plan", "config get", "config history", DOCTOR),
    *("checkpoint list", "checkpoint verify", "simulate", "profile"),
}


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """host:port that nobody answers at, and that nobody else can take meanwhile."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from commands(found, f"{before}{name} ")
        else:
            yield f"{before}{name}", found


def called(folder: Path, name: str, given: tuple[str, ...], *options: str) -> str:
    """What the command says that fails in one message."""
    (folder / "file").touch()
    return refused(*name.split(), *(word.format(folder=folder) for word in given), *options)


def agent_called(*arguments: str) -> Result:
    return CliRunner(env={"ELASTICD_CONFIG": None, "ELASTICD_SOCKET": None}).invoke(agent, arguments)


def test_every_command_is_here() -> None:
    assert {name for name, _ in commands(elasticd)} == {*ASKING, *OTHERS, DOCTOR}


def test_all_that_reads_gives_programs_json() -> None:
    asked = {name for name, command in commands(elasticd) if any(p.name == "as_json" for p in command.params)}
    assert asked == READING


@pytest.mark.parametrize("name", ASKING)
def test_without_a_coordinator_a_command_names_the_one_that_does_not_answer(
    name: str, dead: str, tmp_path: Path
) -> None:
    said = called(tmp_path, name, ASKING[name], "--coordinator", f"http://{dead}")
    answers = "is gone" if name == "record" else "no coordinator answers"
    assert answers in said
    assert f"at http://{dead}" in said


@pytest.mark.parametrize("name", [*ASKING, "coordinator", "up"])
def test_a_configuration_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    said = called(tmp_path, name, ASKING.get(name, ()), "--config", "/nowhere/e.toml")
    assert "cannot read the configuration /nowhere/e.toml (named by --config)" in said


@pytest.mark.parametrize("name", OTHERS)
def test_other_commands_name_what_they_miss(name: str, tmp_path: Path) -> None:
    given, wanted = OTHERS[name]
    if name in ("coordinator", "dashboard"):  # a daemon: it writes to standard error itself, and returns
        done = call(name, *(word.format(folder=tmp_path) for word in given))
        assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True), done.output
        return
    assert wanted in called(tmp_path, name, given)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_ends_commands_and_both_daemons_with_what_would_be_right(
    name: str, tmp_path: Path
) -> None:
    text, wanted = WRONG[name]
    file = tmp_path / "e.toml"
    file.write_bytes(text)
    named = ("--config", str(file))
    assert wanted in refused("status", *named)
    done = agent_called(*named, "--socket", str(tmp_path / "a.sock"))
    assert done.exit_code == 1
    assert wanted in done.output
    assert isinstance(done.exception, SystemExit), done.exception
    if "PEM" not in wanted:  # those are of a coordinator's clients, and are looked at after its election
        assert wanted in refused("coordinator", *named)


def test_a_folder_and_a_file_of_another_kind_are_refused_where_a_problem_or_a_recording_is_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8b\x08\x00" + bytes(40))
    (tmp_path / "x.json").write_bytes(b"[" * 100_000)
    for name in ("", "x.gz", "x.json"):
        path = str(tmp_path / name)
        refused("simulate", "--recorded", path)
        refused("simulate", path)
        refused("plan", path)
        refused("plan", "--diff", path, path)
        refused("status", "--config", path)
    manifest = tmp_path / "step-00000001.plan-1.aa" / MANIFEST
    manifest.parent.mkdir()
    manifest.write_bytes(b'{"x": ' + b"[" * 100_000)
    assert "damaged: " in call("checkpoint", "list", str(tmp_path)).output
    assert "1 of 1 damaged" in refused("checkpoint", "verify", str(tmp_path))


def test_a_user_without_a_home_or_a_name_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("XDG_STATE_HOME", "HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert "set XDG_STATE_HOME" in refused("up")
    done = agent_called("--etcd", dead, "--socket", str(tmp_path / "a.sock"))
    assert "set XDG_STATE_HOME" in done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert "no coordinator answers" in refused("pause", "--coordinator", f"http://{dead}")


def test_doctor_lists_what_a_wrong_secret_keeps_it_from_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # looked for in seconds otherwise
    file = tmp_path / "e.toml"
    file.write_text(f'[etcd]\nuser = "me"\n[agent]\nsocket = "{tmp_path}/a.sock"\n')
    done = call("doctor", "--config", str(file))
    said = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "it cannot be asked: [etcd] user = 'me' has no password" in said
    assert "start one: elasticd-agent" in said


@pytest.mark.parametrize(
    ("package", "program", "said"),
    [
        ("click", "from elasticd.cli import main; main()", "elasticd: the package 'click' is missing"),
        (
            "click",
            "from elasticd_agent.__main__ import main; main()",
            "elasticd-agent: the package 'click' is missing",
        ),
        (
            "uvicorn",
            "sys.argv[1:] = ['coordinator']; from elasticd.cli import main; main()",
            f"elasticd: the package 'uvicorn' is missing: {install('daemon')}",
        ),
    ],
)
def test_a_missing_extra_is_named_in_one_line(package: str, program: str, said: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; {program}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_torch_what_needs_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    for command in (("run", "--job", "j", "--devices", "1"), ("check",), ("profile",)):
        target = f"{script}:model" if command == ("profile",) else str(script)
        assert f"needs the package 'torch': {install('train')}" in refused(*command, target)
    code = "import sys; sys.modules['torch'] = None; import elasticd; elasticd.Job"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert f"elasticd.Job needs torch: {install('train')}" in done.stderr.splitlines()[-1]
