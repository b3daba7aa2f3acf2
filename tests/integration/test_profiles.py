"""A real job whose first plan is made from what was measured of its model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from elasticd_planner.problem_files.profile_file import given_profile
from elasticd_planner.problem_files.times import entry_of
from elasticd_planner.profiling.sample_profile import measured_profile

from elasticd.models import Decoder
from elasticd.records import JobSpec, Keys, decode
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.data.loader import sample_tokens
from elasticd.runtime.profiling.loading import batch_of
from elasticd.runtime.profiling.measure import measure
from elasticd.store.memory import MemoryStore
from elasticd.wire.profiler import Request
from tests.integration.cluster import JOB, Cluster
from tests.integration.train import BATCH, CONFIG, MICRO, Text

SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.slow
def test_the_first_plan_of_a_job_counts_with_what_was_measured() -> None:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    request = Request(target="-", widths=(1,), tokens=(8, 1024), sample_tokens=8, repeats=3, threads=1)
    made = measure(model, request, CPU, batch_of(torch, "", model), None, lambda part: None)
    text = msgspec.json.encode({"model": entry_of(measured_profile(made).profile)})
    expected = given_profile(text, model.spec, sample_tokens(Text()), MICRO)
    with Cluster({"a": 1, "b": 1}) as cluster:
        path = cluster.folder / "profile.json"
        path.write_bytes(text)
        cluster.run(SCRIPT, steps=5, job={"parallelism": {"profile": str(path)}})
        assert cluster.wait() == {"a/0": 0, "b/0": 0}, cluster.log("a/0")[-2000:]
        stored = MemoryStore(cluster.server).get(Keys(cluster="test").job(JOB, "spec"))
        assert stored is not None
        assert decode(stored.value, JobSpec).profile == expected
        prediction = cluster.job()["plan"]["prediction"]
        block = expected.block.fixed_seconds + expected.tokens * expected.block.seconds
        blocks = BATCH // MICRO * model.layers * block
        # Two devices cannot do it in less than half of that; what is guessed from FLOPs is far below.
        assert prediction["step_seconds"] > blocks / 2
