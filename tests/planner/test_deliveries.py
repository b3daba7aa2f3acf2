"""Under ZeRO every device gets what it lacks, once, from who has it, and each element is counted once."""

from __future__ import annotations

import numpy as np
from elasticd_planner.layout.gradient_reduction import (
    Delivery,
    buffers_away,
    gradients_away,
    leading,
    values_back,
)
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box, TensorLayout
from elasticd_planner.spec.plan import Plan
from hypothesis import assume, given, settings

from tests.migration.plans import SPEC, plans
from tests.sizes import examples

Masks = dict[tuple[str, str], np.ndarray]


def masks(layouts: Layouts, names: tuple[str, ...], layout_of: object) -> Masks:
    found: Masks = {}
    for name in names:
        layout: TensorLayout = layout_of(name)  # type: ignore[operator]
        for device in layouts.plan.members:
            mask = np.zeros(layout.shape, dtype=bool)
            for box in layout.of(device):
                mask[box.slices(Box.whole(layout.shape))] = True
            found[name, device] = mask
    return found


def deliver(deliveries: dict[str, tuple[Delivery, ...]], had: Masks) -> Masks:
    """What each device has afterwards; both ends list a delivery alike and in one order."""
    have = {key: np.array(mask) for key, mask in had.items()}
    for device, mine in deliveries.items():
        for other, theirs in deliveries.items():
            between = [
                [d for d in each if {device, other} <= {d.source, *d.destinations}] for each in (mine, theirs)
            ]
            assert between[0] == between[1], "messages between two devices have one order"
        for delivery in mine:
            assert device == delivery.source or device in delivery.destinations
            if device == delivery.source:
                continue
            for name, box in delivery.pieces:
                where = box.slices(Box.whole(had[name, device].shape))
                assert had[name, delivery.source][where].all(), "the source has it"
                assert not have[name, device][where].any(), "nothing comes twice"
                have[name, device][where] = True
    return have


@settings(max_examples=examples(40))
@given(plans(1))
def test_whoever_computes_gets_new_values_and_whoever_keeps_gets_gradients(made: Plan) -> None:
    assume(made.state.zero)
    layouts = Layouts(SPEC, made)
    computing = masks(layouts, layouts.trained, layouts.parameter)
    keeping = masks(layouts, layouts.trained, layouts.state)
    back = deliver({device: values_back(layouts, device) for device in made.members}, keeping)
    assert all((back[key] == keeping[key] | computing[key]).all() for key in computing)
    # Of zero 2 a source has no more gradients than it keeps.
    both = {key: computing[key] & keeping[key] for key in computing}
    away = deliver({device: gradients_away(layouts, device) for device in made.members}, both)
    assert all((away[key] == keeping[key]).all() for key in keeping)
    buffers = tuple(item.name for item in layouts.items if item.role == "buffer")
    own = masks(layouts, buffers, layouts.parameter)
    copied = deliver({device: buffers_away(layouts, device) for device in made.members}, own)
    held = masks(layouts, buffers, layouts.value)
    assert all((copied[key] == held[key]).all() for key in held)


@settings(max_examples=examples(40))
@given(plans(1))
def test_every_element_of_every_gradient_is_counted_by_one_device_that_has_it(made: Plan) -> None:
    assume(made.state.zero)
    layouts = Layouts(SPEC, made)
    keeping = masks(layouts, layouts.trained, layouts.state)
    times = {name: np.zeros(layouts.parameter(name).shape, dtype=np.int64) for name in layouts.trained}
    for device in made.members:
        for name, box in leading(layouts, device):
            where = box.slices(Box.whole(times[name].shape))
            assert keeping[name, device][where].all()
            times[name][where] += 1
    assert all((count == 1).all() for count in times.values())
