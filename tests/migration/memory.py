"""What a move takes at most, measured by the kernel in a process of its own: prints bytes as JSON.

    MALLOC_MMAP_THRESHOLD_=65536 python -m tests.migration.memory

Two devices, as threads, exchange their halves of a state of about 130 MB: beside the old state, in its place,
and cut anew so that every piece passes through staging memory. Fixed, the threshold of malloc lets a
tensor's memory go back to the kernel when it is freed.
"""

import gc
import json
from functools import partial
from pathlib import Path

import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan

from elasticd.simulator.scenarios.model_shapes import Shapes, model_spec
from tests.migration.plans import plan
from tests.migration.ranks import together

SPEC = model_spec("m", Shapes(layers=16, width=256, heads=4, hidden=512, vocabulary=256, dtype="float32"))
LIMIT = 2 << 20
DEVICES = ("n0/0", "n1/0")
HALVES = plan(1, [(8, [("n0/0", 1)]), (8, [("n1/0", 1)])])
SWAPPED = plan(2, [(8, [("n1/0", 1)]), (8, [("n0/0", 1)])])
SLICED = plan(2, [(16, [("n0/0", 1), ("n1/0", 1)])])


def state_of(layouts: Layouts, device: str) -> LocalState:
    planes = {"value": ("value",), "state": ("exp_avg", "exp_avg_sq")}
    return LocalState(
        tensors={
            item: LocalTensor(
                shards=tuple(
                    Shard(box=box, planes={plane: torch.ones(box.shape) for plane in planes[item.role]})
                    for box in boxes
                )
            )
            for item, boxes in layouts.held(device).items()
        }
    )


def peak(after: Plan, *, in_place: bool) -> dict[str, int]:
    """Bytes held at most during a move, beyond what there was before the state was made."""
    gc.collect()
    start = resident("VmRSS")
    old, new = Layouts(SPEC, HALVES), Layouts(SPEC, after)
    states = {device: state_of(old, device) for device in DEVICES}
    whole = sum(state.bytes for state in states.values())
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    ends = MemoryTransport.connect(DEVICES)
    work = partial(moved, old, new, states, in_place)
    results = together(ends, work)
    assert all(isinstance(result, Moved) for result in results), results
    staged = sum(result.bytes_staged for result in results if isinstance(result, Moved))
    return {"state": whole, "peak": resident("VmHWM") - start, "staged": staged}


def moved(
    old: Layouts, new: Layouts, states: dict[str, LocalState], in_place: bool, end: MemoryTransport
) -> Moved:
    me = end.members[end.rank]
    return migrate(old, new, states[me], end, limit=LIMIT, in_place=in_place)


def resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def main() -> None:
    torch.set_num_threads(1)
    peak(SWAPPED, in_place=False)  # what is loaded at the first use
    found = {
        "beside": peak(SWAPPED, in_place=False),
        "in place": peak(SWAPPED, in_place=True),
        "sliced": peak(SLICED, in_place=False),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
