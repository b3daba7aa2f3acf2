"""One rank of four: what the vote takes beside a bare all-gather, and what telling of a step takes of the CPU.

    python benchmarks/_runtime_cost.py FOLDER RANK ADDRESS PAIRS STEPS

CPU seconds are the training thread's own, counted in real steps around the functions that plan the batch, vote,
keep clocks and report, less what is spent inside the collective. The agent's place is taken by a listener in a
process of its own, which throws everything away. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _trained import Text, described, engine_of, plan_of, stage

from elasticd.codec.message import encode
from elasticd.models import DecoderConfig
from elasticd.records import JobSpec
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.control.agent_client import AgentClient
from elasticd.runtime.engine import engine as engines
from elasticd.runtime.engine import pipeline_stage as stages
from elasticd.runtime.engine.batches_ahead import BatchesAhead
from elasticd.runtime.engine.vote import RankRecord, StepVote, fold
from elasticd.runtime.telemetry.step_times import Telemetry
from elasticd.wire import unix_socket
from elasticd.wire.worker import Hello, Report, Welcome

CONFIG = DecoderConfig(vocabulary=64, width=64, layers=4, heads=8, kv_heads=4, hidden=176)
TOKENS = 16
PLAN = plan_of(
    (4, [stage(0, 2, a0=1), stage(2, 4, a1=1)]),
    (4, [stage(0, 2, b0=1), stage(2, 4, b1=1)]),
    micro_batch=1,
)
WARM, BARE = 10, 50


class Meter:
    """CPU seconds of this thread inside the functions that it is put around; in none of them twice.

    The clock is a system call: in the midst of a step its first read finds none of it in the caches, which is
    no time of the function's. So it is read twice, and the second time counts."""

    def __init__(self) -> None:
        self.seconds, self._inside, self._since, self._own = 0.0, False, 0.0, 0.0
        measured = self._counted(lambda: None)
        for _ in range(2000):
            measured()
        self._own, self.seconds = self.seconds / 2000, 0.0

    def around(self, owner: Any, name: str) -> None:
        setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside = True
            time.thread_time()
            self._since = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - self._since - self._own
                self._inside = False

        return counted

    def not_around(self, owner: Any, name: str) -> None:
        """What happens inside of it is not counted, wherever it is called."""
        inner = getattr(owner, name)

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                return inner(*args, **kwargs)
            self.seconds += time.thread_time() - self._since
            self._inside = False
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = True
                time.thread_time()
                self._since = time.thread_time()

        setattr(owner, name, uncounted)


def listen(path: str, ready: Any) -> None:
    """An agent that welcomes one worker and throws away what it says."""
    listener = unix_socket.listen(path)
    listener.setblocking(True)
    ready.set()
    sock, _ = listener.accept()
    unix_socket.receive(sock)
    unix_socket.send(sock, encode(Welcome(device=PLAN.members[0], incarnation="1", address="127.0.0.1")))
    while unix_socket.receive(sock) is not None:
        pass


@contextmanager
def control(folder: Path, rank: int) -> Iterator[AgentClient]:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    path = str(folder / f"agent-{rank}")
    agent = context.Process(target=listen, args=(path, ready), daemon=True)
    agent.start()
    ready.wait(60)
    spec = JobSpec(
        job="bench",
        model=described(CONFIG).spec,
        global_batch=PLAN.global_batch,
        micro_batch=1,
        samples=512,
        sample_tokens=float(TOKENS),
        seed=0,
    )
    made = AgentClient(path, Hello(job="bench", local_rank=rank, world_size=4, pid=os.getpid(), spec=spec))
    made.start(lambda message: None)
    try:
        yield made
    finally:
        agent.kill()
        agent.join()


def cpu_seconds(engine: engines.Engine, talk: AgentClient, steps: int) -> float:
    """Of a step, in the mean."""
    meter = Meter()
    for owner, name in (
        (BatchesAhead, "of"),
        (BatchesAhead, "next"),
        (BatchesAhead, "voted"),
        (stages, "hash_samples"),
        (engines, "expected_hashes"),
        (StepVote, "vote"),
    ):
        meter.around(owner, name)
    for name in ("begin", "mark", "passed", "worked", "finish"):
        meter.around(Telemetry, name)
    meter.not_around(Group, "all_gather")
    meter.around(talk, "send")
    for index in range(WARM + steps):
        if index == WARM:
            meter.seconds = 0.0
        done = engine.step(index, lambda: 0)
        vote = done.outcome.vote
        talk.send(Report(measurement=done.measurement, loss=vote.loss, tokens=vote.tokens))
    return meter.seconds / steps


def paired(group: Group, pairs: int) -> dict[str, list[float]]:
    """Wall seconds of votes and of bare all-gathers of the same size, in turns, each after a barrier."""
    record = RankRecord(
        step=1,
        prepared=0,
        saving=0,
        snapshot=False,
        finite=True,
        tokens=8,
        squares=1.0,
        loss=1.0,
        targets=1.0,
        samples=7,
    )
    vote = StepVote(group)
    packed = torch.zeros_like(vote._packed)

    def bare() -> None:
        out = [torch.empty_like(packed) for _ in range(group.size)]
        group.backend.allgather([out], [packed]).wait()

    sides: list[tuple[str, Callable[[], Any]]] = [
        ("vote", lambda: vote.vote(record, [7] * group.size)),
        ("bare", bare),
    ]
    found: dict[str, list[float]] = {"vote": [], "bare": []}
    for index in range(BARE + pairs):
        for name, work in sides if index % 2 else sides[::-1]:
            group.backend.barrier().wait()
            start = time.perf_counter()
            work()
            if index >= BARE:
                found[name].append(time.perf_counter() - start)
    fold([record] * group.size, [7] * group.size)
    return found


def main(folder: Path, rank: int, address: str, pairs: int, steps: int) -> dict[str, object]:
    torch.set_num_threads(1)
    with control(folder, rank) as talk:
        engine = engine_of(folder, rank, address, PLAN, CONFIG, Text.of(CONFIG.vocabulary, TOKENS))
        found: dict[str, object] = dict(paired(engine.plan_groups.group(PLAN.members, "vote"), pairs))
        found["cpu"] = cpu_seconds(engine, talk, steps)
        return found


if __name__ == "__main__":
    folder, rank, address, pairs, steps = sys.argv[1:]
    print(json.dumps(main(Path(folder), int(rank), address, int(pairs), int(steps))), flush=True)
    os._exit(0)
