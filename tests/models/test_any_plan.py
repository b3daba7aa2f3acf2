"""Any legal plan trains like one process: plans are drawn at random, their members are threads."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise

import msgspec
import pytest
import torch
from elasticd_planner.spec.plan import Plan, Stage, StatePolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.models import next_token_loss
from elasticd.runtime.model.validation import replace_dropouts
from examples.train_gpt2 import GPT, describe
from tests import sizes
from tests.models import precise, test_mixed_precision_matrix
from tests.models.layouts import BATCH, Run, Training, alone, furthest, plan_of, under
from tests.models.texts import Text

LAYERS, MOST = 4, 6


@st.composite
def plans(draw: st.DrawFn, layers: int = LAYERS) -> Plan:
    """One to three pipelines of any stages, interleaved or not, with TP groups of any shares, some in two
    lanes, on at most so many devices; stages that make activations again or have sequence parallelism, state
    kept by any policy."""
    micro_batch = draw(st.sampled_from([1, 2]))
    total = BATCH // micro_batch
    pipelines: list[tuple[int | tuple[int, ...], list[Stage]]] = []
    used, left = 0, total
    count = draw(st.integers(1, 3))
    for pipeline in range(count):
        borders = draw(st.sets(st.integers(1, layers - 1)))
        edges = [0, *sorted(borders), layers]
        spans = list(pairwise(edges))
        turns = [n for n in range(1, len(spans)) if len(spans) % n == 0]  # two stages at least take turns
        depth = len(spans) // draw(st.sampled_from(turns or [1]))
        stages = []
        for (start, stop), *later in (spans[s::depth] for s in range(depth)):
            most = MOST - used - (count - pipeline - 1) - (depth - 1 - len(stages))
            shares = draw(st.lists(st.integers(1, 5), min_size=1, max_size=max(1, min(4, most))))
            stages.append(
                Stage(
                    start=start,
                    stop=stop,
                    later=tuple(later),
                    devices=_names(used, len(shares)),
                    shares=tuple(shares),
                    recompute=draw(st.booleans()),
                    sequence_parallel=draw(st.booleans()),
                )
            )
            used += len(shares)
        last = pipeline == count - 1
        passes = left if last else draw(st.integers(1, left - (count - pipeline - 1)))
        left -= passes
        if passes > 1 and min(len(stage.devices) for stage in stages) > 1 and draw(st.booleans()):
            first = draw(st.integers(1, passes - 1))
            pipelines.append(((first, passes - first), [_two_lanes(draw, stage) for stage in stages]))
        else:
            pipelines.append((passes, stages))
    zero = draw(st.sampled_from([0, 1, 2]))
    state = StatePolicy(zero=zero, replicas=draw(st.integers(1, 2)) if zero else None)
    return plan_of(*pipelines, micro_batch=micro_batch).replace(state=state)


def _two_lanes(draw: st.DrawFn, stage: Stage) -> Stage:
    """Its devices in two TP groups."""
    count = len(stage.devices)
    width = draw(st.integers(1, count - 1))
    return msgspec.structs.replace(stage, lanes=(width, count - width))


def _names(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"n/{i:02}" for i in range(first, first + count))


@cache
def trained() -> tuple[Training, Run, tuple[str, ...]]:
    torch.manual_seed(0)
    gpt = GPT(vocabulary=23, width=24, layers=LAYERS, heads=6, longest=16, dropout=0.2).double()
    whole = copy.deepcopy(gpt)
    for section, module in (("embed", whole.embed), *((f"blocks.{i}", b) for i, b in enumerate(whole.blocks))):
        replace_dropouts(section, module)
    training = Training(model=describe(gpt), loss=next_token_loss, dataset=Text(23))
    return training, alone(training, whole), tuple(name for name, _ in gpt.named_parameters())


@given(plans())
@settings(max_examples=sizes.number(full=8, quick=4), derandomize=True)
def test_any_plan_trains_like_one_process(plan: Plan) -> None:
    training, expected, names = trained()
    found = under(training, plan)
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {name: name for name in names}) < (1e-11, "")


@given(plans(test_mixed_precision_matrix.LAYERS))
@settings(max_examples=sizes.number(full=4, quick=2), derandomize=True)
def test_so_it_does_under_master_weights(plan: Plan) -> None:
    """Finer ones, so that nothing hides in rounding."""
    finer = "fp32 under fp64"
    made, expected = test_mixed_precision_matrix.course("gpt", finer, "adamw")
    assert precise.apart(made, precise.under(made, plan), expected) < test_mixed_precision_matrix.NEAR[finer]
