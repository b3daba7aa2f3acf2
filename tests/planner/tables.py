"""Problems of the shared format: the golden ones, clusters of any size, random small ones."""

import json
import random
from pathlib import Path
from typing import Any

from elasticd_planner.problem_files.file_format import TableProblem, load

REFERENCE = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "golden" / "malleus_reference.json").read_text()
)


def golden(name: str, rates: dict[str, float] | None = None, **changes: Any) -> TableProblem:
    """A golden problem with rates; `pins=None` frees it, `uneven=True` allows uneven shares."""
    text = json.loads(json.dumps(REFERENCE["problems"][name]))
    text["rates"] = rates or {}
    text["model"]["uneven_shares"] = changes.get("uneven", False)
    text["pins"] = changes.get("pins", text["pins"]) or {}
    return load(json.dumps(text))


def large(devices: int, slow: int, *, pinned: bool, uneven: bool = False, seed: int = 0) -> TableProblem:
    """The 70B problem on so many devices in nodes of eight, with slow ones on so many nodes."""
    text = json.loads(json.dumps(REFERENCE["problems"]["70b"]))
    nodes = devices // 8
    text["cluster"]["nodes"] = [{"name": f"n{i}", "devices": 8, "memory_mib": 81252} for i in range(nodes)]
    text["batch"]["global_batch"] = devices
    text["pins"] = {"tp": 8, "dp": devices // 32} if pinned else {}
    text["model"]["uneven_shares"] = uneven
    rng = random.Random(seed)
    text["rates"] = {
        f"n{i}/{rng.randrange(8)}": rng.choice([2.57, 5.42, 12.53, round(rng.uniform(1.3, 6), 2)])
        for i in sorted(rng.sample(range(nodes), slow))
    }
    return load(json.dumps(text))


def small(
    rng: random.Random, nodes: tuple[tuple[int, ...], ...], *, uneven: bool = False, slow: float = 0.35
) -> TableProblem:
    """A few devices in one of these clusters, memory that often binds, now and then pins. `slow`: how likely a
    device is slow or dead."""
    sizes = rng.choice(nodes)
    slowdown = {"1": rng.choice([2.0, 3.6, 3.9, 4.0]), "2": rng.choice([1.2, 1.9, 2.0]), "4": 1.0}
    if rng.random() < 0.3:
        slowdown["3"] = 1.4
    layers = rng.choice([3, 4, 6, 8, 12])
    table = [rng.uniform(800, 2000)]
    for _ in range(rng.randrange(4)):
        table.append(table[-1] * rng.uniform(0.8, 1))
    memory = layers * table[0] * 4 / sum(sizes) * rng.uniform(1.1, 2.5) + 700
    if rng.random() < 0.4:
        memory = 1e9
    text: dict[str, Any] = {
        "cluster": {
            "nodes": [
                {"name": f"n{i}", "devices": n, "memory_mib": memory, "speed": rng.choice([1.0] * 9 + [0.5])}
                for i, n in enumerate(sizes)
            ]
        },
        "model": {
            "name": "random",
            "layers": layers,
            "tp_full": 4,
            "tp_slowdown": slowdown,
            "uneven_shares": uneven,
            "memory": {
                "layer_mib_by_stage": table,
                "embedding_mib": rng.choice([0, 300.0]),
                "fixed_mib": 500,
                "reserve_mib": 100,
            },
        },
        "batch": {"global_batch": rng.choice([2, 4, 6, 8, 12])},
        "rates": {
            f"n{i}/{j}": rng.choice([1.5, 2.0, 2.57, 3.3, 5.42, None])
            for i, n in enumerate(sizes)
            for j in range(n)
            if rng.random() < slow
        },
    }
    if rng.random() < 0.3:
        text["pins"] = {"dp": rng.randint(1, min(2, sum(sizes)))}
    elif rng.random() < 0.2:
        text["pins"] = {"tp": 2}
    return load(json.dumps(text))
