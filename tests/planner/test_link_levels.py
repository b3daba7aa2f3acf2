"""Any number of link levels: which link devices talk over, what a plan makes of it, and what is refused."""

import json
import math
from itertools import product

import msgspec
import pytest
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem
from elasticd_planner.problem_files.convert import problem_of
from elasticd_planner.problem_files.file_format import load
from elasticd_planner.search.planner import plan as planned
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node
from elasticd_planner.value import Invalid

from tests.planner.jobs import profile
from tests.planner.test_timed import EXAMPLE

NVLINK, PCIE, RACK, POD, NETWORK = (
    Link(bandwidth=bandwidth, latency=latency)
    for bandwidth, latency in ((2e11, 1e-6), (5e10, 2e-6), (2.5e10, 5e-6), (1.25e10, 1e-5), (5e9, 2e-5))
)


def racks(nodes: int, devices: int, *, island: int = 0, levels: tuple[Level, ...] | None = None) -> Cluster:
    """Nodes n0, n1, ... of which those with even numbers are one rack, those with odd numbers another."""
    made = tuple(
        Node(
            name=f"n{n}",
            devices=tuple(Device(name=f"n{n}/{i}", memory=1 << 40) for i in range(devices)),
            island=island,
        )
        for n in range(nodes)
    )
    groups = tuple(tuple(f"n{n}" for n in range(first, nodes, 2)) for first in (0, 1))
    rack = Level(name="rack", link=RACK, groups=groups)
    return Cluster(
        nodes=made,
        within=NVLINK if island else None,
        inside=PCIE,
        between=NETWORK,
        levels=(rack,) if levels is None else levels,
    )


def test_devices_talk_over_the_link_of_the_nearest_level_that_joins_them() -> None:
    rack = Level(name="rack", link=RACK, groups=(("n0", "n1"), ("n2", "n3")))
    pod = Level(name="pod", link=POD, groups=(("n0", "n1", "n2", "n3"), ("n4", "n5")))
    here = racks(7, 4, island=2, levels=(rack, pod))
    for devices, link in (
        (("n0/0", "n0/1"), NVLINK),
        (("n0/1", "n0/2"), PCIE),
        (("n0/0", "n1/3"), RACK),
        (("n0/0", "n1/3", "n2/0"), POD),
        (("n4/0", "n5/0"), POD),
        (("n0/0", "n4/0"), NETWORK),
        (("n6/0", "n4/0"), NETWORK),
        (("n6/0", "n6/1"), NVLINK),
    ):
        assert here.reach(devices) == link, devices
    assert {*here.links} == {NVLINK, PCIE, RACK, POD, NETWORK}
    assert msgspec.json.decode(msgspec.json.encode(here), type=Cluster) == here
    # What an older release wrote has no levels.
    plain = msgspec.structs.replace(here, levels=())
    older = msgspec.to_builtins(plain)
    del older["levels"]
    assert msgspec.convert(older, type=Cluster) == plain
    assert plain.reach(("n0/0", "n1/3")) == NETWORK


def test_two_devices_meet_at_the_first_group_that_both_are_in() -> None:
    here = racks(4, 4, island=2)
    for a, b in product([device.name for device in here.devices], repeat=2):
        if a == b:
            continue
        way = zip(here.places(a), here.places(b), strict=True)
        level = next((level for level, (one, other) in enumerate(way) if one == other), 4)
        assert here.exit(a, level - 1) == here.exit(b, level - 1) == here.reach((a, b))


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ([("node", [["n0"]])], ["level 'node'", "none of island, node, network"]),
        ([("", [["n0"]])], ["level ''"]),
        ([("rack", [["n0", "n1"], ["n1"]])], ["rack", "n1 is named twice"]),
        ([("rack", [["n0"], []])], ["rack", "group without nodes"]),
        ([("rack", [["n0"]]), ("rack", [["n0"]])], ["two are called 'rack'"]),
        ([("rack", [["n0", "n1"]]), ("pod", [["n0"], ["n1"]])], ["n0, n1", "rack", "pod", "nearest"]),
        ([("rack", [["n0", "n1"]]), ("pod", [["n0"]])], ["n0, n1", "rack", "pod", "nearest"]),
    ],
)
def test_levels_that_are_no_hierarchy_are_refused(
    levels: list[tuple[str, list[list[str]]]], words: list[str]
) -> None:
    with pytest.raises(Invalid) as caught:
        Cluster(
            nodes=(),
            levels=tuple(
                Level(name=name, link=RACK, groups=tuple(map(tuple, groups))) for name, groups in levels
            ),
        )
    assert [word for word in words if word not in str(caught.value)] == []


def test_levels_are_read_from_a_problem_file_and_what_is_wrong_is_named() -> None:
    raw = json.loads(EXAMPLE.read_text())
    names = [node["name"] for node in raw["cluster"]["nodes"]]
    raw["cluster"]["levels"] = [{"name": "rack", "gb_per_s": 20, "latency_us": 9, "nodes": [names[:2]]}]
    problem = problem_of(load(json.dumps(raw)))
    assert problem.cluster.reach([f"{names[0]}/0", f"{names[1]}/0"]) == Link(bandwidth=20e9, latency=9e-6)
    assert problem.cluster.reach([f"{names[0]}/0", f"{names[2]}/0"]) == problem.cluster.between

    def refused(**change: object) -> str:
        text = json.loads(json.dumps(raw))
        text["cluster"]["levels"][0].update(change)
        with pytest.raises(Invalid) as caught:
            load(json.dumps(text))
        return str(caught.value)

    assert "rack has 'zz', which is none of the nodes" in refused(nodes=[["zz"]])
    assert "gb_per_s" in refused(gb_per_s=0)
    assert "cluster.levels[0]" in refused(name="island")
    assert "racks" in refused(racks=3)
    units = json.loads(json.dumps(raw))
    del units["cluster"]["links"], units["model"]["times"]
    for key in ("state", "recompute", "units", "groups"):
        units["model"].pop(key, None)
    units["model"] |= {"tp_full": 1, "tp_slowdown": {"1": 1.0}}
    for node in units["cluster"]["nodes"]:
        node.pop("island", None)
        node.pop("links", None)
    with pytest.raises(Invalid, match=r"cluster\.levels goes with model\.times"):
        load(json.dumps(units))


@pytest.mark.parametrize("nodes", [4, 12])  # enumerated, and searched
def test_stages_of_a_pipeline_lie_in_one_rack_where_the_network_is_slow(nodes: int) -> None:
    # So large a boundary that none is worth the network, and memory for half a model on a node.
    model = profile(layers=8, boundary_bytes=1e7)
    memory = 1.3 * ProfileCost(model).memory(4, (1,), 0, first=True, last=False, in_flight=2)
    here = racks(nodes, 1)
    small = tuple(
        Node(name=node.name, devices=(Device(name=node.devices[0].name, memory=math.ceil(memory)),))
        for node in here.nodes
    )
    here = msgspec.structs.replace(here, nodes=small)
    problem = Problem(cluster=here, profile=model, global_batch=4 * nodes, micro_batch=1)
    made = planned(problem).plan
    assert made is not None
    assert len(made.pipelines) > 1
    for pipeline in made.pipelines:
        devices = [device for stage in pipeline.stages for device in stage.devices]
        assert len(devices) > 1
        assert here.reach(devices) == RACK
    far = planned(msgspec.structs.replace(problem, cluster=msgspec.structs.replace(here, levels=()))).plan
    assert far is not None
    assert made.prediction is not None
    assert far.prediction is not None
    assert made.prediction.step_seconds < far.prediction.step_seconds
