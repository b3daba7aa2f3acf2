"""Plays a page in a folder of its own, with nothing of this machine's user in it.

python -m tests.pages.play docs/tutorial.md           # the lines that differ, and seconds
python -m tests.pages.play docs/tutorial.md --printed # all that each command printed, to write a page with
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.pages.terminals import Session

ROOT = Path(__file__).resolve().parents[2]
#: What a clone has that pages name, and that commands may write beside.
CLONE = ("LICENSE", "examples")


@contextmanager
def clone(*names: str) -> Iterator[Path]:
    """A folder with these files and folders of the clone; it is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="page-"))  # short: sockets lie in it
    try:
        for name in names:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
            else:
                shutil.copy(source, folder / name)
        (folder / ".user").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path, programs: Path = Path(sys.executable).parent) -> Mapping[str, str]:
    """The environment of a new user on this machine; `programs` is the folder with `elasticd` and `python`."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ELASTICD_", "ETCD_", "XDG_", "TORCHELASTIC_", "PYTEST_", "COLUMNS"))
    }
    return ours | {
        "XDG_STATE_HOME": str(folder / ".user/state"),
        "XDG_RUNTIME_DIR": str(folder / ".user"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(programs.parent),
        "HF_HUB_OFFLINE": "1",
    }


def main() -> int:
    """Plays the page that the command line names; 1 where a line differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--printed", action="store_true", help="print what the commands print")
    parser.add_argument("--patience", type=float, default=420.0, help="seconds for each command")
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # what runs in the terminals is ended on this path too
    echo = sys.stdout if options.printed else None
    with (
        clone(*CLONE) as folder,
        Session(folder / "examples/tutorial", environment(folder), options.patience, echo) as session,
    ):
        differences = session.play(options.page.resolve())
        print(f"{session.checked_lines} lines as shown, {sum(s for _, s in session.seconds):.0f} s")
        print("\n".join(differences))
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
