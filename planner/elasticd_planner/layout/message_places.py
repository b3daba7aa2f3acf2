"""The places of messages between passes in an order of all of them: between two passes of each device.

A message goes when the devices of both ends are between two passes, after the pass that makes it and at most
`EARLY` passes of its receiver before the one that needs it. The first such place is taken. Where there is none,
devices that are done with a pass wait for others: the place is taken where they wait least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_planner.layout.module_passes import ModulePass

#: A message is received this many passes at most before the one that needs it: of all modules on its devices.
EARLY = 4
#: More than any wait.
_FAR = 1 << 60


class MessagePlaces:
    """The passes of each device, and the places of messages between them."""

    def __init__(self, order: Sequence[ModulePass]) -> None:
        """
        Args:
            order: all passes, as they begin.
        """
        self._passes: dict[int, list[ModulePass]] = defaultdict(list)
        self._begins: dict[int, list[int]] = defaultdict(list)
        self._all_begins = [one.begin for one in order]
        for place, one in enumerate(order):
            one.place, one.numbers = place, [len(self._passes[device]) for device in one.group.devices]
            for device in one.group.devices:
                self._passes[device].append(one)
                self._begins[device].append(one.begin)

    def of(self, sender: ModulePass, receiver: ModulePass) -> tuple[int, int]:
        """The place of a message from a pass to another one.

        Returns:
            The index in the order of the pass that comes next, and the time of the message [us].
        """
        if sender.group.devices == receiver.group.devices:  # nothing is sent
            return receiver.place, receiver.begin
        if self._waits(receiver, sender.end):  # and the sender is between two passes
            return bisect_left(self._all_begins, sender.end), sender.end
        spots, time = self._first_spots(sender, receiver)
        least, best = _FAR, receiver.place
        while True:  # a device is to begin its next pass before that
            wait, place, late, begin = 0, receiver.place, None, time
            for spot in spots:
                if spot.number < len(spot.passes):
                    one = spot.passes[spot.number]
                    if one.place < place:
                        place = one.place
                    if one.begin < time:
                        wait += spot.weight * (time - one.begin)
                        if late is None or one.begin < begin:
                            late, begin = spot, one.begin
            if late is None:
                return place, time
            if wait <= least:
                least, best = wait, place
            one = late.passes[late.number]
            if one is receiver:
                return best, receiver.begin
            late.number += 1
            if one.end > time:
                time = one.end

    def _waits(self, receiver: ModulePass, time: int) -> bool:
        """Returns True if the devices of a pass are between two of the last passes before it."""
        for device, number in zip(receiver.group.devices, receiver.numbers, strict=True):
            at = bisect_left(self._begins[device], time)
            if at < number - EARLY or (at and self._passes[device][at - 1].end > time):
                return False
        return True

    def _first_spots(self, sender: ModulePass, receiver: ModulePass) -> tuple[list[_Spot], int]:
        """On each device the first place between passes that a message may have, and when all are there."""
        earliest, time, spots = sender.place + 1, sender.end, []
        for device, number in zip(receiver.group.devices, receiver.numbers, strict=True):
            if number > EARLY:
                earliest = max(earliest, self._passes[device][number - EARLY].place)
        for device, number in zip(receiver.group.devices, receiver.numbers, strict=True):
            passes = self._passes[device]
            at = max(0, number - EARLY, bisect_left(self._begins[device], sender.end, 0, number) - 1)
            while at < number and passes[at].place < earliest:
                at += 1
            if at and passes[at - 1].end > time:
                time = passes[at - 1].end
            spots.append(_Spot(passes, at, 2))
        for device, number in zip(sender.group.devices, sender.numbers, strict=True):
            if device not in receiver.group.devices:
                passes, at = self._passes[device], max(number + 1, bisect_left(self._begins[device], time) - 1)
                while at < len(passes) and passes[at].place < earliest:
                    at += 1
                spots.append(_Spot(passes, at, 1))
        for spot in spots:
            if spot.number and (end := spot.passes[spot.number - 1].end) > time:
                time = end
        return spots, time


@dataclass(slots=True)
class _Spot:
    """A place between two passes of a device."""

    passes: list[ModulePass]
    number: int  #: of the pass that comes after
    weight: int  #: of the time that this pass is late: for a device of the receiver 2, else 1
