"""The data network breaks between nodes whose agents, leader and store all reach each other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.faults.network_partition import HEALING_SECONDS, MOST_REGROUPS
from elasticd.machines.job.state.events import AgentUp, CoordinatorSend, Effect, Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.machines.job.state.reachable_nodes import Pair, pair
from elasticd.records import Fence, Proposal, decode
from elasticd.wire.coordinator import TryReach, Unreached
from elasticd.wire.worker import PeersLost, Refused, StateReport
from tests import sizes
from tests.machines.test_checkpoints import save
from tests.machines.test_recovery import ROOM, recovered
from tests.machines.world import World

NODES = ("alpha", "beta", "gamma")


class Parted(World):
    """Pairs of nodes in `apart` do not reach each other: what their workers do together waits in silence, or
    fails at once where it is `loud`. Agents say whom they do not reach, but for `mute` ones; of a pair in
    `one_way` only the first does."""

    def __init__(self, nodes: tuple[str, ...] = NODES, memory: int = ROOM, *, loud: bool = True) -> None:
        super().__init__(nodes, memory=memory)
        self.apart: set[Pair] = set()
        self.loud = loud
        self.one_way: set[tuple[str, str]] = set()
        self.mute: set[str] = set()
        self.tries = 0
        self.inbox.clear()
        for name, record in self.records.items():
            self.records[name] = msgspec.structs.replace(record, reach=f"{name}:1")
            self.say(AgentUp(record=self.records[name]))

    def _execute(self, effect: Effect) -> None:
        super()._execute(effect)
        if not isinstance(effect, CoordinatorSend) or not isinstance(effect.message, TryReach):
            return
        self.tries += 1
        order, node = effect.message, effect.node
        assert order.targets == {name: f"{name}:1" for name in order.targets}
        assert node not in order.targets
        if node in self.mute or node in self.cut:
            return
        failed = {
            other: "no answer"
            for other in order.targets
            if pair(node, other) in self.apart and (other, node) not in self.one_way
        }
        self.say(Received(node=node, message=Unreached(job=order.job, round=order.round, nodes=failed)))

    def _read(self, proposal: Proposal) -> None:
        """A group of nodes that are apart never stands."""
        members = self._members(proposal)
        if proposal.status == "aborted" or not self._broken(members):
            super()._read(proposal)
        elif self.loud:
            worker = self.workers[next(device for device in members if self.workers[device].alive)]
            self.outcome(worker, Refused(number=proposal.number, reason="connection refused"))

    def _broken(self, devices: tuple[str, ...]) -> bool:
        nodes = {node_of(device) for device in devices}
        return any(one in nodes and other in nodes for one, other in self.apart)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            plan = self.plan()
            if plan is None or not self._broken(plan.members) or self.done() is not None:
                super().train(1)
                continue
            for device in plan.members if self.loud and not self._unresolved() else ():
                worker = self.workers[device]
                if worker.plan == plan.number and not any(isinstance(word, PeersLost) for word in worker.said):
                    word = PeersLost(step=self.steps, reason="connection reset", plan=plan.number)
                    self.outcome(worker, word)
            self.tick(1.0)

    @property
    def fences(self) -> int:
        return self.kinds().count("fenced")

    def used(self) -> frozenset[str]:
        plan = self.plan()
        assert plan is not None
        return plan.nodes


def running(nodes: tuple[str, ...] = NODES, memory: int = ROOM, *, loud: bool = True) -> Parted:
    world = Parted(nodes, memory, loud=loud)
    world.start()
    world.settle()
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    return world


@pytest.mark.parametrize("loud", [True, False])
def test_the_largest_set_that_reaches_each_other_goes_on(loud: bool) -> None:
    world = running(loud=loud)
    world.train(12)
    assert len(world.used()) > 1
    world.apart = {("alpha", "gamma")}
    world.train(30)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert world.used() <= {"alpha", "beta"}
    steps, fences = world.steps, world.fences
    assert fences <= 4
    reason = decode(world.fence_record, Fence).reason
    assert "nodes alpha and gamma do not reach each other" in reason
    world.train(150)
    assert world.steps == steps + 150, "nothing disturbs it any more"
    assert world.fences == fences


def test_one_of_two_nodes_goes_on_alone() -> None:
    world = running(("alpha", "beta"))
    world.apart = {("alpha", "beta")}
    world.train(30)
    assert recovered(world)
    assert world.used() == {"alpha"}
    assert world.fences <= 4


def test_a_link_that_carries_one_way_is_of_no_use() -> None:
    world = running(("alpha", "beta"), loud=False)
    world.apart, world.one_way = {("alpha", "beta")}, {("beta", "alpha")}
    world.train(40)
    assert recovered(world)
    assert len(world.used()) == 1


def test_a_break_that_heals_before_it_counts_costs_no_node() -> None:
    world = running()
    world.apart = {("alpha", "gamma")}
    world.train(1)
    world.apart = set()
    world.train(20)
    assert recovered(world)
    assert decode(world.fence_record, Fence).gone == {}


def test_a_network_that_heals_gives_its_nodes_back_each_time_later() -> None:
    world = running()
    world.train(14)
    waited = []
    for _ in range(4):
        world.apart = {("alpha", "gamma"), ("beta", "gamma")}
        seconds = until(world, lambda: "gamma" not in world.used())
        assert seconds < 20
        assert world.used() == {"alpha", "beta"}
        world.apart = set()
        waited.append(until(world, lambda: "gamma" in world.used()))
    assert waited[0] + 2 < waited[1] < waited[2] < waited[3], "a network that comes and goes costs ever less"
    assert world.fences <= 4 * 3


def test_a_break_long_after_the_others_counts_as_the_first() -> None:
    """A job runs for weeks: a network that breaks once a day does not cost an hour each time in the end."""
    world = running()
    world.train(14)
    waited = []
    for _ in range(3):
        world.apart = {("alpha", "gamma"), ("beta", "gamma")}
        until(world, lambda: "gamma" not in world.used())
        world.apart = set()
        waited.append(until(world, lambda: "gamma" in world.used()))
    assert waited[0] < waited[2]
    world.now += world.settings.most_retry_seconds
    world.train(5)
    assert recovered(world)
    world.apart = {("alpha", "gamma"), ("beta", "gamma")}
    until(world, lambda: "gamma" not in world.used())
    world.apart = set()
    assert until(world, lambda: "gamma" in world.used()) <= waited[0] + 2


def until(world: Parted, reached: Callable[[], bool]) -> int:
    """Seconds of training until then."""
    for second in range(300):
        if reached():
            return second
        world.train(1)
    raise AssertionError(f"{world.phase} {world.job.reason}")


def test_state_that_no_such_set_holds_is_waited_for_and_then_the_job_ends() -> None:
    world = running(("alpha", "beta"), memory=3_000_000)  # no room for replicas
    world.apart = {("alpha", "beta")}
    world.train(30)
    assert world.phase is JobPhase.RECOVERING
    assert "nodes alpha and beta do not reach each other" in world.job.reason
    assert "no nodes that do hold all of the state" in world.job.reason
    fences = world.fences
    world.train(int(HEALING_SECONDS))
    assert world.phase is JobPhase.STOPPED
    assert "nodes alpha and beta do not reach each other" in world.job.reason
    assert world.fences == fences <= 4


def test_state_that_no_such_set_holds_is_gone_on_from_when_the_network_heals() -> None:
    world = running(("alpha", "beta"), memory=3_000_000)
    world.apart = {("alpha", "beta")}
    world.train(30)
    world.apart = set()
    world.train(30)
    assert recovered(world)
    assert world.used() == {"alpha", "beta"}
    assert world.job.network.hopeless_since is None


def test_a_network_that_healed_is_found_so_where_the_recovery_began_with_a_death() -> None:
    """Found by the soak: a worker died while two nodes were apart. Nobody had been regrouped for the network,
    so nobody tried again whom it reached, and the job ended although all did."""
    world = running(("alpha", "beta"), memory=3_000_000, loud=False)
    world.apart = {("alpha", "beta")}
    world.train(30)
    assert world.job.network.hopeless_since is not None
    network = msgspec.structs.replace(world.job.network, regroups=0)
    job = msgspec.structs.replace(world.job, network=network)
    world.state = msgspec.structs.replace(world.state, jobs={job.job: job})
    world.apart = set()
    assert until(world, lambda: recovered(world)) <= 10


def test_a_set_that_has_no_plan_is_not_gone_on_with() -> None:
    """Each node could read a checkpoint, and has no room to train alone."""
    world = running(("alpha", "beta"), memory=4_000_000)
    save(world, world.steps)
    world.apart = {("alpha", "beta")}
    world.train(30)
    assert world.phase is JobPhase.RECOVERING
    assert "there is no plan for alpha: does not fit" in world.job.reason
    assert "there is no plan for beta: does not fit" in world.job.reason
    assert decode(world.fence_record, Fence).gone == {}, "nobody gave up what it holds"
    world.apart = set()
    world.train(20)
    assert recovered(world)
    assert world.used() == {"alpha", "beta"}
    world.apart = {("alpha", "beta")}
    world.train(int(HEALING_SECONDS) + 30)
    assert world.phase is JobPhase.STOPPED
    assert "there is no plan for alpha" in world.job.reason


def test_a_checkpoint_is_gone_back_to_where_no_such_set_holds_all_state() -> None:
    world = running(("alpha", "beta"))
    saved = save(world, world.steps)
    world.train(2)
    world.apart = {("alpha", "beta")}
    for device in list(world.workers):
        lost = StateReport(fence=world.job.highest + 1, copies=())
        world.deaf.add(device)  # nobody has a whole copy: each says so of the fence to come
        world.train(1) if not world._unresolved() else None
        world.stand(device, msgspec.structs.replace(lost, fence=world.job.highest))
    world.settle()
    world.train(5)
    for device in ("alpha/0", "alpha/1", "beta/0", "beta/1"):
        world.stand(device, StateReport(fence=world.job.highest, copies=()))
    world.settle()
    world.deaf.clear()
    world.train(30)
    found = [proposal for proposal in world.proposals if saved.name in proposal.checkpoints]
    assert found, world.job.reason
    assert len(found[-1].plan.nodes) == 1


@pytest.mark.parametrize("how", ["their agents reach each other", "older agents", "mute agents"])
def test_members_that_cannot_go_on_together_end_clearly_where_nothing_says_who_is_apart(how: str) -> None:
    world = running(("alpha", "beta"))
    world.apart = {("alpha", "beta")}
    world.one_way = {("alpha", "beta"), ("beta", "alpha")}
    if how == "older agents":
        for name, record in world.records.items():
            world.records[name] = msgspec.structs.replace(record, reach="")
            world.say(AgentUp(record=world.records[name]))
        world.settle()
    elif how == "mute agents":
        world.mute = {"alpha", "beta"}
    world.train(300)
    assert world.phase is JobPhase.STOPPED
    assert f"could not go on together {MOST_REGROUPS} times in a row" in world.job.reason
    assert world.fences == MOST_REGROUPS


def test_a_step_that_takes_long_is_no_fault() -> None:
    """An evaluation: the network is tried, ever more rarely."""
    world = running()
    for _ in range(300):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING
    assert world.fences == 0
    assert 3 <= world.tries <= 3 * 20
    tries = world.tries
    world.train(20)
    assert world.tries == tries, "and not at all while steps go on"


def test_a_node_that_the_members_do_not_reach_joins_no_plan() -> None:
    world = running()
    world.train(14)
    world.kill("gamma/0")
    world.kill("gamma/1")
    world.settle()
    assert recovered(world)
    world.apart = {("alpha", "gamma"), ("beta", "gamma")}
    world.restart("gamma")
    world.settle()
    steps, fences, before = world.steps, world.fences, world.kinds().count("proposed")
    world.train(120)
    assert recovered(world)
    assert world.steps == steps + 120
    assert world.fences == fences
    assert world.used() == {"alpha", "beta"}
    assert world.kinds().count("proposed") <= before + 3
    world.apart = set()
    world.train(60)
    assert "gamma" in world.used()


def test_a_leader_that_comes_at_any_event_ends_it_too() -> None:
    whole = running()
    start = whole.events
    whole.apart = {("alpha", "gamma")}
    whole.train(25)
    for at in sizes.every(range(start + 1, whole.events + 1), 19):
        world = running()
        world.crash_at = at
        world.apart = {("alpha", "gamma")}
        world.train(45)
        assert recovered(world), f"event {at}: {world.phase} {world.job.reason}"
        assert not {"alpha", "gamma"} <= world.used()
        assert world.fences <= 10
