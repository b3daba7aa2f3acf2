"""A script's own loop on real processes: what it asks for between steps, its own batches, a torn sample."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler

from elasticd.checkpoints.folder import damages, scan
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration import train, train_loop
from tests.integration.cluster import ROOT, Cluster
from tests.integration.test_checkpoints import ledger as all_lines
from tests.integration.test_switch import check_exactness, plan_of, stage

SCRIPT = Path(train_loop.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)
#: a/2 stands by, and comes in by the recovery from b/0's death.
PLANS = {
    "": plan_of((2, [stage(0, 3, ("a/0", 1), ("a/1", 1))]), (1, [stage(0, 3, ("b/0", 1))]), idle=("a/2",)),
    "without b/0": plan_of((3, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("a/1", 1), ("a/2", 1))])),
}


def noted(cluster: Cluster, device: str) -> list[list[Any]]:
    path = cluster.folder / f"noted-{cluster.workers[device].pid}"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_evaluations_and_state_dicts_are_those_of_one_process_though_a_worker_dies_in_the_midst_of_one() -> (
    None
):
    steps = 20
    with Cluster({"a": 3, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        # Each evaluation reads its sample 4 there: the fourth is of the weights after ten steps.
        cluster.run(SCRIPT, steps=steps, **{"b/0": {"deadly": [4, 4]}})
        codes = cluster.wait(240)
        assert codes.pop("b/0") == -signal.SIGKILL
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=2)
        lines = {device: noted(cluster, device) for device in codes}
        expected = train_loop.reference(steps)
        every = sorted({(step, weights) for step, weights in expected})
        for device in ("a/0", "a/1"):
            told = [(step, weights, loss) for kind, step, weights, loss in _of(lines[device], "evaluation")]
            assert sorted((step, weights) for step, weights, _ in told) == every, "each once"
            assert [loss for *_, loss in told] == pytest.approx(
                [expected[step, weights] for step, weights, _ in told], abs=1e-10
            )
            assert [line[1] for line in _of(lines[device], "step")] == list(range(steps))
        joined = [step for _, step, *_ in _of(lines["a/2"], "evaluation")]
        assert joined == [15, 15, 20, 20], "it took part in the one that was under way, and was not told of it"
        assert [line[-1] for line in _of(lines["a/2"], "plan")] == [True]
        assert [line[3:] for line in _of(lines["a/0"], "plan")] == [[0, 0, True], [0, 0, False]]
        written = [line[1] for each in lines.values() for line in _of(each, "metrics") if "loss" in line[2]]
        assert sorted(written) == [4, 9, 14, 19], "by the first rank alone"
        assert all(each[-1] == ["end"] for each in lines.values())
        _, weights = train.reference(steps)
        whole = torch.load(cluster.folder / f"all-{steps}")
        for name, value in weights.items():
            assert float((whole[name] - value).abs().max()) < 1e-10, name
            assert whole[f"optimizer.state.{name}.exp_avg"].shape == value.shape
        mean = torch.load(cluster.folder / f"average-{steps}")
        assert set(mean) == {*weights, "head.output.weight"}, (
            "under the parameters' own names, a tied one's both"
        )
        assert any(float((mean[name] - value).abs().max()) > 1e-6 for name, value in weights.items())


def _of(lines: list[list[Any]], kind: str) -> list[list[Any]]:
    return [line for line in lines if line[0] == kind]


@pytest.mark.slow
def test_a_script_that_gives_its_own_batches_makes_each_step_once_though_a_worker_dies() -> None:
    steps = 30
    with Cluster({"a": 3, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, steps=steps, own=True)
        cluster.runs(1, steps=6)
        cluster.workers["b/0"].kill()
        codes = cluster.wait(240)
        assert codes.pop("b/0") == -signal.SIGKILL
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        lines = ledger(cluster)
        assert [line["step"] for line in lines] == list(range(steps)), "each step once"
        assert [tuple(line["samples"]) for line in lines] == [train_loop.samples(step) for step in range(steps)]


@pytest.mark.full  # the stream below it; tests/runtime/test_one_process.py names such a sample of a dataset
@pytest.mark.slow
def test_a_sample_that_cannot_be_read_is_named_by_all_and_the_state_before_it_is_saved(tmp_path: Path) -> None:
    folder, steps = tmp_path / "checkpoints", 15
    sampler = Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED)
    torn, job = sampler.samples(7)[4], {"checkpointing": {"folder": str(folder), "every": 100}}
    with Cluster({"a": 2}) as cluster:
        cluster.run(SCRIPT, steps=steps, torn=torn, job=job)
        codes = cluster.wait(240)
        assert codes == {"a/0": 1, "a/1": 1}
        last = [cluster.log(device).strip().splitlines()[-1] for device in codes]
        said = f"sample {torn} of the dataset could not be read"
        assert all(line.startswith("elasticd: ") and said in line for line in last), last
        assert said in cluster.job()["reason"]
        assert "the state is saved" in cluster.job()["reason"]
        assert "in __getitem__" in cluster.job()["exception"]["traceback"]
        assert any(re.search(r"OSError: the disk is gone \(.*, line \d+\)$", line) for line in last), last
        assert [line["step"] for line in ledger(cluster)] == list(range(7))
        until(lambda: scan(folder))
    saved = scan(folder)[0]
    assert (saved.step, damages(saved.path)) == (7, ())
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=steps, job=job)
        assert cluster.wait(240) == {"a/0": 0}, cluster.log("a/0")[-3000:]
        lines = ledger(cluster)
    losses, _ = train.reference(steps)
    assert [line["step"] for line in lines] == list(range(7, steps))
    assert [line["loss"] for line in lines] == pytest.approx(losses[7:], abs=1e-10)


@pytest.mark.slow
def test_a_stream_that_raises_ends_the_job_by_the_word_of_its_leader_and_the_state_is_saved(
    tmp_path: Path,
) -> None:
    torn, job = 7 * train.BATCH + 4, {"checkpointing": {"folder": str(tmp_path), "every": 100}}
    with Cluster({"a": 2}) as cluster:
        cluster.run(SCRIPT, steps=15, torn=torn, stream=True, job=job)
        assert cluster.wait(240) == {"a/0": 1, "a/1": 1}
        until(lambda: cluster.job()["phase"] == "stopped")
        reason = cluster.job()["reason"]
        assert f"sample {torn} of the dataset could not be read: OSError: the disk is gone" in reason
        assert "the state is saved" in reason
        assert "in __iter__" in cluster.job()["exception"]["traceback"]
    assert scan(tmp_path)[0].step == 7


@pytest.mark.slow
def test_a_device_that_can_read_nothing_is_left_and_the_others_go_on(tmp_path: Path) -> None:
    steps, job = 15, {"checkpointing": {"folder": str(tmp_path), "every": 100}}
    with Cluster({"a": 3, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, steps=steps, job=job, **{"b/0": {"left": 80}})
        codes = cluster.wait(240)
        assert codes.pop("b/0") == 1
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        (raised,) = cluster.events("raised")
        assert "NothingRead: sample" in raised["text"]
        check_exactness(cluster, steps, plans=2)
    assert scan(tmp_path)[0].step == steps


#: a/0 is the first rank, which reads.
WITH_READER = {
    "": plan_of((2, [stage(0, 3, ("a/0", 1))]), (1, [stage(0, 1, ("b/0", 1)), stage(1, 3, ("b/1", 1))])),
    "without a/0": plan_of((3, [stage(0, 3, ("b/0", 1), ("b/1", 1))])),
}


@pytest.mark.slow
def test_a_stream_is_trained_on_once_in_order_though_its_reader_dies_and_the_job_starts_anew(
    tmp_path: Path,
) -> None:
    folder, steps, more = tmp_path / "checkpoints", 24, 6
    job = {"checkpointing": {"folder": str(folder), "every": 5}}
    losses = train_loop.in_order(steps + more)
    with Cluster({"a": 1, "b": 2}, plans=WITH_READER, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, steps=steps, stream=True, job=job)
        cluster.runs(1, steps=6)
        reader = cluster.workers["a/0"]
        reader.kill()
        codes = cluster.wait(240)
        assert codes.pop("a/0") == -signal.SIGKILL
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        lines = ledger(cluster)
        assert [line["step"] for line in lines] == list(range(steps))
        assert [line["loss"] for line in lines] == pytest.approx(losses[:steps], abs=1e-10)
        assert [i for line in lines for i in line["samples"]] == list(range(steps * train.BATCH))
        first, second = (read(cluster, device) for device in ("a/0", "b/0"))
        assert first == list(range(len(first))), "no sample twice"
        assert second == list(range(second[0], second[0] + len(second)))
        assert len(first) - 3 * train.BATCH < second[0] <= len(first), (
            "no more than was under way is read again"
        )
        assert not (cluster.folder / f"read-{cluster.workers['b/1'].pid}").exists(), "one rank reads"
    with Cluster({"a": 1}) as cluster:
        cluster.run(SCRIPT, steps=steps + more, stream=True, job=job)
        assert cluster.wait(240) == {"a/0": 0}, cluster.log("a/0")[-3000:]
        lines = ledger(cluster)
        assert [line["step"] for line in lines] == list(range(steps, steps + more))
        assert [line["loss"] for line in lines] == pytest.approx(losses[steps:], abs=1e-10)
        assert read(cluster, "a/0")[0] == steps * train.BATCH


def ledger(cluster: Cluster) -> list[dict[str, Any]]:
    """Each step that anybody was given: all who were say the same of it."""
    found: dict[int, dict[str, Any]] = {}
    for line in all_lines(cluster):
        first = found.setdefault(line["step"], line)
        assert (first["loss"], first["samples"]) == (line["loss"], line["samples"])
    return list(found.values())


def read(cluster: Cluster, device: str) -> list[int]:
    path = cluster.folder / f"read-{cluster.workers[device].pid}"
    return [int(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_example_of_a_loop_evaluates_writes_for_tensorboard_and_leaves_the_weights(tmp_path: Path) -> None:
    example, logs = ROOT / "examples" / "own_loop.py", tmp_path / "logs"
    given = ["--steps", "4", "--every", "2", "--tokens", "16", "--held-out", "10", "--logs", str(logs)]
    script = tmp_path / "script.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(example.parent)!r})\n"
        f"sys.argv = {[str(example), *given]!r}\nrunpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    with Cluster({"a": 2}, forward=1e-5) as cluster:
        cluster.run(script)
        codes = cluster.wait(240)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        printed = "".join(cluster.log(device) for device in codes)
        assert "step 1: held-out loss" in printed
    assert list(logs.glob("events.out.tfevents.*"))
    weights = torch.load(logs / "weights.pt")
    assert weights["blocks.0.attention.qkv.weight"].isfinite().all()
