"""A job whose blocks are compiled, one by one or those of a chunk together, switches to other widths, and stays
exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elasticd_planner.spec.plan import Plan

from tests import sizes
from tests.integration import train
from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_switch import SETTINGS, check_exactness, plan_of, stage

#: TP 2, then unequal shares; the other device of the second stage stays alone.
PLANS = {
    "": plan_of((3, [stage(0, 2, ("a/0", 1), ("a/1", 1)), stage(2, 3, ("b/0", 1))])),
    "a/1": plan_of((3, [stage(0, 1, ("a/0", 6), ("a/1", 2)), stage(1, 3, ("b/0", 1))])),
}


def graphs(cluster: Cluster, plan: int) -> dict[str, list[int]]:
    """By device: how many graphs it had made at each step under a plan."""
    return {
        path.name: json.loads(path.read_text()).get(str(plan), []) for path in cluster.folder.glob("graphs-*")
    }


@pytest.mark.full  # tests/runtime/test_compiled_blocks.py has the parts
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("compile", [True, "chunks"])
@pytest.mark.parametrize("backend", sizes.beside(["aot_eager"], ["aot_eager", "inductor"]))
def test_other_widths_are_compiled_once_and_training_stays_that_of_one_process(
    backend: str, compile: bool | str
) -> None:
    plans: dict[str, Plan] = PLANS
    with Cluster({"a": 2, "b": 1}, plans=plans, settings=SETTINGS) as cluster:
        cluster.run(Path(train.__file__), job={"parallelism": {"compile": compile}}, graphs=backend)
        cluster.runs(1, steps=12, seconds=400)
        cluster.pace("a/1", SLOW)
        cluster.runs(2, steps=6, seconds=400)
        steps = cluster.finish()
        codes = cluster.wait(300)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        check_exactness(cluster, steps, plans=2)
        first, second = graphs(cluster, 1), graphs(cluster, 2)
        assert not [device for device in codes if "without torch.compile" in cluster.log(device)]
        for device, made in second.items():
            assert made[0] == made[-1], f"{device} compiled after its first step: {made}"
            # b/0 has the width of before; with "chunks" its two blocks are one graph more.
            assert (made[0] > first[device][-1]) == ("a:" in device or compile == "chunks"), device
