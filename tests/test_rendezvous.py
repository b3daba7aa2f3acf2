"""The live mode's handler without a torchrun: what it refuses, and the ranks it computes as torch would."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.utils import store as torch_store

from elasticd import rendezvous
from elasticd.codec.message import encode
from elasticd.rendezvous.errors import RendezvousOver, RendezvousRefusal
from elasticd.rendezvous.handler import create_handler
from elasticd.rendezvous.live_mode import EXIT_BARRIER, RankStore
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import Join, Joined
from elasticd.wire.worker import StoreAnswer, from_worker
from tests.sizes import examples


def parameters(run_id: str = "job", **conf: str) -> RendezvousParameters:
    return RendezvousParameters(
        backend="elasticd", endpoint="/nowhere/a.sock", run_id=run_id, min_nodes=1, max_nodes=2, **conf
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (parameters("none"), r"torchrun --rdzv-id=NAME; torch's default 'none' would be shared"),
        (parameters("a/b"), "the job's name 'a/b' cannot be used: a name is made of letters, digits"),
        (parameters(mode="restart", settle="long"), "settle=long must be a number of seconds, as 1"),
        (parameters(mode="restart", join_timeout="0"), "--rdzv-conf: The join timeout"),
        (parameters(mode="restart", agent_timeout="0"), r"no agent listens at /nowhere/a\.sock"),
        (parameters(mode="dead"), "mode=dead is unknown"),
        (parameters(agent_timeout="soon"), "agent_timeout=soon must be a number of seconds"),
    ],
)
def test_options_that_cannot_work_are_refused(wrong: RendezvousParameters, reason: str) -> None:
    with pytest.raises(RendezvousRefusal, match=reason):
        create_handler(wrong)


def test_handler_comes_from_the_entry_point_under_its_name() -> None:
    handler = rendezvous.get_handler()(parameters())
    assert (handler.get_backend(), handler.get_run_id()) == ("elasticd", "job")
    assert handler.num_nodes_waiting() == 0
    assert handler.use_agent_store
    assert not handler.is_closed()


def test_missing_agent_is_a_rendezvous_error_that_names_it() -> None:
    with pytest.raises(RendezvousError, match=r"no agent listens at /nowhere/a\.sock"):
        create_handler(parameters(agent_timeout="0")).next_rendezvous()


def answering(path: Path, times: int) -> threading.Thread:
    """An agent that lets `times` torchruns take part, one after the other, and ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener:
            for _ in range(times):
                with listener.accept()[0] as client:
                    data = unix_socket.receive(client)
                    assert data is not None
                    assert isinstance(from_worker(data), Join)
                    unix_socket.send(client, encode(Joined(node_rank=0, nodes=1)))
        path.unlink()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_torchrun_that_took_part_waits_for_an_agent_that_is_started_again(tmp_path: Path) -> None:
    """Its workers ended meanwhile, so that it asks anew. Only the first agent must be there at once."""
    path = tmp_path / "a.sock"
    asked = RendezvousParameters("elasticd", str(path), "job", min_nodes=1, max_nodes=1, agent_timeout="0")
    agent = answering(path, 1)
    handler = create_handler(asked)
    assert handler.next_rendezvous().rank == 0
    agent.join(30)
    assert not path.exists()
    found: list[int] = []
    again = threading.Thread(target=lambda: found.append(handler.next_rendezvous().rank))
    again.start()
    time.sleep(0.5)
    assert again.is_alive()
    agent = answering(path, 1)
    again.join(30)
    agent.join(30)
    assert found == [0]
    with pytest.raises(RendezvousError, match="no agent listens at"):
        create_handler(asked).next_rendezvous()


def test_refusal_ends_a_program_with_its_message_and_the_end_of_a_job_in_good_order() -> None:
    assert RendezvousRefusal("why").code == "elasticd: why"
    assert RendezvousOver("done").code == 0


def failed(exitcode: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=exitcode, error_file="none")
    return ChildFailedError("train.py", {0: failure})


@pytest.mark.parametrize(
    ("exitcode", "how"), [(1, "ended with exit code 1"), (-9, "was ended by signal 9 (SIGKILL)")]
)
def test_failed_worker_is_one_line_and_any_other_error_is_left_to_the_hook_before(
    exitcode: int, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    for _ in range(2):  # a handler for each rendezvous makes no chain of hooks
        create_handler(parameters())
    sys.excepthook(ChildFailedError, failed(exitcode), None)
    said = capsys.readouterr().err
    assert said == f"elasticd: a worker of this node {how}: its own last line above says why\n"
    other = ValueError("x")
    sys.excepthook(ValueError, other, None)
    assert others == [other]
    assert capsys.readouterr().err == ""


class Agent:
    """The leader's store for role infos, without the way there."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def call(self, op: str, key: str, value: bytes = b"", seconds: float = 0.0) -> StoreAnswer:
        if op == "set":
            self.values[key] = value
        elif key not in self.values:
            raise RuntimeError(f"{key} never came")
        return StoreAnswer(id=1, value=self.values[key])


def stores(nodes: int) -> list[RankStore]:
    shared: dict[str, bytes] = {}
    return [RankStore(Agent(shared), Joined(node_rank=i, nodes=nodes)) for i in range(nodes)]  # type: ignore[arg-type]


def ranks(store: Any, node: int, nodes: int, role: str, size: int) -> list[Any]:
    spec = SimpleNamespace(role=role, local_world_size=size)
    workers = LocalElasticAgent._assign_worker_ranks(None, store, node, nodes, spec)  # type: ignore[arg-type]
    return [(w.global_rank, w.world_size, w.role_rank, w.role_world_size) for w in workers]


NODES = st.lists(st.tuples(st.sampled_from(["default", "other"]), st.integers(1, 4)), min_size=1, max_size=5)


@settings(max_examples=examples(50))
@given(NODES)
def test_ranks_are_those_that_torch_assigns_over_one_shared_store(nodes: list[tuple[str, int]]) -> None:
    ours, shared = stores(len(nodes)), dist.HashStore()
    for each in [*ours, shared]:
        for i, (role, size) in enumerate(nodes):  # all nodes have spoken, whatever the order they read in
            info = {"role": role, "rank": i, "local_world_size": size}
            if each is shared or each is ours[i]:
                each.set(f"torchelastic/role_info/{i}", json.dumps(info))
    for i, (role, size) in enumerate(nodes):
        assert ranks(ours[i], i, len(nodes), role, size) == ranks(shared, i, len(nodes), role, size)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_the_leader_does_not_take_are_said_where_others_need_them(
    nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(Agent):
        def call(self, op: str, key: str, value: bytes = b"", seconds: float = 0.0) -> StoreAnswer:
            raise RuntimeError("set of rdzv/torchelastic/role_info/0: too often")

    store = RankStore(Refusing({}), Joined(node_rank=0, nodes=nodes))  # type: ignore[arg-type]
    store.set("torchelastic/role_info/0", json.dumps({"role": "default", "rank": 0, "local_world_size": 3}))
    said = capsys.readouterr().err
    assert ("the other nodes do not hear how many workers this one has" in said) == (nodes > 1)
    assert ("too often" in said) == (nodes > 1)


def test_late_node_finds_its_ranks_without_the_others() -> None:
    first, late = stores(2)
    first.set("torchelastic/role_info/0", json.dumps({"role": "default", "rank": 0, "local_world_size": 3}))
    del first
    assert ranks(late, 1, 2, "default", 2) == [(3, 5, 3, 5), (4, 5, 4, 5)]


def test_exit_barrier_waits_for_nobody() -> None:
    store = stores(4)[0]
    torch_store.barrier(store, 4, EXIT_BARRIER.removesuffix("/last_member"), barrier_timeout=1)
    assert store.get(EXIT_BARRIER) == b"1"


def test_key_that_nobody_will_set_is_an_error_and_no_wait() -> None:
    with pytest.raises(RuntimeError, match="nobody else sets it"):
        stores(1)[0].get("some/key")
