"""One rank of the migration benchmark: moves its part of a state again and again, and plainly sends as much.

    python benchmarks/_mover.py FOLDER RANK ADDRESS SCENE REPEATS

The group is the runtime's own (`PlanGroups`), bootstrapped over files in FOLDER. In each repetition all ranks
first send the bytes of the move plainly: from pair to pair in messages of 64 MiB, nothing checked, nothing cut.
Then they make the rounds, as in a job they do while training goes on, and move. Memory for what comes is asked
for anew both times. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _scenes import SCENES, SPEC
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_migration.migrate import Moved, PreparedMove, migrate, prepare_move
from elasticd_migration.reshard import bytes_lacking, reshard
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.comm.sockets import tcp_sockets
from tests.file_key_value import FileKeyValue

#: Bytes of one message of the plain exchange.
LARGE = 64 << 20
PLANES = {"value": ("value",), "state": ("exp_avg", "exp_avg_sq"), "buffer": ("value",)}
#: Bytes of one element of all its planes.
SIZES = {role: 4 * len(planes) for role, planes in PLANES.items()}


def members_of(old: Plan, new: Plan) -> tuple[str, ...]:
    """The members of both plans, those of the old one first."""
    return tuple(dict.fromkeys((*old.members, *new.members)))


def element(item: Item, plane: str, box: Box) -> torch.Tensor:
    """What is in a box of a plane: told by its place in the model alone, so that any copy can be checked."""
    seed = float(sum(map(ord, f"{item.name}{plane}")) % 997)
    found = torch.full(box.shape, seed)
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        line = torch.arange(start, stop, dtype=torch.float32) * (dim + 1)
        found += line.reshape([-1 if d == dim else 1 for d in range(len(box.shape))])
    return found


def state_of(layouts: Layouts, device: str) -> LocalState:
    """The part of the state that a device holds."""
    return LocalState(
        tensors={
            item: LocalTensor(
                shards=tuple(
                    Shard(box=box, planes={plane: element(item, plane, box) for plane in PLANES[item.role]})
                    for box in boxes
                ),
                scalars={"step": torch.tensor(3.0)} if item.role == "state" else {},
            )
            for item, boxes in layouts.held(device).items()
        }
    )


def check(state: LocalState, layouts: Layouts, device: str) -> None:
    """Every element is what it should be, and nothing is missing."""
    for item, boxes in layouts.held(device).items():
        for box in boxes:
            shard = state.tensors[item].around(box)
            for plane in PLANES[item.role]:
                assert torch.equal(shard.part(plane, box), element(item, plane, box)), (item, plane, box)


def acknowledged() -> int:
    """Bytes that the peers of all our TCP connections have acknowledged, as the kernel counts them
    (tcpi_bytes_acked, at byte 120 of struct tcp_info)."""
    total = 0
    for _, listening, _, _, sock in tcp_sockets():
        with sock:
            if not listening:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += struct.unpack_from("Q", info, 120)[0]
    return total


class Plain:
    """The same bytes from pair to pair, in large messages, without anything else."""

    def __init__(self, group: Group, pairs: dict[tuple[str, str], int]) -> None:
        self._group = group
        mine = {end: size for (start, end), size in pairs.items() if start == group.me}
        self._into = {start: size for (start, end), size in pairs.items() if end == group.me}
        self._out = {end: torch.ones(size, dtype=torch.uint8) for end, size in mine.items()}

    def __call__(self) -> None:
        backend, rank = self._group.backend, self._group.members.index
        received = []
        for start, size in self._into.items():
            for part in torch.empty(size, dtype=torch.uint8).split(LARGE):
                received.append(backend.recv([part], rank(start), 7))
        sent = [
            backend.send([part], rank(end), 7)
            for end, whole in self._out.items()
            for part in whole.split(LARGE)
        ]
        for work in received:
            work.wait()
        self._group.all_gather(torch.ones(1))
        for work in sent:
            work.wait()


def timed(group: Group, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds until all ranks have done it, and seconds of this process on a processor."""
    group.all_gather(torch.ones(1))
    start, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - spent


class Mover:
    """One rank's part of a scene: makes the rounds, and moves the state by them, as a switch does."""

    def __init__(self, group: Group, before: Plan, after: Plan) -> None:
        self._group, self._before, self._after = group, before, after
        self._old, self.new = Layouts(SPEC, before), Layouts(SPEC, after)
        self.state = state_of(self._old, group.me)
        self.sizes = {item: SIZES[item.role] for item in self.new.items}
        self.moved: list[Moved] = []  # what was moved; the caller frees it when no clock runs

    def pairs(self) -> dict[tuple[str, str], int]:
        """Bytes that go from each device to each other one."""
        pairs: dict[tuple[str, str], int] = {}
        for transfer in reshard(self._old, self.new, self.sizes):
            pair = transfer.source, transfer.destination
            element = sum(self.sizes[item] for item in transfer.items)
            pairs[pair] = pairs.get(pair, 0) + transfer.box.size * element
        return pairs

    def lacking(self) -> int:
        """Bytes that the new holders lack, counted by box differences alone."""
        return sum(bytes_lacking(self._old, self.new, self.sizes).values())

    def rounds(self) -> PreparedMove | None:
        """What is made while training goes on, with fresh layouts."""
        old, new = Layouts(SPEC, self._before), Layouts(SPEC, self._after)
        return prepare_move(old, new, self.state.schema(), self._transport())

    def move(self, rounds: PreparedMove | None) -> None:
        """Moves the state, and waits until all ranks have said ok."""
        transport = self._transport()
        self.moved.append(migrate(self._old, self.new, self.state, transport, prepared=rounds))
        self._group.all_gather(torch.ones(1))
        transport.drain()

    def _transport(self) -> ProcessGroupTransport:
        group = self._group
        return ProcessGroupTransport(group.backend, group.members, group.me, group.all_gather)


def main(folder: str, rank: int, address: str, scene: str, repeats: int) -> dict[str, object]:
    """Plays a scene and says what it took.

    Args:
        folder: of the files by which the ranks find each other.
        rank: this process's.
        address: where it can be reached.
        scene: of SCENES.
        repeats: how often it is timed, after one time that is not.

    Returns:
        Seconds of the plain exchange and of the move, in turns, and the bytes of the last move.
    """
    torch.set_num_threads(1)
    before, after = SCENES[scene]
    members = members_of(before, after)
    plan_groups = PlanGroups("bench", members[rank], address, FileKeyValue(Path(folder) / "store"))
    group = plan_groups.group(members, "transition")
    mover = Mover(group, before, after)
    pairs, lacking = mover.pairs(), mover.lacking()
    assert lacking == sum(pairs.values())
    plain = Plain(group, pairs)
    seconds: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    ahead: list[float] = []
    for turn in range(repeats + 1):
        sent, sent_cpu = timed(group, plain)
        wire = acknowledged()
        began = time.perf_counter()
        rounds = mover.rounds()
        took = time.perf_counter() - began
        moved, moved_cpu = timed(group, partial(mover.move, rounds))
        wire = acknowledged() - wire
        if turn == 0:
            check(mover.moved[0].state, mover.new, group.me)
            continue  # memory was touched for the first time, which takes most of the time
        seconds.append((sent, moved))
        cpu.append((sent_cpu, moved_cpu))
        ahead.append(took)
        del mover.moved[:-1]
    last = mover.moved[-1]
    group.all_gather(torch.ones(1))
    return {
        "seconds": seconds,
        "cpu": cpu,
        "ahead": ahead,
        "lacking": lacking,
        "wire": wire,
        "sent": last.bytes_sent,
        "beside": last.bytes_sealed,
        "tensors": sum(len(s.planes) for tensor in mover.state.tensors.values() for s in tensor.shards),
    }


if __name__ == "__main__":
    found = main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    print(json.dumps(found), flush=True)
    os._exit(0)
