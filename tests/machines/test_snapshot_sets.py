"""What agents keep, as arithmetic: when a set is whole, who reads which share, what is dead history."""

from __future__ import annotations

from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from hypothesis import given
from hypothesis import strategies as st

from elasticd.machines.job.state.snapshot_sets import Moment, SnapshotSets, stand_ins
from elasticd.wire.snapshots import Held

NODES = ("alpha", "beta", "gamma")
NOW = Moment(3, 20)


def plan(devices: list[str], number: int = 3) -> Plan:
    """A replica on each device."""
    pipelines = tuple(
        Pipeline(stages=(Stage(start=0, stop=8, devices=(name,), shares=(1,)),), micro_batches=1)
        for name in devices
    )
    return Plan(
        number=number,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),),
        micro_batch=1,
        global_batch=len(devices),
        binding={name: f"i-{name}" for name in devices},
    )


def held(device: str, moment: Moment = NOW, incarnation: str = "") -> Held:
    return Held(
        job="demo",
        device=device,
        incarnation=incarnation or f"i-{device}",
        plan=moment.plan,
        step=moment.step,
        node=node_of(device),
        size=1,
    )


DEVICES = st.lists(
    st.sampled_from([f"{node}/{index}" for node in NODES for index in range(3)]), min_size=1, unique=True
)
KEPT = st.dictionaries(
    st.sampled_from(NODES),
    st.lists(
        st.tuples(st.sampled_from([f"{n}/{i}" for n in NODES for i in range(3)]), st.booleans()), max_size=12
    ),
)


@given(DEVICES, KEPT, st.sets(st.sampled_from(NODES)))
def test_a_set_is_whole_when_each_share_is_on_two_nodes_or_there_is_no_second(
    devices: list[str], kept: dict[str, list[tuple[str, bool]]], takers: set[str]
) -> None:
    made = plan(devices)
    snapshots = SnapshotSets()
    for node, found in kept.items():
        words = [held(name, incarnation="" if true else "another") for name, true in dict(found).items()]
        snapshots = snapshots.replaced(node, words, ())
    homes = {node_of(name) for name in devices}

    def safe(device: str) -> bool:
        nodes = {node for node, found in kept.items() if dict(found).get(device)}
        others = (homes & takers) - {node_of(device)}
        return len(nodes) >= (2 if others else 1)

    assert snapshots.is_whole(NOW, made, takers) == all(safe(device) for device in devices)
    assert not snapshots.is_whole(Moment(3, 21), made, takers)


@given(DEVICES, DEVICES, st.data())
def test_each_share_is_read_on_a_node_that_keeps_it_and_as_evenly_as_these_let(
    old: list[str], members: list[str], data: st.DataObject
) -> None:
    made = plan(old)
    copies = {
        device: data.draw(st.lists(st.sampled_from(NODES), min_size=1, unique=True), label=device)
        for device in old
    }
    found = stand_ins(made.members, copies, members)
    by_node = {node: [m for m in members if m.startswith(node + "/")] for node in NODES}
    possible = all(any(by_node[node] for node in nodes) for nodes in copies.values())
    assert (found is not None) == possible
    if found is None:
        return
    assert [*found] == [*made.members]
    for device, reader in found.items():
        assert reader in members
        assert reader.rpartition("/")[0] in copies[device]
    load = {member: [*found.values()].count(member) for member in members}
    for node in NODES:  # on one node any member can read what another can
        if by_node[node]:
            assert max(load[m] for m in by_node[node]) - min(load[m] for m in by_node[node]) <= 1


def test_whoever_can_read_its_own_share_does() -> None:
    devices = [f"{node}/{index}" for node in ("alpha", "beta") for index in (0, 1)]
    copies = {device: ["alpha", "beta"] for device in devices}
    assert stand_ins(plan(devices).members, copies, devices) == {device: device for device in devices}


def test_history_that_a_later_plan_did_not_go_on_from_is_dead() -> None:
    snapshots = SnapshotSets().replaced(
        "alpha", [held("alpha/0"), held("alpha/0", Moment(3, 30))], [plan(["alpha/0"])]
    )
    assert snapshots.moments() == [Moment(3, 30), NOW]
    after = snapshots.recorded(5, 25)
    assert after.moments() == [NOW], "step 30 was made again, or will be"
    again = after.replaced("beta", [held("alpha/0", Moment(3, 26)), held("alpha/0", Moment(5, 26))], ())
    assert again.moments() == [Moment(5, 26), NOW], "an agent that was away says what it kept"
    assert again.plans == snapshots.plans
    assert again.forgotten("alpha").forgotten("beta").moments() == []


def test_plans_that_no_snapshot_is_of_any_more_are_forgotten() -> None:
    snapshots = SnapshotSets().replaced("alpha", [held("alpha/0")], [plan(["alpha/0"])])
    snapshots = snapshots.replaced("alpha", [held("alpha/0", Moment(4, 30))], [plan(["alpha/0"], number=4)])
    assert [*snapshots.plans] == [4]
