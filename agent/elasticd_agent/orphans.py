"""Orphans, which would keep their devices: workers of a torchrun that is gone, and children of dead workers.

A torchrun marks its environment, which its workers inherit, and theirs after them: by itself as a process
(`elasticd.system.process_mark`), and in restart mode by its name too. A worker that still imports torch is
found by that, long before it could have asked the kernel to end with its parent. What a worker started is in
its session (`elasticd.system.process_sessions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

from elasticd.machines.agent.state import Event, Opened, Said
from elasticd.system import process_mark, process_sessions
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.unix_socket import SOCKET_VARIABLE, TORCHRUN_VARIABLE
from elasticd.wire.worker import Goodbye, Hello

#: Seconds until the second look: a torchrun may be killed in the moment in which it starts a worker.
_AGAIN_SECONDS = 1.0

_log = logging.getLogger(__name__)


class TorchrunOrphans:
    """The torchruns in live mode on this agent's socket; what one that is killed leaves behind is ended. One
    that took its leave has ended its workers itself. On the running loop."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, int] = {}
        self._clients: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Looks for those that an agent before this one knew, and for what they left while there was none."""
        self._run(self._begin())

    def observe(self, event: Event) -> None:
        """Takes an event of the agent's machine. From a torchrun's `Join` on its process is watched, until its
        `Leave` or its end."""
        if isinstance(event, Opened) and isinstance(event.body, Join):
            marked = process_mark.mark(event.pid)
            if marked is not None:  # else it had not been answered, and has no workers
                self._clients[event.client] = marked
                self._watch(marked)
        elif isinstance(event, Said) and isinstance(event.body, Leave):
            self._forget(self._clients.pop(event.client, ""))

    def close(self) -> None:
        """Ends all watching. Torchruns and workers that live are left alone."""
        for task in self._tasks:
            task.cancel()
        for marked in list(self._watched):
            self._forget(marked)

    async def _begin(self) -> None:
        for marked in await asyncio.to_thread(_starters, self._socket):
            self._watch(marked)

    def _watch(self, marked: str) -> None:
        if marked in self._watched:
            return
        try:
            pidfd = os.pidfd_open(int(marked.partition("-")[0]))
        except (OSError, ValueError, OverflowError):  # the last two: whoever set the environment made it up
            self._run(self._end(marked))
            return
        if not process_mark.alive(marked):
            os.close(pidfd)
            self._run(self._end(marked))
            return
        self._watched[marked] = pidfd
        self._loop.add_reader(pidfd, self._gone, marked)

    def _forget(self, marked: str) -> None:
        pidfd = self._watched.pop(marked, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _gone(self, marked: str) -> None:
        self._forget(marked)
        self._clients = {client: other for client, other in self._clients.items() if other != marked}
        self._run(self._end(marked))

    async def _end(self, marked: str) -> None:
        entry = f"{process_mark.VARIABLE}={marked}"
        for pause in (0.0, _AGAIN_SECONDS):
            await asyncio.sleep(pause)
            ended = await asyncio.to_thread(_end, lambda environment: entry in environment)
            if ended:
                _log.warning("a torchrun (%s) is gone: its workers %s are ended", marked, ended)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class WorkerOrphans:
    """The processes that this agent's workers start: those of one that dies, or drains, are ended after it. One
    that ends its script in good order has settled its affairs. On the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        self._workers: dict[str, int] = {}
        self._settled: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def observe(self, event: Event) -> None:
        """Takes an event of the agent's machine. From a worker's `Hello` on its process is watched."""
        if isinstance(event, Opened) and isinstance(event.body, Hello):
            self._watch(event.client, event.pid)
        elif isinstance(event, Said) and isinstance(event.body, Goodbye) and not event.body.drained:
            self._settled.update(pid for client, pid in self._workers.items() if client == event.client)

    def close(self) -> None:
        """Ends all watching."""
        for task in self._tasks:
            task.cancel()
        for pid in list(self._pidfds):
            self._forget(pid)

    def _watch(self, client: str, pid: int) -> None:
        """Nothing for a worker that leads no session, as one that no torchrun started: it shares another's."""
        self._settled.discard(pid)  # a further job of its script
        if pid in self._pidfds:
            self._workers[client] = pid
        if pid in self._pidfds or not process_sessions.is_led(pid):
            return
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            self._pidfds[pid], self._workers[client] = pidfd, pid
            self._loop.add_reader(pidfd, self._gone, pid)

    def _gone(self, pid: int) -> None:
        self._forget(pid)
        settled = pid in self._settled
        self._settled.discard(pid)
        if not settled:
            task = self._loop.create_task(self._end(pid))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, pid: int) -> None:
        if ended := await asyncio.to_thread(process_sessions.end, {pid}):
            _log.warning("the processes %s are ended, which worker %d left", sorted(ended), pid)

    def _forget(self, pid: int) -> None:
        self._workers = {client: other for client, other in self._workers.items() if other != pid}
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)


def has_ended(pid: int) -> bool:
    """Returns True if the process is gone, or only waits for its parent to look."""
    return process_mark.mark(pid) is None


def end(torchrun: str, marked: str) -> list[int]:
    """Kills all that the torchrun of this name, in restart mode, left behind.

    A process gives itself its name, and could give another's. So the time of its start has to fit, too, which
    the agent knows by itself; the process's number may be another one in a container.

    Args:
        torchrun: the name.
        marked: the mark (`process_mark`) that the process had while it ran. Empty: it is not known, and nothing
            is killed.

    Returns:
        The process ids of those that were killed.
    """
    if not marked:
        return []
    named, started = f"{TORCHRUN_VARIABLE}={torchrun}", f"-{marked.partition('-')[2]}"

    def left(environment: set[str]) -> bool:
        return named in environment and any(
            entry.startswith(f"{process_mark.VARIABLE}=") and entry.endswith(started) for entry in environment
        )

    return _end(left)


def _end(left: Callable[[set[str]], bool]) -> list[int]:
    """Kills all processes whose environment `left` takes; their process ids."""
    ended = []
    for pid, environment in _environments():
        if not left(environment):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # By a descriptor, and looked at again, so that the number cannot be another process' by now.
            fd = os.pidfd_open(pid)
            try:
                if left(_environment(pid)):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    ended.append(pid)
            finally:
                os.close(fd)
    return ended


def _starters(socket: str) -> set[str]:
    """The marks of the torchruns on this socket that some process descends from."""
    starters = set()
    for _, environment in _environments():
        if f"{SOCKET_VARIABLE}={socket}" in environment:
            prefix = f"{process_mark.VARIABLE}="
            starters |= {entry.removeprefix(prefix) for entry in environment if entry.startswith(prefix)}
    return starters


def _environments() -> Iterator[tuple[int, set[str]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name), _environment(int(entry.name))


def _environment(pid: int) -> set[str]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return set()
