"""What is believed of a device whose communicators may be aborted, and how it comes to rest."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.layouts import Layouts

from elasticd.machines.worker.switch import SwitchPhase
from elasticd.records import Recovery
from elasticd.runtime.accelerator import Accelerator, DeviceLost
from elasticd.runtime.comm.device_communicators import DeviceCommunicators
from elasticd.runtime.comm.groups import Cancelled, Group, PeerLost, PlanGroups, shut
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld
from elasticd.runtime.engine import device_rest
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.state_health import StateHealth
from elasticd.runtime.switch.copies import Copies
from elasticd.runtime.switch.switcher import Switcher
from elasticd.runtime.telemetry.comm_timer import Stopwatch
from elasticd.testing.waiting import until
from tests.runtime.test_engine_parity import make_recipe, plan_of, stage, unpaced


class Moment:
    """In the place of a device's event: passed at the n-th look."""

    def __init__(self, after: int, then: Callable[[], object] = lambda: None) -> None:
        self.after, self.then = after, then

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        self.after -= 1
        if self.after == 0:
            self.then()
        return self.after < 0


def beside_the_host(moment: Moment, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    made = Accelerator("cpu")
    made.immediate = False
    monkeypatch.setattr(made, "event", lambda timing=False: moment)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    return made


def test_a_wait_ends_with_the_fault_also_where_the_device_passes_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead: list[bool] = []

    def check() -> None:
        if dead:
            raise Cancelled("shut")

    device = beside_the_host(Moment(3, lambda: dead.append(True)), monkeypatch)
    with pytest.raises(Cancelled):
        device.passed(check)
    dead.clear()
    beside_the_host(Moment(3), monkeypatch).passed(check)


def test_a_rank_that_has_nothing_to_read_waits_for_its_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may only send, or keep state for others: its vote says that it has what they sent."""
    looks = Moment(3)
    assert beside_the_host(looks, monkeypatch).read(0.0, 1.5) == [0.0, 1.5]
    assert looks.after < 0

    def check() -> None:
        raise Cancelled("shut")

    with pytest.raises(Cancelled):
        beside_the_host(Moment(0), monkeypatch).read(0.0, check=check)


def test_a_device_that_hangs_and_one_with_an_error_do_not_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside_the_host(Moment(3), monkeypatch).drained(10.0)
    assert not beside_the_host(Moment(1 << 30), monkeypatch).drained(0.05)

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not beside_the_host(Moment(2, fails), monkeypatch).drained(10.0)


def an_engine(world: MemoryWorld) -> Engine:
    plan = plan_of((8, [stage(0, 6, ("a/0", 1))]))
    recipe = make_recipe()
    groups = cast(PlanGroups, MemoryPlanGroups(world, "a/0"))
    return Engine(recipe, Layouts(recipe.model.spec, plan), groups, unpaced)


def test_what_was_delivered_is_believed_once_the_device_has_it_and_no_fault_came() -> None:
    engine = an_engine(MemoryWorld())
    engine.health.send_parameters()
    engine._delivered = Moment(2)
    engine._look()
    assert engine.health.stale, "it is under way"

    class Ended(Moment):
        def query(self) -> bool:
            engine.plan_groups.dead = True
            return True

    engine._delivered = Ended(0)
    engine._look()
    engine._look()
    assert engine.health.stale, "an abort may have ended it"
    with pytest.raises(Cancelled):
        engine.check()
    engine.plan_groups.dead, engine._delivered = False, Moment(0)
    engine._look()
    assert not engine.health.stale


def test_an_engine_whose_device_is_lost_has_no_state_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(MemoryWorld())
    engine.rest()  # the CPU is at rest
    monkeypatch.setattr(device_rest, "DRAIN_SECONDS", 0.05)
    engine.accelerator = beside_the_host(Moment(1 << 30), monkeypatch)
    monkeypatch.setattr(engine.plan_groups, "shut", lambda: None)
    with pytest.raises(DeviceLost, match="did not come to rest"):
        engine.rest()
    assert engine.health.torn


class Library:
    """Communicators that are ready when told, and whose launches fail when told."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.is_ready, self.fails = True, False
        self.aborted: list[list[Any]] = []

    def connect(self, channel: Channel, me: str, store: Any) -> Library:
        return self

    def abort(self, communicators: list[Any]) -> None:
        self.aborted.append(communicators)

    def ready(self) -> bool:
        return self.is_ready

    def all_reduce(self, tensor: torch.Tensor) -> Library:
        if self.fails:
            raise RuntimeError("[rank 1] NCCL error: remote process exited\nbacktrace")
        return self

    def exchange(self, sends: list[Any], receives: list[Any]) -> Library:
        return Library()

    def join(self) -> None:
        pass

    def over(self) -> bool:
        return True


class Groups(PlanGroups):
    """Without gloo."""

    def __init__(self, name: str) -> None:
        self.name, self.me, self.dead, self.seconds, self.planes = name, "a/0", False, 60.0, []
        self.stopwatch = Stopwatch()

    def store(self, prefix: str) -> Any:
        return None

    def shut_sockets(self) -> None:
        pass


TEAM = Channel("reduce", ("a/0", "a/1"))
OTHER = Channel("tensor", ("a/0", "b/0"))


def made(library: Library, groups: Groups, *channels: Channel) -> DeviceCommunicators:
    everyone = cast(Group, SimpleNamespace(all_gather=lambda tensor: tensor))
    return DeviceCommunicators(groups, channels or (TEAM,), everyone, cast(Any, library))


def test_communicators_of_all_plans_are_aborted_side_by_side_and_once() -> None:
    library, groups = Library(), [Groups("one"), Groups("two")]
    planes = [made(library, groups[0], TEAM, OTHER), made(library, groups[1])]
    shut(groups)
    assert all(plane.rest(10.0) for plane in planes)
    assert sorted(len(call) for call in library.aborted) == [1, 2]
    shut(groups)
    assert all(plane.rest(10.0) for plane in planes)
    assert len(library.aborted) == 2


def test_a_plan_comes_to_rest_though_another_one_that_connects_ends_late() -> None:
    freed = threading.Event()

    class Late(Library):
        def abort(self, communicators: list[Any]) -> None:
            freed.wait(60)
            super().abort(communicators)

    library, late, groups = Library(), Late(), [Groups("one"), Groups("two")]
    planes = [made(late, groups[0]), made(library, groups[1])]
    shut(groups)
    assert planes[1].rest(10.0)
    assert not late.aborted
    freed.set()
    assert planes[0].rest(10.0)


def test_a_launch_after_the_fault_is_cancelled_and_a_refused_one_tells_of_a_lost_peer() -> None:
    library, groups = Library(), Groups("one")
    team = made(library, groups).team(TEAM)
    work = team.begin_all_reduce(torch.ones(1))
    library.fails = True
    with pytest.raises(PeerLost, match=r"reduce a/0 a/1: NCCL error: remote process exited$"):
        team.all_reduce(torch.ones(1))
    groups.dead = True
    for attempt in (lambda: team.all_reduce(torch.ones(1)), lambda: team.finish(work)):
        with pytest.raises(Cancelled):
            attempt()


def test_tensors_are_kept_until_the_abort_has_returned() -> None:
    """The device may write to them until then."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(Library):
        def abort(self, communicators: list[Any]) -> None:
            entered.set()
            assert leave.wait(30)

    library, groups = Slow(), Groups("one")
    plane = made(library, groups)
    plane.team(TEAM).begin_all_reduce(torch.ones(1))
    groups.shut()
    assert entered.wait(30)
    assert not plane.rest(0.05)
    assert plane._open
    leave.set()
    assert plane.rest(10.0)
    assert not plane._open


def test_rounds_that_a_member_only_sends_in_are_let_go_as_messages_are() -> None:
    """Nobody finishes them where the other end alone waits: outputs of a module of images, and gradients."""
    channel = Channel("items", ("a/0", "a/1"))
    plane = made(Library(), Groups("one"), channel)
    mesh = plane.mesh(channel)
    for _ in range(3):
        sent = mesh.begin_round([("a/1", torch.ones(1))], [])
        mesh.begin_round([("a/1", torch.ones(1))], [])
        mesh.arrived(sent)
        mesh.finish(sent)  # no error, though it is let go
        receipt = mesh.begin_round([], [("a/1", torch.ones(1))])
        assert len(plane._open) == 2
        plane.received()
        assert [*plane._open.values()] == [receipt]
        mesh.finish(receipt)
    assert not plane._open


def test_an_error_of_the_device_while_tensors_are_let_go_is_a_device_that_does_not_come_to_rest() -> None:
    class Broken(Library):
        def join(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    library, groups = Broken(), Groups("one")
    plane = made(library, groups)
    plane.team(TEAM).begin_all_reduce(torch.ones(1))
    groups.shut()
    assert not plane.rest(10.0)


def test_a_connection_that_does_not_come_ends_with_the_fault_or_at_its_time() -> None:
    library, groups = Library(), Groups("one")
    library.is_ready, groups.seconds = False, 0.05
    with pytest.raises(PeerLost, match="peers did not connect within 0 s"):
        made(library, groups)
    groups = Groups("two")
    timer = threading.Timer(0.1, groups.shut)
    timer.start()
    with pytest.raises(Cancelled):
        made(library, groups)
    timer.join()
    until(lambda: library.aborted == [[library]], lambda: str(library.aborted))


def test_a_switch_moves_nothing_before_the_old_plans_deliveries_are_there() -> None:
    """The new engine takes tensors of the old one by reference, and vouches for them."""
    moves: list[Any] = []
    made = Switcher.__new__(Switcher)
    made.step, made._moves = 3, cast(Any, SimpleNamespace(move=lambda *given: moves.append(given)))

    def shut_meanwhile() -> None:
        raise Cancelled("shut")

    made.engine = cast(Any, SimpleNamespace(delivered=shut_meanwhile))
    prepared = SimpleNamespace(proposal=SimpleNamespace(recovery=None), old=None)
    with pytest.raises(Cancelled):
        made._moved(cast(Any, prepared))
    assert not moves
    made.engine = cast(Any, SimpleNamespace(delivered=lambda: None))
    made._moved(cast(Any, prepared))
    assert len(moves) == 1


@pytest.mark.parametrize("source", [True, False])
def test_a_recovery_takes_a_copy_here_only_if_it_counts_on_it(source: bool) -> None:
    """A torn copy, whose update did not end, lies under the same plan as those that the job goes on from."""
    moves: list[Any] = []
    made = Switcher.__new__(Switcher)
    made.step, made._moves, made._device = (
        4,
        cast(Any, SimpleNamespace(move=lambda *held: moves.append(held))),
        "a/0",
    )
    made._copies = Copies(lambda *_: None)
    health = StateHealth()
    if not source:
        health.begin_update()
    made.engine = cast(Any, SimpleNamespace(plan=SimpleNamespace(number=1), lent=None, health=health))
    sources = {"a/1": "x", **({"a/0": "x"} if source else {})}
    recovery = Recovery(fence=2, step=4 if source else 3, sources=sources)
    old = SimpleNamespace(plan=SimpleNamespace(number=1))
    proposal = SimpleNamespace(recovery=recovery)
    made._moved(cast(Any, SimpleNamespace(proposal=proposal, old=old, all_read=False)))
    ((_, held, _),) = moves
    assert held is (made.engine if source else None)


def test_a_rank_that_is_fenced_anywhere_brings_its_device_to_rest_before_it_reports() -> None:
    done: list[str] = []
    made = Switcher.__new__(Switcher)
    made._todo = queue.Queue()
    made.engine = cast(Any, SimpleNamespace(rest=lambda: done.append("rest"), health=StateHealth(), lent=None))
    made._state = cast(
        Any, SimpleNamespace(phase=SwitchPhase.STOPPING, trains=True, fenced=False, at_work=False)
    )

    def feed(event: Any) -> None:
        done.append(type(event).__name__)
        made._state = cast(
            Any, SimpleNamespace(phase=SwitchPhase.FENCED, trains=True, fenced=False, at_work=True)
        )

    made._feed = feed  # type: ignore[method-assign]
    made._rest()
    assert done == ["rest", "Rested"]
