"""Notifications of a daemon to the service manager that started it: systemd's notification protocol
(sd_notify(3)).

Without a service manager nothing is sent, and the daemon runs as it does in a terminal.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping


class SdNotifier:
    """The service manager, as named by `NOTIFY_SOCKET`, and how often it wants to hear that we live
    (`WATCHDOG_USEC`, meant for us where `WATCHDOG_PID` is ours or not given)."""

    def __init__(self, environment: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # '@' stands for a socket in the abstract namespace, whose name begins with a zero byte.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        addressed = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid() if pid is None else pid))
        microseconds = environment.get("WATCHDOG_USEC", "")
        self._watchdog = int(microseconds) / 1e6 if addressed and microseconds.isdigit() else None

    def ready(self, status: str) -> None:
        """The daemon serves; also the end of `reloading`. `status` is a line for `systemctl status`."""
        self._notify("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """The line for `systemctl status` from now on. It can be sent at any time, and does not mean that the
        daemon is ready."""
        self._notify(f"STATUS={text}")

    def reloading(self) -> None:
        """The configuration is being read anew; `ready` ends that."""
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The daemon has begun to end. It is sent before connections are closed, which may take a while."""
        self._notify("STOPPING=1", "STATUS=ending")

    async def watch(self) -> None:
        """Says again and again, on the running loop, that the loop runs: a loop that hangs falls silent, and
        the service manager starts the daemon anew. Returns at once where no watchdog is set."""
        while self._address and self._watchdog:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(self._watchdog / 2)

    def _notify(self, *lines: str) -> None:
        """One datagram. A service manager that is gone is no reason to end: it is not told."""
        if not self._address:
            return
        text = "\n".join(line.replace("\n", " ") for line in lines)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(text.encode(), self._address)
            except OSError:
                return
