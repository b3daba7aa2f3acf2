"""Builds the wheel of a release from the commit that is named in its folder.

    python -m tests.releases.build 0.1.0

The wheel is kept in the repository, so that tests need neither git's history nor the network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from tests.releases import kept

ROOT = kept.FOLDER.parents[1]


def sources(version: str, folder: Path) -> None:
    """Unpacks all files of the release's commit. Raises subprocess.CalledProcessError without that commit."""
    packed = subprocess.run(
        ["git", "archive", kept.commit(version)], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        # Python before 3.11.4 has no filters; the archive is git's own.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]


def build(version: str) -> Path:
    """Makes the wheel anew, with the commit's own time in it."""
    time = subprocess.run(
        ["git", "show", "-s", "--format=%ct", kept.commit(version)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        sources(version, Path(name))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "-w",
                kept.wheel(version).parent,
                name,
            ],
            env={**os.environ, "SOURCE_DATE_EPOCH": time},
            check=True,
        )
    return kept.wheel(version)


if __name__ == "__main__":
    print(build(sys.argv[1]))
