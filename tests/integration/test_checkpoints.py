"""A job that was killed whole goes on from its checkpoint, on other devices, and trains as if undisturbed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import TokenBatchSampler
from elasticd_planner.spec.box import Box

from elasticd.checkpoints.folder import damages, scan
from elasticd.testing.waiting import until
from tests import forkserver
from tests.forkserver import Forked
from tests.integration import train
from tests.integration.cluster import JOB, ROOT, Cluster
from tests.integration.test_switch import plan_of, stage

SCRIPT = Path(train.__file__)
#: A group of unequal shares beside a device by itself; later one group of other shares on two devices.
TWO_PIPELINES = {
    "": plan_of(
        (2, [stage(0, 3, ("a/0", 5), ("a/1", 3))]),
        (1, [stage(0, 3, ("b/0", 1))]),
    )
}
ONE_GROUP = {"": plan_of((3, [stage(0, 3, ("a/0", 3), ("a/1", 1))]))}


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"checkpointing": {"folder": str(folder), "every": 4, "keep": 2, **changes}}


def ledger(cluster: Cluster) -> list[dict[str, Any]]:
    lines = [
        json.loads(line) for path in cluster.folder.glob("ledger-*") for line in path.read_text().splitlines()
    ]
    return sorted(lines, key=lambda line: line["step"])


def killed(cluster: Cluster, folder: Path, steps: int, script: Path = SCRIPT) -> int:
    """Lets a job make checkpoints, ends all its workers at once; the step of the newest checkpoint."""
    cluster.run(script, steps=100_000, job=options(folder))
    until(
        lambda: any(item.step >= steps for item in scan(folder)),
        lambda: [event["text"] for event in cluster.events()] + [cluster.log(d) for d in cluster.workers],
    )
    for worker in cluster.workers.values():
        os.kill(worker.pid, signal.SIGKILL)
    cluster.wait()
    return scan(folder)[0].step


@pytest.mark.slow
def test_a_job_makes_a_checkpoint_when_asked_and_a_last_one_when_told_to_go(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    job = options(folder, every=1_000_000)
    with Cluster({"a": 2, "b": 1}, plans=TWO_PIPELINES) as cluster:
        cluster.run(SCRIPT, steps=100_000, job=job)
        cluster.runs(1, steps=5)
        cluster.checkpoint()
        until(lambda: cluster.events("checkpoint"), lambda: f"{cluster.events()} {cluster.log('a/0')}")
        until(lambda: scan(folder), lambda: cluster.log("a/0"))
        for worker in cluster.workers.values():
            worker.send_signal(signal.SIGTERM)
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}
        made = ledger(cluster)[-1]["step"] + 1
        until(lambda: cluster.job()["phase"] == "stopped", lambda: str(cluster.events()))
        told = re.search(r"all workers drain \(SIGTERM\), after (\d+) steps", cluster.job()["reason"])
        assert told, cluster.job()["reason"]
    last, asked = scan(folder)
    assert damages(asked.path) == ()
    assert 5 <= asked.step < last.step
    assert int(told[1]) >= last.step, "the leader has heard of the step that was saved"
    assert damages(last.path) == ()
    assert 0 <= made - last.step <= 5, "what was trained while the leader's word was on its way"
    steps = last.step + 6
    losses, _ = train.reference(steps)
    with Cluster({"a": 2}, plans=ONE_GROUP) as cluster:
        cluster.run(SCRIPT, steps=steps, job=job)
        codes = cluster.wait()
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        lines = ledger(cluster)
        assert [line["step"] for line in lines] == list(range(last.step, steps))
        assert [line["loss"] for line in lines] == pytest.approx(losses[last.step :], abs=1e-10)


@pytest.mark.slow
def test_a_job_killed_whole_goes_on_under_another_layout_as_if_undisturbed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster({"a": 2, "b": 1}, plans=TWO_PIPELINES) as cluster:
        step = killed(cluster, folder, 9)
        told = [event["data"]["name"] for event in cluster.events("checkpoint")]
        assert scan(folder)[0].name in told, "what has its name was published"
    for item in scan(folder):
        assert damages(item.path) == ()
    steps = step + 11
    losses, weights = train.reference(steps)
    with Cluster({"a": 2}, plans=ONE_GROUP) as cluster:
        cluster.run(SCRIPT, steps=steps, job=options(folder))
        codes = cluster.wait()
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        lines = ledger(cluster)
        assert [line["step"] for line in lines] == list(range(step, steps))
        assert [line["loss"] for line in lines] == pytest.approx(losses[step:], abs=1e-10)
        starts = [event["data"]["checkpoint"] for event in cluster.events("swapped")]
        assert starts
        assert all(name.startswith(f"step-{step:08d}.") for name in starts)
    newest = scan(folder)[0]
    assert newest.step == steps, "the last step is saved"
    assert damages(newest.path) == ()
    found = newest.manifest
    assert found is not None
    from elasticd_planner.layout.layouts import Item

    from elasticd.checkpoints.reader import CheckpointReader, Wanted

    for name, value in weights.items():
        into = torch.empty(value.shape, dtype=value.dtype)
        flat = into.reshape(-1).view(torch.uint8).numpy()
        CheckpointReader(newest.path, found).read(
            [Wanted(Item(name, "value"), "value", Box.whole(value.shape), flat)]
        )
        assert float((into - value).abs().max()) < 1e-10, name
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=steps, job=options(folder))
        assert set(cluster.wait().values()) == {0}
        assert ledger(cluster) == [], "nothing is left to train"
        assert cluster.events("finished")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster({"a": 2}) as cluster:
        killed(cluster, folder, 12)
    newest, before = scan(folder)[:2]
    file = next(path for path in sorted(newest.path.glob("__0_*.distcp")))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with Cluster({"a": 1, "b": 1}) as cluster:
        cluster.run(SCRIPT, steps=before.step + 3, job=options(folder))
        codes = cluster.wait()
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        assert [line["step"] for line in ledger(cluster)] == list(range(before.step, before.step + 3))
        logs = "".join(cluster.log(device) for device in cluster.workers)
        assert str(file) in logs, "the damaged file is named"
    for item in scan(folder):
        (item.path / ".metadata").unlink()
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=5, job=options(folder))
        assert cluster.wait() == {"a/0": 1}
        last = cluster.log("a/0").strip().splitlines()[-1]
        assert last.startswith("elasticd: all ")
        assert ".metadata" in last


@pytest.mark.slow
def test_what_all_ranks_find_damaged_only_by_reading_it_stops_the_job_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=5, job=options(folder))
        assert cluster.wait() == {"a/0": 0}
    for item in scan(folder):
        file = item.path / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with Cluster({"a": 2}) as cluster:
        cluster.run(SCRIPT, steps=9, job=options(folder))
        codes = cluster.wait()
        assert set(codes.values()) == {1}
        for device in codes:
            last = cluster.log(device).strip().splitlines()[-1]
            assert "none of the checkpoints" in last
            assert "__0_0.distcp" in last
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=9, job=options(folder), global_batch=12)
        assert cluster.wait() == {"a/0": 1}
        assert "its global_batch is 6, not 12" in cluster.log("a/0")


@pytest.mark.slow
def test_steps_of_so_many_tokens_go_on_from_a_checkpoint_and_no_others_do(tmp_path: Path) -> None:
    """Each step has the samples that it would have had, and the planner chooses the plan of the packed job."""
    folder = tmp_path / "checkpoints"

    def job(global_tokens: int) -> dict[str, Any]:
        data = {"packing": {"tokens": 16, "least": 1}, "global_tokens": global_tokens}
        return {**options(folder), "data": data}

    for devices, steps in (({"a": 1}, 5), ({"a": 2, "b": 1}, 9)):
        with Cluster(devices) as cluster:
            cluster.run(SCRIPT, steps=steps, job=job(45))
            codes = cluster.wait()
            assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
            lines = ledger(cluster)
            sampler, plain = TokenBatchSampler(train.Known.lengths, 45, train.SEED), train.Plain()
            assert [line["step"] for line in lines] == list(range(0 if steps == 5 else 5, steps))
            drawn = [sampler.samples(step) for step in range(steps)]
            losses = [plain.step(samples) for samples in drawn]
            assert [sorted(line["samples"]) for line in lines] == [
                sorted(drawn[line["step"]]) for line in lines
            ]
            assert [line["loss"] for line in lines] == pytest.approx(
                [losses[line["step"]] for line in lines], abs=1e-10
            )
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=12, job=job(50))
        assert cluster.wait() == {"a/0": 1}
        assert "its global_tokens is 45, not 50" in cluster.log("a/0")


@pytest.mark.slow
def test_a_single_step_from_a_checkpoint_on_is_saved_and_none_is_not_saved_again(tmp_path: Path) -> None:
    folder, found = tmp_path / "checkpoints", []
    for steps in (5, 6, 6):
        with Cluster({"a": 1}) as cluster:
            cluster.run(SCRIPT, steps=steps, job=options(folder))
            assert cluster.wait() == {"a/0": 0}
        found.append([item.step for item in scan(folder)])
    assert found == [[5, 4], [6, 5], [6, 5]]


def torchrun(cluster: Cluster, workers: int, **options: Any) -> Forked:
    """The real torchrun of node a."""
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT),
        ELASTICD_SOCKET=cluster.socket("a"),
        OPTIONS=json.dumps({"out": str(cluster.folder), **options}),
    )
    command = ("--nnodes=1", f"--nproc-per-node={workers}", "--rdzv-backend=elasticd", f"--rdzv-id={JOB}")
    log = cluster.folder / "torchrun.log"
    return forkserver.start("torch.distributed.run", *command, str(SCRIPT), environment=environment, output=log)


@pytest.mark.full  # test_run_any_script stops a job of `elasticd run`, which goes on from its checkpoint
@pytest.mark.slow
def test_under_real_torchruns_too(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster({"a": 2}) as cluster:
        until(lambda: Path(cluster.socket("a")).exists())
        process = torchrun(cluster, 2, steps=100_000, job=options(folder))
        try:
            log = cluster.folder / "torchrun.log"
            until(lambda: any(item.step >= 8 for item in scan(folder)), log.read_text)
        finally:
            process.kill()  # its workers end with it
            process.wait()
        step = scan(folder)[0].step
    steps = step + 5
    with Cluster({"a": 1}) as cluster:
        until(lambda: Path(cluster.socket("a")).exists())
        process = torchrun(cluster, 1, steps=steps, job=options(folder))
        try:
            assert process.wait(240) == 0, (cluster.folder / "torchrun.log").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
        lines = ledger(cluster)
    losses, _ = train.reference(steps)
    assert [line["step"] for line in lines] == list(range(step, steps))
    assert [line["loss"] for line in lines] == pytest.approx(losses[step:], abs=1e-10)
