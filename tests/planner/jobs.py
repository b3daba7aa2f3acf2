"""Random small problems of a job, from a seeded generator."""

from __future__ import annotations

import math
import random

from elasticd_planner.cost.model_profile import SectionProfile
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node

from tests.planner.models import profile, replica_bytes

SIZES = ((1,), (2,), (3,), (4,), (5,), (6,), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 2))


def small(rng: random.Random, sizes: tuple[tuple[int, ...], ...] = SIZES) -> Problem:
    """One to six devices on one or two nodes, two to eight layers, up to twelve micro-batches, slow links or
    fast ones; memory often binds. The rates are few, so that enumeration is quick."""
    model = profile(
        layers=rng.randint(2, 8),
        share_units=rng.choice([4, 6, 8]),
        groups=rng.choice([0, 2]),
        block=SectionProfile(
            seconds=1e-3,
            cut_bytes=1000,
            grouped_bytes=rng.choice([0, 200]),
            whole_bytes=10,
            cut_activation=rng.choice([0.0, 2.0]),
            whole_activation=rng.choice([0.0, 1.0]),
            collectives=rng.choice([0, 4]),
        ),
        embed=SectionProfile(seconds=rng.choice([0.0, 5e-4]), cut_bytes=700, collectives=1),
        head=SectionProfile(seconds=rng.choice([0.0, 1e-3]), cut_bytes=700),
        tied_bytes=rng.choice([0, 700]),
        boundary_bytes=rng.choice([10.0, 5000.0]),
        overhead_seconds=rng.choice([0.0, 0.05]),
        pipeline_scale=rng.choice([1.0, 0.9]),
    )
    room = [0.25, 0.35, 0.5, 0.7, 1.0, 2.0] if rng.random() < 0.6 else [50.0]
    memories = [math.ceil(replica_bytes(model) * rng.choice(room)) for _ in range(2)]
    slow = [rng.choice([1.0, 1.2, 1.5, 2.0, 3.0, 5.0]) for _ in range(2)]
    nodes = []
    for n, count in enumerate(rng.choice(sizes)):
        each = [rng.choice(memories) if rng.random() < 0.3 else memories[0] for _ in range(count)]
        devices = tuple(Device(name=f"n{n}/{i}", memory=memory) for i, memory in enumerate(each))
        nodes.append(Node(name=f"n{n}", devices=devices))
    between = Link(bandwidth=rng.choice([1e6, 1e7, 1e9]), latency=1e-3)
    cluster = Cluster(nodes=tuple(nodes), between=between)
    rates = {device.name: rng.choice([1.0, 1.0, 1.0, *slow]) for device in cluster.devices}
    return Problem(
        cluster=cluster, profile=model, rates=rates, global_batch=2 * rng.randint(1, 12), micro_batch=2
    )


def unlike(rng: random.Random, sizes: tuple[tuple[int, ...], ...] = SIZES) -> Problem:
    """Devices whose slowdowns are of every kind: none, each its own, a few large ones; up to 16 layers and 24
    micro-batches; room for the state that is scarce or plenty."""
    model = profile(
        layers=rng.randint(3, 16),
        share_units=rng.choice([4, 8, 16]),
        block=SectionProfile(
            seconds=3e-4,
            cut_bytes=800_000,
            collectives=rng.choice([0, 4]),
            cut_activation=rng.choice([0.0, 50.0]),
        ),
        embed=SectionProfile(seconds=rng.choice([0.0, 1e-4]), cut_bytes=100_000),
        head=SectionProfile(seconds=rng.choice([0.0, 3e-4]), cut_bytes=100_000, collectives=1),
        boundary_bytes=rng.choice([512.0, 4096.0]),
    )
    counts = rng.choice(sizes)
    memory = math.ceil(replica_bytes(model) * rng.choice([1.1, 1.3, 1.6, 2.5, 50.0]) / sum(counts)) + 100_000
    nodes = tuple(
        Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=memory) for i in range(count)))
        for n, count in enumerate(counts)
    )
    between = Link(bandwidth=rng.choice([1e7, 1e8, 1e9]), latency=rng.choice([1e-4, 1e-3]))
    few = rng.choice([(1.0,), (1.0, 1.0, 1.0, 2.57, 5.42), (1.0, 1.25, 2.0), ()])
    cluster = Cluster(nodes=nodes, between=between)
    rates = {d.name: rng.choice(few) if few else round(rng.uniform(1, 1.6), 2) for d in cluster.devices}
    batch = rng.choice([4, 6, 8, 12, 16, 24])
    return Problem(cluster=cluster, profile=model, rates=rates, global_batch=batch, micro_batch=1)
