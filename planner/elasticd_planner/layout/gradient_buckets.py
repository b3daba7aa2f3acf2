"""Buckets of gradients: which pieces of a reduction share a flat buffer, and the order of their all-reduces.

All devices of a holder set cut the same buckets. A device that is in several sets launches the buckets of all
of them in one order, that in which backward passes compute gradients: the model's last parameters first. The
order depends on the buckets alone, so that every device has the same: sets that overlap cannot wait for each
other in a circle. No device launches a sum before the last backward passes have left the section where its
gradients are computed last, which for a tied parameter may be on another device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from elasticd_planner.layout.gradient_reduction import Piece, Reduction, rounds
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.model import ModelSpec, item_size, section_of
from elasticd_planner.value import Value

#: Bytes of one flat buffer; a piece that is larger has one to itself. Small enough that several are under way
#: while a model of a few blocks runs backward.
BUCKET = 4 * 1024 * 1024

#: In the place of a section that no device has.
NO_SECTION = ""

#: The dtype that the gradients of a parameter are summed in, by the parameter's name.
DtypeOf = Callable[[str], str]


class Bucket(Value, frozen=True, kw_only=True):
    """Pieces of gradients, all of one dtype, that are reduced in one flat buffer."""

    devices: tuple[str, ...]  #: that reduce it
    pieces: tuple[Piece, ...]  #: in the order in which they lie in the buffer
    dtype: str
    counter: str  #: the device that adds the squares of this bucket to the norm; devices take turns

    @property
    def size(self) -> int:
        """Its elements."""
        return sum(piece.box.size for piece in self.pieces)


def buckets(
    layouts: Layouts, reductions: Sequence[Reduction], dtype_of: DtypeOf | None = None, most: int = BUCKET
) -> tuple[Bucket, ...]:
    """The buckets of some reductions, in the order in which every device launches those that it is in.

    Args:
        layouts: of the plan.
        reductions: some of the plan's; those of one device need no bucket.
        dtype_of: None: gradients have the dtype of their parameters.
        most: bytes of one bucket.
    """
    dtype_of = dtype_of or (lambda name: layouts.rule(name).dtype)
    number = {name: index for index, name in enumerate(layouts.trained)}
    rank = {device: index for index, device in enumerate(layouts.plan.members)}
    made = [
        bucket
        for reduction in reductions
        if len(reduction.devices) > 1
        for bucket in _of_set(reduction, dtype_of, most)
    ]

    def order(bucket: Bucket) -> tuple[int, list[int], tuple[int, ...]]:
        last = bucket.pieces[-1]  # the one that is computed last
        return -number[last.name], [rank[device] for device in bucket.devices], last.box.start

    return tuple(sorted(made, key=order))


def passed_on(
    layouts: Layouts, listed: Sequence[Bucket], own: Collection[tuple[str, ...]]
) -> tuple[tuple[Bucket, ...], ...]:
    """The buckets of sets without a communicator of their own, in rounds. Their `counter` gets the terms of the
    other devices as messages, adds them, and sends the sum to them.

    Args:
        layouts: of the plan.
        listed: buckets of a device, or of all, in their order.
        own: the sets that have a communicator.
    """
    number = rounds(layouts, layouts.trained)
    found: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in listed:
        if bucket.devices not in own:
            found[number[bucket.pieces[0].name]].append(bucket)
    return tuple(tuple(found[at]) for at in sorted(found))


def last_users(spec: ModelSpec, sections: Sequence[str]) -> dict[str, str]:
    """For each tied parameter the section of a device after whose last backward pass it launches sums with it:
    no later one in the model uses the parameter. `NO_SECTION`: there is none here, and all passes come before.

    Args:
        spec: of the model.
        sections: of the device.
    """
    number = {section: index for index, section in enumerate(spec.sections(0, len(spec.layers)))}
    first: dict[str, int] = {}
    for alias, owner in spec.ties:
        users = number[section_of(alias)], number[section_of(owner)]
        first[owner] = min(first.get(owner, len(number)), *users)
    here = sorted((number[section], section) for section in sections)
    return {
        name: max(((at, section) for at, section in here if at <= least), default=(0, NO_SECTION))[1]
        for name, least in first.items()
    }


def _of_set(reduction: Reduction, dtype_of: DtypeOf, most: int) -> Iterator[Bucket]:
    devices = reduction.devices
    for index, (dtype, pieces) in enumerate(_cut(reduction, dtype_of, most)):
        counter = devices[index % len(devices)]
        yield Bucket(devices=devices, pieces=tuple(pieces), dtype=dtype, counter=counter)


def _cut(reduction: Reduction, dtype_of: DtypeOf, most: int) -> Iterator[tuple[str, list[Piece]]]:
    bucket: list[Piece] = []
    size, last = 0, ""
    for piece in reversed(reduction.pieces):
        dtype = dtype_of(piece.name)
        more = piece.box.size * item_size(dtype)
        if bucket and (size + more > most or dtype != last):
            yield last, bucket
            bucket, size = [], 0
        bucket.append(piece)
        size, last = size + more, dtype
    if bucket:
        yield last, bucket
