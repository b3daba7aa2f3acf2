"""Packed jobs drawn by a seed: real models on 7 to 16 GPUs, lengths with a tail or without, slow devices."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from elasticd_planner.cost.model_profile import Numbers, derive, suited
from elasticd_planner.detection.lengths import attention_rise, evaluated
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.sample_packing import linear_of
from elasticd_planner.spec.sequence_lengths import Lengths, even
from elasticd_planner.value import Value

from tests.planner.real_models import ZERO, cluster_of, spec_of

MODELS = ("Qwen2.5-7B", "Llama-3.1-8B", "OLMo-2-7B", "Qwen2.5-0.5B", "SmolLM2-135M")
CLUSTERS = ((7,), (8,), (4, 4), (3, 3, 3), (5, 5), (6, 6), (4, 4, 4), (7, 7), (8, 8), (4, 4, 4, 4))
#: Sequences of a step, tokens of the longest, of a row at most, and of the rows that profiles are of.
SEQUENCES, LONGEST, ROW, TOKENS = 256, 16_000, 16_384, 4096


class PackedJob(Value, frozen=True, kw_only=True):
    """A packed job. slow: how many of its devices are."""

    name: str
    problem: Problem
    slow: int


def drawn(seed: int, count: int) -> Iterator[PackedJob]:
    """Packed jobs, the same of the same seed."""
    chance = np.random.default_rng(seed)
    for number in range(count):
        model, nodes = MODELS[number % len(MODELS)], CLUSTERS[int(chance.integers(len(CLUSTERS)))]
        memory = float(chance.choice([40, 80, 140] if "B" in model and model[-2:] != "5B" else [4, 24, 80]))
        spread = float(chance.choice([0.3, 1.0, 1.5]))
        lengths = np.clip(np.exp(chance.normal(6.5, spread, SEQUENCES)), 16, LONGEST).astype(np.int64)
        devices = [f"n{node}/{at}" for node, each in enumerate(nodes) for at in range(each)]
        slow = int(chance.integers(3))
        rates = {
            str(name): float(chance.uniform(1.2, 4.0)) for name in chance.choice(devices, slow, replace=False)
        }
        space = SearchSpace(states=ZERO[:1], lanes=len(devices), recompute=bool(chance.integers(2)))
        words = f"{model} on {'+'.join(map(str, nodes))} of {memory:g} GB, spread {spread:g}, {slow} slow"
        made = packed_job(model, nodes, memory, lengths, rates, space)
        yield PackedJob(name=words, problem=made, slow=slow)


def packed_job(
    model: str,
    nodes: tuple[int, ...],
    gigabytes: float,
    lengths: np.ndarray,
    rates: dict[str, float],
    space: SearchSpace,
) -> Problem:
    """A job whose steps have sequences of these lengths."""
    spec, total = spec_of(model), float(lengths.sum())
    packed = PackedSequences(
        sequences=float(len(lengths)),
        lengths=Lengths(
            mean=total / len(lengths), effective=float((lengths**2).sum()) / total, longest=float(lengths.max())
        ),
        longest=int(lengths.max()),
        linear=linear_of(spec),
        row_tokens=ROW,
        least=64,
    )
    profile = suited(derive(spec, TOKENS, 1, 4e14), Numbers(compute="bfloat16"))
    profile = evaluated(profile, even(float(TOKENS)), packed.lengths, attention_rise(spec), rows=True)
    return Problem(
        cluster=cluster_of(nodes, gigabytes=gigabytes),
        profile=profile,
        global_batch=len(lengths),
        micro_batch=1,
        rates=rates,
        packed=packed,
        search_space=space,
    )


def pinned(job: PackedJob, width: int) -> Problem:
    """The job's problem with TP groups of this size."""
    space = msgspec.structs.replace(job.problem.search_space, fixed_tp=width)
    return msgspec.structs.replace(job.problem, search_space=space)
