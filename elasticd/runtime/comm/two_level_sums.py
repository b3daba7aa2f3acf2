"""Sums of gradients in two levels, over gloo: inside each node, between nodes, and back inside each node.

Each device of a node gets the node's sum of one slice, the devices with the same slice sum it between nodes,
and each node gathers the slices. See `elasticd_planner.layout.two_level_sums`. Gloo's own reduce-scatter is an
all-reduce, and its all-gather has a copy of everything made. So inside of a node slices go by all-to-all: first
each device gets the terms of its slice and adds them, at last it gives their sum to all.

Each of the three phases goes over a group of its own. A tensor is cut in parts. One thread for all sums of a
plan advances them: it looks whether the collective of a part is complete, and starts the part's next one. A
part enters a phase after the part before it, so that all members start the collectives of a group in one order,
whenever they come to them. While one part is between nodes, the next one is inside of them. The thread ends
with the last part.

A member that is gone makes collectives fail, or `PlanGroups.dead` ends the wait for it. All sums of the set
then fail alike, and `finish` raises what ended them. The sums of other sets go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticd.runtime.comm.groups import Cancelled, PlanGroups, pause

#: Bytes of a part, about: those of a bucket. Large enough that its messages take longer than it takes to start
#: them, and small enough that the parts of a large tensor are in different phases.
PART = 4 * 1024 * 1024
#: Parts of a set that are in one phase inside of nodes at once: each takes its size of memory meanwhile. With
#: two of them gloo begins one when it has ended the other.
_AT_ONCE = 2
#: Elements that are added up at once: they stay in the cache, and torch uses no further threads for so few.
_CHUNK = 1 << 14

#: What a part is at: its turn has not come; inside of nodes; between them; inside of them; it is over.
_WAITS, _SCATTERS, _BETWEEN, _GATHERS, _DONE = range(5)


class _Part:
    """One part of a tensor under way."""

    def __init__(self, here: Tensor, size: int) -> None:
        """
        Args:
            here: this member's term, on the host, and where the sum goes: [elements].
            size: the number of slices, which are of one length: what does not divide is padded.
        """
        self._here, length = here, -(-here.numel() // size)
        self._padded = None if length * size == here.numel() else here.new_zeros(length * size)
        if self._padded is not None:
            self._padded[: here.numel()] = here
        self.slices = (here if self._padded is None else self._padded).view(size, length)
        self.room: Tensor | None = None  #: memory for a copy, in bytes: what comes, or goes, inside of the node
        self.phase = _WAITS
        self.work: Any = None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def land(self) -> None:
        """The sum goes where the term was."""
        if self._padded is not None:
            self._here.copy_(self._padded[: self._here.numel()])

    @property
    def copy(self) -> Tensor:
        """The memory for a copy in the shape of `slices`."""
        assert self.room is not None
        return self.room[: self.slices.nbytes].view(self.slices.dtype).view(self.slices.shape)


class Sum:
    """One sum under way: a tensor, on the host or copied there, in parts."""

    def __init__(self, tensor: Tensor, size: int) -> None:
        self._tensor = tensor
        here = tensor.detach().cpu().contiguous()
        self._here = None if here.data_ptr() == tensor.data_ptr() and tensor.device.type == "cpu" else here
        flat = here.view(-1)
        most = max(1, PART // flat.element_size() // size) * size
        self.parts = [_Part(part, size) for part in flat.split(most) if part.numel()]

    def wait(self) -> None:
        """Waits until the sum is where the term was, and raises what ended it otherwise."""
        for part in self.parts:
            part.over.wait()
            if part.error is not None:
                raise part.error
            part.land()
        if self._here is not None:
            self._tensor.copy_(self._here)


class TwoLevelTeam:
    """A `Team` of equally many devices on each of several nodes."""

    def __init__(
        self, plan_groups: PlanGroups, nodes: Sequence[tuple[str, ...]], label: str, progress: ProgressThread
    ) -> None:
        """
        Args:
            plan_groups: of the plan. Three groups are made of it, in the same order on all members.
            nodes: the devices of each node.
            label: what the stopwatch counts waits for.
            progress: advances the sums.
        """
        self.members = tuple(device for near in nodes for device in near)
        self.me, self.rank, self.size = plan_groups.me, self.members.index(plan_groups.me), len(self.members)
        self._plan_groups, self._label, self._progress = plan_groups, label, progress
        near = next(devices for devices in nodes if self.me in devices)
        across = tuple(devices[near.index(self.me)] for devices in nodes)
        name = "_".join(self.members)
        self._inside = plan_groups.group_apart(near, label, f"terms of {name}")
        self._between = plan_groups.group_apart(across, label, f"between nodes of {name}")
        self._back = plan_groups.group_apart(near, label, f"sums of {name}")
        self._error: BaseException | None = None
        self._free: list[Tensor] = []  # former `_Part.room`, which is touched already

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the members, in place, the same to the bit on each. Raises as `finish`."""
        self.finish(self.begin_all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """All members' tensors, stacked by rank: each is summed with -0.0, which changes no number."""
        if out is None:
            out = tensor.new_empty((self.size, *tensor.shape))
        out.fill_(-0.0)
        out[self.rank] = tensor
        return self.all_reduce(out)

    def begin_all_reduce(self, tensor: Tensor) -> Sum:
        """Starts a sum in place, which goes on beside computation. Returns the work for `finish`."""
        begun = Sum(tensor, self._inside.size)
        self._progress.begin(self, begun.parts)
        return begun

    def finish(self, work: Sum) -> None:
        """Waits for a sum.

        Raises:
            PeerLost: a member is gone.
            Cancelled: the plan's groups were shut meanwhile.
        """
        with self._plan_groups.stopwatch.measure(self._label):
            work.wait()

    def advance(self, parts: list[_Part]) -> bool:
        """Starts what can be started, and takes parts away that are over: where one has failed, all of them.

        Args:
            parts: of the sums of this team, in the order of their launches.

        Returns:
            Whether a part has entered another phase.
        """
        moved = False
        if self._error is None:
            try:
                moved = self._advanced(parts)
            except BaseException as error:  # whatever it is, nobody may wait for these sums for ever
                self._error = error
        for part in [each for each in parts if each.phase == _DONE or self._error is not None]:
            parts.remove(part)
            part.error = None if part.phase == _DONE else self._error
            part.over.set()
        if not parts:
            self._free = []
        return moved

    def _advanced(self, parts: Sequence[_Part]) -> bool:
        moved = False
        phases = [part.phase for part in parts]
        for at, part in enumerate(parts):
            follows = at == 0 or phases[at - 1] > phases[at]
            after = phases[at] + 1
            room = after not in (_SCATTERS, _GATHERS) or phases.count(after) < _AT_ONCE
            if follows and room and self._ended(part):
                self._enter(part, after)
                part.phase = phases[at] = after
                moved = True
        return moved

    def _ended(self, part: _Part) -> bool:
        """Returns True if the phase of a part is at its end."""
        if part.phase == _WAITS:
            return True
        group = {_SCATTERS: self._inside, _BETWEEN: self._between, _GATHERS: self._back}[part.phase]
        return group.completed(part.work)

    def _enter(self, part: _Part, phase: int) -> None:
        if self._plan_groups.dead:
            raise Cancelled("shut between two collectives of a sum")
        mine = part.slices[self._inside.rank]
        if phase == _SCATTERS:
            self._make_room(part)
            part.work = self._inside.begin_all_to_all(part.slices, part.copy)
        elif phase == _BETWEEN:
            _add(part.copy, mine)
            self._let_go(part)
            part.work = self._between.begin_all_reduce(mine)
        elif phase == _GATHERS:
            self._make_room(part)
            for chunk, copies in _chunks(mine, part.copy):
                for each in copies:
                    each.copy_(chunk)
            part.work = self._back.begin_all_to_all(part.copy, part.slices)
        else:
            self._let_go(part)

    def _make_room(self, part: _Part) -> None:
        part.room = self._free.pop() if self._free else None
        if part.room is None or part.room.nbytes < part.slices.nbytes:
            part.room = torch.empty(part.slices.nbytes, dtype=torch.uint8)

    def _let_go(self, part: _Part) -> None:
        assert part.room is not None
        self._free.append(part.room)
        part.room = part.work = None


def _add(terms: Tensor, total: Tensor) -> None:
    """The sum of all rows, in their order and in the precision of their type, as gloo adds."""
    for out, (first, second, *others) in _chunks(total, terms):
        torch.add(first, second, out=out)
        for term in others:
            out += term


def _chunks(one: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Chunks of a tensor, each with the same chunk of all rows of another."""
    for chunk, of_all in zip(one.split(_CHUNK), rows.split(_CHUNK, dim=1), strict=True):
        yield chunk, of_all.unbind()


class ProgressThread:
    """Advances the two-level sums of one plan, in a thread that lives while there are any."""

    def __init__(self, plan_groups: PlanGroups) -> None:
        self._plan_groups = plan_groups
        self._lock = threading.Lock()
        self._begun: list[tuple[TwoLevelTeam, Sequence[_Part]]] = []  # that the thread has not seen
        self._runs = False

    def begin(self, team: TwoLevelTeam, parts: Sequence[_Part]) -> None:
        """Has parts advanced after those of the team that are under way. Returns at once."""
        with self._lock:
            self._begun.append((team, parts))
            if not self._runs:
                name = f"elasticd-sums-{self._plan_groups.name}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._runs = True
                self._plan_groups.helped_by(thread)

    def _run(self) -> None:
        """Parts are the thread's alone until they are over."""
        under_way: dict[TwoLevelTeam, list[_Part]] = {}
        turns, since = 0, time.perf_counter()
        while self._taken(under_way):
            if sum(team.advance(parts) for team, parts in under_way.items()):
                turns, since = 0, time.perf_counter()
            time.sleep(pause(turns, time.perf_counter() - since))
            turns += 1

    def _taken(self, under_way: dict[TwoLevelTeam, list[_Part]]) -> bool:
        """Takes the parts that have begun. Returns whether any are under way; where not, the thread is over."""
        with self._lock:
            for team, parts in self._begun:
                under_way.setdefault(team, []).extend(parts)
            self._begun = []
            self._runs = any(under_way.values())
            return self._runs
