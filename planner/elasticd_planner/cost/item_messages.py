"""Messages between modules that a device keeps until a step ends: nothing earlier proves that they are there.

The gradient that comes back proves that an output has arrived. Nothing comes back of the outputs of a module
that is not trained, nor of gradients: they stay until the vote at the end of the step (`engine.item_border`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from elasticd_planner.spec.plan import ModulePlan, Plan


def kept_messages(plan: Plan, module: ModulePlan, items: Sequence[float], size: float) -> dict[str, float]:
    """Bytes that devices keep of a mean step.

    Args:
        plan: of all modules.
        module: of items.
        items: of the step, that each lane of the module with the loss takes. One of a sequence that is cut over
            lanes goes to each of them.
        size: bytes of what the module gives of an item.

    Returns:
        Bytes by device: of each member of a TP group all that it may send, though one of them does.
    """
    pipelines = plan.loss_module.pipelines
    takers = [(p, lane) for p, pipeline in enumerate(pipelines) for lane in pipeline.by_lane]
    makers = [(lane.serves or range(len(pipelines)), lane) for lane in module.by_lane]
    together = Counter[tuple[int, ...] | range]()  # the weights of lanes by the pipelines that they serve
    for serves, lane in makers:
        together[serves] += lane.micro_batches
    weights = [0] * len(pipelines)  # of the lanes that serve each
    for serves, weight in together.items():
        for p in serves:
            weights[p] += weight
    ends = [lane.stages[-1].devices for _, lane in makers], [lane.stages[0].devices for _, lane in takers]
    by_device: dict[str, list[int]] = defaultdict(list)  # the lanes that take items with a device
    for number, devices in enumerate(ends[1]):
        for device in devices:
            by_device[device].append(number)
    sent = list(items)
    if not module.trainable:
        wanted = [0.0] * len(pipelines)
        for (p, _), need in zip(takers, items, strict=True):
            wanted[p] += need
        each = {serves: sum(wanted[p] / weights[p] for p in serves) for serves in together}
        sent = [each[serves] * lane.micro_batches for serves, lane in makers]
    for maker, (serves, lane) in enumerate(makers):
        for taker in {number for device in ends[0][maker] for number in by_device[device]}:
            (p, _), near, far = takers[taker], {*ends[0][maker]}, {*ends[1][taker]}
            if p not in serves:
                continue
            part = items[taker] * lane.micro_batches / weights[p]
            if module.trainable and near <= far:  # gradients that are there
                sent[taker] -= part
            elif not module.trainable and far <= near:  # outputs that are
                sent[maker] -= part
    found: dict[str, float] = defaultdict(float)
    for devices, kept in zip(ends[module.trainable], sent, strict=True):
        for device in devices:
            found[device] += max(0.0, kept) * size
    return {device: kept for device, kept in found.items() if round(kept)}
