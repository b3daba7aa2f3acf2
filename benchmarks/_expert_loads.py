"""Loads of experts that drift, and placements of them: this planner's, EPLB's as published, contiguous ones."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from elasticd_planner.numeric import Floats
from elasticd_planner.placement.expert_forecast import ExpertForecast
from elasticd_planner.placement.expert_placement import arrivals, busiest, least_busiest, placed
from elasticd_planner.spec.expert_load import divided
from elasticd_planner.spec.plan import HeldExperts, SplitExperts

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
#: Experts on devices.
SIZES = ((64, 8), (128, 16))
#: Routers in training: from step to step.
WINDOWS = (("a router that begins to learn", 20, 200), ("a trained router", 400, 600))
#: Pairs of a row and an expert in a step.
PAIRS = 32768
#: Steps between two placements, and between two reports of a step's rows, which they are made from.
EVERY, REPORTED = 20, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Means over the steps after the first placement, each over that step's bound; and what moved."""

    size: tuple[int, int]
    slow: float
    drift: float
    exact: float  # of the steps that made a placement, the worst
    later: float
    eplb: float
    contiguous: float
    moved: float  # experts a placement


def drifting(
    experts: int, steps: int, rng: np.random.Generator, drift: float, *, stays: bool
) -> Iterator[Floats]:
    """Rows of each expert, step by step: Zipf's, whose logarithms walk at random and return slowly, to where
    they began (`stays`), or to their mean, so that the load becomes even."""
    zipf = np.log(1 / np.arange(1, experts + 1) ** 0.9)[rng.permutation(experts)]
    logs = zipf
    for _ in range(steps):
        logs = logs + rng.normal(0, drift, experts) - 0.02 * (logs - (zipf if stays else logs.mean()))
        chances = np.exp(logs)
        yield rng.multinomial(PAIRS, chances / chances.sum()).astype(float)


def eplb(load: Sequence[float], devices: int, redundant: int) -> tuple[HeldExperts, SplitExperts]:
    """DeepSeek's EPLB in one group (deepseek-ai/EPLB, `replicate_experts` and `balanced_packing`): redundant
    copies of the expert with the largest load a copy, one by one; then copies in descending order to the device
    with the least load of those that have fewer than their number. It knows no speeds. A device with two copies
    takes two parts of an expert's rows."""
    copies = np.ones(len(load), dtype=int)
    for _ in range(redundant):
        copies[np.argmax(np.asarray(load) / copies)] += 1
    listed = sorted(
        ((load[e] / copies[e], e) for e in range(len(load)) for _ in range(copies[e])), reverse=True
    )
    most = -(-len(listed) // devices)
    held: list[Counter[int]] = [Counter() for _ in range(devices)]
    sums, counts = [0.0] * devices, [0] * devices
    for rows, expert in listed:
        device = min((d for d in range(devices) if counts[d] < most), key=lambda d: sums[d])
        held[device][expert] += 1
        sums[device] += rows
        counts[device] += 1
    splits = tuple(
        (expert, *parts)
        for expert in range(len(load))
        if len(parts := [own[expert] for own in held if expert in own]) > 1
    )
    return tuple(tuple(sorted(own)) for own in held), splits


def contiguous(experts: int, devices: int) -> HeldExperts:
    """As many experts on each device, in order."""
    return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(experts), devices))


def trained(experts: int, steps: int) -> Iterator[Floats]:
    """Rows of each expert of a block, step by step, while the model of examples/train_moe.py trains: its router
    learns and drifts, beside a balance loss."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import train_moe

    options = train_moe.parser().parse_args(["--layers=1", f"--experts={experts}", "--width=16", "--tokens=32"])
    model, data = train_moe.make_model(options), train_moe.Windows(options.tokens)
    update = train_moe.optimizer(model.parameters())
    (block,), rows = model.blocks, np.zeros(experts)
    samples = PAIRS // options.tokens // block.chosen
    balance = torch.zeros(())

    def noted(_: object, __: object, logits: torch.Tensor) -> None:
        nonlocal balance
        chances = logits.softmax(-1)
        counts = torch.bincount(chances.topk(block.chosen).indices.flatten(), minlength=experts)
        rows[:] = counts.numpy()
        balance = experts * (counts / counts.sum() * chances.mean(0)).sum()

    block.router.register_forward_hook(noted)
    order = np.random.default_rng(0).permutation(len(data))
    for step in range(steps):
        listed = [data[int(order[(step * samples + at) % len(order)])] for at in range(samples)]
        batch = {key: torch.stack([sample[key] for sample in listed]) for key in listed[0]}
        update.zero_grad()
        total, count = train_moe.loss(model(batch), batch)
        (total / count + options.balance * balance).backward()
        update.step()
        yield rows.copy()


def score(
    experts: int,
    devices: int,
    slow: float,
    drift: float,
    steps: int,
    *,
    stays: bool = True,
    loads: Iterable[Floats] | None = None,
) -> Score:
    """Places a drifting load every `EVERY` steps, one of the devices being slow, and scores later steps. The
    load is as the leader forecasts it from reports of one step in ten, for EPLB, too.

    loads: of each step, in the place of drawn ones.
    """
    rng = np.random.default_rng(experts + devices)
    loads = drifting(experts, steps, rng, drift, stays=stays) if loads is None else loads
    slowdown = [1.0, slow, *[1.0] * (devices - 2)]
    forecast = ExpertForecast()
    even = contiguous(experts, devices)
    scores, exact, moved, ours, theirs = [], [], [], None, None
    for step, load in enumerate(loads):
        if ours is not None and theirs is not None:
            bound = least_busiest(load, slowdown)
            held = ((ours.held, divided(load, ours.held, slowdown)), theirs, (even, ()))
            scores.append([busiest(load, slowdown, own, splits) / bound for own, splits in held])
        if step % REPORTED == 0:
            forecast = forecast.after({0: tuple(load.tolist())})
        if step % EVERY == 0 and step:
            mean = forecast.rows[0]
            new = placed(mean, slowdown, ours.held if ours is not None else even)
            exact.append(busiest(mean, slowdown, new.held, new.splits) / least_busiest(mean, slowdown))
            if ours is not None:
                moved.append(arrivals(ours.held, new.held))
            ours, theirs = new, eplb(mean, devices, devices)
    later, of_eplb, of_contiguous = np.mean(scores, 0).tolist()
    return Score(
        size=(experts, devices),
        slow=slow,
        drift=drift,
        exact=max(exact),
        later=later,
        eplb=of_eplb,
        contiguous=of_contiguous,
        moved=float(np.mean(moved)),
    )
