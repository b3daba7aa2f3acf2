"""A program for `test_nursery.py`: starts a script that is to end with it; says its id and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys

from elasticd.system.parent_death_signal import ending_with_us


def main() -> None:
    script, *path = sys.argv[1:]
    environment = {**os.environ, **({"PYTHONPATH": path[0]} if path else {})}
    with open(os.devnull, "rb") as nothing:
        command = ending_with_us([sys.executable, "-u", script, "word"])
        child = subprocess.Popen(command, env=environment, stdin=nothing, start_new_session=True)
    print(f"pid {child.pid}", flush=True)
    print(f"code {child.wait()}", flush=True)


if __name__ == "__main__":
    main()
