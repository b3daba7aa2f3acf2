"""The cluster's values and what they refuse."""

import msgspec
import pytest
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node, check_rates
from elasticd_planner.value import Invalid

from tests.planner.models import cluster


def test_devices_are_found_by_name_and_linked_by_node() -> None:
    two = cluster(2, 1)
    assert [device.name for device in two.devices] == ["n0/0", "n0/1", "n1/0"]
    assert two.device("n1/0").node == "n1"
    assert two.reach(("n0/0", "n0/1")) is two.inside
    assert two.reach(("n0/0", "n1/0")) is two.between
    assert Link(bandwidth=100, latency=1).seconds(50) == 1.5


def test_a_node_name_may_have_slashes() -> None:
    assert Device(name="rack/7/3", memory=1).node == "rack/7"


@pytest.mark.parametrize("name", ["n0", "n0/x", "/0", "n0/", ""])
def test_a_device_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="not of the form 'node/index'"):
        Device(name=name, memory=1)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(Invalid, match="memory must be a positive number"):
        Device(name="n0/0", memory=0)
    with pytest.raises(Invalid, match="bandwidth must be positive"):
        Link(bandwidth=0)
    with pytest.raises(Invalid, match="n1/0 is listed under node 'n0'"):
        Node(name="n0", devices=(Device(name="n1/0", memory=1),))
    node = Node(name="n0", devices=(Device(name="n0/0", memory=1),))
    with pytest.raises(Invalid, match="n0/0 is listed twice"):
        Cluster(nodes=(node, node))
    with pytest.raises(Invalid, match="'n7/0' is not in the cluster"):
        cluster(1).device("n7/0")
    with pytest.raises(Invalid, match="'n7/0' is not a device"):
        check_rates({"n7/0": 2.0}, cluster(1))
    with pytest.raises(Invalid, match=r"n0/0 has rate 0\.01"):
        check_rates({"n0/0": 0.01}, cluster(1))


def test_a_cluster_without_a_device_keeps_the_links_of_its_nodes() -> None:
    own, rack = Link(bandwidth=1e11), Level(name="rack", link=Link(bandwidth=1e10), groups=(("n0", "n1"),))
    nodes = tuple(msgspec.structs.replace(node, inside=own) for node in cluster(2, 1).nodes)
    whole = msgspec.structs.replace(cluster(2, 1), nodes=nodes, levels=(rack,))
    left = whole.without(["n1/0"], {"n0/0": 3})
    assert left is not None
    assert left.nodes[0].inside == own
    assert left.levels[0].groups == (("n0",),)
    assert left.memory["n0/0"] == whole.memory["n0/0"] - 3
    assert left.memory["n0/1"] == whole.memory["n0/1"]
    assert whole.without([], whole.memory) is None


def test_a_cluster_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(cluster(2, 3)), type=Cluster) == cluster(2, 3)
