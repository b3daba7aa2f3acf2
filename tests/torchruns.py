"""A real torchrun, or `elasticd run`, for tests: what it says goes to a file, and it is ended on every path."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import psutil

from tests import forkserver, nursery
from tests.liveness import living

#: In place of a variable's value: the program is to have no such variable.
UNSET = "(unset)"


def environment() -> dict[str, str]:
    """Of a torchrun: ours, without what was set for elasticd, etcd and Python's output."""
    others = ("ELASTICD_", "ETCD_", "PYTHONUNBUFFERED")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**ours, "ELASTICD_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(forkserver.ROOT)}


class Torchrun:
    """A torchrun with its workers. What they say goes to a file in `folder`; `changed` are variables of its
    environment that are other than ours."""

    def __init__(
        self, folder: Path, *options: str, program: str = "torch.distributed.run", **changed: str
    ) -> None:
        number, name = tempfile.mkstemp(dir=folder, prefix="torchrun-")
        os.close(number)
        self._log = Path(name)
        running = {name: value for name, value in {**environment(), **changed}.items() if value != UNSET}
        self.process = forkserver.start(program, *options, environment=running, output=self._log)

    @property
    def said(self) -> str:
        """All that it and its workers said so far."""
        return self._log.read_text()

    def ended(self, seconds: float = 60.0) -> tuple[int, str]:
        """Waits for it; its exit code, and all that was said."""
        return self.process.wait(seconds), self.said

    def workers(self) -> list[int]:
        """The ids of its workers' processes, as they are now."""
        return [worker.pid for worker in self._workers()]

    def _workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return living(psutil.Process(self.process.pid).children(), unnamed=nursery.NAME)
        return []

    def kill(self) -> list[psutil.Process]:
        """SIGKILL, to it alone; its workers, which live on."""
        workers = self._workers()
        self.process.kill()
        self.process.wait()
        return workers

    def stop(self) -> None:
        """Ends it and its workers."""
        workers = []
        if self.process.poll() is None:
            workers = self._workers()
            self.process.terminate()  # it ends its workers then, which live in sessions of their own
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for worker in workers:
            end(worker)


def end(worker: psutil.Process) -> None:
    """Kills a worker that its torchrun left behind, if it is still that one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.kill()
