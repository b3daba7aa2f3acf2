"""Problems of several modules at random: unlike devices, encoders of any size beside language models."""

from __future__ import annotations

import random

from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.problem import ModuleProblem, Problem
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node

GIB, MIB = 1 << 30, 1 << 20
LOSS = "language"


def drawn_problem(seed: int, *, memory: int = 60 * GIB, modules: int = 1) -> Problem:
    """A problem of 8 devices on two nodes."""
    rng = random.Random(seed)
    cluster = cluster_of(2, 4, memory)
    names = [device.name for device in cluster.devices]
    slow = rng.sample(names, rng.choice((0, 0, 1, 2)))
    layers, batch = rng.choice((8, 12, 24)), rng.choice((16, 32))
    profile = language(layers, 1e-3 * rng.uniform(0.5, 2), rng.choice((100, 400)) * MIB)
    work = layers * profile.block.seconds * batch / 8
    return Problem(
        cluster=cluster,
        profile=profile,
        global_batch=batch,
        micro_batch=1,
        rates={name: rng.choice((1.5, 2.0, 3.0)) for name in slow},
        module=LOSS,
        modules=tuple(encoder(rng, f"encoder{at}", work / modules, batch) for at in range(modules)),
    )


def cluster_of(nodes: int, devices: int, memory: int = 60 * GIB) -> Cluster:
    """Nodes of as many devices each."""
    return Cluster(
        nodes=tuple(
            Node(name=f"n{k}", devices=tuple(Device(name=f"n{k}/{i}", memory=memory) for i in range(devices)))
            for k in range(nodes)
        ),
        inside=Link(bandwidth=5e10, latency=1e-5),
        between=Link(bandwidth=1e10, latency=2e-5),
    )


def language(layers: int, seconds: float, layer_bytes: int) -> ModelProfile:
    """A language model of micro-batches that count as one token."""
    block = SectionProfile(
        seconds=seconds,
        cut_bytes=layer_bytes,
        cut_activation=64.0 * MIB,
        collectives=4,
        slowdown={2: 1.1, 4: 1.3},
    )
    return ModelProfile(
        name="language", layers=layers, share_units=8, tokens=1.0, block=block, boundary_bytes=8.0 * MIB
    )


def encoder(rng: random.Random, name: str, work: float, batch: int) -> ModuleProblem:
    """An encoder that takes 0.1 to 2 times so many seconds for all items of a step, on one device."""
    layers, rows = 4, rng.choice((256.0, 576.0, 1024.0))
    items = rng.choice((0.5, 1.0, 2.0, 3.5))
    seconds = rng.uniform(0.1, 2) * work / (batch * items * rows * layers)
    block = SectionProfile(
        seconds=seconds,
        cut_bytes=rng.choice((5, 50)) * MIB,
        cut_activation=8.0 * MIB / rows,
        collectives=4,
        slowdown={2: 1.1, 4: 1.3},
    )
    profile = ModelProfile(
        name=name, layers=layers, share_units=8, tokens=rows, block=block, boundary_bytes=8192.0
    )
    return ModuleProblem(
        name=name,
        profile=profile,
        items=f"{name} items",
        items_a_sample=items,
        rows_an_item=rows,
        trained=rng.random() < 0.8,
    )
