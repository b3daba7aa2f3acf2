"""Features of training scripts in a loop of `elasticd.live` that loses a device: the state of each is that of
one process of plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration import train_live, train_live_rich
from tests.integration.cluster import Cluster
from tests.integration.test_live import NODES, SETTINGS, check, codes_of, entries, full
from tests.integration.train_live_rich import reference

SCRIPT = Path(train_live_rich.__file__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "at"),
    [
        ("fsdp", "backward", 5),
        full("ddp", "backward", 5),
        full("hsdp", "backward", 4),
        full("ddp", "vote", 7),  # some updates are left out
        full("ddp", "update", 5),  # those of three optimizers are torn, and snapshots have the step before
        full("fsdp", "after the vote", 6),
    ],
)
def test_optimizers_schedulers_averages_scalers_and_small_shards_outlive_a_device(
    kind: str, moment: str, at: int
) -> None:
    steps = 10
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": [moment, at]})
        codes_of(cluster, "b/1")
        losses, state = reference(steps)
        totals = {row[0]: row[1] for rows in entries(cluster).values() for row in rows if row[1] == row[1]}
        assert totals == pytest.approx(dict(enumerate(losses)), abs=1e-13)
        outs = sorted(cluster.folder.glob("state-*"))
        assert len(outs) == 3
        for path in outs:
            own = torch.load(path)
            assert own.keys() == state.keys()
            for name, expected in state.items():
                exact = expected.dtype != torch.float64
                assert own[name].dtype == expected.dtype, name
                torch.testing.assert_close(
                    own[name], expected, atol=0 if exact else 1e-11, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert state["skipped"] == 2
        assert len(cluster.events("fenced")) == 1


@pytest.mark.full
@pytest.mark.slow
def test_a_later_start_on_other_devices_goes_on_from_a_checkpoint_beside_a_death(
    tmp_path: Path,
) -> None:
    """A rank dies in the first body that saves; its try that is made again saves all."""
    options = {"kind": "fsdp", "checkpoints": str(tmp_path)}
    script = Path(train_live.__file__)
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(script, **options, steps=6, dies={"b/1": ["backward", 4]})
        codes_of(cluster, "b/1")
        check(cluster, "fsdp", 6)
    with Cluster({"a": 1, "b": 1}, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(script, **options, steps=10)
        assert set(cluster.wait(120).values()) == {0}, cluster.log("a/0")
        assert min(row[0] for rows in entries(cluster).values() for row in rows) == 4
        assert cluster.events("swapped")[0]["data"]["step"] == 4
        check(cluster, "fsdp", 10, first=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "features", "apart"),
    [
        ("fsdp", {"compiled": "aot_eager", "recomputed": True, "mixed": True}, 1e-4),
        full("ddp", {"compiled": "aot_eager", "recomputed": True}, 1e-11),
        full("hsdp", {"compiled": "aot_eager"}, 1e-11),
        full("fsdp", {"compiled": "inductor"}, 1e-11),
        full("ddp", {"compiled": "inductor", "recomputed": True}, 1e-11),
        full("tp", {"recomputed": True}, 1e-11),
        full("hsdp", {"mixed": True}, 1e-4),
    ],
)
def test_compiled_and_recomputed_blocks_and_mixed_precision_outlive_a_device(
    kind: str, features: dict[str, object], apart: float
) -> None:
    """`build` compiles the blocks of each mesh again. The survivors repeat the step that was lost. Float32
    beside float64 differs by less than an update does."""
    steps, nodes = 6, {"a": 1, "b": 1, "c": 1}
    with Cluster(nodes if kind == "fsdp" else NODES, settings=SETTINGS, emulated=False) as cluster:
        victim = "c/0" if kind == "fsdp" else "b/1"
        cluster.run(
            Path(train_live.__file__), kind=kind, steps=steps, dies={victim: ["backward", 3]}, features=features
        )
        codes_of(cluster, victim)
        check(cluster, kind, steps, loss_apart=1e-13 if apart < 1e-10 else 1e-6, apart=apart)
        assert len(cluster.events("fenced")) == 1
