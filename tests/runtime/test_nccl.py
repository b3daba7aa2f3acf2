"""What is asked of torch's ProcessGroupNCCL, and when NCCL is refused. What launches do is in
tests/accelerators, where the same code trains over process groups that have NCCL's rules."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elasticd_planner.layout.channels import Channel
from torch._C import _distributed_c10d as c10d

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm import communicators, nccl
from elasticd.runtime.comm.communicators import GlooCommunicators, agreed
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.comm.nccl import NcclLibrary, NotUsable
from elasticd.system.torch_build import CONNECTIONS_VARIABLE
from elasticd.testing.waiting import until

FINE = dict(nccl.SETTINGS, **{CONNECTIONS_VARIABLE: "32"})


class Recorded:
    """In the place of ProcessGroupNCCL: every call, in order."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None, max_ctas=None)
            self._timeout: Any = None
            self.is_high_priority_stream = False
            self.group_name = ""

    calls: list[tuple[Any, ...]]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.calls, self.options = [("made", store, rank, size)], options

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.calls.append((name, *given))
            return SimpleNamespace(synchronize=lambda: None, is_completed=lambda: True)

        return call


def connected(use: Any, me: str = "a/1") -> tuple[Any, Recorded]:
    library = NcclLibrary(torch.device("cuda:3"), Recorded)
    made = library.connect(Channel(use, ("a/0", "a/1", "b/0")), me, "store")  # type: ignore[arg-type]
    group: Recorded = made._group
    return made, group


def test_a_communicator_connects_beside_the_host_and_gives_up_an_abort_before_long() -> None:
    _, group = connected("reduce")
    assert group.calls == [("made", "store", 1, 3), ("eager_connect_single_device", torch.device("cuda:3"))]
    assert group.options.config.blocking == 0
    assert group.options.is_high_priority_stream
    assert group.options._timeout.total_seconds() == nccl.ABORT_SECONDS
    assert group.options.config.max_ctas is None
    assert connected("gradient")[1].options.config.max_ctas == nccl.PAIR_BLOCKS


def test_messages_go_side_by_side_in_one_batch_and_a_lone_one_by_itself() -> None:
    made, group = connected("state")
    one, two = torch.zeros(2), torch.ones(3)
    made.exchange([(0, one), (2, one)], [(2, two)])
    assert [call[0] for call in group.calls[2:]] == [
        "_start_coalescing",
        "send",
        "send",
        "recv",
        "_end_coalescing",
    ]
    assert group.calls[3][1:] == ([one], 0, 0)
    made.exchange([], [(2, two)])
    assert group.calls[-1] == ("recv", [two], 2, 0)


def test_a_batch_whose_launch_fails_is_closed() -> None:
    made, group = connected("state")

    def fails(*_: Any) -> None:
        raise RuntimeError("a peer is gone")

    group.recv = fails  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a peer is gone"):
        made.exchange([(0, torch.zeros(1))], [(0, torch.zeros(1))])
    assert group.calls[-1] == ("_end_coalescing",)


def test_a_connection_is_waited_for_beside_the_host_and_tells_why_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)  # there may be no GPU here
    made, group = connected("reduce")
    there = threading.Event()
    group._comm_ptr = lambda: there.wait(30)  # type: ignore[attr-defined]
    assert not made.ready()
    assert not made.ready()
    there.set()
    made._connecting.join(30)
    assert made.ready()

    def refused() -> None:
        raise RuntimeError("ncclRemoteError")

    made, group = connected("reduce")
    group._comm_ptr = refused  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="ncclRemoteError"):
        until(made.ready, lambda: "it failed")


def test_all_are_aborted_side_by_side_though_one_waits_for_another() -> None:
    """As an abort does that waits for the device, which another communicator's kernel holds."""
    freed = threading.Event()

    def waits() -> None:
        assert freed.wait(30)
        raise RuntimeError("ProcessGroup abort timed out")

    library = NcclLibrary(torch.device("cuda:0"), Recorded)
    first, second = connected("reduce"), connected("tensor")
    first[1].abort = waits  # type: ignore[attr-defined]
    second[1].abort = freed.set  # type: ignore[attr-defined]
    library.abort([first[0], second[0]])
    assert freed.is_set()


@pytest.mark.parametrize(
    ("version", "channels", "environ", "lacking", "said"),
    [
        ((2, 25, 1), 3, FINE, [], "NCCL 2.25.1 may hang when a peer dies: install torch with NCCL 2.27"),
        (
            (2, 27, 5),
            3,
            FINE | {"TORCH_NCCL_BLOCKING_WAIT": "0"},
            [],
            "BLOCKING_WAIT is 0, and elasticd needs 1",
        ),
        ((2, 27, 5), 24, nccl.SETTINGS, [], "CUDA_DEVICE_MAX_CONNECTIONS is 8, and this plan has 24 comm"),
        ((2, 27, 5), 3, FINE | {CONNECTIONS_VARIABLE: "1"}, [], "export CUDA_DEVICE_MAX_CONNECTIONS=32 before"),
        ((2, 27, 5), 3, FINE, ["ProcessGroupNCCL.abort"], "lacks ProcessGroupNCCL.abort"),
    ],
)
def test_what_would_hang_is_refused_with_the_remedy(
    version: tuple[int, ...], channels: int, environ: dict[str, str], lacking: list[str], said: str
) -> None:
    with pytest.raises(NotUsable, match=said):
        nccl.check(version, channels, environ, lacking)
    nccl.check((2, 27), 24, FINE)
    nccl.check((2, 27, 5), 4, nccl.SETTINGS)  # 8 queues are enough


def test_the_environment_is_settled_before_cuda_begins_and_the_users_values_stay() -> None:
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    nccl.settle_environment(environ, began=False)
    assert environ == FINE | nccl.DEFAULTS | {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    late: dict[str, str] = {}
    nccl.settle_environment(late, began=True)
    assert late == nccl.SETTINGS | nccl.DEFAULTS, "the driver would not read it any more"


def test_torch_has_the_names_that_are_called() -> None:
    """Those of ProcessGroupNCCL as this version's own stub file has them: a CPU build has no such class."""
    stub = Path(torch.__file__).parent / "_C/_distributed_c10d.pyi"
    (declared,) = (
        node
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ProcessGroupNCCL"
    )
    names = {node.name for node in declared.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    both = SimpleNamespace(**dict.fromkeys(names | set(dir(c10d.Backend))))
    assert nccl.missing(SimpleNamespace(ProcessGroupNCCL=both, Work=c10d.Work)) == []
    assert "ProcessGroupNCCL.abort" in nccl.missing(SimpleNamespace(Work=c10d.Work))


def test_members_on_unlike_devices_communicate_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(communicators, "BY_DEVICE", {"cuda": made})
    cuda, shared = (fake(shared=each) for each in (False, True))

    def choices(*of: Accelerator) -> set[Any]:
        names = [f"a/{index}" for index in range(len(of))]
        found = run_threads(names, lambda groups: agreed(groups.group(names, "x"), of[names.index(groups.me)]))
        return set(found.values())

    assert choices(cuda, cuda, cuda) == {made}
    for others in ((cuda, CPU), (cuda, shared), (shared, shared), (CPU, CPU)):
        assert choices(*others) == {GlooCommunicators}


def fake(*, shared: bool) -> Accelerator:
    made = Accelerator("cpu", shared=shared)
    made.device = torch.device("cuda:0")
    return made


def test_what_torch_answers_is_asked_in_the_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads its variables when it begins: the driver's own number of queues is refused."""
    from elasticd.runtime import torch_answer

    order: list[str] = []
    monkeypatch.setattr(nccl, "available", lambda: True)
    monkeypatch.setattr(nccl, "settle_environment", lambda: order.append("settled"))

    def current() -> None:
        order.append("CUDA is asked")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    torch_answer.build()
    assert order[:2] == ["settled", "CUDA is asked"]
