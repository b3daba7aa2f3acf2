"""A real job on emulated devices reads its data in other lengths: it switches where it must, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elasticd_planner.detection.settings import DetectSettings

from elasticd.chaos.client import Chaos
from elasticd.client import Api, CannotReach
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration import train, train_shifting
from tests.integration.cluster import JOB, Cluster

SCRIPT = Path(train_shifting.__file__)
#: Bytes of a device: two replicas fit with windows of 512 tokens, with 2,048 only half of the model does.
MEMORY = 9_200_000
FORWARD = 1e-4
#: A busy machine may well make a device twice as slow as the other; four times the tokens would make it four.
SETTINGS = JobSettings(detect=DetectSettings(slow=3.0))


class Shifting:
    """The job, and its plans by what they are: how many pipelines of how many stages."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def plan(self) -> dict[str, Any]:
        return dict(self.cluster.job().get("plan") or {})

    def shape(self) -> list[int]:
        """Stages of each pipeline."""
        return [len(pipeline["stages"]) for pipeline in self.plan()["strategies"][0]["modules"][0]["pipelines"]]

    def shift(self, tokens: int) -> None:
        with Api(self.cluster.coordinator.url) as api:
            Chaos(api).shift(JOB, tokens)

    def told(self, kind: str, times: int) -> None:
        until(lambda: len(self.cluster.events(kind)) >= times, self.events, seconds=300)

    def becomes(self, shape: list[int], sequence: int) -> dict[str, Any]:
        def there() -> bool:
            for device, worker in self.cluster.workers.items():
                assert worker.poll() in (None, 0), f"{device}: {self.cluster.log(device)[-3000:]}"
            return bool(self.plan()) and (self.shape(), self.plan()["sequence"]) == (shape, sequence)

        until(there, self.events, seconds=300)
        return self.plan()

    def events(self) -> str:
        return str([event["text"] for event in self.cluster.events()])


@pytest.mark.slow
def test_a_job_switches_when_its_data_shifts_and_back_and_never_for_a_shift_that_pays_nothing() -> None:
    with Cluster({"a": 1, "b": 1}, settings=SETTINGS, forward=FORWARD, memory=MEMORY) as cluster:
        cluster.run(SCRIPT, steps=100_000)
        job = Shifting(cluster)
        job.becomes([1, 1], 0)
        job.told("fitted", 1)

        kept = len(cluster.events("kept_plan"))
        job.shift(512)
        job.becomes([1, 1], 512)
        job.told("shifted", 1)
        until(lambda: len(cluster.events("kept_plan")) > kept, job.events, seconds=300)
        assert job.shape() == [1, 1]
        proposed = len(cluster.events("proposed"))

        job.shift(2048)
        longer = job.becomes([2], 2048)
        job.told("shifted", 2)
        assert max(longer["prediction"]["memory"].values()) <= MEMORY
        assert len(cluster.events("proposed")) == proposed + 2, "the order, and the answer to it"

        job.shift(0)
        job.becomes([1, 1], 0)
        job.told("shifted", 3)
        assert not cluster.events("slow"), "a shift is nobody's slowness"


@pytest.mark.slow
def test_the_data_of_a_job_whose_dataset_has_one_length_alone_cannot_be_changed() -> None:
    with Cluster({"a": 1, "b": 1}) as cluster, Api(cluster.coordinator.url) as api:
        cluster.run(Path(train.__file__), steps=100_000)
        cluster.runs(1, steps=1)
        with pytest.raises(CannotReach, match=r"no at_length\(tokens\)"):
            Chaos(api).shift(JOB, 512)
        with pytest.raises(CannotReach, match="no job 'other'; there are: job"):
            Chaos(api).shift("other", 512)
        with pytest.raises(CannotReach, match="must be the length of a sequence"):
            api.shift(JOB, -1)
