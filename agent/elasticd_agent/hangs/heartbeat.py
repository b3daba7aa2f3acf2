"""Which workers answer, and which are frozen: each is asked a few times a second, once it has answered.

Silence alone proves little: a process that computes without letting its control thread run is busy, one that
waits for a disk may come back. So the kernel is asked as well: what it says decides how long silence may last.
What the agent itself was late for it does not hold against a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

#: Seconds between two looks.
BEAT_SECONDS = 0.2
#: Seconds of silence after which a process counts as frozen: one that the kernel says is stopped; one that uses
#: no processor; and one that does.
STOPPED, IDLE, BUSY = 0.4, 5.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The kernel's account of a process: whether it is stopped, and the processor time that it has used."""

    stopped: bool
    used: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Since when an answer is due, and the processor time used until the last look that saw it grow."""

    since: float
    idle_since: float
    used: float = -1.0
    frozen: bool = False


class Heartbeats:
    """`look` asks the kernel by process id; None: that process is gone."""

    def __init__(self, look: Callable[[int], Look | None]) -> None:
        self._look = look
        self._asked: dict[str, _Asked] = {}
        self._before: float | None = None

    def beat(
        self, clients: Mapping[str, int], now: float, outside: Container[str] = ()
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Of the workers that are there (name to process id) those to ask now, and those that are found frozen,
        with how. outside: those that were last in their script's own code, which may well keep the interpreter
        to itself; such a one is frozen if the kernel says that it is stopped, and not by its silence."""
        late = 0.0 if self._before is None else max(0.0, now - self._before - 2 * BEAT_SECONDS)
        self._before = now
        clients = {name: pid for name, pid in clients.items() if pid > 0}  # 0: of another process namespace
        self._asked = {name: self._later(asked, late) for name, asked in self._asked.items() if name in clients}
        ask = tuple(name for name in clients if name not in self._asked)
        frozen = {}
        for name, asked in self._asked.items():
            how, self._asked[name] = self._judged(asked, clients[name], now, spared=name in outside)
            if how and not asked.frozen:
                frozen[name] = how
        self._asked |= {name: _Asked(since=now, idle_since=now) for name in ask}
        return ask, frozen

    def answered(self, client: str) -> bool:
        """Returns True if it had been found frozen."""
        asked = self._asked.pop(client, None)
        return asked is not None and asked.frozen

    @staticmethod
    def _later(asked: _Asked, seconds: float) -> _Asked:
        return replace(asked, since=asked.since + seconds, idle_since=asked.idle_since + seconds)

    def _judged(self, asked: _Asked, pid: int, now: float, *, spared: bool) -> tuple[str, _Asked]:
        silent = now - asked.since
        if asked.frozen or silent < STOPPED:
            return "", asked
        look = self._look(pid)
        if look is None:
            return "", asked  # its end is told by other means
        if look.used > asked.used:
            asked = replace(asked, used=look.used, idle_since=now)
        how = ""
        if look.stopped:
            how = f"it is stopped (by SIGSTOP or a debugger), and has not answered for {silent:.1f} s"
        elif spared:
            pass
        elif now - asked.idle_since >= IDLE:
            idle = now - asked.idle_since
            how = f"it has not answered for {silent:.1f} s, and used no processor for {idle:.1f} s"
        elif silent >= BUSY:
            how = f"it has not answered for {silent:.1f} s, though it uses the processor"
        return how, replace(asked, frozen=bool(how))


def look(pid: int) -> Look | None:
    """From Linux's /proc; elsewhere nothing is known, and nobody is found frozen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Look(stopped=fields[0] in (b"T", b"t"), used=float(int(fields[11]) + int(fields[12])))
