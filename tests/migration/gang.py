"""One of several gloo processes: runs the transport's contract and one real move, and prints what it found.

    python -m tests.migration.gang RANK SIZE STORE_FILE

The group is a raw one, made by its members and unknown to torch's world, as the runtime makes them.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from elasticd_migration.migrate import migrate
from elasticd_migration.reshard import bytes_lacking
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layout.layouts import Layouts
from torch._C._distributed_c10d import FileStore, PrefixStore

from tests.migration.contract import CHECKS
from tests.migration.plans import SPEC, plan
from tests.migration.ranks import assert_same_bits, copy_of, local, members, trained

BEFORE = plan(1, [(1, [("n0/0", 3), ("n0/1", 1)]), (2, [("n1/0", 1)])])
AFTER = plan(2, [(2, [("n0/0", 1), ("n1/1", 2)]), (1, [("n1/0", 1)])])
TIMEOUT = 120.0


def raw_group(rank: int, size: int, file: str) -> dist.ProcessGroup:
    store = PrefixStore("move", FileStore(file, size))
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT))
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def polled(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gathers without ever being blocked inside the backend."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty((group.size(), *tensor.shape))
        work = group._allgather_base(out, tensor.unsqueeze(0))
        deadline = time.monotonic() + TIMEOUT
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("collective did not end")
            time.sleep(0.0002)
        work.wait()
        return out

    return gather


def moved(transport: ProcessGroupTransport) -> dict[str, object]:
    """Migrate real AdamW state, check it against the reference, and say what was sent."""
    old, new = Layouts(SPEC, BEFORE), Layouts(SPEC, AFTER)
    whole = trained()
    device = transport.members[transport.rank]
    state = local(whole, old, device)
    kept = copy_of(state)
    start = transport.bytes_sent
    result = migrate(old, new, state, transport, limit=20_000)
    assert_same_bits(result.state, local(whole, new, device))
    assert_same_bits(state, kept)
    assert transport.bytes_sent - start == result.bytes_sent + result.bytes_sealed
    everything = transport.all_gather(b"ok")
    transport.drain()
    assert everything == [b"ok"] * transport.size
    sizes = whole.state().schema().sizes
    return {
        "sent": result.bytes_sent,
        "received": result.bytes_received,
        "lacking": bytes_lacking(old, new, sizes).get(device, 0),
    }


def bereaved(transport: ProcessGroupTransport) -> str:
    """The last rank dies; whoever waits for it learns so."""
    last = transport.size - 1
    if transport.rank == last:
        return ""
    try:
        transport.receive(last, torch.empty(4)).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def main(rank: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    names = members(BEFORE, AFTER)[:size]
    group = raw_group(rank, size, file)
    transport = ProcessGroupTransport(group, names, names[rank], polled(group))
    found: dict[str, object] = {}
    for check in CHECKS:
        try:
            check(transport)
            found[check.__name__] = "kept"
        except Exception as error:
            found[check.__name__] = f"rank {rank}: {type(error).__name__}: {error}"
    found["move"] = moved(transport)
    transport.all_gather(b"all did everything")
    found["bereaved"] = bereaved(transport)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
