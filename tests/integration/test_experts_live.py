"""A job of placed experts in processes: experts move while it trains, and the one device that has some of them
is killed. Losses, weights, biases and balances are those of one process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import HeldExperts, Stage

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.models import next_token_loss
from tests.integration import train_experts
from tests.integration.cluster import Cluster
from tests.integration.test_modules_live import die_and_finish, ledger_of, weights_of
from tests.integration.train import optimizer
from tests.integration.train_experts import BALANCE, BATCH, LAYERS, whole
from tests.models.layouts import Training, plan_of
from tests.models.mixture import VOCABULARY
from tests.models.test_balance import one_process
from tests.models.texts import Text
from tests.runtime.test_engine_parity import stage

#: How near one process losses, weights and balances are.
NEAR = 1e-10


def placed(of: Stage, held: HeldExperts) -> Stage:
    return msgspec.structs.replace(of, experts=(held,) * LAYERS)


LANES = stage(0, LAYERS, ("a/0", 2), ("a/1", 1), ("b/0", 1), lanes=(2, 1))
#: By the slow or dead device. Experts 3, 4 and 7 are on b/0 alone.
PLANS = {
    "": plan_of(((3, 1), [placed(LANES, ((0, 1, 5), (2, 6), (3, 4, 7)))])),
    "a/0": plan_of(((3, 1), [placed(LANES, ((0,), (1, 2, 5, 6), (3, 4, 7)))])),
    "without b/0": plan_of(
        (BATCH, [placed(stage(0, LAYERS, ("a/0", 1), ("a/1", 1)), ((0, 1, 2, 4, 6), (3, 5, 6, 7)))])
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_move_while_a_job_trains_and_the_one_device_that_has_some_dies() -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=JobSettings(retry_seconds=0.5)) as cluster:
        cluster.run(Path(train_experts.__file__), job={"checkpointing": {"snapshot_every": 2}})
        cluster.runs(1, steps=6)
        cluster.slow("a/0")
        cluster.runs(2, steps=6)
        steps = die_and_finish(cluster)
        alone = whole()
        blocks = [(block.router, block.experts, block.shift) for block in alone.blocks]
        training = Training(
            model=whole().describe(),
            loss=next_token_loss,
            dataset=Text(VOCABULARY),
            steps=steps,
            batch=BATCH,
        )
        (losses, weights), balances, _ = one_process(training, alone, BALANCE, blocks, optimizer)
        lines = {line["step"]: line for line in ledger_of(cluster.folder)}
        assert sorted(lines) == list(range(steps))
        assert [lines[step]["loss"] for step in range(steps)] == pytest.approx(losses, abs=NEAR)
        assert [lines[step]["balance"] for step in range(steps)] == pytest.approx(balances, abs=NEAR)
        assert len({line["plan"] for line in lines.values()}) == 3
        seen = set()
        for named, (start, stop, value) in weights_of(cluster.folder, but="b:0"):
            name = named.partition("[")[0]
            expected = weights[name][Box(start=start, stop=stop).slices(Box.whole(weights[name].shape))]
            assert float((value - expected).abs().max()) < NEAR, named
            seen.add(name)
        assert seen == set(weights)
