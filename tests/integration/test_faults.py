"""Faults in a real job: workers die at any moment, the others go on, and training stays that of one process."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.spec.batch import Sampler

from elasticd.checkpoints.folder import scan
from elasticd.client import ApiClient
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_switch import check_exactness, plan_of, stage

SCRIPT = Path(train.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)

#: A frame of the script's `fail`, as `faulthandler` writes it ("in fail"), or py-spy where that is installed.
IN_FAIL = re.compile(r"\bin fail\b|\bfail \(")

#: b/0 holds a whole replica, the two others one together.
PLANS = {
    "": plan_of((2, [stage(0, 3, ("a/0", 1), ("a/1", 1))]), (1, [stage(0, 3, ("b/0", 1))])),
    "a/1": plan_of((2, [stage(0, 3, ("a/0", 6), ("a/1", 2))]), (1, [stage(0, 3, ("b/0", 1))])),
    "without b/0": plan_of((3, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("a/1", 1))])),
}
#: Two whole replicas; the one that is left has nobody to make a group with.
PAIR = {
    "": plan_of((2, [stage(0, 3, ("a/0", 1))]), (1, [stage(0, 3, ("b/0", 1))])),
    "without b/0": plan_of((3, [stage(0, 3, ("a/0", 1))])),
    "without a/0": plan_of((3, [stage(0, 3, ("b/0", 1))])),
}


def gone_on(cluster: Cluster, plans: int = 2) -> None:
    """The survivors finish, each step was made once under so many plans, and the numbers are those of one
    process."""
    steps = cluster.finish()
    codes = cluster.wait(120)
    assert codes.pop("b/0") == -signal.SIGKILL
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
    check_exactness(cluster, steps, plans=plans)
    numbers = [event["data"]["number"] for event in cluster.events("recorded")]
    assert numbers == sorted(set(numbers)), "numbers only grow"


@pytest.mark.full  # the one below it, whose lanes all wait for each other
@pytest.mark.slow
def test_a_worker_killed_in_the_midst_of_training_costs_one_device() -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=5)
        pids = {device: worker.pid for device, worker in cluster.workers.items()}
        cluster.workers["b/0"].kill()
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        assert {member["pid"] for member in cluster.job()["members"]} == {pids["a/0"], pids["a/1"]}
        gone_on(cluster)


#: Three lanes, and two.
LANES = {
    "": plan_of(((1, 1, 1), [stage(0, 3, ("a/0", 1), ("a/1", 1), ("b/0", 1), lanes=(1, 1, 1))])),
    "without b/0": plan_of(((2, 1), [stage(0, 3, ("a/0", 1), ("a/1", 1), lanes=(1, 1))])),
}


@pytest.mark.slow
def test_a_worker_killed_while_sequences_are_cut_over_it_costs_one_device() -> None:
    """No lane holds a whole sequence, so that all lanes of a row wait for each other in every block."""
    with Cluster({"a": 2, "b": 1}, plans=LANES, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, job={"data": {"packing": {"tokens": 6, "least": 1}}})
        cluster.runs(1, steps=5)
        cluster.workers["b/0"].kill()
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        gone_on(cluster)


@pytest.mark.full  # after an exception in the body of the loop one of two goes on alone, too
@pytest.mark.slow
def test_the_last_survivor_goes_on_alone() -> None:
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=5)
        cluster.workers["b/0"].kill()
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        gone_on(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    sizes.beside(["moving"], ["preparing", "voting", "moving", "acking", "swapping"]),
)
def test_a_worker_killed_at_any_moment_of_a_switch_costs_one_device(moment: str) -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, **{"b/0": {"die_at": moment}})
        cluster.runs(1, steps=12)
        cluster.slow("a/1")
        until(
            lambda: cluster.events("fenced") and cluster.job()["phase"] in ("running", "done"),
            lambda: str([event["text"] for event in cluster.events()]),
        )
        gone_on(cluster)


def sample_of(step: int) -> int:
    """The last sample of a step, which the pipeline of b/0 has under `PAIR`."""
    return Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED).samples(step)[-1]


@pytest.mark.full  # the one below begins likewise
@pytest.mark.slow
def test_an_exception_on_one_device_costs_it_and_nothing_else() -> None:
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, fail=("raise", sample_of(5), "b.sock"))
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes == {"a/0": 0, "b/0": 1}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=2)
        (told,) = cluster.events("raised")
        assert f"ValueError: sample {sample_of(5)} is bad" in told["text"]
        assert "in loss" in told["data"]["traceback"]
        assert "ValueError" in cluster.log("b/0")


@pytest.mark.slow
def test_an_exception_in_the_body_of_the_loop_costs_its_device_and_nothing_else() -> None:
    """The interpreter drops what the loop runs over before anybody hears of the exception."""
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, fail_after=5)
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes == {"a/0": 0, "b/0": 1}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=2)
        (told,) = cluster.events("raised")
        assert "ValueError: the body of the loop is bad" in told["text"]


@pytest.mark.slow
@pytest.mark.parametrize("where", sizes.beside(["body"], ["raise", "body"]))
def test_an_exception_that_comes_again_on_another_device_ends_the_job_with_its_state_saved(
    where: str, tmp_path: Path
) -> None:
    """The sample goes with the step: b/0 meets it in its loss, then a/0, which holds all that is left. In the
    body of the loop, after the step, both meet it at once."""
    made = 6 if where == "body" else 5
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS) as cluster:
        job = {"checkpointing": {"folder": str(tmp_path / "kept")}}
        cluster.run(SCRIPT, fail=(where, sample_of(5), ""), job=job)
        codes = cluster.wait(120)
        assert codes == {"a/0": 1, "b/0": 1}, {device: cluster.log(device)[-3000:] for device in codes}
        job = cluster.job()
        assert job["phase"] == "stopped"
        assert f"ValueError: sample {sample_of(5)} is bad" in job["reason"]
        first, last = ("a/0", "b/0") if job["exception"]["device"] == "b/0" else ("b/0", "a/0")
        again = f"(in step 5, on {last}), as on {first} before; the state is saved"
        assert again in job["reason"]
        assert last == "a/0" or where == "body"
        assert ("in main" if where == "body" else "in loss") in job["exception"]["traceback"]
        assert [found.step for found in scan(tmp_path / "kept")] == [made]
        assert "ValueError" in cluster.log("a/0"), "and the script ends with its own exception"


@pytest.mark.slow
@pytest.mark.parametrize("how", sizes.beside(["lock"], ["lock", "sleep"]))
def test_a_main_thread_that_hangs_in_the_loss_costs_one_device(how: str) -> None:
    """With "lock" no other thread of the worker runs either, so that it answers nobody."""
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, fail=(how, sample_of(12), "b.sock"))
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        (told,) = cluster.events("halted")
        assert "worker b/0 stands still in the loss of step 12 for " in told["text"]
        assert ", while a/0 (in " in told["text"]
        assert IN_FAIL.search(told["data"]["stack"])
        fenced = cluster.events("fenced")[0]
        assert fenced["data"]["gone"] == ["b/0"]
        cluster.workers["b/0"].kill()
        gone_on(cluster)


@pytest.mark.full  # tests/agent/test_main_thread_watch.py has it without processes
@pytest.mark.slow
@pytest.mark.parametrize("how", ["lock", "sleep"])
def test_a_hang_in_a_jobs_first_step_is_named_and_costs_a_device_at_the_configured_limit_alone(
    how: str,
) -> None:
    """It might be a first compilation. Silence does not count either, which with "lock" is 5 s elsewhere."""
    limited = JobSettings(retry_seconds=0.5, detect=DetectSettings(outside_seconds=15.0))
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=limited) as cluster:
        cluster.run(SCRIPT, fail=(how, sample_of(0), "b.sock"))
        until(lambda: "waits for" in cluster.job()["reason"], lambda: str(cluster.events()))
        said = cluster.job()["reason"]
        assert said.startswith("waits for worker b/0, which is in the loss (in its plan's first steps) for 1")
        assert not cluster.events("fenced")
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        (told,) = cluster.events("halted")
        assert IN_FAIL.search(told["data"]["stack"])
        assert cluster.events("fenced")[0]["data"]["gone"] == ["b/0"]
        cluster.workers["b/0"].kill()
        gone_on(cluster, plans=1)  # none was made under the first one


@pytest.mark.full  # test_mixed_releases starts both agents of a job anew, and no worker
@pytest.mark.slow
def test_an_agent_that_is_started_again_gets_its_workers_back() -> None:
    patient = JobSettings(
        retry_seconds=0.5, node_seconds=3.0
    )  # a step that a busy machine holds up is no fault
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=patient) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=12)
        before = cluster.job()["members"]
        cluster.restart_agent("a")
        until(lambda: cluster.events("agent_restarted"), lambda: str(cluster.events()))
        cluster.slow("a/1")
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        after = cluster.job()["members"]
        assert [(m["device"], m["incarnation"]) for m in after] == [
            (m["device"], m["incarnation"]) for m in before
        ]
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        assert not cluster.events("fenced")
        check_exactness(cluster, steps, plans=2)


@pytest.mark.slow
def test_an_agent_that_is_started_again_before_the_first_plan_gets_its_workers_back() -> None:
    cluster = Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS)
    let = cluster.folder / "let"  # the planner answers once this is there
    waiting = f'until [ -e "{let}" ]; do sleep 0.05; done; exec "$@"'
    cluster._planner = ("/bin/sh", "-c", waiting, "planner", *cluster._planner)
    with cluster:
        cluster.run(SCRIPT)
        until(lambda: cluster.job().get("phase") == "planning", lambda: str(cluster.events()))
        before = [(member["device"], member["pid"]) for member in cluster.job()["members"]]
        cluster.restart_agent("a")
        until(lambda: cluster.events("agent_restarted"), lambda: str(cluster.events()))
        let.touch()
        cluster.runs(1, steps=5)
        assert [(member["device"], member["pid"]) for member in cluster.job()["members"]] == before
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=1)


@pytest.mark.slow
def test_a_frozen_worker_is_left_behind_and_joins_again_when_it_thaws() -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=5)
        frozen = cluster.workers["b/0"]
        frozen.send_signal(signal.SIGSTOP)
        try:
            until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
            fence = cluster.events("fenced")[-1]
            assert fence["data"]["gone"] == ["b/0"]
            assert "worker b/0 is frozen: it is stopped" in fence["text"]
        finally:
            frozen.send_signal(signal.SIGCONT)
        until(
            lambda: any(event["data"].get("device") == "b/0" for event in cluster.events("joined")),
            lambda: str(cluster.events()),
        )
        assert frozen.poll() is None, "it stands by, in the same process"


@pytest.mark.slow
def test_a_drained_node_is_left_in_the_midst_of_training() -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=5)
        with ApiClient(cluster.coordinator.url) as api:
            api.drain("b", on=True)
            until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
            node = next(node for node in api.status().nodes if node.node == "b")
            assert (node.draining, node.members) == (True, 0)
        assert not cluster.events("fenced")
        steps = cluster.finish()
        assert set(cluster.wait(120).values()) == {0}
        check_exactness(cluster, steps, plans=2)
