"""Sums in two steps: one that would be relayed is made near its terms first, and then among those that need it.

`resolve` has such a sum made on one device, which sends it to the others. In two steps no more is sent, and on
more links at once. HSPMD calls the steps bottom tier and top tier.
"""

from __future__ import annotations

import msgspec

from elasticd_planner.layout.resolve import demands, resolve
from elasticd_planner.spec.box import Holding, TensorLayout


def in_two_steps(source: TensorLayout, target: TensorLayout) -> tuple[TensorLayout, ...]:
    """The layouts through which one becomes another: the target, or one on the way and the target.

    Where a sum would be sent on to further devices that need it, those of them that hold a term (one for each
    term) first get the sum of the terms that are nearest to them. Then these sums are summed, or gathered. No
    more elements are sent: of k terms, h of them on n devices that need the sum, k - h, then h - 1 + n - 1.
    """
    values = all(holding.partial is None for holding in target.holdings)
    if not values or not any(step.operation == "relay" for step in resolve(source, target)):
        return (target,)
    between: list[Holding] = []
    for box, terms, needers in demands(source, target):
        first = (next((device for device in needers if device in term), None) for term in terms)
        near = [device for device in dict.fromkeys(first) if device] if len(terms) > 1 else []
        between += [Holding(device=device, box=box, partial=device) for device in near]
        between += [] if near else [Holding(device=device, box=box) for device in needers]
    return msgspec.structs.replace(target, holdings=tuple(between)), target
