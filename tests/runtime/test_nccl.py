"""Groups over NCCL: the refusal without a device, and the way out of a blocked collective with two."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.comm.nccl import NcclPlanGroups
from tests.runtime import gang
from tests.runtime.test_groups import Silent


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_the_message_says_what_to_use() -> None:
    with pytest.raises(RuntimeError, match="use gloo"):
        NcclPlanGroups("plan/1", "a", "127.0.0.1", Silent())


def abort_while_blocked(name: str, store: Any) -> dict[str, Any]:
    """b never comes to the collective; both abort, and meet anew."""
    members = ("a", "b")
    torch.cuda.set_device(members.index(name))
    plan_groups = NcclPlanGroups("plan/1", name, "127.0.0.1", store)
    group = plan_groups.group(members, "reduce")
    first = float(group.all_reduce(torch.ones(1, device="cuda")))
    left = ""
    start = time.monotonic()
    if name == "b":
        store.get("left/a", 60)
        plan_groups.shut()
    else:
        threading.Timer(0.2, plan_groups.shut).start()
        try:
            group.all_reduce(torch.ones(4 << 20, device="cuda"))
        except (Cancelled, PeerLost) as error:
            left = type(error).__name__
        store.set("left/a", b"")
    spent = time.monotonic() - start
    plan_groups.park().join(60)
    again = NcclPlanGroups("plan/2", name, "127.0.0.1", store).group(members, "reduce")
    second = float(again.all_reduce(torch.ones(1, device="cuda")))
    return {"first": first, "second": second, "left": left, "seconds": spent}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses to share one")
def test_aborting_frees_a_blocked_collective_and_the_ranks_meet_anew() -> None:
    results = gang.run(__file__, "abort_while_blocked", ["a", "b"])
    assert results["a"]["left"] in ("Cancelled", "PeerLost")
    for result in results.values():
        assert result["first"] == result["second"] == 2.0
        assert result["seconds"] < 20
