"""The strangers of benchmarks/doors.py, in a process of their own.

    python benchmarks/_doors_strangers.py HOST PORT NUMBER

So many connections without a word, each of which comes back as soon as it is dropped. Prints a line once all
have connected, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys


async def hold(host: str, port: int, connected: asyncio.Semaphore) -> None:
    """One of them."""
    first = True
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            if first:
                connected.release()
                first = False
            try:
                await reader.read(1)
            finally:
                writer.close()


async def main(host: str, port: int, number: int) -> None:
    """Until standard input ends."""
    connected = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(hold(host, port, connected)) for _ in range(number)]
    for _ in range(number):
        await connected.acquire()
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
