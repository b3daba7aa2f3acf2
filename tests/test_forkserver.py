"""A forked script is what `python SCRIPT` is: its arguments, environment, output, exit code, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticd.testing.waiting import until
from tests import forkserver
from tests.liveness import ended


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, sys\n{body}\n")
    return path


def test_arguments_environment_and_both_outputs_are_the_scripts_own(tmp_path: Path) -> None:
    body = "print(sys.argv[1:], os.environ['WORD'], os.environ.get('HOME')); print('why', file=sys.stderr)"
    out, errors = tmp_path / "out", tmp_path / "errors"
    path = script(tmp_path, body)
    started = forkserver.start(path, "a", "b", environment={"WORD": "w"}, output=out, errors=errors)
    assert started.wait(60) == 0
    assert (out.read_text(), errors.read_text()) == ("['a', 'b'] w None\n", "why\n")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('this is why')", 1, "this is why"),
        ("os._exit(4)", 4, ""),
        ("raise ValueError('no good')", 1, "ValueError: no good"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_the_exit_code_and_what_is_said_of_it_are_those_of_an_interpreter(
    body: str, code: int, said: str, tmp_path: Path
) -> None:
    path = script(tmp_path, body)
    forked = forkserver.start(path, environment=os.environ, output=tmp_path / "out")
    assert forked.wait(60) == forked.poll() == forked.returncode == code
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert plain.returncode == code
    assert said in (tmp_path / "out").read_text()
    assert said in plain.stderr


def test_a_worker_has_torch_at_once_on_one_thread_and_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'")
    body = (
        "assert 'torch' in sys.modules\nimport torch, beside\n"
        "assert __name__ == '__main__'\n"
        "print(beside.word, torch.get_num_threads(), len(os.listdir('/proc/self/task')))"
    )
    forked = forkserver.start(script(tmp_path, body), environment=os.environ, output=tmp_path / "out")
    assert forked.wait(60) == 0, (tmp_path / "out").read_text()
    assert (tmp_path / "out").read_text() == "found 1 1\n"


def test_a_worker_can_be_frozen_thawed_ended_and_waited_for_in_vain(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\ntime.sleep(600)")
    forked = forkserver.start(path, environment=os.environ, output=tmp_path / "out")
    process = psutil.Process(forked.pid)
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.05)
    forked.send_signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    forked.send_signal(signal.SIGCONT)
    until(lambda: process.status() != psutil.STATUS_STOPPED)
    forked.terminate()
    assert forked.wait(60) == -signal.SIGTERM
    forked.kill()  # its id may be another process's by now: nothing happens


def test_workers_that_a_test_leaves_are_killed_and_named(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\ntime.sleep(600)")
    forked = forkserver.start(path, environment=os.environ, output=tmp_path / "out")
    assert forkserver.end_all() == [str(path)]
    assert forked.returncode == -signal.SIGKILL
    assert forkserver.end_all() == []


def test_no_worker_outlives_a_pytest_process_that_is_killed(tmp_path: Path) -> None:
    script(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    starts = (
        "import os, time\nfrom pathlib import Path\nfrom tests import forkserver\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "forked = forkserver.start(folder / 'script.py', environment=os.environ, output=folder / 'out')\n"
        "print(forked.pid, flush=True)\ntime.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        try:
            assert parent.stdout is not None
            worker = psutil.Process(int(parent.stdout.readline()))
            until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() == "up\n")
        finally:
            parent.kill()
    until(lambda: ended(worker))
