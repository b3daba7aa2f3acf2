"""A small soak of a loop of its own: faults of a fixed seed on four real processes (`make soak` draws more)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest
from elasticd_planner.policy.policy import PolicySettings

from elasticd.chaos.faults import Fault
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration.cluster import Cluster
from tests.integration.test_live import SCRIPT, check, members_of
from tests.soak.random_faults import Soaking, draw

#: It draws a freeze for longer than a silent rank is waited for, a slow device and two deaths, within 8 steps.
FIXED = 69
NODES = ("a", "b", "c", "d")
DEVICES = tuple(f"{node}/0" for node in NODES)
DRAWN = Soaking(
    count=4, first=4, least=2, most=4, freeze=1.5, weights={"kill": 3.0, "freeze": 2.0, "slow": 1.0}
)
#: Steps after the last fault.
REST = 12
#: A device that comes back is not to be damped.
SETTINGS = JobSettings(retry_seconds=0.5, policy=PolicySettings(horizon_steps=40))


class Faults:
    """Plays faults on a cluster, each once its step is made and two devices train. A process that ends before
    its script does is started again."""

    def __init__(self, cluster: Cluster, options: dict[str, object]) -> None:
        self._cluster, self._options = cluster, options
        self._frozen: dict[str, float] = {}

    def play(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            until(lambda at=fault.step: self._may_come(at), self._cluster.events, seconds=60.0)  # type: ignore[misc]
            self._strike(fault)
        until(self._is_over, self._cluster.events, seconds=60.0)

    def _may_come(self, step: int) -> bool:
        self._tend()
        job = self._cluster.job()
        return (job.get("step") or 0) >= step and members_of(self._cluster) > 1 and not self._frozen

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._cluster.workers[fault.device].kill()
            case "freeze":
                os.kill(self._cluster.workers[fault.device].pid, signal.SIGSTOP)
                self._frozen[fault.device] = time.monotonic() + fault.lasts
            case _:
                self._cluster.pace(fault.device, fault.factor)

    def _is_over(self) -> bool:
        """All processes came to the end of the script, one that ended before it was started again."""
        self._tend()
        return all(worker.poll() == 0 for worker in self._cluster.workers.values())

    def _tend(self) -> None:
        for device, until_when in list(self._frozen.items()):
            if time.monotonic() > until_when:
                os.kill(self._cluster.workers[device].pid, signal.SIGCONT)
                del self._frozen[device]
        for device, worker in self._cluster.workers.items():
            if worker.poll() not in (None, 0):
                self._cluster.rejoin(device.partition("/")[0])
                self._cluster.start_worker(device, SCRIPT, self._options)


@pytest.mark.slow
def test_a_sharded_job_goes_on_through_faults_of_a_fixed_seed() -> None:
    """Each sample counts once, and losses, weights and moments are those of one process."""
    script = [*draw(DRAWN, DEVICES, FIXED)]
    steps = (script[-1].step or 0) + REST
    with Cluster(dict.fromkeys(NODES, 1), settings=SETTINGS, forward=2e-3) as cluster:
        options: dict[str, object] = {"kind": "fsdp", "steps": steps}
        cluster.run(SCRIPT, **options)
        Faults(cluster, options).play(script)
        check(cluster, "fsdp", steps)
        assert cluster.events("fenced")
