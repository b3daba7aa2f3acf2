"""A real torchrun over real agents: ranks, clean ends, and what stands in its way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.config.tree import AgentSection, ClusterSection, Config
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.testing.waiting import until
from elasticd.wire.coordinator import WorkerLost
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.worker import Goodbye, Hello
from tests.agent.support import CLUSTER, Leader, RunningAgent, closing_all
from tests.torchruns import UNSET, Torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys
from tests import forkserver
from tests.agent.support import Trainer, spec
from elasticd.wire.worker import Goodbye, Hello
job = os.environ["TORCHELASTIC_RUN_ID"]
trainer = Trainer(sys.argv[1])
rank = os.environ.get("ELASTICD_SLOT") or os.environ["LOCAL_RANK"]
hello = Hello(job=job, local_rank=int(rank), world_size=int(os.environ["WORLD_SIZE"]), pid=os.getpid(),
              spec=spec(job))
trainer.say(hello)
welcome = trainer.hear()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
with open(os.path.join(sys.argv[2], f"{os.getpid()}.json"), "w") as file:
    json.dump({"device": getattr(welcome, "device", None), "pid": os.getpid(),
               "threads": os.environ.get("OMP_NUM_THREADS"), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
               **{name: int(os.environ[name]) for name in names}}, file)
if not hasattr(welcome, "device"):
    sys.exit(welcome.reason)
if "wait" in sys.argv:
    trainer.hear()
trainer.say(Goodbye())
"""


class Nodes:
    """Two agents, a leader, and torchruns on either node."""

    def __init__(self, register: Callable[[Any], Any], folder: Path, nodes: int) -> None:
        server = MemoryServer()
        self.folder, self.register = folder, register
        self.leader: Leader = register(Leader(MemoryStore(server), nodes=nodes)).lead()
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        (folder / "out").mkdir()
        for name in ("alpha", "beta"):
            agent = AgentSection(node=name, socket=self.path(name), devices=2, memory=1 << 20)
            config = Config(cluster=ClusterSection(name=CLUSTER), agent=agent)
            register(RunningAgent(config, MemoryStore(server)))

    def path(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    def torchrun(self, node: str, *extra: str, nnodes: int = 2, nproc: int = 2) -> Torchrun:
        torchrun = Torchrun(self.folder, *self.options(node, nnodes, nproc), *extra)
        self.register(torchrun)
        return torchrun

    def options(self, node: str, nnodes: int, nproc: int) -> tuple[str, ...]:
        """Of a torchrun, its script, and what the script is given."""
        return (
            "--rdzv-backend=elasticd",
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--rdzv-endpoint={self.path(node)}",
            "--rdzv-id=job",
            str(self.script),
            self.path(node),
            str(self.folder / "out"),
        )

    def workers(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in (self.folder / "out").iterdir()]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    with closing_all() as register:
        yield lambda nodes: Nodes(register, tmp_path, nodes)


def test_unequal_nodes_get_the_ranks_that_torch_gives_them_and_all_end_cleanly(
    cluster: Callable[[int], Nodes],
) -> None:
    nodes = cluster(2)
    runs = [nodes.torchrun("alpha"), nodes.torchrun("beta", nproc=1)]
    for run in runs:
        code, said = run.ended()
        assert code == 0, said
        assert "Traceback" not in said
    workers = sorted(nodes.workers(), key=lambda worker: int(worker["RANK"]))
    assert [worker["device"] for worker in workers] == ["alpha/0", "alpha/1", "beta/0"]
    assert [worker["RANK"] for worker in workers] == [0, 1, 2]
    assert {worker["WORLD_SIZE"] for worker in workers} == {3}
    assert [worker["GROUP_RANK"] for worker in workers] == [0, 0, 1]
    until(lambda: len([m for m in nodes.leader.heard if isinstance(m, WorkerLost) and m.clean]) == 3)
    assert len(nodes.leader.bodies(Hello)) == len(nodes.leader.bodies(Goodbye)) == 3
    until(lambda: len(nodes.leader.bodies(Leave)) == 2)
    assert not [worker for worker in workers if Path(f"/proc/{worker['pid']}").exists()]

    nodes.leader.over = "the job finished after 9 steps"
    code, said = nodes.torchrun("alpha").ended()
    assert code == 0, said
    assert "nothing to do: the job finished after 9 steps" in said
    assert "Traceback" not in said
    assert len(nodes.workers()) == 3


def test_workers_of_elasticd_run_have_a_thread_each_and_drive_the_devices_that_their_gpus_are(
    cluster: Callable[[int], Nodes],
) -> None:
    """GPU 1 is device 1 of the node, also where the job has it first: the agent reads health by that number."""
    nodes = cluster(2)
    options = ("run", "--job", "job", "--devices", "2", "--socket", nodes.path("alpha"))
    script = (str(nodes.script), nodes.path("alpha"), str(nodes.folder / "out"))
    chosen = {"OMP_NUM_THREADS": UNSET, "CUDA_VISIBLE_DEVICES": "1,0", "ELASTICD_DEVICE": UNSET}
    run = Torchrun(nodes.folder, *options, *script, program="elasticd", **chosen)
    nodes.register(run)
    code, said = run.ended()
    assert code == 0, said
    assert "each of the 2 workers computes with one thread" in said
    workers = sorted(nodes.workers(), key=lambda worker: str(worker["device"]))
    assert [worker["device"] for worker in workers] == ["alpha/0", "alpha/1"]
    assert [worker["gpus"] for worker in workers] == ["0", "1"]
    assert [worker["threads"] for worker in workers] == ["1", "1"]
    assert [(worker["LOCAL_RANK"], worker["LOCAL_WORLD_SIZE"]) for worker in workers] == [(0, 1), (0, 1)]
    assert sorted(worker["RANK"] for worker in workers) == [0, 1]


def test_one_torchrun_does_not_wait_for_another_to_end(cluster: Callable[[int], Nodes]) -> None:
    nodes = cluster(2)
    stays, goes = nodes.torchrun("alpha", "wait", nproc=1), nodes.torchrun("beta", nproc=1)
    code, said = goes.ended()
    assert code == 0, said
    assert stays.process.poll() is None
    stays.process.terminate()  # its worker waits for ever
    assert stays.ended()[0] != 0


def test_script_that_cannot_start_ends_torchrun_with_two_lines_of_ours_and_no_traceback(
    cluster: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIONS", '{"out": "/", "steps": 1, "global_batch": 7, "micro_batch": 2}')
    nodes = cluster(1)
    nodes.script = Path(__file__).resolve().parents[1] / "integration" / "train.py"
    code, said = nodes.torchrun("alpha", nnodes=1, nproc=1).ended()
    assert code == 1
    assert "Traceback" not in said
    ours = [line for line in said.splitlines() if line.startswith("elasticd: ")]
    assert "global_batch 7 does not divide into micro-batches of 2: choose a multiple of 2" in ours[0]
    assert ours[1:] == [
        "elasticd: a worker of this node ended with exit code 1: its own last line above says why"
    ]


def test_killed_torchrun_takes_its_leave_through_its_agent(cluster: Callable[[int], Nodes]) -> None:
    nodes = cluster(2)
    alone = nodes.torchrun("alpha")
    until(lambda: nodes.leader.bodies(Join))
    alone.process.kill()
    code, _ = alone.ended()
    assert code != 0
    until(lambda: nodes.leader.bodies(Leave))


def test_more_processes_than_devices_are_refused_with_the_number(cluster: Callable[[int], Nodes]) -> None:
    nodes = cluster(1)
    code, said = nodes.torchrun("alpha", nnodes=1, nproc=3).ended()
    assert code != 0
    assert "local rank 2 has no device: node 'alpha' has 2" in said
    assert "--nproc-per-node=2 at most" in said


def test_torchrun_without_an_agent_says_what_to_start_and_shows_no_traceback(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    node = ("--rdzv-backend=elasticd", f"--rdzv-endpoint={path}", "--rdzv-conf=agent_timeout=0.1")
    run = Torchrun(tmp_path, *node, "--nnodes=2", "--rdzv-id=job", "x.py")
    try:
        code, said = run.ended()
    finally:
        run.stop()
    assert code == 1
    assert (
        f"elasticd: no agent listens at {path}: start one ('elasticd up' on one machine, elasticd-agent on a "
        "node of a cluster), or set ELASTICD_SOCKET" in said
    )
    assert "Traceback" not in said
