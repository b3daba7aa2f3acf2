"""A real job on emulated devices whose data gets other lengths: it switches where it must, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elasticd_planner.detection.settings import DetectSettings

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration import train_shifting
from tests.integration.cluster import Cluster

SCRIPT = Path(train_shifting.__file__)
#: Bytes of a device: two replicas fit with windows of 512 tokens, with 2,048 only half of the model does.
MEMORY = 16_500_000
FORWARD = 1e-4
#: A busy machine may well make a device twice as slow as the other; four times the tokens would make it four.
SETTINGS = JobSettings(detect=DetectSettings(slow=3.0))
#: Steps from which on samples have 512 tokens, 2,048, and 256 as before.
FIRST, SECOND, BACK = 30, 45, 62


class Shifting:
    """The job, and its plans by what they are: how many pipelines of how many stages."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def plan(self) -> dict[str, Any]:
        return dict(self.cluster.job().get("plan") or {})

    def shape(self) -> list[int]:
        """Stages of each pipeline."""
        return [len(pipeline["stages"]) for pipeline in self.plan()["strategies"][0]["modules"][0]["pipelines"]]

    def step(self) -> int:
        return int(self.cluster.job().get("step") or 0)

    def told(self, kind: str, times: int) -> None:
        until(lambda: len(self.cluster.events(kind)) >= times, self.events, seconds=300)

    def becomes(self, shape: list[int]) -> dict[str, Any]:
        def there() -> bool:
            for device, worker in self.cluster.workers.items():
                assert worker.poll() in (None, 0), f"{device}: {self.cluster.log(device)[-3000:]}"
            return bool(self.plan()) and self.shape() == shape

        until(there, self.events, seconds=300)
        return self.plan()

    def events(self) -> str:
        return str([event["text"] for event in self.cluster.events()])


@pytest.mark.slow
def test_a_job_switches_when_its_data_shifts_and_back_and_never_for_a_shift_that_pays_nothing() -> None:
    with Cluster({"a": 1, "b": 1}, settings=SETTINGS, forward=FORWARD, memory=MEMORY) as cluster:
        cluster.run(SCRIPT, shifts=[(FIRST, SECOND, 512), (SECOND, BACK, 2048)])
        job = Shifting(cluster)
        job.becomes([1, 1])
        job.told("fitted", 1)
        assert job.step() < FIRST
        kept = len(cluster.events("kept_plan"))

        job.told("shifted", 1)
        until(lambda: len(cluster.events("kept_plan")) > kept, job.events, seconds=300)
        assert job.shape() == [1, 1]
        proposed = len(cluster.events("proposed"))
        assert job.step() < SECOND

        longer = job.becomes([2])
        job.told("shifted", 2)
        assert max(longer["prediction"]["memory"].values()) <= MEMORY
        assert len(cluster.events("proposed")) == proposed + 1
        assert job.step() < BACK

        job.becomes([1, 1])
        job.told("shifted", 3)
        at = [event["data"]["step"] for event in cluster.events("shifted")]
        assert FIRST <= at[0] < SECOND <= at[1] < BACK <= at[2]
        assert not cluster.events("slow"), "a shift is nobody's slowness"
