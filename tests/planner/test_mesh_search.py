"""The plan of a mesh: the best shares of samples, most devices, and devices that stay where they are."""

from __future__ import annotations

import math
from itertools import product

import msgspec
from elasticd_planner.problem import MeshProblem
from elasticd_planner.search.mesh import cost, plan_mesh, shared_samples
from elasticd_planner.search.planner import answer
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.mesh import AllowedMesh, MeshPlan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples

MESHES = "replicate, shard", "shard", "dp, tp=2", "ddp=*, fsdp=3"
LINK = Link(latency=1e-5, bandwidth=1e10)


def problem(
    devices: list[str],
    *meshes: str,
    batch: int = 24,
    rates: dict[str, float] | None = None,
    current: MeshPlan | None = None,
    sample_seconds: float = 0.01,
) -> MeshProblem:
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.split("/")[0], []).append(Device(name=device, memory=1 << 30))
    return MeshProblem(
        cluster=Cluster(
            nodes=tuple(Node(name=name, devices=tuple(held)) for name, held in nodes.items()),
            inside=LINK,
            between=LINK,
        ),
        meshes=tuple(map(AllowedMesh.from_text, meshes)),
        global_batch=batch,
        rates=rates or {},
        current=current,
        sample_seconds=sample_seconds,
    )


def names(count: int) -> list[str]:
    return [f"n{i}/0" for i in range(count)]


def planned(asked: MeshProblem) -> MeshPlan:
    plan = plan_mesh(asked, 7).plan
    assert plan is not None
    assert plan.number == 7
    return plan


@settings(max_examples=examples(150))
@given(
    costs=st.lists(st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 10.0]), min_size=1, max_size=4),
    more=st.integers(0, 8),
)
def test_no_other_shares_have_a_faster_slowest_lane(costs: list[float], more: int) -> None:
    samples = len(costs) + more
    shares = shared_samples(costs, samples)
    assert sum(shares) == samples
    assert min(shares) >= 1
    every = product(range(1, samples + 1), repeat=len(costs))
    best = min(max(n * c for n, c in zip(each, costs, strict=True)) for each in every if sum(each) == samples)
    assert max(n * c for n, c in zip(shares, costs, strict=True)) == best


@settings(max_examples=examples(150))
@given(
    count=st.integers(1, 9),
    meshes=st.sets(
        st.sampled_from(["replicate, shard", "shard", "dp, tp=2", "replicate=*, shard=3"]), min_size=1
    ),
    batch=st.integers(1, 30),
    slow=st.dictionaries(st.integers(0, 8), st.sampled_from([1.2, 3.0, 60.0]), max_size=2),
)
def test_a_plan_fills_an_allowed_mesh_and_all_its_samples(
    count: int, meshes: set[str], batch: int, slow: dict[int, float]
) -> None:
    rates = {f"n{i}/0": rate for i, rate in slow.items() if i < count}
    asked = problem(names(count), *sorted(meshes), batch=batch, rates=rates)
    told = plan_mesh(asked)
    allowed = {mesh.names: mesh for mesh in asked.meshes}
    least = [(mesh.sizes or (1,) * len(mesh.names), mesh.names) for mesh in asked.meshes]
    fills = any(
        math.prod(size or 1 for size in sizes) <= count
        and math.prod(size or 1 for size, name in zip(sizes, dims, strict=True) if name != "tp") <= batch
        for sizes, dims in least
    )
    assert (told.plan is not None) == fills
    if told.plan is None:
        return
    plan = told.plan
    sizes = allowed[plan.names].sizes or (0,) * len(plan.shape)
    assert all(size in (0, extent) for size, extent in zip(sizes, plan.shape, strict=True))
    assert sorted((*plan.members, *plan.idle)) == names(count)
    assert plan.global_batch == batch
    assert plan.prediction is not None
    assert plan.prediction.bound_seconds <= plan.prediction.step_seconds + 1e-9


def test_hsdp_has_two_replicas_and_shards_as_many_as_there_are() -> None:
    assert planned(problem(names(4), "replicate, shard", "shard")).shape == (2, 2)
    assert planned(problem(names(6), "replicate, shard", "shard")).shape == (2, 3)
    three = planned(problem(names(3), "replicate, shard", "shard"))
    assert (three.names, three.shape) == (("shard",), (3,))
    assert planned(problem(names(3), "replicate, shard")).shape == (1, 3)


def test_shards_lie_inside_nodes_of_several_devices() -> None:
    devices = [f"n{i}/{j}" for i in range(3) for j in range(2)]
    plan = planned(problem(devices, "replicate, shard"))
    assert plan.shape == (3, 2)
    assert plan.members == tuple(devices)


def test_three_survivors_of_tensor_parallelism_are_two_that_work_and_one_that_stands_by() -> None:
    plan = planned(problem(names(3), "dp, tp=2"))
    assert plan.shape == (1, 2)
    assert len(plan.idle) == 1
    assert "no allowed mesh has a place for n2/0, which stands by" in plan.reason


def test_a_rank_at_a_third_of_its_speed_gets_the_share_that_it_can_do() -> None:
    plan = planned(problem(names(4), "shard", rates={"n0/0": 3.0}))
    assert plan.samples == (2, 8, 7, 7)
    assert plan.prediction is not None
    assert math.isclose(plan.prediction.step_seconds, 8 * 0.01)
    assert cost(plan, {"n0/0": 3.0}) <= 1.15 * 24 / (3 + 1 / 3)


def test_a_device_that_a_single_sample_holds_up_stands_by() -> None:
    plan = planned(problem(names(4), "shard", rates={"n2/0": 60.0}))
    assert plan.members == ("n0/0", "n1/0", "n3/0")
    assert plan.idle == ("n2/0",)
    assert "a step is faster without n2/0" in plan.reason


def test_devices_keep_their_ranks_where_the_mesh_stays() -> None:
    current = planned(problem(names(4), "replicate, shard"))
    after = planned(problem(["n0/0", "n2/0", "n3/0", "n9/0"], "replicate, shard", current=current))
    assert after.members == ("n0/0", "n9/0", "n2/0", "n3/0")


def test_the_current_plan_is_costed_where_its_devices_are_there() -> None:
    current = planned(problem(names(4), "shard"))
    same = plan_mesh(problem(names(4), "shard", current=current, rates={"n1/0": 2.0}))
    assert same.current_seconds is not None
    assert math.isclose(same.current_seconds, 0.12)
    assert plan_mesh(problem(names(3), "shard", current=current)).current_seconds is None


def test_tensor_parallelism_stays_inside_nodes() -> None:
    devices = [f"n{i}/{j}" for i in range(3) for j in range(4)]
    slow = {"n0/1": 3.0, "n1/2": 3.0}
    plan = planned(problem(devices, "dp, tp=4", rates=slow))
    assert (plan.shape, {*plan.idle}) == ((3, 4), set()), "two nodes would be no faster than three"
    plan = planned(problem([*devices[1:], "n3/0", "n3/1"], "dp, tp=4"))
    assert all(len({device.split("/")[0] for device in lane}) == 1 for lane in plan.lanes)
    assert plan.shape == (2, 4)
    again = [*devices[:4], *devices[8:], *(f"n9/{j}" for j in range(4))]
    current = planned(problem(devices, "dp, tp=4"))
    kept = planned(problem(again, "dp, tp=4", current=current))
    assert [lane[0] for lane in kept.lanes] == ["n0/0", "n9/0", "n2/0"]


def test_too_few_devices_are_refused_with_the_meshes_that_there_are() -> None:
    told = plan_mesh(problem(names(1), "dp, tp=2"))
    assert told.plan is None
    assert (
        "1 device with 24 samples a step fill none of the meshes that the job may have (dp, tp=2)"
        in told.refusal
    )


def test_the_planning_child_answers_a_mesh_problem() -> None:
    from elasticd_planner.__main__ import read

    asked = problem(names(4), "shard")
    assert read(msgspec.json.encode(asked)) == asked
    assert answer(asked) == plan_mesh(asked)
