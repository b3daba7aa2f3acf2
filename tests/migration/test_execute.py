"""A move equals the reference bit by bit, sends exactly what is lacking, and is all or nothing."""

import threading
from collections.abc import Iterable

import msgspec
import pytest
import torch
from elasticd_migration.exchange import checksum
from elasticd_migration.local_state import LocalState, install, own, restore_optimizer
from elasticd_migration.migrate import Corrupt, Incomplete, Moved, agree, execute, migrate
from elasticd_migration.reshard import Lost, bytes_lacking, reshard
from elasticd_migration.rounds import Message, Round, schedule
from elasticd_migration.schema import Disagreement, Schema
from elasticd_migration.text_codec import from_text
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sizes
from tests.migration.plans import LAYERS, SPEC, alone, plan, plans
from tests.migration.ranks import (
    SCALER,
    Training,
    adamw,
    assert_same_bits,
    copy_of,
    local,
    mapped,
    members,
    together,
    trained,
    training,
)
from tests.sizes import examples

WHOLE = trained()
BEFORE = plan(1, [(1, [("n0/0", 3), ("n0/1", 1)]), (2, [("n1/0", 1)])])
AFTER = plan(2, [(2, [("n0/0", 1), ("n1/1", 2)]), (1, [("n1/0", 1)])])
OLD, NEW = Layouts(SPEC, BEFORE), Layouts(SPEC, AFTER)


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def held(layouts: Layouts, device: str) -> LocalState:
    return local(WHOLE, layouts, device)


def installed(state: LocalState, layouts: Layouts, device: str) -> Training:
    """A training made anew and given what was moved, as the runtime does it."""
    mine = training(layouts, device)
    install(state, mine.values, buffers=mine.buffers)
    mine.owned = own(layouts, device, mine.values)  # the values have adopted other memory
    mine.optimizer = adamw([(name, parameter) for name, _, parameter in mine.owned])
    mine.scheduler = torch.optim.lr_scheduler.StepLR(mine.optimizer, step_size=2, gamma=0.5)
    restore_optimizer(state, mine.owned, mine.optimizer)
    mine.scheduler.load_state_dict(from_text(state.extras["scheduler"]))
    return mine


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=sizes.number(full=300, quick=20))
@given(plans(1), plans(2), st.sampled_from([2_000, 20_000, 1 << 26]))
def test_a_move_equals_the_reference_and_sends_exactly_what_is_lacking(
    before: Plan, after: Plan, limit: int
) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    ends = MemoryTransport.connect(members(before, after))
    states = {device: held(old, device) for device in ends[0].members}
    kept = {device: copy_of(state) for device, state in states.items()}
    results = together(ends, lambda end: migrate(old, new, states[end.members[end.rank]], end, limit=limit))
    moved = [result for result in results if isinstance(result, Moved)]
    assert len(moved) == len(ends), results
    lacks = bytes_lacking(old, new, held(Layouts(SPEC, alone()), "n0/0").schema().sizes)
    for end, result in zip(ends, moved, strict=True):
        device = end.members[end.rank]
        assert_same_bits(result.state, held(new, device))
        assert_same_bits(states[device], kept[device])
        assert result.bytes_received == lacks.get(device, 0)
        assert sum(size for size, _ in result.flows.values()) == result.bytes_received
        assert all(seconds > 0 and device != source for source, (_, seconds) in result.flows.items())
        assert end.bytes_sent == result.bytes_sent + result.bytes_sealed
        assert from_text(result.state.extras["scaler"]) == SCALER
    assert sum(result.bytes_sent for result in moved) == sum(lacks.values())


@settings(max_examples=examples(25))
@given(plans(1), plans(2))
def test_training_goes_on_from_the_moved_state_as_the_whole_model_would(before: Plan, after: Plan) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    states = {device: held(old, device) for device in members(before, after)}
    ends = MemoryTransport.connect(members(before, after))
    results = together(ends, lambda end: migrate(old, new, states[end.members[end.rank]], end))
    whole = trained()
    for number in (9, 10):
        whole.step(number)
    for device, result in zip(ends[0].members, results, strict=True):
        assert isinstance(result, Moved)
        if device not in after.members:
            continue
        mine = installed(result.state, new, device)
        for number in (9, 10):
            mine.step(number)
        for found, expected in zip(mine.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
            settings = expected.keys() - {"params", "param_names"}
            different = {key for key in settings if found[key] != expected[key]}
            assert not different, "settings that a scheduler has changed since are those of the whole model"
        assert mine.scheduler.state_dict() == whole.scheduler.state_dict()
        sources = {name: (box, parameter) for name, box, parameter in whole.owned}
        for name, box, parameter in mine.owned:
            if box.empty:
                assert parameter not in mine.optimizer.state
                continue
            everything, reference = sources[name]
            torch.testing.assert_close(parameter, reference[box.slices(everything)])
            assert mine.optimizer.state[parameter]["step"] == 5
    assert all(t.scalars["step"] == 3 for s in states.values() for i, t in s.tensors.items() if i[1] == "state")


def test_before_the_first_step_values_move_alone() -> None:
    blank = trained(0)

    def work(end: MemoryTransport) -> Moved:
        return migrate(OLD, NEW, local(blank, OLD, end.members[end.rank]), end)

    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    for end, result in zip(ends, together(ends, work), strict=True):
        assert isinstance(result, Moved)
        assert_same_bits(result.state, local(blank, NEW, end.members[end.rank]))


def test_what_stays_is_not_copied_and_its_counters_are() -> None:
    states = {device: held(OLD, device) for device in members(BEFORE, AFTER)}
    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    results = together(ends, lambda end: migrate(OLD, NEW, states[end.members[end.rank]], end))
    result = results[ends[0].members.index("n1/0")]
    assert isinstance(result, Moved)
    item = Item("blocks.2.q.weight", "state")
    old, new = states["n1/0"].tensors[item], result.state.tensors[item]
    assert new.shards[0].planes["exp_avg"] is old.shards[0].planes["exp_avg"]
    assert new.scalars["step"] is not old.scalars["step"]


class Damaging(MemoryTransport):
    """Turns one bit of one data message, as a bad link would."""

    victim = -1

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        if channel == 0 and destination == self.victim:
            self.victim = -1
            tensor = tensor.clone()
            tensor.view(torch.uint8).reshape(-1)[5] ^= 64
        return super().send(destination, tensor, channel=channel)


def test_a_damaged_piece_is_named_where_it_arrives_and_nobody_hangs_or_loses_the_old_state() -> None:
    ends = Damaging.connect(members(BEFORE, AFTER))
    names = ends[0].members
    states = {device: held(OLD, device) for device in names}
    kept = {device: copy_of(state) for device, state in states.items()}
    sender = ends[names.index("n0/1")]
    assert isinstance(sender, Damaging)
    sender.victim = names.index("n1/1")
    results = together(ends, lambda end: migrate(OLD, NEW, states[end.members[end.rank]], end, limit=20_000))
    for device, result in zip(names, results, strict=True):
        if device == "n1/1":
            assert isinstance(result, Corrupt)
            assert "from n0/1 arrived damaged at n1/1 in the move to plan 2" in str(result)
        else:
            assert isinstance(result, Moved)
        assert_same_bits(states[device], kept[device])


def agreed_sizes() -> dict[Item, int]:
    return held(Layouts(SPEC, alone()), "n0/0").schema().sizes


def run(end: MemoryTransport, rounds: tuple[Round, ...], number: int) -> Moved:
    device = end.members[end.rank]
    state = held(OLD, device)
    return execute(rounds, state, NEW.held(device), end, agree(end, state.schema()), number=number)


def all_rounds() -> tuple[Round, ...]:
    planes = held(Layouts(SPEC, alone()), "n0/0").schema().planes
    return schedule(reshard(OLD, NEW, agreed_sizes()), planes, limit=20_000)


def test_a_message_of_another_move_is_refused() -> None:
    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    results = together(ends, lambda end: run(end, all_rounds(), number=2 + (end.rank == 0)))
    refused = [result for result in results if isinstance(result, Corrupt)]
    assert refused
    assert all("plan 3" in str(error) or "acknowledges" in str(error) for error in refused)
    assert any("is in round" in str(error) for error in refused)


def test_a_schedule_with_a_hole_is_noticed() -> None:
    rounds = all_rounds()
    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    results = together(ends, lambda end: run(end, rounds[1:], number=2))
    assert any(isinstance(result, Incomplete) for result in results)
    assert "lacks came" in str(next(result for result in results if isinstance(result, Incomplete)))


def exchanged(message: Message) -> Message:
    """The same bytes on the wire, said to be another plane's."""
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    pieces = tuple(
        msgspec.structs.replace(piece, plane=other.get(piece.plane, piece.plane)) for piece in message.pieces
    )
    return Message(source=message.source, destination=message.destination, pieces=pieces)


def test_ranks_whose_schedules_differ_notice_it_though_all_sizes_fit() -> None:
    rounds = all_rounds()
    other = tuple(Round(messages=tuple(map(exchanged, turn.messages))) for turn in rounds)
    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    sender = ends[0].members.index("n0/1")
    results = together(ends, lambda end: run(end, other if end.rank == sender else rounds, number=2))
    refused = [result for result in results if isinstance(result, Corrupt)]
    assert refused
    assert all("n0/1 sends other pieces in round" in str(error) for error in refused)


def test_ranks_that_took_different_steps_all_refuse_alike() -> None:
    later = trained(4)
    before = plan(1, [(LAYERS, [("n0/0", 1)])], [(LAYERS, [("n0/1", 1)])])
    old, new = Layouts(SPEC, before), Layouts(SPEC, plan(2, [(LAYERS, [("n0/2", 1)])]))

    def work(end: MemoryTransport) -> Moved:
        device = end.members[end.rank]
        state = local(later, old, device) if device == "n0/1" else held(old, device)
        return migrate(old, new, state, end)

    results = together(MemoryTransport.connect(("n0/0", "n0/1", "n0/2")), work)
    assert all(isinstance(result, Disagreement) for result in results)
    assert len({str(result) for result in results}) == 1
    assert "n0/0 holds" in str(results[0])
    assert "taken the same steps" in str(results[0])


def test_a_rank_that_cannot_take_part_tells_all_others_why() -> None:
    ends = MemoryTransport.connect(("n0/0", "n0/1"))
    results = together(ends, lambda end: agree(end, Schema(refused="LBFGS" if end.rank else "")))
    assert [str(result) for result in results] == ["n0/1: LBFGS"] * 2


def test_lost_state_stops_every_rank_before_anything_is_sent() -> None:
    ends = MemoryTransport.connect(tuple(sorted({*members(BEFORE, AFTER)} - {"n0/1"})))
    left = SurvivingLayouts(Layouts(SPEC, BEFORE), gone={"n0/1"})
    results = together(ends, lambda end: migrate(left, NEW, held(OLD, end.members[end.rank]), end))
    assert all(isinstance(result, Lost) for result in results)
    assert all(end.bytes_sent == 0 for end in ends)


def test_a_new_incarnation_does_not_use_what_its_predecessor_held() -> None:
    shape = [(LAYERS, [("n0/0", 1)])], [(LAYERS, [("n0/1", 1)])]
    old = Layouts(SPEC, plan(1, *shape, binding={"n0/0": "a", "n0/1": "b"}))
    new = Layouts(SPEC, plan(2, *shape, binding={"n0/0": "a", "n0/1": "c"}))
    stale = local(trained(1), old, "n0/1")
    ends = MemoryTransport.connect(("n0/0", "n0/1"))
    results = together(ends, lambda end: migrate(old, new, stale if end.rank else held(old, "n0/0"), end))
    assert isinstance(results[1], Moved)
    assert_same_bits(results[1].state, held(new, "n0/1"))


class Weighing(MemoryTransport):
    """Remembers how many bytes of data were kept for receivers at most."""

    most = 0

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        ticket = super().send(destination, tensor, channel=channel)
        self.kept = getattr(self, "kept", {})
        if channel == 0:
            self.kept[ticket] = tensor.numel() * tensor.element_size()
        self.most = max(self.most, sum(self.kept.values()))
        return ticket

    def drain(self, tickets: Iterable[int] | None = None) -> None:
        released = list(self.kept if tickets is None else tickets)
        for ticket in released:
            self.kept.pop(ticket, None)
        super().drain(released)


def test_a_sender_keeps_at_most_two_rounds_of_buffers() -> None:
    old = Layouts(SPEC, plan(1, [(LAYERS, [("n0/0", 1)])]))
    new = Layouts(SPEC, plan(2, [(LAYERS, [("n0/1", 1)])]))
    ends = Weighing.connect(("n0/0", "n0/1"))
    results = together(ends, lambda end: migrate(old, new, held(old, end.members[end.rank]), end, limit=20_000))
    assert all(isinstance(result, Moved) for result in results), results
    sender = ends[0]
    assert isinstance(sender, Weighing)
    assert 20_000 < sender.most <= 40_000 < sender.bytes_sent


def test_the_death_of_a_rank_ends_the_others_wait() -> None:
    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    agreed = threading.Barrier(len(ends))

    def work(end: MemoryTransport) -> Moved:
        state = held(OLD, end.members[end.rank])
        schema = agree(end, state.schema())
        agreed.wait()
        if end.members[end.rank] == "n1/0":
            end.close("n1/0 died")
            raise RuntimeError("died")
        return execute(all_rounds(), state, NEW.held(end.members[end.rank]), end, schema, number=2)

    results = together(ends, work)
    assert any("n1/0 died" in str(result) for result in results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_state_on_a_gpu_moves_through_host_memory() -> None:
    cuda = torch.device("cuda")

    def work(end: MemoryTransport) -> Moved:
        state = on(cuda, held(OLD, end.members[end.rank]))
        return migrate(OLD, NEW, state, end, limit=20_000, device=cuda)

    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    for end, result in zip(ends, together(ends, work), strict=True):
        assert isinstance(result, Moved), result
        shards = [shard for tensor in result.state.tensors.values() for shard in tensor.shards]
        planes = [plane for shard in shards for plane in shard.planes.values()]
        assert all(plane.is_cuda for plane in planes)
        assert_same_bits(on(torch.device("cpu"), result.state), held(NEW, end.members[end.rank]))


def on(device: torch.device, state: LocalState) -> LocalState:
    return mapped(state, lambda plane: plane.to(device))


def test_the_sum_of_bytes_does_not_depend_on_where_they_lie() -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn):
        base = torch.arange(1, 40, dtype=torch.float32).to(dtype)
        for start in range(3):
            assert checksum(base[start : start + 21]) == checksum(base[start : start + 21].clone())
    ones = torch.ones(13)
    changed = ones.clone()
    changed[12] = 2
    assert checksum(ones) != checksum(changed)
    assert checksum(torch.empty(0)) == 0
