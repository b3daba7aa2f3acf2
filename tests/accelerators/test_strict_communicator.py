"""The strict communicator: NCCL's refusals, its hangs, and its abort, in processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from elasticd.runtime.comm.groups import PlanGroups
from tests.accelerators import vgpu
from tests.accelerators.strict_communicator import (
    Aborted,
    Communicator,
    LaunchLog,
    Line,
    Mismatch,
    Refused,
    Work,
)
from tests.planner.launch_order import Join, Launch, Log, deadlock
from tests.runtime import gang

#: Seconds until a test believes that something hangs, and that it does not.
BRIEF, LONG = 0.3, 60.0


def processes(case: str, names: Sequence[str], device: str) -> dict[str, Any]:
    """What the function `case` gives for each name; each runs in a process of its own, on the device."""
    if device == vgpu.NAME:
        vgpu.needed()
    return gang.run(__file__, "inside", names, case, names, device, seconds=120)


def inside(name: str, store: Any, case: str, names: Sequence[str], device: str) -> Any:
    """In such a process."""
    torch.set_num_threads(1)
    if device == vgpu.NAME:
        vgpu.load()
    log = LaunchLog()

    def make(label: str = "all", line: Line | None = None) -> Communicator:
        groups = PlanGroups(label, name, "127.0.0.1", store)
        gloo = groups.group(tuple(names), label).backend
        return Communicator(label, gloo, names, name, device, log, line)

    result = globals()[case](name, device, make)
    if device == vgpu.NAME:
        assert not (noted := vgpu.settled_errors()), noted
    # No member leaves while another one still needs it.
    store.set(f"done/{name}", b"")
    for other in names:
        store.get(f"done/{other}", LONG)
    return result


def done(work: Work | None) -> None:
    assert work is not None
    work.wait(LONG)


Make = Callable[..., Communicator]


# -- what works ----------------------------------------------------------------------------------------------


def values(name: str, device: str, make: Make) -> dict[str, list[float]]:
    """One of each operation among three; each rank has its rank + 1."""
    communicator = make()
    rank = communicator.rank
    mine = torch.full((2,), rank + 1.0, device=device)
    found = {}
    for reduction in ("sum", "avg", "product", "min", "max"):
        tensor = mine.clone()
        done(communicator.all_reduce(tensor, reduction))
        found[reduction] = tensor.tolist()
    gathered = torch.empty(3, 2, device=device)
    done(communicator.all_gather(gathered, mine))
    found["gathered"] = gathered.flatten().tolist()
    part = torch.empty(1, dtype=torch.bfloat16, device=device)
    done(communicator.reduce_scatter(part, torch.arange(3, device=device, dtype=torch.bfloat16) * (rank + 1)))
    found["scattered"] = part.tolist()
    root = mine.clone()
    done(communicator.broadcast(root, 1))
    found["broadcast"] = root.tolist()
    if rank == 0:
        done(communicator.send(mine, 2))
    elif rank == 2:
        received = torch.empty(2, device=device)
        done(communicator.recv(received, 0))
        found["received"] = received.tolist()
    around, own = torch.empty(2, device=device), torch.empty(2, device=device)
    with communicator.batch() as works:
        communicator.recv(around, (rank - 1) % 3)
        communicator.send(mine, (rank + 1) % 3)
        communicator.send(mine, rank)
        communicator.recv(own, rank)
    done(works[0])
    found["around"] = around.tolist()
    assert torch.equal(own, mine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "vgpu"])
def test_each_operation_gives_its_values(device: str) -> None:
    found = processes("values", ["a", "b", "c"], device)
    for rank, name in enumerate("abc"):
        each = found[name]
        assert [each[reduction][0] for reduction in ("sum", "avg", "product", "min", "max")] == [6, 2, 6, 1, 3]
        assert each["gathered"] == [1, 1, 2, 2, 3, 3]
        assert each["scattered"] == [6 * rank]
        assert each["broadcast"] == [2, 2]
        assert each["around"] == [(rank - 1) % 3 + 1] * 2
    assert found["c"]["received"] == [1, 1]


# -- what is refused, and what does not match ----------------------------------------------------------------


class NoGloo:
    """A gloo that says nothing."""

    def recv_anysource(self, *_: object) -> Any:
        raise RuntimeError("nobody is there")


def test_what_nccl_refuses_is_refused_by_name() -> None:
    communicator = Communicator("pair", NoGloo(), ["a", "b"], "a", "cpu")
    x = torch.ones(4, 4)
    meta = torch.ones(4, device="meta")
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"all_reduce: .* on meta: the communicator is of cpu", lambda: communicator.all_reduce(meta)),
        (r"all_reduce: .* not contiguous: its strides are \[1, 4\]", lambda: communicator.all_reduce(x.t())),
        (r"send: .* torch.int16: NCCL has no such type", lambda: communicator.send(x.short(), 1)),
        (r"recv with tag 3", lambda: communicator.recv(x, 1, 3)),
        (r"no rank 2 among 2", lambda: communicator.send(x, 2)),
        (r"to itself a rank sends in a batch alone", lambda: communicator.recv(x, 0)),
        (r"not dense", lambda: communicator.all_reduce(x.to_sparse())),
        (r"8 elements are not 2 times 3", lambda: communicator.all_gather(torch.ones(8), torch.ones(3))),
        (r"tensors of torch.float64 and torch.float32", lambda: communicator.all_gather(x.double(), x[:2])),
        (r"no average of torch.int64", lambda: communicator.all_reduce(x.long(), "avg")),
        (r"no reduction 'xor'", lambda: communicator.all_reduce(x, "xor")),
    ]
    for message, call in cases:
        with pytest.raises(Refused, match=message):
            call()
    with communicator.batch(), pytest.raises(Refused, match="a batch has messages alone"):
        communicator.all_reduce(x)
    with communicator.log.launching(), pytest.raises(Refused, match="two threads launch"):
        communicator.all_reduce(x)
    assert communicator.log.entries == [], "nothing was launched"


def refused_on_device(name: str, device: str, make: Make) -> str:
    with pytest.raises(Refused) as refused:
        make("refused").all_reduce(torch.ones(4))
    return str(refused.value)


def mismatched(name: str, device: str, make: Make) -> dict[str, str]:
    """Members that are in different operations: what each is told."""
    found = {}
    x = torch.ones(6, device=device)
    first = name == "a"
    cases: dict[str, Callable[[Communicator], Work | None]] = {
        "size": lambda c: c.all_reduce(x[:2] if first else x[:4]),
        "dtype": lambda c: c.all_reduce(x.double() if first else x),
        "operation": lambda c: c.broadcast(x, 0) if first else c.all_reduce(x),
        "root": lambda c: c.broadcast(x, 0 if first else 1),
        "collective": lambda c: c.send(x, 1) if first else c.all_reduce(x),
    }
    for case, launch in cases.items():
        communicator = make(case)
        work = launch(communicator)
        assert work is not None
        with pytest.raises(Mismatch) as told:
            work.wait(LONG)
        found[case] = str(told.value)
        again = communicator.all_reduce(x)
        with pytest.raises(Mismatch):
            again.wait(LONG)
    communicator = make("message")
    if name in "ab":
        message = communicator.send(x, 1) if first else communicator.recv(x[:5], 0)
        assert message is not None
        with pytest.raises(Mismatch) as told:
            message.wait(LONG)
        found["message"] = str(told.value)
    return found


@pytest.mark.slow
def test_members_in_different_operations_are_all_told() -> None:
    found = processes("mismatched", ["a", "b", "c"], "cpu")
    for told in found.values():
        assert "all_reduce sum, torch.float32 of 2" in told["size"]
        assert "all_reduce sum, torch.float64 of 6" in told["dtype"]
        assert "broadcast from 0, torch.float32 of 6" in told["operation"]
        assert "broadcast from 1" in told["root"]
        assert "a send of torch.float32 of 6" in told["collective"]
    text = "message: b is in a receive of torch.float32 of 5; a is in a send of torch.float32 of 6"
    assert found["a"]["message"] == found["b"]["message"] == text


# -- what hangs, and abort -----------------------------------------------------------------------------------


def hangs(name: str, device: str, make: Make) -> dict[str, Any]:
    """Both do the same unbatched, and wait until they abort; then they meet anew."""
    other = 1 if name == "a" else 0
    found: dict[str, Any] = {}
    for order in ("receive first", "send first", "alone"):
        communicator = make(order)
        x, y = torch.ones(3, device=device), torch.ones(3, device=device)
        works: list[Work | None] = []
        if order == "receive first":
            works = [communicator.recv(y, other), communicator.send(x, other)]
        elif order == "send first":
            works = [communicator.send(x, other), communicator.recv(y, other)]
        elif name == "a":
            works = [communicator.all_reduce(y)]
        if works:
            assert works[0] is not None
            with pytest.raises(TimeoutError):
                works[0].wait(BRIEF)
            assert not works[0].is_completed()
        start = time.monotonic()
        abort = threading.Timer(0.1, communicator.abort)
        abort.start()
        for work in works:
            done(work)  # no error
        found[order] = (time.monotonic() - start, y.isnan().all().item() if works else True)
        abort.join()
        with pytest.raises(Aborted, match="was aborted"):
            communicator.all_reduce(x)
    total = torch.ones(1, device=device)
    done(make("anew").all_reduce(total))
    found["anew"] = total.item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "vgpu"])
def test_what_hangs_in_nccl_hangs_and_abort_frees_it_with_garbage_and_no_error(device: str) -> None:
    for found in processes("hangs", ["a", "b"], device).values():
        assert found.pop("anew") == 2
        for seconds, garbage in found.values():
            assert seconds < 30
            assert garbage


def in_line(name: str, device: str, make: Make) -> dict[str, bool]:
    """Whether what "a" sends comes to "b" although "a" receives first, on another communicator."""
    came = {}
    for label, line in (("apart", None), ("line", Line(name) if name == "a" else None)):
        forth, back = make(f"{label}-forth", line), make(f"{label}-back", line)
        mine, theirs = torch.ones(2, device=device), torch.zeros(2, device=device)
        if name == "a":
            for work in [back.recv(theirs, 1), forth.send(mine, 1)]:
                done(work)
            continue
        first = forth.recv(theirs, 0)
        assert first is not None
        try:
            first.wait(LONG if label == "apart" else BRIEF)
            came[label] = True
        except TimeoutError:
            came[label] = False
        done(back.send(mine, 0))
        if not came[label]:
            first.wait(LONG)
    return came


@pytest.mark.slow
def test_in_one_line_an_operation_waits_for_those_before_it_on_other_communicators() -> None:
    found = processes("in_line", ["a", "b"], "cpu")
    assert found["b"] == {"apart": True, "line": False}


# -- streams and the log -------------------------------------------------------------------------------------


def unjoined(name: str, device: str, make: Make) -> list[str]:
    """What is said where a tensor is used between launch and join."""
    communicator, said = make(), list[str]()
    x = torch.ones(4, device=device)
    work = communicator.all_reduce(x)
    for use in (x.sum, x.zero_):
        with pytest.raises(RuntimeError) as race:
            use()
        said.append(str(race.value))
    with vgpu.counting() as counts:
        done(work)
        total = x.sum()
    assert (counts.synchronizations, total.item()) == (0, 8)
    sent = torch.ones(4, device=device)
    with communicator.batch() as works:
        communicator.send(sent, 1 - communicator.rank)
        communicator.recv(x, 1 - communicator.rank)
    with pytest.raises(RuntimeError) as race:
        sent.zero_()
    said.append(str(race.value))
    sent.sum()  # reading what is sent is no race
    done(works[0])
    sent.zero_()
    said.append(refused_on_device(name, device, make))
    return said


@pytest.mark.slow
def test_on_a_device_a_tensor_is_the_communicators_from_launch_to_join() -> None:
    for said in processes("unjoined", ["a", "b"], "vgpu").values():
        read, written, sent, refused = said
        assert "reads what communication on stream 1 of vgpu:0 writes" in read
        assert "writes what communication on stream 1 of vgpu:0 writes" in written
        assert "writes what communication on stream 1 of vgpu:0 reads" in sent
        assert refused.endswith("on cpu: the communicator is of vgpu:0")


def logged(name: str, device: str, make: Make) -> list[Launch | Join]:
    """Two communicators: the same collectives on one, and on the other a hang that a timeout ends here."""
    first, second = make("first"), make("second")
    x, y = torch.ones(2), torch.ones(2)
    done(first.all_reduce(x))
    with first.batch() as works:
        first.send(x, 1 - first.rank)
        first.recv(y, 1 - first.rank)
    done(works[0])
    fine = len(first.log.entries)
    second.recv(y, 1 - second.rank)
    second.send(x, 1 - second.rank)
    second.abort()
    return [*first.log.entries[:fine], Join("-"), *first.log.entries[fine:]]


@pytest.mark.slow
def test_the_checker_finds_a_deadlock_in_the_logs_of_communicators() -> None:
    found = processes("logged", ["a", "b"], "cpu")
    fine: dict[str, Log] = {}
    hanging: dict[str, Log] = {}
    for name, log in found.items():
        at = log.index(Join("-"))
        fine[name], hanging[name] = log[:at], log[at + 1 :]
        kinds = [type(entry).__name__ for entry in log[:at]]
        assert kinds == ["Launch", "Join", "Launch", "Join"]
    assert deadlock(fine) is None
    reason = deadlock(hanging)
    assert reason is not None
    assert set(reason.operations) == {"second: a to b, 1", "second: b to a, 1"}
