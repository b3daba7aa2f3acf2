"""The example in which all comes together: a vision-language model with experts, in processes.

Its encoder is on three devices beside a language model of two unlike pipelines, with TP groups of unequal
shares and unequal numbers of experts, some of them twice, and ZeRO 1 with two replicas. A device becomes slow,
one is killed, one joins, and a checkpoint is resumed on fewer devices. Losses and weights are those of plain
torch in one process.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box

from elasticd.checkpoints.folder import damages, scan
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.accelerators import vgpu
from tests.integration import train_example
from tests.integration.cluster import Cluster
from tests.integration.test_modules_live import ledger_of, said, weights_of
from tests.integration.test_moe_example import wait
from tests.integration.test_stop_request import stop
from tests.models.mixture import Margins

SCRIPT = Path(train_example.__file__)
#: How near one process losses and weights are.
NEAR = 1e-10
BATCH = 6
NODES = {"a": 4, "b": 3, "c": 1}
DEVICES = [f"{node}/{index}" for node, count in NODES.items() for index in range(count)]
SMALL = ["--dtype=float64", f"--batch={BATCH}", "--snapshot-every=2"]
SETTINGS = JobSettings(retry_seconds=0.5)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(train_example.EXAMPLES))
    return importlib.import_module("all_in_one")


@pytest.mark.full  # its plan trains in tests/models/test_all_in_one.py, and jobs of modules die in others
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu", "vgpu"])
def test_it_trains_as_one_process_whatever_happens(device: str, example: Any, tmp_path: Path) -> None:
    if device == "vgpu":
        vgpu.needed()
    more = [f"--checkpoints={tmp_path / 'checkpoints'}"]
    options = {"example": "all_in_one", "double": True, "vgpu": device == "vgpu"}
    with Cluster(NODES, settings=SETTINGS) as cluster:
        arguments = [*SMALL, *more, "--devices", *DEVICES]
        cluster.run(SCRIPT, **options, arguments=arguments)
        cluster.runs(1, steps=4)
        assert "given by the job" in cluster.events("proposed")[0]["text"]
        cluster.pace("a/1", 2.0)
        cluster.runs(1, steps=12)
        for device in ("b/1", "c/0"):  # one with experts, and one that only encodes
            before = len(cluster.events("recorded"))
            dead = cluster.workers.pop(device)
            dead.kill()
            wait(cluster, lambda: len(cluster.events("recorded")) > before)  # noqa: B023
            assert dead.wait(30) == -signal.SIGKILL
        cluster.rejoin("c")
        cluster.start_worker("c/0", SCRIPT, {**options, "arguments": arguments})
        wait(cluster, lambda: "c/0" in cluster.job()["plan"]["binding"])
        cluster.runs(cluster.job()["plan"]["number"], steps=3)
        stop(cluster)
        until(lambda: cluster.job()["phase"] == "stopped", lambda: said(cluster))
        cluster.wait(120)
        first = ledger_of(cluster.folder)
    (last, *_) = scan(tmp_path / "checkpoints")
    assert damages(last.path) == ()
    steps = max(50, last.step + 6)
    with Cluster({"a": 3, "b": 2}, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, **options, arguments=[*SMALL, *more], steps=steps)
        codes = cluster.wait(240)
        assert set(codes.values()) == {0}, {name: cluster.log(name)[-3000:] for name in codes}
        losses, weights = in_one_process(example, steps)
        lines = {line["step"]: line["loss"] for line in (*first, *ledger_of(cluster.folder))}
        assert [lines[step] for step in range(steps)] == pytest.approx(losses, abs=NEAR)
        compare_weights(example, cluster.folder, weights)


@pytest.mark.full
@pytest.mark.slow
def test_the_planner_cuts_its_packed_samples_beside_the_encoder(example: Any) -> None:
    steps = 14
    with Cluster({"a": 2, "b": 2}, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, example="all_in_one", double=True, arguments=[*SMALL, "--pack"], steps=steps)
        codes = cluster.wait(240)
        assert set(codes.values()) == {0}, {name: cluster.log(name)[-3000:] for name in codes}
        assert "2 lanes" in cluster.events("proposed")[0]["text"]
        losses, weights = in_one_process(example, steps)
        lines = {line["step"]: line["loss"] for line in ledger_of(cluster.folder)}
        assert [lines[step] for step in range(steps)] == pytest.approx(losses, abs=NEAR)
        compare_weights(example, cluster.folder, weights)


def in_one_process(example: Any, steps: int, batch: int = BATCH) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: the whole model, sample by sample. Losses, and weights by their names in the model."""
    margins = Margins()
    with margins:
        model = example.make_model(torch.float64)
        data, losses = example.Pictures(), []
        update = example.optimizer(model.parameters())
        sampler = Sampler(size=len(data), global_batch=batch, seed=0)
        for step in range(steps):
            losses.append(_step(model, update, [data.encoded(index) for index in sampler.samples(step)]))
    assert margins.least > 1e-9, "a router's choice hangs on the last digits"
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _step(model: Any, update: torch.optim.Optimizer, samples: Sequence[dict[str, torch.Tensor]]) -> float:
    update.zero_grad(set_to_none=True)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        given = {name: x for name, x in sample.items() if name != "labels"}
        given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).long()
        logits, targets = model(**given).logits[0, :-1], sample["labels"][0, 1:]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        count += int((targets != -100).sum())
    (total / count).backward()
    update.step()
    return float(total.detach()) / count


def compare_weights(example: Any, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The parts of all ranks are those of one process."""
    import elasticd
    from elasticd.models.huggingface import their_name

    described = elasticd.from_hf(example.make_model(torch.float64), experts="experts")
    seen: set[str] = set()
    for named, (low, high, value) in weights_of(folder):
        name = named.partition("[")[0]
        module, rest = described.graph.named(name)
        whole = weights[their_name(described, name)].reshape(module.parameter(rest).shape)
        part = whole[Box(start=low, stop=high).slices(Box.whole(whole.shape))]
        assert float((value - part).abs().max()) < NEAR, named
        seen.add(name)
    assert {their_name(described, name) for name in seen} == set(weights)
