"""A job of two modules goes on from a checkpoint alone, on fewer and on more devices, as if undisturbed.

The new cluster has an empty store. Each time both modules have another layout, optimizer states are sharded
otherwise, or the encoder is on devices of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from elasticd_planner.spec.plan import Plan

from elasticd.checkpoints.folder import damages, scan
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train_modules
from tests.integration.cluster import Cluster
from tests.integration.test_checkpoints import killed, ledger, options
from tests.integration.test_modules_live import by_hand, compare_weights
from tests.integration.test_stop_request import stop
from tests.runtime.image_model import pipeline, plan_of, stage

SCRIPT = Path(train_modules.__file__)

THREE = plan_of(
    [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))],
    [pipeline(3, stage(0, 5, ("a/1", 1))), pipeline(2, stage(0, 5, ("b/0", 1)))],
    zero=1,
)
#: On fewer devices a TP group of unequal shares has the encoder and a part of the language model.
FEWER = plan_of(
    [pipeline(1, stage(0, 2, ("a/0", 1), ("a/1", 3)))],
    [pipeline(5, stage(0, 2, ("a/1", 1)), stage(2, 5, ("a/0", 1)))],
    ahead=2,
)
#: On more the encoder is a pipeline of its own.
MORE = plan_of(
    [pipeline(1, stage(0, 1, ("c/0", 1)), stage(1, 2, ("d/0", 1)))],
    [pipeline(3, stage(0, 5, ("a/0", 1))), pipeline(2, stage(0, 5, ("b/0", 1)))],
    ahead=3,
    zero=2,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nodes", "plan"),
    sizes.beside(
        [({"a": 2}, FEWER)], [({"a": 2}, FEWER), (dict.fromkeys("abcd", 1), MORE), ({"a": 2, "b": 1}, THREE)]
    ),
)
def test_a_killed_job_goes_on_on_other_devices(tmp_path: Path, nodes: dict[str, int], plan: Plan) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster({"a": 2, "b": 1}, plans={"": THREE}) as cluster:
        step = killed(cluster, folder, 5, SCRIPT)
    assert all(damages(item.path) == () for item in scan(folder))
    goes_on(nodes, plan, folder, step)


@pytest.mark.full  # the test before it, of a job that is stopped
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_job_goes_on_on_more_devices(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster({"a": 2}, plans={"": FEWER}) as cluster:
        cluster.run(SCRIPT, job=options(folder, every=1000))
        cluster.runs(1, steps=5)
        stop(cluster)
        until(lambda: cluster.job()["phase"] == "stopped", lambda: str(cluster.events()))
        step = cluster.job()["step"]
        cluster.wait()
    assert scan(folder)[0].step == step
    goes_on(dict.fromkeys("abcd", 1), MORE, folder, step)


def goes_on(nodes: dict[str, int], plan: Plan, folder: Path, step: int) -> None:
    """A new job on these devices trains some steps from a checkpoint on, as one process does."""
    steps = step + 6
    losses, weights = by_hand(steps)
    with Cluster(nodes, plans={"": plan}) as cluster:
        cluster.run(SCRIPT, steps=steps, job=options(folder))
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        by_step = {line["step"]: line["loss"] for line in ledger(cluster)}
        assert sorted(by_step) == list(range(step, steps))
        assert [by_step[each] for each in sorted(by_step)] == pytest.approx(losses[step:], abs=1e-10)
        compare_weights(cluster.folder, weights, near=1e-10)
    assert scan(folder)[0].step == steps
