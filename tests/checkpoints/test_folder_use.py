"""Two jobs do not save to one folder at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticd.checkpoints.folder_use import FolderUse

_HOLDS = """
import sys
from pathlib import Path
from elasticd.checkpoints.folder_use import FolderUse

use = FolderUse(Path(sys.argv[1]), sys.argv[2])
print("holds", flush=True)
sys.stdin.read()
"""


def test_another_job_is_refused_while_a_process_of_the_first_lives(tmp_path: Path) -> None:
    holds = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(tmp_path), "job first"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holds.stdout is not None
        assert holds.stdout.readline() == "holds\n"
        with pytest.raises(
            ValueError, match=f"job first saves to {tmp_path}, and would remove the checkpoints"
        ):
            FolderUse(tmp_path, "job second-run")
        FolderUse(tmp_path, "job first").end()  # another worker of it, which ends before the first
        with pytest.raises(ValueError, match="job first saves to"):
            FolderUse(tmp_path, "process 7")
    finally:
        holds.kill()
        holds.communicate()
    second = FolderUse(tmp_path, "job second-run")
    assert [path.name for path in tmp_path.iterdir()] == [".used-by-job-second-run.lock"]
    with pytest.raises(ValueError, match="job second-run saves to"):
        FolderUse(tmp_path, "job first")
    second.end()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_locks_protects_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("elasticd.checkpoints.folder_use.fcntl.flock", refused)
    for use in (FolderUse(tmp_path, "job a"), FolderUse(tmp_path, "job b")):
        use.end()
