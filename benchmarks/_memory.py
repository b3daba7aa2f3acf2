"""Memory: what is predicted of one rank over what it has alive at most, for ten classes of transformers.

Each class is built from its config at a small size and trained twice for two steps by two pipelines over gloo,
threads of one process. The job has no profile: it measures its own sections, as every job does. Alive are the
storages that the rank's operations made, from the one that makes it until it is freed, in the run that has
least (tests/runtime/live_bytes.py, a TorchDispatchMode): the CPU allocator's bytes, but for what a kernel
needs inside one operation. The user's own copy of the model does not count on either side.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from _results import Row, row
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.spec.plan import Plan, Stage, StatePolicy

from elasticd.machines.job.replan import first_profile
from elasticd.models import next_token_loss
from elasticd.runtime.api.hello import job_spec
from elasticd.runtime.engine.recipe import Recipe
from tests.models.layouts import plan_of
from tests.runtime.live_bytes import most_live

#: The goal: predicted over measured.
LEAST, MOST = 0.95, 1.10
#: Runs of which that with least counts: in one of some ten, bytes of one copy of the parameters stay alive.
RUNS = 2
LAYERS, TOKENS, VOCABULARY, SAMPLES = 6, 256, 1024, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
#: Classes of transformers, with what they have besides those sizes.
CLASSES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 64},
    "Gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": None},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "GPTNeoX": {},
    "Cohere": {"num_key_value_heads": 6, "tie_word_embeddings": True},
}
#: GPT-2's sizes have names of their own; its dropouts keep masks.
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 192, "n_layer": LAYERS, "n_head": 6, "n_positions": 512}


class _Text:
    """Samples of one length, each a function of its index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def memory_rows(names: Sequence[str] = tuple(CLASSES), zeros: Sequence[int] = (0, 1, 2)) -> Iterator[Row]:
    """Every class under every state policy, as it is and with every block recomputed."""
    import transformers

    logging.getLogger("elasticd").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ratios = []
    for name in names:
        for zero, recompute in product(zeros, (False, True)):
            ratio = _ratio(_theirs(transformers, name), zero, recompute)
            ratios.append(ratio)
            yield row(
                f"predicted over measured memory of a rank: {name}, ZeRO {zero}{', recomputed' * recompute}",
                ratio,
                "x",
                goal=f"{LEAST} to {MOST:.2f}",
                met=LEAST <= ratio <= MOST,
            )
    within = sum(LEAST <= ratio <= MOST for ratio in ratios)
    yield row(
        f"predicted within {LEAST} to {MOST:.2f} of the measured memory, of {len(ratios)}", within, "rows"
    )


def _theirs(transformers: Any, name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | CLASSES[name]))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _plan(zero: int, recompute: bool) -> Plan:
    """Two pipelines of one device, each with two micro-batches."""
    stages = [
        Stage(start=0, stop=LAYERS, devices=(f"n/{i}",), shares=(1,), recompute=recompute) for i in (0, 1)
    ]
    plan = plan_of(*((2, [stage]) for stage in stages), micro_batch=SAMPLES)
    return plan.replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))


def _ratio(theirs: Any, zero: int, recompute: bool) -> float:
    import elasticd

    plan = _plan(zero, recompute)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = Recipe(
            model=elasticd.from_hf(theirs),
            loss=next_token_loss,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
            dataset=_Text(),
            global_batch=plan.global_batch,
            micro_batch=SAMPLES,
            seed=0,
        )
        others = [*theirs.parameters(), *theirs.buffers()]
        measured = min(most_live(recipe, plan, "n/0", others) for _ in range(RUNS))
    profile = first_profile(job_spec(recipe, "memory"), 1e12)
    return memory_by_device(plan, ProfileCost(profile))["n/0"] / measured
