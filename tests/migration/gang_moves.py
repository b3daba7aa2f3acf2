"""One of several gloo processes that move one state through random plans, each time checked with the reference.

python -m tests.migration.gang_moves RANK SIZE STORE_FILE MOVES
"""

import os
import sys

import torch
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layout.layouts import Layouts

from tests.migration.gang import polled, raw_group
from tests.migration.plans import SPEC, random_plan
from tests.migration.ranks import assert_same_bits, copy_of, local, trained


def main(rank: int, size: int, file: str, moves: int) -> None:
    torch.set_num_threads(1)
    names = tuple(f"n{i % 3}/{i // 3}" for i in range(size))
    group = raw_group(rank, size, file)
    transport = ProcessGroupTransport(group, names, names[rank], polled(group))
    whole = trained()
    old = Layouts(SPEC, random_plan(size, 1, names))
    state = local(whole, old, names[rank])
    for number in range(2, 2 + moves):
        new = Layouts(SPEC, random_plan(1000 * size + number, number, names))
        kept = copy_of(state)
        result = migrate(old, new, state, transport, limit=20_000)
        assert transport.all_gather(b"ok") == [b"ok"] * size
        transport.drain()
        assert_same_bits(result.state, local(whole, new, names[rank]))
        assert_same_bits(state, kept)
        old, state = new, result.state
    print(moves, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
