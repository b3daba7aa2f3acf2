"""Ten models as they are published, by their sizes, and jobs that train them.

The sizes are those of each model's `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticd_planner.cost.model_profile import ModelProfile, Numbers, derive, suited
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.spec.plan import StatePolicy


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder's sizes. norms: lengths of norms besides the two in front of attention and hidden layer: over
    heads or all queries and keys, and behind both parts."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    tied: bool = False
    norms: tuple[int, ...] = ()


REAL = {
    "Llama-3.1-8B": Sizes(4096, 32, 32, 8, 128, 14336, 128256),
    "Qwen2.5-7B": Sizes(3584, 28, 28, 4, 128, 18944, 152064),
    "Qwen2.5-0.5B": Sizes(896, 24, 14, 2, 64, 4864, 151936, tied=True),
    "Qwen3-0.6B": Sizes(1024, 28, 16, 8, 128, 3072, 151936, tied=True, norms=(128, 128)),
    "Gemma-3-1b": Sizes(1152, 26, 4, 1, 256, 6912, 262144, tied=True, norms=(256, 256, 1152, 1152)),
    "Mistral-Nemo-12B": Sizes(5120, 40, 32, 8, 128, 14336, 131072),
    "OLMo-2-7B": Sizes(4096, 32, 32, 32, 128, 11008, 100352, norms=(4096, 4096)),
    "SmolLM2-135M": Sizes(576, 30, 9, 3, 64, 1536, 49152, tied=True),
    "Llama-3.1-70B": Sizes(8192, 80, 64, 8, 128, 28672, 128256),
    "Llama-3.1-405B": Sizes(16384, 126, 128, 8, 128, 53248, 128256),
}

#: State policies in the order of preference.
ZERO = (StatePolicy(), StatePolicy(zero=1, replicas=1), StatePolicy(zero=2, replicas=1))


def spec_of(name: str) -> ModelSpec:
    """The model's parameters in bfloat16, cut as tensor parallelism cuts them."""
    return decoder(name, REAL[name])


def decoder(name: str, sizes: Sizes) -> ModelSpec:
    """The parameters of a decoder of these sizes."""
    width, rows = sizes.width, sizes.vocabulary
    queries, keys = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width

    def parameter(part: str, *shape: int, cut: Cut | None = None, add: bool = False) -> Parameter:
        return Parameter(name=part, shape=shape, dtype="bfloat16", cut=cut, replicas="add" if add else "same")

    columns, kv = Cut(dim=0, units="columns"), Cut(dim=0, units="kv_heads")
    block = (
        parameter("attention_norm", width),
        parameter("q", queries, width, cut=Cut(dim=0, units="heads")),
        parameter("k", keys, width, cut=kv, add=True),
        parameter("v", keys, width, cut=kv, add=True),
        parameter("o", width, queries, cut=Cut(dim=1, units="heads")),
        parameter("mlp_norm", width),
        parameter("gate", sizes.hidden, width, cut=columns),
        parameter("up", sizes.hidden, width, cut=columns),
        parameter("down", width, sizes.hidden, cut=Cut(dim=1, units="columns")),
        *(parameter(f"norm_{index}", length) for index, length in enumerate(sizes.norms)),
    )
    vocabulary = Cut(dim=0, units="rows")
    return ModelSpec(
        name=name,
        embed=(parameter("tokens", rows, width, cut=vocabulary),),
        kinds=(block,),
        layers=(0,) * sizes.layers,
        head=(parameter("norm", width), parameter("output", rows, width, cut=vocabulary)),
        units=(
            Units(kind="heads", count=sizes.heads),
            Units(kind="kv_heads", count=sizes.kv_heads, follows="heads"),
            Units(kind="columns", count=sizes.hidden),
            Units(kind="rows", count=rows),
        ),
        ties=(("head.output", "embed.tokens"),) if sizes.tied else (),
        width=width,
        dtype="bfloat16",
    )


def profile_of(name: str, *, tokens: int = 4096, micro_batch: int = 1, flops: float = 4e14) -> ModelProfile:
    """The profile that a job has before anything was measured: bfloat16, float32 master weights and moments."""
    return suited(derive(spec_of(name), tokens, micro_batch, flops), Numbers(compute="bfloat16"))


def cluster_of(
    nodes: tuple[int, ...], *, gigabytes: float = 75.0, inside: float = 300.0, between: float = 25.0
) -> Cluster:
    """Nodes of so many devices, each with so many GB that can be used; links in GB/s."""
    return Cluster(
        nodes=tuple(
            Node(
                name=f"n{n}",
                devices=tuple(Device(name=f"n{n}/{i}", memory=int(gigabytes * 1e9)) for i in range(count)),
            )
            for n, count in enumerate(nodes)
        ),
        inside=Link(bandwidth=inside * 1e9, latency=5e-6),
        between=Link(bandwidth=between * 1e9, latency=1e-5),
    )


def job(
    name: str,
    nodes: tuple[int, ...],
    *,
    batch: int = 128,
    tokens: int = 4096,
    flops: float = 4e14,
    rates: dict[str, float] | None = None,
    links: dict[str, float] | None = None,
    **space: Any,
) -> Problem:
    """A job that trains the model on such a cluster. `space`: fields of the search space; by default ZeRO 0 and
    1, and recomputation where memory demands it."""
    return Problem(
        cluster=cluster_of(nodes, **(links or {})),
        profile=profile_of(name, tokens=tokens, flops=flops),
        global_batch=batch,
        micro_batch=1,
        rates=rates or {},
        search_space=SearchSpace(**{"states": ZERO[:2], "recompute": True, **space}),
    )
