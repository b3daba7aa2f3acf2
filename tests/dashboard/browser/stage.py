"""A cluster of real processes with tokens, a real job on emulated devices, and the dashboard before it.

Everything is what a user starts: `elasticd coordinator`, `elasticd-agent`, `elasticd run` and
`elasticd dashboard`. All are forked (`tests.forkserver`), which is quicker than to start them.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from elasticd.chaos.client import Chaos
from elasticd.client import ApiClient, CannotReach
from elasticd.config.credentials import Credentials
from elasticd.config.tree import load
from elasticd.records import Keys
from elasticd.store.etcd import EtcdStore
from elasticd.store.leader import read_leader
from elasticd.store.protocol import StoreError
from elasticd.store.server import EtcdServer
from elasticd.store.session import EtcdOptions
from elasticd.testing.waiting import until
from elasticd.wire.api_types import JobStatus
from tests import forkserver
from tests.coordinator.secured import private
from tests.forkserver import Forked
from tests.soak import worker
from tests.torchruns import Torchrun, environment

JOB = "my-job"
NODES, DEVICES = ("alpha", "beta"), 2
VIEWER, OPERATOR, AGENT = (f"{role}-0123456789abcdef" for role in ("viewer", "operator", "agent"))
#: Seconds that a start may take on a busy machine.
PATIENCE = 180.0
T = TypeVar("T")


class Stage:
    """Started part by part, ended by `with`. `url`: where the dashboard serves."""

    url: str

    def __init__(self, folder: Path, *, coordinators: int = 1, nodes: Sequence[str] = NODES) -> None:
        self.folder, self.nodes, self._count = folder, tuple(nodes), coordinators
        self._exits = contextlib.ExitStack()
        self._coordinators: dict[str, Forked] = {}
        self._starts = 0
        self._known = Credentials(token=OPERATOR)

    def __enter__(self) -> Stage:
        with self._exits as exits:
            self._start()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exits.close()
        if kind is None:
            said = self.said("dashboard")
            assert "Traceback" not in said, said

    def _start(self) -> None:
        self._sockets = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="elasticd-stage-")))
        self.etcd = self._exits.enter_context(EtcdServer(fsync=False))
        self._exits.callback(self.etcd.thaw)  # a test that failed may have left it frozen
        self._store = EtcdStore(EtcdOptions(endpoints=(self.etcd.endpoint,)))
        self._exits.callback(self._store.close)
        for name, own in self._files().items():
            (self.folder / f"{name}.toml").write_text(self._toml(own))
        self.keys = Keys(cluster=load(self.configuration("coordinator")).cluster.name)
        for _ in range(self._count):
            self.start_coordinator()
        self.asked(lambda api: True)
        for node in self.nodes:
            options = ("--node", node, "--socket", self.socket(node), "--address", "127.0.0.1")
            self._python(
                f"agent-{node}", "elasticd_agent", *options, "--config", str(self.configuration("agent"))
            )
        self.start_dashboard()

    def _files(self) -> dict[str, str]:
        secret = {
            name: private(self.folder / f"{name}.token", text)
            for name, text in {
                "viewers": f"bob {VIEWER}\n",
                "operators": f"alice {OPERATOR}\n",
                "agents": f"{AGENT}\n",
                "agent": AGENT,
                "viewer": VIEWER,
                "operator": OPERATOR,
            }.items()
        }
        roles = "\n".join(f'{role} = "{secret[role]}"' for role in ("viewers", "operators", "agents"))
        return {
            "coordinator": roles,
            "agent": f'token_file = "{secret["agent"]}"',
            "dashboard": f'token_file = "{secret["viewer"]}"',
            "operator": f'token_file = "{secret["operator"]}"',
        }

    def _toml(self, security: str) -> str:
        state = self.folder / "state"
        return "\n".join(
            [
                '[cluster]\nname = "stage"',
                f'[etcd]\nendpoints = ["{self.etcd.endpoint}"]',
                f'[coordinator]\nhost = "127.0.0.1"\nport = 0\nstate = "{state}"',
                f'[agent]\ndevices = {DEVICES}\nstate = "{state}"',
                f'[dashboard]\nport = 0\nhistory = "{self.folder / "history.db"}"',
                # Steps of half a second, most of which the emulated devices sleep: other tests run beside it.
                "[emulate]\nenabled = true\nforward = 2e-3\nbackward = 4e-3\nmemory = 1073741824",
                "[planner]\nflops = 2e6",
                "[chaos]\nenabled = true",
                f"[security]\n{security}",
                "",
            ]
        )

    def configuration(self, name: str) -> Path:
        """The file of "coordinator", "agent", "dashboard" or "operator"."""
        return self.folder / f"{name}.toml"

    def socket(self, node: str) -> str:
        """Of a node's agent."""
        return str(self._sockets / f"{node}.sock")

    def _python(self, name: str, module: str, *options: str) -> Forked:
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)  # of the one before it
        variables = {**environment(), "PYTHONUNBUFFERED": "1"}
        process = forkserver.start(f"{module}.__main__", *options, environment=variables, output=log)
        self._exits.callback(_end, process)
        return process

    def said(self, name: str) -> str:
        """What a program of this stage wrote so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # -- parts -------------------------------------------------------------------------------------------------

    def start_coordinator(self) -> str:
        """Starts another coordinator; its name."""
        self._starts += 1
        name = f"c{self._starts}"
        options = ("coordinator", "--config", str(self.configuration("coordinator")), "--name", name)
        self._coordinators[name] = self._python(name, "elasticd", *options)
        return name

    def kill_leader(self) -> str:
        """SIGKILL to the coordinator that leads; its name."""
        name = self.asked(lambda api: api.status().leader.name)
        process = self._coordinators.pop(name)
        process.kill()
        process.wait()
        return name

    def start_dashboard(self, port: int = 0) -> None:
        """Starts the dashboard, at this port if it is not 0, and waits until it serves."""
        file = self.configuration("dashboard")
        file.write_text(re.sub(r"(?<=\[dashboard\]\n)port = \d+", f"port = {port}", file.read_text()))
        options = ("dashboard", "--config", str(file))
        self._dashboard = self._python("dashboard", "elasticd", *options)

        def serves() -> str | None:
            assert self._dashboard.poll() is None, self.said("dashboard")
            text = r"^dashboard of \S+ at (http://127\.0\.0\.1:\d+)"
            found = re.search(text, self.said("dashboard"), re.MULTILINE)
            return found[1] if found else None

        self.url = until(serves, lambda: self.said("dashboard"), seconds=PATIENCE)

    def stop_dashboard(self) -> None:
        """Ends the dashboard, as a service manager does."""
        _end(self._dashboard)

    def start_job(self, steps: int = 100_000) -> None:
        """Starts `elasticd run` on each node, and waits until the job trains."""
        self.runs = [self._run(node, steps) for node in self.nodes]
        until(
            lambda: (found := self.job()) is not None and found.phase == "running" and found.step > 3,
            lambda: "\n".join([*(run.said for run in self.runs), self.said("c1")])[-4000:],
            seconds=PATIENCE,
        )

    def _run(self, node: str, steps: int) -> Torchrun:
        run = Torchrun(
            self.folder,
            *("run", "--job", JOB, "--nnodes", str(len(self.nodes)), "--devices", str(DEVICES)),
            *("--socket", self.socket(node), "--max-restarts", "1000"),
            *(worker.__file__, str(self.folder), "--steps", str(steps)),
            program="elasticd",
        )
        self._exits.callback(run.stop)
        return run

    def start_job_that_is_over(self, name: str) -> None:
        """Starts a job on the first node that waits for a node more than there are, and stops it."""
        options = ("--job", name, "--nnodes", str(len(self.nodes) + 1), "--devices", "1")
        script = (worker.__file__, str(self.folder), "--steps", "1")
        run = Torchrun(
            self.folder, "run", *options, "--socket", self.socket(self.nodes[0]), *script, program="elasticd"
        )
        try:
            until(lambda: self.asked(lambda api: api.status().job(name)), lambda: run.said, seconds=PATIENCE)
            self.asked(lambda api: (api.stop(name, 0.0, by="the stage"),))
            until(lambda: self.asked(lambda api: api.status().job(name).over), seconds=PATIENCE)  # type: ignore[union-attr]
        finally:
            run.stop()

    def fail_in_restart_mode(self, name: str) -> None:
        """Runs a script in restart mode, on both devices of the first node, that writes a line and raises."""
        script = self.folder / f"{name}.py"
        script.write_text(
            "import os\nprint('written by', os.environ['LOCAL_RANK'])\nraise ValueError('planted')\n"
        )
        options = ("--job", name, "--mode", "restart", "--devices", str(DEVICES))
        socket = ("--socket", self.socket(self.nodes[0]))
        run = Torchrun(self.folder, "run", *options, *socket, str(script), program="elasticd")

        def failed() -> bool:
            jobs = self.asked(lambda api: api.status().restarts)
            return any(job.job == name and job.phase == "failed" for job in jobs)

        try:
            until(failed, lambda: run.said, seconds=PATIENCE)
        finally:
            run.stop()

    # -- what the leader says ----------------------------------------------------------------------------------

    def reached(self, ask: Callable[[ApiClient], T]) -> T | None:
        """What the leader answers, None while nobody leads."""
        try:
            leader = read_leader(self._store, self.keys.leader)
            if leader is None:
                return None
            with ApiClient(leader.value, self._known) as api:
                return ask(api)
        except (CannotReach, StoreError):
            return None

    def asked(self, ask: Callable[[ApiClient], T]) -> T:
        """What the leader answers, as soon as there is one."""
        found: list[T] = []

        def answered() -> bool:
            answer = self.reached(lambda api: (ask(api),))
            found.extend(answer or ())
            return answer is not None

        until(answered, lambda: self.said(f"c{self._starts}")[-2000:], seconds=PATIENCE)
        return found[0]

    def job(self) -> JobStatus | None:
        """The job, as the leader has it."""
        return self.reached(lambda api: api.status().job(JOB))

    def chaos(self, do: Callable[[Chaos], None]) -> None:
        """Harms the cluster."""
        self.asked(lambda api: do(Chaos(api)))


def _end(process: Forked) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
