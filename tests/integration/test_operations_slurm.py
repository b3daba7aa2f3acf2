"""The text of docs/operations.md for Slurm, as it is written, under an `srun` that starts one task here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elasticd.config.tree import with_overrides
from elasticd.testing.waiting import until
from tests.etcds import SharedEtcd
from tests.integration.cluster import ROOT
from tests.integration.launches import Launches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: What `srun` does with one task on one node, as far as the text goes.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def text() -> str:
    """The command in the docs."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page[page.index("## Slurm") :]
    (command,) = re.findall(r"(?m)^    srun .*?exit \$code'$", section, re.S)[:1]
    return textwrap.dedent("    " + command.strip())


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.full), 3])
def test_step_ends_with_the_exit_code_of_the_script_and_leaves_no_agent(
    code: int, tmp_path: Path, shared_etcd: SharedEtcd
) -> None:
    launches = Launches({"other": 1}, etcd=shared_etcd)
    config = with_overrides(launches.cluster.config, {"cluster.name": shared_etcd.cluster()})
    launches.cluster.config = config
    with launches:
        file = tmp_path / "elasticd.toml"
        file.write_text(
            f'[cluster]\nname = "{config.cluster.name}"\n[etcd]\nendpoints = ["{shared_etcd.endpoint}"]\n'
            '[agent]\nnode = "step"\ndevices = 1\n'
        )
        (tmp_path / "train.py").write_text(f"import sys\nsys.exit({code})\n")
        srun = tmp_path / "srun"
        srun.write_text(SRUN)
        srun.chmod(0o700)
        path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
        environment |= {"ELASTICD_DEVICE": "cpu", "TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
        command = text().replace("/shared/elasticd.toml", str(file))
        command = command.replace("train.py", "--devices 1 train.py")  # this machine has no GPU to count
        step = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert step.returncode == code, step.stderr
        until(lambda: {node["node"] for node in launches.status()["nodes"]} == {"other"})
