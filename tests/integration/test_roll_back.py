"""A step that would harm the weights has the job go back, and leave out what led to it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler

from elasticd.machines.job.state.job_state import JobSettings
from tests.integration import rolls_back, train
from tests.integration.cluster import Cluster
from tests.integration.test_switch import plan_of, stage
from tests.scripts.corpus import ordinary as o

SETTINGS = JobSettings(retry_seconds=0.5)
PLANS = {"": plan_of((2, [stage(0, 2, ("a/0", 1))]), (1, [stage(0, 2, ("b/0", 1))]))}
#: The step whose batch has the sample with a loss that is not finite.
HARMFUL = 10


def batches() -> list[list[int]]:
    sampler = Sampler(size=64, global_batch=train.BATCH, seed=o.SEED)
    return [list(sampler.samples(step)) for step in range(rolls_back.STEPS)]


def reference(bad: int, back_to: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of plain torch, without the updates from the snapshot up to the harmful step."""
    gpt, loss = o.made(), rolls_back.loss_of(bad)
    optimizer, losses = rolls_back.optimizer_of(gpt.named_parameters()), []
    for step, indices in enumerate(batches()):
        batch = torch.utils.data.default_collate([o.Text()[index] for index in indices])
        total, count = loss(gpt(batch), batch)
        losses.append(float(total / count))
        if not back_to <= step <= HARMFUL:
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
    return losses, copy.deepcopy(gpt.state_dict())


def steps_of(folder: Path, node: str) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"steps-{node}").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "nothing to go back to"])
def test_a_job_goes_back_to_its_newest_snapshot_and_leaves_out_the_steps_up_to_the_harmful_one(
    snapshots: bool,
) -> None:
    bad = batches()[HARMFUL][1]
    with Cluster({"a": 1, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(Path(rolls_back.__file__), bad=bad, snapshots=snapshots)
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, cluster.log("a/0")[-3000:]
        assert cluster.job()["phase"] == "done"
        (fenced,) = cluster.events("fenced")
        assert f"step {HARMFUL} would have harmed the weights: its loss is not finite" in fenced["text"]
        lines = steps_of(cluster.folder, "a")
        assert repr(steps_of(cluster.folder, "b")) == repr(lines), "the same on both"
        again = next(i for i in range(1, len(lines)) if lines[i][0] <= lines[i - 1][0] or i == HARMFUL + 1)
        back_to = lines[again][0]
        if snapshots:
            assert back_to in (HARMFUL - 2, HARMFUL - 6), "the newest whole one"
        else:
            assert back_to == HARMFUL + 1, "the job goes on from the state that it has"
        left_out = [step for step, _, applied, _ in lines[again:] if not applied]
        assert left_out == list(range(back_to, HARMFUL + 1))
        losses, weights = reference(bad, min(back_to, HARMFUL))
        survived = {step: loss for step, loss, _, _ in lines}
        assert [survived[step] for step in range(rolls_back.STEPS)] == pytest.approx(
            losses, abs=1e-12, nan_ok=True
        )
        assert math.isnan(survived[HARMFUL])
        found = torch.load(cluster.folder / "weights")
        assert max(float((found[name] - value).abs().max()) for name, value in weights.items()) < 1e-12
