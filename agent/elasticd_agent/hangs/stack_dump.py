"""The stack of a worker that stands still: by py-spy where that is installed and may, else by the worker,
whose interpreter writes it into its memory file at a signal, whatever its threads are at (`faulthandler`)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress

from elasticd.wire.main_thread import STACK

#: Characters of a stack that are kept: of py-spy's the beginning, of the interpreter's the end, which is where
#: each has the main thread.
MOST = 6000
#: Seconds that either has.
_SPY_SECONDS, _WRITE_SECONDS = 2.0, 0.5
#: What a stack shows of a process that compiles, or that somebody debugs: no step tells how long that may take.
_COMPILERS = ("torch/_dynamo/", "torch/_inductor/", "torch/utils/cpp_extension", "triton/")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/_pydevd_bundle/")


async def stack(pid: int, pidfd: int | None, own: tuple[int, int] | None) -> str:
    """The stack of a process; nothing where it cannot be had.

    Args:
        pid: the process.
        pidfd: a descriptor of it, which is closed.
        own: a descriptor of its memory file, which is closed, and the signal at which it writes its stacks
            there.
    """
    try:
        text = await _spied(pid)
        if not text and own is not None and pidfd is not None:
            text = await _written(pidfd, *own)
        return text
    finally:
        for fd in (pidfd, own[0] if own is not None else None):
            if fd is not None:
                os.close(fd)


def busy(text: str) -> str:
    """The work of a process that may take any time, by its stack; empty for most."""
    if any(each in text for each in _DEBUGGERS):
        return "a debugger"
    return "a compilation of its model" if any(each in text for each in _COMPILERS) else ""


async def _spied(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *("dump", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await asyncio.wait_for(process.communicate(), _SPY_SECONDS)
    except (OSError, TimeoutError):
        return ""
    finally:
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    return output.decode(errors="replace")[:MOST] if process.returncode == 0 else ""


async def _written(pidfd: int, fd: int, number: int) -> str:
    if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return ""  # it would end the process, or mean something else to it
    try:
        os.ftruncate(fd, STACK)
        os.lseek(fd, STACK, os.SEEK_SET)  # the worker's own place in the file, too: it is one open file
        signal.pidfd_send_signal(pidfd, number)
        return await _grown(fd)
    except OSError:
        return ""


async def _grown(fd: int) -> str:
    """Returns the text once no more of it comes. A writer that waits for a processor is in the midst of a
    line."""
    size = STACK
    for _ in range(int(_WRITE_SECONDS / 0.05)):
        await asyncio.sleep(0.05)
        before, size = size, os.fstat(fd).st_size
        if size == before > STACK and os.pread(fd, 1, size - 1) == b"\n":
            break
    data = os.pread(fd, MOST, max(STACK, size - MOST))
    return data.decode(errors="replace")
