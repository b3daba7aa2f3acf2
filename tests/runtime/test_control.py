"""The worker's end of the agent's socket, against a listener that plays the agent."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticd_planner.spec.measurement import Measurement

from elasticd.codec.message import Message, encode
from elasticd.records import JobSpec, Proposal
from elasticd.runtime.control.agent_client import AgentClient, AgentKeyValue, RejectedByAgent
from elasticd.system import process_mark
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.main_thread import Whereabouts
from elasticd.wire.worker import (
    Closed,
    Finished,
    FromWorker,
    Goodbye,
    Hello,
    PeersLost,
    Propose,
    Recorded,
    Rejected,
    Report,
    RunningPlan,
    StateReport,
    StayedOnPlan,
    StoreAnswer,
    Switched,
    ToWorker,
    Welcome,
    from_worker,
)
from tests.machines.test_snapshot_sets import plan as made_plan
from tests.runtime.test_model import decoder


def hello() -> Hello:
    spec = JobSpec(
        job="j", model=decoder().spec, global_batch=4, micro_batch=1, samples=9, sample_tokens=8.0, seed=0
    )
    return Hello(job="j", local_rank=0, world_size=2, pid=1, spec=spec)


class Agent:
    """Accepts one worker and answers its hello."""

    def __init__(self, path: str, answer: ToWorker | None, *, hold: bool = False) -> None:
        """Without an `answer` it hangs up, or `hold`s the connection."""
        self.came, self._hold = threading.Event(), hold
        self._listener = unix_socket.listen(path)
        self._listener.setblocking(True)
        self._answer = answer
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(60)
        self.hello = self.receive()
        self.came.set()
        if self._answer is not None:
            self.send(self._answer)
        elif not self._hold:
            self.socket.close()

    def receive(self) -> FromWorker | None:
        """The next message for a leader; None at the end."""
        while True:
            data, fd = unix_socket.accept(self.socket)
            if fd is not None:
                os.close(fd)
            if data is None:
                return None
            message = from_worker(data)
            if not isinstance(message, Whereabouts):
                return message

    def send(self, message: Message) -> None:
        unix_socket.send(self.socket, encode(message))

    def again(self, answer: ToWorker) -> None:
        """Accepts one more connection."""
        self._answer = answer
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()
        self.socket.close()

    def ready(self) -> Agent:
        self._thread.join(60)
        return self


WELCOME = Welcome(device="a/0", incarnation="1f", address="127.0.0.1")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Agent, AgentClient]]:
    agent = Agent(str(tmp_path / "s"), WELCOME)
    control = AgentClient(str(tmp_path / "s"), hello())
    yield agent.ready(), control
    agent.socket.close()


def report(step: int) -> Report:
    measurement = Measurement(device="a/0", plan=1, step=step, tokens=1, block_seconds=1.0, block_work=1.0)
    return Report(measurement=measurement)


def test_a_worker_says_hello_and_hears_what_is_sent(pair: tuple[Agent, AgentClient]) -> None:
    agent, control = pair
    assert agent.hello == hello()
    heard: list[object] = []
    came = threading.Event()
    control.start(lambda message: (heard.append(message), came.set()))
    agent.send(Recorded(number=3))
    assert came.wait(60)
    assert heard == [Recorded(number=3)]
    control.close(Goodbye(reason="done"))
    assert agent.receive() == Goodbye(reason="done")
    assert agent.receive() is None


def test_a_message_that_elasticd_fails_on_leaves_the_worker_hearing_the_next(
    pair: tuple[Agent, AgentClient], caplog: pytest.LogCaptureFixture
) -> None:
    agent, control = pair
    heard: list[object] = []
    came = threading.Event()

    def handler(message: object) -> None:
        if message == Recorded(number=3):
            raise KeyError("a defect")
        heard.append(message)
        came.set()

    control.start(handler)
    agent.send(Recorded(number=3))
    agent.send(Recorded(number=4))
    assert came.wait(60)
    assert heard == [Recorded(number=4)]
    assert not control.lost
    assert "failed on Recorded" in caplog.text
    control.close(Goodbye(reason="done"))


def test_store_calls_are_answered_by_number(pair: tuple[Agent, AgentClient]) -> None:
    agent, control = pair
    control.start(lambda message: None)
    store = AgentKeyValue(control)

    def serve() -> None:
        first, second = agent.receive(), agent.receive()
        agent.send(StoreAnswer(id=second.id, value=second.key.encode()))
        agent.send(StoreAnswer(id=first.id, value=first.key.encode()))
        third = agent.receive()
        agent.send(StoreAnswer(id=third.id, error="nobody set it"))

    server = threading.Thread(target=serve)
    server.start()
    got: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=lambda key=key: got.update({key: store.get(key, 10)})) for key in ("x", "y")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == {"x": b"x", "y": b"y"}
    with pytest.raises(TimeoutError, match="nobody set it"):
        store.get("z", 5)
    server.join(10)


def test_a_full_socket_drops_reports_and_keeps_outcomes(pair: tuple[Agent, AgentClient]) -> None:
    agent, control = pair
    control.start(lambda message: None)
    for step in range(5000):
        control.send(report(step))
    assert control.dropped > 0
    control.send(StayedOnPlan(number=4, step=5))
    received = []
    while not received or not isinstance(received[-1], StayedOnPlan):
        received.append(agent.receive())
    assert received[-1] == StayedOnPlan(number=4, step=5)


def test_a_lost_agent_fails_calls_and_nothing_else(pair: tuple[Agent, AgentClient]) -> None:
    agent, control = pair
    control.start(lambda message: None)

    def hang_up() -> None:
        agent.receive()  # the call
        agent.socket.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=hang_up, daemon=True).start()
    with pytest.raises(TimeoutError, match="connection to the agent broke"):
        AgentKeyValue(control).get("x", 20)
    control.send(report(1))
    control.close(Goodbye())


def test_a_rejection_carries_its_reason(tmp_path: Path) -> None:
    Agent(str(tmp_path / "s"), Rejected(reason="use --nproc-per-node=2 at most"))
    with pytest.raises(RejectedByAgent, match="--nproc-per-node=2"):
        AgentClient(str(tmp_path / "s"), hello())


def test_an_agent_that_hangs_up_is_named(tmp_path: Path) -> None:
    Agent(str(tmp_path / "s"), None)
    with pytest.raises(RejectedByAgent, match="closed the connection"):
        AgentClient(str(tmp_path / "s"), hello(), connect_seconds=0.0)


def test_a_worker_whose_agent_ends_at_its_hello_comes_to_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first, made = Agent(path, None), list[AgentClient]()
    worker = threading.Thread(target=lambda: made.append(AgentClient(path, hello())))
    worker.start()
    first.ready().close()
    second = Agent(path, WELCOME).ready()
    worker.join(60)
    try:
        assert made[0].welcome == WELCOME
        made[0].start(lambda message: None)
        made[0].close(Goodbye())
    finally:
        second.close()


@pytest.mark.parametrize("torchruns", [False, True])
def test_a_worker_of_a_torchrun_waits_as_long_as_for_one_that_returns(
    torchruns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its torchrun has had its place from an agent a moment ago; a script by itself may have none at all."""
    waited: dict[str, float] = {}  # by path: clients of tests before this one may still look for their agents

    def connect(path: str, seconds: float) -> socket.socket:
        waited[path] = seconds
        raise unix_socket.NoAgent("no agent listens")

    monkeypatch.setattr(unix_socket, "connect", connect)
    monkeypatch.delenv(process_mark.VARIABLE, raising=False)
    if torchruns:
        monkeypatch.setenv(process_mark.VARIABLE, "1:2")
    with pytest.raises(unix_socket.NoAgent):
        AgentClient(str(tmp_path / "s"), hello())
    assert waited[str(tmp_path / "s")] == pytest.approx(120.0 if torchruns else 10.0, abs=1.0)


def test_no_agent_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(unix_socket.NoAgent, match="'elasticd up' on one machine"):
        AgentClient(str(tmp_path / "none"), hello(), connect_seconds=0.0)


def test_a_worker_comes_back_to_another_agent_as_itself_and_says_what_it_had_said(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = Agent(path, WELCOME)
    control = AgentClient(path, hello())
    first.ready()
    control.start(lambda message: None)
    control.send(StayedOnPlan(number=4, step=5))
    assert first.receive() == StayedOnPlan(number=4, step=5)
    first.close()
    second = Agent(path, WELCOME).ready()
    try:
        assert isinstance(second.hello, Hello)
        assert second.hello.incarnation == WELCOME.incarnation
        assert second.receive() == StayedOnPlan(number=4, step=5)
        control.close(Goodbye())
    finally:
        second.close()


def test_the_last_step_is_said_to_each_agent_until_the_end_is_written(tmp_path: Path) -> None:
    """An agent that heard of it and died has written nothing."""
    path, last = str(tmp_path / "s"), Finished(step=9)
    first = Agent(path, WELCOME)
    control = AgentClient(path, hello())
    first.ready()
    control.start(lambda message: None)
    control.send(last)
    assert first.receive() == last
    leaves = threading.Thread(target=control.close, args=(Goodbye(),), daemon=True)
    leaves.start()
    first.close()
    second = Agent(path, WELCOME).ready()
    try:
        assert second.receive() == last
        assert leaves.is_alive()
        second.send(Closed(reason="it finished after 9 steps"))
        assert second.receive() == Goodbye()
        leaves.join(60)
        assert not leaves.is_alive()
    finally:
        second.close()


def test_a_worker_says_to_another_agent_which_plan_it_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = Agent(path, WELCOME)
    control = AgentClient(path, hello())
    first.ready()
    heard: list[object] = []
    control.start(heard.append)
    assert isinstance(first.hello, Hello)
    assert first.hello.running is None
    plan = made_plan(["a/0"], 4)
    first.send(Propose(proposal=Proposal(number=4, epoch=1, plan=plan, old=None)))
    until(lambda: bool(heard))
    control.send(Switched(number=4, step=7, pause_seconds=0, bytes_sent=0, bytes_lacking=0, bytes_state=0))
    assert isinstance(first.receive(), Switched)
    first.close()
    second = Agent(path, WELCOME).ready()
    try:
        assert isinstance(second.hello, Hello)
        assert second.hello.running == RunningPlan(plan=plan, step=7, highest=4)
        control.close(Goodbye())
    finally:
        second.close()


def test_a_worker_that_was_fenced_off_comes_as_another(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = Agent(path, WELCOME)
    control = AgentClient(path, hello())
    first.ready()
    control.start(lambda message: None)
    control.send(StayedOnPlan(number=4, step=5))
    renewed = threading.Thread(target=control.renew)
    first.again(Welcome(device="a/0", incarnation="2e", address="127.0.0.1"))
    renewed.start()
    renewed.join(20)
    assert not renewed.is_alive()
    first.ready()
    assert isinstance(first.hello, Hello)
    assert first.hello.incarnation == "", "it asks for a new one"
    assert control.welcome.incarnation == "2e"
    control.close(Goodbye())
    assert first.receive() == Goodbye(), "what the other incarnation said is not said again"
    first.close()


def test_a_loss_that_is_over_is_not_said_again(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = Agent(path, WELCOME)
    control = AgentClient(path, hello())
    first.ready()
    control.start(lambda message: None)
    said = [StateReport(fence=2, copies=()), PeersLost(step=5, reason="reset"), StateReport(fence=4, copies=())]
    for word in said:
        control.send(word)
        assert first.receive() == word
    first.close()
    second = Agent(path, WELCOME).ready()
    try:
        assert second.receive() == said[-1]
        control.close(Goodbye())
        assert second.receive() == Goodbye()
    finally:
        second.close()


def test_a_renewal_that_comes_while_the_agent_is_away_is_a_renewal(tmp_path: Path) -> None:
    """The control thread is on its way back as the incarnation that it was: that connection is not taken."""
    path = str(tmp_path / "s")
    first = Agent(path, WELCOME)
    control = AgentClient(path, hello())
    first.ready()
    control.start(lambda message: None)
    control.send(StayedOnPlan(number=4, step=5))
    assert first.receive() == StayedOnPlan(number=4, step=5)
    first.close()
    second = Agent(path, None, hold=True)
    assert second.came.wait(60)
    assert isinstance(second.hello, Hello)
    assert second.hello.incarnation == WELCOME.incarnation
    renewed = threading.Thread(target=control.renew)
    renewed.start()
    deadline = time.monotonic() + 60
    while control._renewing is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    second.send(WELCOME)
    try:
        old = second.socket
        second.again(Welcome(device="a/0", incarnation="2e", address="127.0.0.1"))
        second.ready()
        renewed.join(60)
        assert not renewed.is_alive()
        assert isinstance(second.hello, Hello)
        assert second.hello.incarnation == "", "it asks for a new one"
        assert control.welcome.incarnation == "2e"
        assert unix_socket.receive(old) is None, "nothing was said on the other"
        control.close(Goodbye())
        assert second.receive() == Goodbye()
    finally:
        second.close()
