"""Packed rows and cut sequences in the runtime: exactness, bytes of keys, groups, and what uncut rows cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, product
from typing import Any, cast

import _small_rounds
import torch
import torch.nn.functional as F
from _results import Row, row
from elasticd_planner.batching import context_exchange
from elasticd_planner.batching.context_members import ContextMembers
from elasticd_planner.batching.heads_exchange import divided_heads
from elasticd_planner.spec.batch import MicroBatch, SequencePiece
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.parallel.attention import attention
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from tests.planner.test_context_exchange import exchanges, lanes_of, members_of, moved, row_of, stage_of
from tests.runtime import gang, test_cut_sequences, test_engine_parity, test_packed
from tests.runtime.test_engine import engine_on
from tests.runtime.test_packed import trained

CLOSE = 1e-10
POLICIES = test_cut_sequences.POLICIES
STEPS_OF_DEGREES = 200


def worst(plan: Plan, make: Callable[[], Recipe]) -> float:
    """The largest difference of a weight from one process of plain torch, after a few steps."""
    _, _, weights = test_engine_parity.reference(test_engine_parity.STEPS)
    found = run_threads(
        plan.members,
        lambda memory: trained(memory.me, plan, cast(PlanGroups, memory), make(), test_engine_parity.STEPS),
    )
    return max(
        float((torch.from_numpy(value) - weights[name][tuple(map(slice, start, stop))]).abs().max())
        for result in found.values()
        for name, (start, stop, value) in result["weights"].items()
    )


def parity_rows(most: int | None = None) -> Iterator[Row]:
    """Weights after AdamW steps under every layout and policy, in float64."""
    for title, module, make in (
        ("packed, whole sequences", test_packed, test_packed.packed),
        ("sequences cut over lanes", test_cut_sequences, test_cut_sequences.cutting),
        (
            "sequences that memory cuts, as the dealing gives them",
            test_cut_sequences,
            test_cut_sequences.cut_by_memory,
        ),
    ):
        plans: dict[str, Plan] = dict(islice(module.PLANS.items(), most))
        apart = {
            (name, policy): worst(plan.replace(state=state), make)
            for name, plan in plans.items()
            for policy, state in POLICIES.items()
        }
        yield row(
            f"decoder, {title}: {len(plans)} layouts x {len(POLICIES)} policies, worst weight",
            max(apart.values()),
            "",
            goal=f"<= {CLOSE:g}",
            met=max(apart.values()) <= CLOSE,
        )


def heads_rows(most: int | None = None) -> Iterator[Row]:
    """Weights after AdamW steps where lanes divide heads, over those of one device, in float64."""
    plans = {name: test_cut_sequences.PLANS[name] for name in islice(test_cut_sequences.BY_HEADS, most)}
    make = test_cut_sequences.by_heads
    apart = [
        test_cut_sequences.apart_from_one_device(make, test_packed.in_threads(plan.replace(state=state), make))
        for plan in plans.values()
        for state in POLICIES.values()
    ]
    count = f"{len(plans)} layouts x {len(POLICIES)} policies"
    title = f"decoder, heads of cut sequences divided: {count}, worst weight"
    yield row(title, max(apart), "", goal=f"<= {CLOSE:g}", met=max(apart) <= CLOSE)


def exchange_rows() -> Iterator[Row]:
    """Bytes that lanes send each other, in what launches, and process groups while degrees change."""
    over = []
    for lanes in range(2, 9):
        length = 2 * lanes * 64
        members = members_of(stage_of(*[(1,)] * lanes))
        found = exchanges(row_of(lanes, [(length, dict.fromkeys(range(lanes), 1))]), members)
        taken = sum(part.size for each in found.values() for one in each.rounds for part in one.takes)
        ring = (lanes - 1) * length * 4  # each of 4 kv-heads of each token goes to all other lanes
        over.append(taken / ring)
    yield row(
        "bytes of keys over those of a ring, 2 to 8 equal lanes: worst",
        max(over),
        "x",
        goal="<= 0.76",
        met=max(over) <= 0.76,
    )
    yield from relay_rows()
    yield small_rounds_row()
    yield from degree_rows()


def form_rows() -> Iterator[Row]:
    """Bytes of a sequence whose heads are divided over those of keys, forward and backward, on one node."""
    for each in (1, 2, 4, 8):
        ratios = {}
        for lanes, causal in product((2, 4, 8, 16, 32), (True, False)):
            members = lanes_of("a" * lanes, 32, 32 // each)
            row_ = row_of(lanes, [(128 * lanes, dict.fromkeys(range(lanes), 1))])
            ratios[lanes, causal] = _moved_by(divided_heads, row_, members, causal) / _moved_by(
                lambda *given: None, row_, members, causal
            )
        told = ", ".join(
            f"{lanes} lanes {ratios[lanes, True]:.2f} ({ratios[lanes, False]:.2f})"
            for lanes in (2, 4, 8, 16, 32)
        )
        title = f"bytes by heads over those of keys, 32 heads, {each} for a kv-head"
        yield row(f"{title}: {told} under a causal mask (without): 8 lanes", ratios[8, True], "x")


def _moved_by(
    division: Callable[[ContextMembers, Any, int], Any],
    lanes: tuple[MicroBatch, ...],
    members: ContextMembers,
    causal: bool,
) -> int:
    before = context_exchange.heads_form
    context_exchange.heads_form = lambda members, held, length, **of: division(members, held, length)
    try:
        return sum(moved(lanes, members, causal=causal))
    finally:
        context_exchange.heads_form = before


def relay_rows() -> Iterator[Row]:
    """Bytes of keys between nodes, where they come once for all lanes of a node, over those of a lane each."""
    for nodes in ("aabb", "aaaabbbb", "aaaabbbbccccdddd"):
        members = lanes_of(nodes, 32, 8)
        lanes = row_of(len(nodes), [(128 * len(nodes), dict.fromkeys(range(len(nodes)), 1))])
        before = context_exchange._fewer_bytes, context_exchange.heads_form
        found = []
        for passes_on in (True, False):
            context_exchange.heads_form = lambda *given, **of: None
            context_exchange._fewer_bytes = lambda *given, passes_on=passes_on: passes_on  # type: ignore[misc]
            try:
                found.append(moved(lanes, members)[0])
            finally:
                context_exchange._fewer_bytes, context_exchange.heads_form = before
        count, of_node, over = len(set(nodes)), nodes.count("a"), found[0] / found[1]
        title = f"bytes of keys between {count} nodes of {of_node} lanes over those of each lane by itself"
        yield row(title, over, "x", goal=f"<= {1.1 / of_node:.2f}", met=over <= 1.1 / of_node)


def small_rounds_row() -> Row:
    """Rounds of few bytes launched together, over gloo."""
    value, noise = _small_rounds.middle(
        gang.run(_small_rounds.__file__, "timed", _small_rounds.CASE.stage.devices)
    )
    title = "attention of 120 tokens on 6 lanes, forward and backward: rounds together over rounds one by one"
    return row(title, value, "x", goal="< 1", met=value < 1, noise=noise)


def degree_rows() -> Iterator[Row]:
    """Process groups that are made while degrees change."""
    plan = test_cut_sequences.PLANS["five lanes"]
    made: list[str] = []

    def member(memory: MemoryPlanGroups) -> tuple[int, set[int]]:
        engine = engine_on(memory, test_cut_sequences.cutting(), plan)
        before, group = len(made), memory.group

        def counted(*arguments: Any, **more: Any) -> Any:
            made.append(memory.me)
            return group(*arguments, **more)

        memory.group = counted  # type: ignore[method-assign]
        degrees = set()
        for step in range(STEPS_OF_DEGREES):
            rows = engine._batches.of(step).pipelines[0]
            lanes: dict[int, int] = {}
            for each in (piece for row_ in rows for lane in row_.lanes for piece in lane):
                lanes[each.sample] = lanes.get(each.sample, 0) + 1
            degrees |= set(lanes.values())
            engine.step(step, lambda: 0)
        return len(made) - before, degrees

    found = run_threads(plan.members, member)
    degrees = sorted(set().union(*(each[1] for each in found.values())))
    yield row(
        f"groups made in {STEPS_OF_DEGREES} steps of {degrees[0]} to {degrees[-1]} lanes a sequence",
        len(made),
        "groups",
        goal="0",
        met=not made,
    )


def uncut_rows(rounds: int = 1000) -> Iterator[Row]:
    """`elasticd.attention` over SDPA: one sequence in a row, and several against each by itself."""
    torch.set_num_threads(1)
    for name, lengths in {"one of 1,024 tokens": (1024,), "700, 200 and 124 tokens": (700, 200, 124)}.items():
        q, k, v = (torch.randn(1, 8, sum(lengths), 64, requires_grad=True) for _ in range(3))
        packed = PackedRow([SequencePiece.whole(i, n) for i, n in enumerate(lengths)], CPU.device)

        def ours(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, packed: PackedRow = packed
        ) -> None:
            with passing(packed):
                attention(q, k, v).sum().backward()

        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        parts = [
            tuple(x.detach()[:, :, a:b].clone().requires_grad_() for x in (q, k, v)) for a, b in pairwise(ends)
        ]

        def theirs(parts: list[Any] = parts) -> None:
            for part in parts:
                F.scaled_dot_product_attention(*part, is_causal=True).sum().backward()

        ratios = _pairs(ours, theirs, rounds)
        low, high = statistics.quantiles(ratios, n=40)[0], statistics.quantiles(ratios, n=40)[-1]
        middle = statistics.median(ratios)
        half = (
            1.57
            * (statistics.quantiles(ratios, n=4)[2] - statistics.quantiles(ratios, n=4)[0])
            / len(ratios) ** 0.5
        )
        yield row(
            f"elasticd.attention over SDPA, {name}: upper end of the median's interval",
            middle + half,
            "x",
            goal="<= 1.03",
            met=middle + half <= 1.03,
            noise=(high - low) / 2,
        )


def _pairs(one: Callable[[], None], other: Callable[[], None], count: int) -> list[float]:
    found = []
    for at in range(count + 20):
        took = {}
        for which in (one, other) if at % 2 else (other, one):
            start = time.perf_counter()
            which()
            took[which] = time.perf_counter() - start
        if at >= 20:
            found.append(took[one] / took[other])
    return found
