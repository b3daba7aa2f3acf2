"""The example of a mixture of experts in processes: the leader places its experts by their load, anew where a
device becomes slow, and the one device that has some of them dies. Losses, balances and weights are those of
one process."""

from __future__ import annotations

import importlib
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.expert_load import held_in
from elasticd_planner.spec.plan import Plan, Stage

from elasticd import Balance
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train_example
from tests.integration.cluster import Cluster
from tests.integration.test_modules_live import ledger_of, said, weights_of
from tests.models.layouts import BATCH, SEED, Training
from tests.models.mixture import EXPERTS, Margins
from tests.models.test_balance import one_process

SCRIPT = Path(train_example.__file__)
#: How near one process losses, weights and balances are.
NEAR = 1e-10
SMALL = ["--dtype=float64", f"--batch={BATCH}", f"--seed={SEED}", "--tokens=24", "--snapshot-every=2"]
#: Devices of each node, and arguments: a TP group of three; and two of two, each a pipeline.
CASES = {
    "one group": ({"a": 3}, [f"--micro-batch={BATCH}"]),
    "two pipelines": ({"a": 2, "b": 2}, [f"--micro-batch={BATCH // 2}"]),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sizes.beside(["one group"], CASES))
def test_the_leader_places_experts_by_load_and_a_device_that_alone_has_some_dies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, more = CASES[name]
    with Cluster(nodes, settings=JobSettings(retry_seconds=0.5), forward=2e-4, flops=1e6) as cluster:
        cluster.run(SCRIPT, example="train_moe", arguments=[*SMALL, *more])
        wait(cluster, lambda: places(plan_in(cluster)))
        first = plan_in(cluster)
        slow = next(stage for stage in stages(first) if stage.experts).devices[-1]
        cluster.pace(slow, 3.0)
        wait(cluster, lambda: slow in {event["data"]["device"] for event in cluster.events("slow")})
        wait(cluster, lambda: plan_in(cluster).number > first.number)
        victim = lone_holder(plan_in(cluster))
        before = len(cluster.events("recorded"))
        cluster.workers[victim].kill()
        until(lambda: len(cluster.events("recorded")) > before, lambda: said(cluster))
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes.pop(victim) == -signal.SIGKILL
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        assert len({line["plan"] for line in ledger_of(cluster.folder)}) >= 3
        monkeypatch.syspath_prepend(str(train_example.EXAMPLES))
        compare(cluster, steps, importlib.import_module("train_moe"), [*SMALL, *more], victim)


def wait(cluster: Cluster, there: Callable[[], bool]) -> None:
    """Waits until it is true of a job that has a plan, and has not ended."""

    def look() -> bool:
        job = cluster.job()
        assert job.get("phase") not in ("done", "stopped"), said(cluster)
        return bool(job.get("plan")) and there()

    until(look, lambda: said(cluster))


def plan_in(cluster: Cluster) -> Plan:
    """The plan in force."""
    return msgspec.convert(cluster.job()["plan"], Plan)


def stages(plan: Plan) -> list[Stage]:
    """The stages of all its pipelines."""
    return [stage for pipeline in plan.pipelines for stage in pipeline.stages]


def places(plan: Plan) -> bool:
    """The plan places experts by their load."""
    return any(stage.experts for stage in stages(plan))


def lone_holder(plan: Plan) -> str:
    """A device that alone has an expert of a block in its pipeline."""
    for stage in stages(plan):
        held = held_in(stage, stage.start, EXPERTS)
        copies = Counter(expert for own in held for expert in own)
        for device, own in zip(stage.devices, held, strict=True):
            if any(copies[expert] == 1 for expert in own):
                return device
    raise AssertionError("no expert has one copy alone")


def compare(cluster: Cluster, steps: int, example: ModuleType, arguments: list[str], victim: str) -> None:
    """Losses, balances and weights are those of plain torch."""
    options: Any = example.parser().parse_args(arguments)
    whole = example.make_model(options)
    blocks = [(block.router, block.experts, None) for block in whole.blocks]
    data = example.Windows(options.tokens)
    training = Training(model=example.describe(whole), loss=example.loss, dataset=data, steps=steps)
    margins = Margins()
    with margins:
        balance = example.balance(options) or Balance(loss=1e-300)
        (losses, weights), balances, _ = one_process(training, whole, balance, blocks, example.optimizer)
    assert margins.least > 1e-9, "a router's choice hangs on the last digits"
    lines = {line["step"]: line for line in ledger_of(cluster.folder)}
    assert sorted(lines) == list(range(steps))
    assert [lines[step]["loss"] for step in range(steps)] == pytest.approx(losses, abs=NEAR)
    assert [lines[step]["balance"] for step in range(steps)] == pytest.approx(balances, abs=NEAR)
    seen = set()
    for named, (start, stop, value) in weights_of(cluster.folder, but=victim.replace("/", ":")):
        name = named.partition("[")[0]
        whole_value = weights[name].reshape(training.model.parameter(name).shape)
        expected = whole_value[Box(start=start, stop=stop).slices(Box.whole(whole_value.shape))]
        assert float((value.reshape(expected.shape) - expected).abs().max()) < NEAR, named
        seen.add(name)
    assert seen == set(weights)
