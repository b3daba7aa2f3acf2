"""Sequences cut over lanes: attention and its gradients are those of one process, whatever the lanes."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import torch
from elasticd_planner.batching import context_exchange as context_exchanges
from elasticd_planner.batching import heads_exchange
from elasticd_planner.batching.context_exchange import context_exchange
from elasticd_planner.batching.context_members import ContextMembers, context_members
from elasticd_planner.layout.channels import Channel
from elasticd_planner.spec.batch import MicroBatch
from elasticd_planner.spec.model import ModelSpec, Units, apportion
from elasticd_planner.spec.plan import Stage
from torch import Tensor

import elasticd
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.communicators import Connect, GlooCommunicators, Mesh
from elasticd.runtime.comm.groups import Cancelled, PeerLost, PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.comm.running_group import running
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.context_parallel import ContextParallel
from elasticd.runtime.parallel.packed_row import PackedRow, first_pass, passing, second_pass
from tests import sizes
from tests.planner.launch_order import Join, Launch, Operation, deadlock
from tests.planner.test_context_exchange import SPEC, row_of, stage_of
from tests.runtime import gang

SIZE = 6
LAYERS = 3
Lanes = tuple[tuple[int, ...], ...]
Sequences = tuple[tuple[int, dict[int, int]], ...]


class Case(NamedTuple):
    """Lanes with the shares of their members, and the sequences of a row with their shares by lane."""

    lanes: Lanes
    sequences: Sequences
    kv: str = "grouped"
    values: int = SIZE
    options: tuple[tuple[str, Any], ...] = ()
    nodes: str = "abcdefgh"  #: of the lanes

    @property
    def stage(self) -> Stage:
        return stage_of(*self.lanes, nodes=self.nodes)

    @property
    def row(self) -> tuple[MicroBatch, ...]:
        return row_of(len(self.lanes), self.sequences)

    @property
    def kv_heads(self) -> int:
        return {"grouped": 4, "multi-head": 8, "multi-query": 1, "not cut": 4}[self.kv]


THREE: Sequences = (
    (101, {0: 5, 1: 3, 2: 2}),
    (40, {1: 1, 2: 1}),
    (17, {0: 1}),
    (24, {2: 1}),
    (9, {2: 3, 0: 1}),
)
CASES = {
    "two lanes, evenly": Case(((1,), (1,)), ((64, {0: 1, 1: 1}),)),
    "two lanes, unevenly": Case(((1,), (1,)), ((63, {0: 5, 1: 2}), (20, {1: 3, 0: 1}))),
    "three lanes": Case(((1,), (1,), (1,)), ((60, {0: 1, 1: 1, 2: 1}),)),
    "sequences of all lanes, of two and of one": Case(((1,), (1,), (1,)), THREE),
    "five lanes": Case(
        ((1,),) * 5,
        ((120, {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}), (31, {4: 1, 3: 1}), (12, {0: 1}), (50, {1: 1, 0: 2, 2: 3})),
    ),
    "one device beside three heads and one": Case(
        ((1,), (3, 1)), ((101, {0: 5, 1: 3}), (17, {0: 1}), (23, {1: 1}))
    ),
    "heads that do not divide": Case(((5, 3), (1,), (1, 1, 1)), THREE),
    "heads of each": Case(((1,), (3, 1), (5, 3)), THREE, kv="multi-head"),
    "one kv-head for all": Case(((1,), (3, 1), (1, 1, 1)), THREE, kv="multi-query"),
    "replicas": Case(((1,), (3, 1), (5, 3)), THREE, kv="not cut"),
    "replicas in equal numbers": Case(((1, 1), (1, 1)), ((63, {0: 5, 1: 2}), (20, {1: 3, 0: 1})), kv="not cut"),
    "a window": Case(((1,), (3, 1), (1, 1, 1)), THREE, options=(("window", 13),)),
    "a window that some lanes need nothing under": Case(
        ((1,), (1,), (1,)), ((90, {0: 1, 1: 1, 2: 1}),), options=(("window", 3),)
    ),
    "no causal mask": Case(((1,), (3, 1), (1,)), THREE, options=(("causal", False),)),
    "values of another size": Case(((1,), (3, 1), (1,)), THREE, values=5),
    "by heads": Case(
        ((1,),) * 4, ((64, dict.fromkeys(range(4), 1)), (9, {2: 1})), kv="multi-head", nodes="aaaa"
    ),
    "by heads, a device beside three heads and one": Case(
        ((1,), (3, 1)), ((96, {0: 1, 1: 1}), (17, {0: 1})), kv="multi-head", values=5
    ),
    "by heads that cut groups, beside others": Case(
        ((1,),) * 4,
        (
            (160, {0: 3, 1: 1, 2: 3, 3: 1}),
            (101, {0: 5, 1: 3, 2: 2}),
            (24, {2: 1}),
            (64, {3: 1, 1: 1, 2: 1, 0: 1}),
        ),
        nodes="aaaa",
    ),
    "by heads without a causal mask": Case(
        ((1,),) * 4, ((64, dict.fromkeys(range(4), 1)),), options=(("causal", False),)
    ),
    "keys that are passed on": Case(
        ((1,),) * 4, ((90, {0: 1, 1: 2, 2: 3, 3: 2}), (33, {1: 1, 3: 2})), kv="multi-query", nodes="aabb"
    ),
    "keys that are passed on in groups of unlike width": Case(
        ((1,), (3, 1), (1, 1, 1), (1,)),
        ((90, {0: 1, 1: 2, 2: 3, 3: 2}), (33, {1: 1, 2: 2, 3: 1}), (20, {0: 1})),
        nodes="aabb",
    ),
    "keys that are passed on among three nodes": Case(
        ((1,),) * 6, ((240, {0: 1, 1: 2, 2: 3, 3: 2, 4: 2, 5: 1}), (60, {1: 1, 2: 2, 3: 1})), nodes="aabbbc"
    ),
    "keys under a window that are passed on": Case(
        ((1,),) * 4, ((90, {0: 1, 1: 2, 2: 3, 3: 2}),), nodes="aabb", options=(("window", 40),)
    ),
    "another scale": Case(((1,), (1,), (1,)), THREE, options=(("scale", 0.7),)),
}


def drawn(case: Case, layer: int) -> list[list[Tensor]]:
    """Of each sequence q, k, v and the gradient of the output, [heads, tokens, size]."""
    generator = torch.Generator().manual_seed(7 + layer)
    shapes = [(8, SIZE), (case.kv_heads, SIZE), (case.kv_heads, case.values), (8, case.values)]
    return [
        [torch.randn(heads, length, size, generator=generator, dtype=torch.float64) for heads, size in shapes]
        for length, _ in case.sequences
    ]


def expected(case: Case, layer: int) -> list[list[Tensor]]:
    """Of each sequence the output, dq, dk and dv, by the formula."""
    options, found = dict(case.options), []
    for q, k, v, grad in drawn(case, layer):
        given = [x.requires_grad_() for x in (q, k, v)]
        each = 8 // case.kv_heads
        keys, values = (x.repeat_interleave(each, 0) for x in (k, v))
        scores = q @ keys.transpose(-1, -2) * options.get("scale", 1 / math.sqrt(SIZE))
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (distance >= 0) if options.get("causal", True) else torch.ones_like(distance, dtype=torch.bool)
        seen = seen & (distance < options.get("window", 10**6))
        out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ values
        out.backward(grad)
        found.append([out.detach(), *(x.grad for x in given if x.grad is not None)])
    return found


def spec_of(case: Case) -> ModelSpec:
    """A model with as many kv-heads."""
    if case.kv == "not cut":
        return msgspec.structs.replace(SPEC, units=(Units(kind="columns", count=24),))
    units: tuple[Units, ...] = (Units(kind="heads", count=8),)
    if case.kv_heads < 8:
        units = (*units, Units(kind="kv_heads", count=case.kv_heads, follows="heads"))
    return msgspec.structs.replace(SPEC, units=units)


def heads_of(case: Case, shares: Sequence[int], position: int) -> tuple[list[int], list[int]]:
    """The heads of a member of a lane, and the kv-head of each of its keys: one for each head where they do not
    divide, as `UnitsOf` says."""
    if case.kv == "not cut":
        return list(range(8)), list(range(4))
    given = apportion(8, tuple(shares))
    start = sum(given[:position])
    stop, each = start + given[position], 8 // case.kv_heads
    if start % each or stop % each:
        return list(range(start, stop)), [head // each for head in range(start, stop)]
    return list(range(start, stop)), list(range(start // each, stop // each))


class Device:
    """One device at work: its part of each layer's tensors, and its row."""

    def __init__(self, case: Case, device: str, mesh: Mesh, on: Accelerator = CPU) -> None:
        stage, row = case.stage, case.row
        lane, position = next(
            (number, lane.devices.index(device))
            for number, lane in enumerate(stage.by_lane)
            if device in lane.devices
        )
        self._case, self._on, self.dtype = case, on, torch.float64
        self.heads, self.reads = heads_of(case, stage.by_lane[lane].shares, position)
        self.parallel = ContextParallel(spec_of(case), stage, device, mesh)
        self._lanes, self._pieces = row, row[lane]

    def step(self, recomputed: Sequence[int] = ()) -> list[list[Found]]:
        """All layers forward, then backward, as of a block each."""
        self.parallel.begin_step()
        row = PackedRow(self._pieces, self._on.device, self.parallel.row(self._lanes))
        options, made = dict(self._case.options), []
        with passing(row):
            for layer in range(LAYERS):
                *given, grad = self._given(row, layer)
                if layer in recomputed:
                    with first_pass(f"blocks.{layer}"), torch.no_grad():
                        out = elasticd.attention(*given, **options)
                else:
                    out = elasticd.attention(*given, **options)
                made.append((given, grad, out))
            for layer, (given, grad, out) in reversed(list(enumerate(made))):
                if layer in recomputed:
                    with second_pass(f"blocks.{layer}"):
                        again = elasticd.attention(*given, **options)
                    assert torch.equal(again, out)
                    again.backward(grad)
                else:
                    out.backward(grad)
        return [self._found(row, given, out) for given, _, out in made]

    def _given(self, row: PackedRow, layer: int) -> list[Tensor]:
        """q, k, v and the gradient of the output, [1, heads, tokens, size]."""
        whole = drawn(self._case, layer)
        found = []
        for at, heads in enumerate((self.heads, self.reads, self.reads, self.heads)):
            parts = [whole[s.piece.sample][at][heads, s.start : s.stop] for s in row.segments]
            found.append(torch.cat(parts, 1)[None].to(self._on.device, self.dtype))
        return [x.requires_grad_() for x in found[:3]] + found[3:]

    def _found(self, row: PackedRow, given: Sequence[Tensor], out: Tensor) -> list[Found]:
        made = [x[0].detach().cpu().double() for x in (out, *(x.grad for x in given if x.grad is not None))]
        assert len(made) == 4
        return [
            Found(s.piece.sample, s.start, s.stop, self.heads, self.reads, [x[:, s.rows].numpy() for x in made])
            for s in row.segments
        ]


class Found(NamedTuple):
    """What a device has of a sequence: output, dq, dk and dv of some tokens, by head and by kv-head."""

    sequence: int
    start: int
    stop: int
    heads: list[int]
    reads: list[int]
    values: list[Any]


def check(case: Case, found: Mapping[str, list[list[Found]]], close: float = 1e-12) -> None:
    """Against one process: each element of output and queries once, the terms of keys added up. Each replica
    has all of it."""
    lanes = [lane.devices for lane in case.stage.by_lane]
    if case.kv == "not cut" and len(found) > len(lanes):
        for turn in range(max(map(len, lanes))):
            check(case, {own[turn % len(own)]: found[own[turn % len(own)]] for own in lanes}, close)
        return
    for layer in range(LAYERS):
        wanted = expected(case, layer)
        made = [[torch.zeros_like(x) for x in each] for each in wanted]
        for layers in found.values():
            for each in layers[layer]:
                for at, (into, values) in enumerate(zip(made[each.sequence], each.values, strict=True)):
                    for column, head in enumerate(each.heads if at < 2 else each.reads):
                        into[head, each.start : each.stop] += torch.from_numpy(values[column])
        for number, (mine, right) in enumerate(zip(made, wanted, strict=True)):
            for name, got, want in zip(("output", "dq", "dk", "dv"), mine, right, strict=True):
                worst = float((got - want).abs().max())
                assert worst < close, f"{name} of sequence {number} in layer {layer}: {worst}"


def at_work(
    case: Case, device: str, groups: PlanGroups, make: Connect = GlooCommunicators, on: Accelerator = CPU
) -> Device:
    channel = Channel("context", case.stage.devices)
    everyone = groups.group(case.stage.devices, "vote")
    return Device(case, device, make(groups, (channel,), everyone, on).mesh(channel), on)


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_one_process(name: str) -> None:
    case = CASES[name]

    def run(memory: MemoryPlanGroups) -> list[list[Found]]:
        return at_work(case, memory.me, cast(PlanGroups, memory)).step()

    check(case, run_threads(case.stage.devices, run))


@pytest.mark.parametrize(
    "name",
    sizes.beside(
        ["heads that do not divide", "one kv-head for all", "a window"],
        [name for name, case in CASES.items() if case.kv != "not cut"],
    ),
)
def test_any_lanes_can_divide_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fewer bytes would move by keys, and where heads divide by no means as tokens do."""
    monkeypatch.setattr(heads_exchange, "EVEN", 0)

    def heads_form(members: ContextMembers, held: Any, length: int, **of: Any) -> Any:
        return heads_exchange.divided_heads(members, held, length)

    monkeypatch.setattr(context_exchanges, "heads_form", heads_form)
    case = CASES[name]

    def run(memory: MemoryPlanGroups) -> list[list[Found]]:
        mine = at_work(case, memory.me, cast(PlanGroups, memory))
        found = mine.step()
        assert mine.parallel._passes == 2 * LAYERS
        return found

    check(case, run_threads(case.stage.devices, run))


def worker(device: str, store: Any, names: Sequence[str]) -> dict[str, list[list[tuple[Any, ...]]]]:
    """As one of several processes, over gloo; each case twice."""
    groups, found = PlanGroups("plan/1", device, "127.0.0.1", store), {}
    for name in names:
        mine = at_work(CASES[name], device, groups)
        found[name] = mine.step()
        everyone = groups.group(CASES[name].stage.devices, "vote")
        everyone.all_gather(torch.zeros(1))
        assert_same_bits(found[name], mine.step())
        everyone.all_gather(torch.zeros(1))
    return {name: [[tuple(each) for each in layer] for layer in layers] for name, layers in found.items()}


def assert_same_bits(one: list[list[Found]], other: list[list[Found]]) -> None:
    for mine, its in zip(chain(*one), chain(*other), strict=True):
        for x, y in zip(mine.values, its.values, strict=True):
            assert (x == y).all(), "a repeated step has the same bits"


@pytest.mark.parametrize(
    "names",
    [
        ("two lanes, evenly", "two lanes, unevenly"),
        pytest.param(("one device beside three heads and one",), marks=pytest.mark.slow),
        pytest.param(("heads that do not divide",), marks=(pytest.mark.slow, pytest.mark.full)),
        pytest.param(
            ("sequences of all lanes, of two and of one", "a window that some lanes need nothing under"),
            marks=(pytest.mark.slow, pytest.mark.full),
        ),
        pytest.param(("by heads that cut groups, beside others", "by heads"), marks=pytest.mark.slow),
        pytest.param(("keys that are passed on",), marks=pytest.mark.slow),
        pytest.param(
            ("keys that are passed on in groups of unlike width",), marks=(pytest.mark.slow, pytest.mark.full)
        ),
    ],
)
def test_processes_do_as_one_process(names: tuple[str, ...]) -> None:
    found = gang.run(__file__, "worker", CASES[names[0]].stage.devices, names)
    for name in names:
        check(
            CASES[name],
            {device: [[Found(*x) for x in layer] for layer in each[name]] for device, each in found.items()},
        )


class Noted:
    """A mesh with a log of what is launched and joined, as the checker of launches reads it."""

    def __init__(self, mesh: Mesh, me: str) -> None:
        self._mesh, self._me = mesh, me
        self.log: list[Launch | Join] = []
        self.rounds: list[int] = []  # elements that were sent
        self._counts: dict[tuple[str, str], int] = defaultdict(int)
        self.kept = self.most_kept = 0

    def begin_round(self, sends: Any, receives: Any) -> Any:
        ends = [(self._me, to) for to, _ in sends] + [(source, self._me) for source, _ in receives]
        named = []
        for pair in ends:
            self._counts[pair] += 1
            named.append(Operation(f"{pair} {self._counts[pair]}", pair))
        self.log.append(Launch("context", tuple(named)))
        self.rounds += [tensor.numel() for _, tensor in sends]
        self.kept += len(sends)
        self.most_kept = max(self.kept, self.most_kept)
        return named[0].name, len(sends), self._mesh.begin_round(sends, receives)

    def finish(self, work: Any) -> None:
        self.log.append(Join(work[0]))
        self._mesh.finish(work[2])

    def arrived(self, work: Any) -> None:
        self.kept -= work[1]
        self._mesh.arrived(work[2])


def noted(case: Case, recomputed: Mapping[str, Sequence[int]] = {}) -> dict[str, Noted]:
    """What is launched in a step, which is checked, too."""

    def run(memory: MemoryPlanGroups) -> tuple[Noted, list[list[Found]]]:
        mine = at_work(case, memory.me, cast(PlanGroups, memory))
        mine.parallel.mesh = mesh = Noted(mine.parallel.mesh, memory.me)
        return mesh, mine.step(recomputed.get(memory.me, ()))

    found = run_threads(case.stage.devices, run)
    check(case, {device: each for device, (_, each) in found.items()})
    return {device: mesh for device, (mesh, _) in found.items()}


@pytest.mark.parametrize("name", sizes.beside(tuple(CASES)[1::2], CASES))
def test_launches_run_whatever_the_timing(name: str) -> None:
    logs = {device: mesh.log for device, mesh in noted(CASES[name]).items()}
    assert deadlock(logs) is None


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("three lanes", 6),
        ("a window that some lanes need nothing under", 6),
        ("by heads", 12),
        ("keys that are passed on", 12),
    ],
)
def test_messages_are_kept_for_two_passes_at_most(name: str, most: int) -> None:
    """Of one attention, not of all layers: in a pass by heads, say, twice to three others."""
    for mesh in noted(CASES[name]).values():
        assert mesh.most_kept <= most
        assert len(mesh.rounds) >= 3 * LAYERS


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("sequences of all lanes, of two and of one", ()),
        ("sequences of all lanes, of two and of one", ("b/0",)),
        ("sequences of all lanes, of two and of one", ("a/0", "b/0", "c/0")),
        ("by heads that cut groups, beside others", ("a/1", "a/2")),
    ],
)
def test_a_second_forward_pass_exchanges_nothing(name: str, who: tuple[str, ...]) -> None:
    """Also where one lane recomputes and others do not."""
    case = CASES[name]
    plain = {device: mesh.rounds for device, mesh in noted(case).items()}
    again = {device: mesh.rounds for device, mesh in noted(case, dict.fromkeys(who, (0, 2))).items()}
    assert again == plain


@pytest.mark.parametrize("name", sizes.beside(tuple(CASES)[::2], CASES))
def test_what_is_sent_is_what_is_lacking(name: str) -> None:
    """Keys and values once forward, and once more backward with their gradients, and numbers where keys go one
    way alone. By heads queries, keys and values with their gradients, and outputs with theirs."""
    case = CASES[name]
    device, (heads, reads) = case.stage.devices[0], heads_of(case, case.lanes[0], 0)
    members = context_members(spec_of(case), case.stage, device, len(heads), len(reads))
    options = {key: value for key, value in case.options if key != "scale"}
    parts = rounds = 0
    for each in members.members:
        exchange = context_exchange(case.row, members, each.device, **options)
        keys = sum(part.size for one in exchange.rounds for part in one.takes)
        terms = sum(part.size for one in exchange.rounds for part in one.gets)
        parts += (2 * keys + terms) * (SIZE + case.values)
        rounds += sum(not one.sends for one in exchange.rounds)
        for one in exchange.heads_messages:
            parts += 2 * sum(part.size for part in (*one.takes_queries, *one.takes_keys)) * (SIZE + case.values)
    assert rounds or name != "one kv-head for all"
    sent = sum(sum(mesh.rounds) for mesh in noted(case).values())
    assert sent == LAYERS * (parts + 2 * rounds)


@pytest.mark.parametrize(
    ("name", "most"), [("sequences of all lanes, of two and of one", 1.2), ("by heads", 5.5)]
)
def test_a_block_that_recomputes_keeps_no_more_than_it_must(name: str, most: float) -> None:
    """The output and a number for each query; by heads queries, keys, values and their output, too."""
    case = CASES[name]

    def run(memory: MemoryPlanGroups) -> float:
        mine = at_work(case, memory.me, cast(PlanGroups, memory))
        exchange = mine.parallel.row(case.row)
        row = PackedRow(mine._pieces, CPU.device, exchange)
        q, k, v, _ = mine._given(row, 0)
        with passing(row), first_pass("block"), torch.no_grad():
            out = elasticd.attention(q, k, v)
        if row.exchange is None or row.whole:
            return 0.0
        *tensors, by_heads = exchange._kept["block"][0]
        tensors += [x for each in by_heads.values() for x in each]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values()) / out.untyped_storage().nbytes()

    assert 1 < max(run_threads(case.stage.devices, run).values()) < most


@pytest.mark.parametrize("name", ["heads that do not divide", "by heads that cut groups, beside others"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_in_other_types(dtype: torch.dtype, close: float, name: str) -> None:
    case = CASES[name]

    def run(memory: MemoryPlanGroups) -> list[Any]:
        mine = at_work(case, memory.me, cast(PlanGroups, memory))
        mine.dtype = dtype
        return mine.step()

    check(case, run_threads(case.stage.devices, run), close)


def dying(device: str, store: Any) -> str:
    """The last device dies in the middle of a round, once the first keys are under way."""
    case = CASES["sequences of all lanes, of two and of one"]
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    mine = at_work(case, device, groups)
    mine.step()
    if device == case.stage.devices[-1]:
        finish, count = mine.parallel.mesh.finish, 0

        def last(work: Any) -> None:
            nonlocal count
            count += 1
            if count == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            finish(work)

        mine.parallel.mesh.finish = last  # type: ignore[method-assign]
    else:
        threading.Timer(1.0, groups.shut).start()  # as the agent's word does
    try:
        mine.step()
    except (Cancelled, PeerLost) as error:
        return type(error).__name__
    return "finished"


@pytest.mark.slow
def test_a_death_in_the_middle_of_a_round_frees_the_others() -> None:
    devices = CASES["sequences of all lanes, of two and of one"].stage.devices
    found = gang.run(__file__, "dying", devices, dying=devices[-1:], seconds=60)
    assert set(found.values()) <= {"Cancelled", "PeerLost"}
    assert set(found) == set(devices[:-1])


@pytest.mark.parametrize("alike", [True, False])
def test_members_of_a_tp_group_whose_heads_no_units_tell_of_are_refused(alike: bool) -> None:
    """Unless they are replicas, which all have the same keys."""
    case = CASES["replicas in equal numbers"]

    def run(memory: MemoryPlanGroups) -> list[list[Found]]:
        mine = at_work(case, memory.me, cast(PlanGroups, memory))
        lane = next(lane.devices for lane in case.stage.by_lane if memory.me in lane.devices)
        if not alike and memory.me == lane[-1]:
            mine.heads, mine.reads = mine.heads[::-1], mine.reads[::-1]
        with running(memory.group(lane, "tensor")):
            return mine.step()

    if alike:
        check(case, run_threads(case.stage.devices, run))
        return
    with pytest.raises(ModelError, match="8 heads and 4 kv-heads of its own, and no kind of units"):
        run_threads(case.stage.devices, run)


def test_a_part_of_a_sequence_without_other_lanes_is_refused() -> None:
    row = PackedRow(CASES["two lanes, evenly"].row[0], CPU.device)
    x = torch.zeros(1, 2, row.tokens, 4)
    with passing(row), pytest.raises(RuntimeError, match="no other lane to fetch the rest from"):
        elasticd.attention(x, x, x)
