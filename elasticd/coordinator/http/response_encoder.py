"""Answers to viewers, made and encoded beside the event loop.

With 1,000 nodes of eight devices the status takes 40 ms to be made and encoded, the metrics take 260 ms, and a
journal full of tracebacks has 80 MB. On the event loop all agents would wait for that. The leader's state is
immutable: a thread can read it while the loop goes on to later ones. There is one such thread, however many
viewers ask at once. So the loop shares the interpreter with one thread at most, and viewers never take the
threads in which the leader talks to its store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

#: Bytes of an answer that are encoded at a time, and sent before the next are.
PIECE_BYTES = 256 << 10

T = TypeVar("T")


class Viewers:
    """The thread of one coordinator."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="viewers")

    async def beside(self, work: Callable[..., T], *values: Any) -> T:
        """Returns the result of `work`, or raises its exception. It may read immutable values alone: the loop
        runs meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *values)

    async def encoded(self, answer: msgspec.Struct) -> AsyncIterator[bytes]:
        """JSON of an answer, as many bytes at a time as its reader takes."""
        parts = pieces(answer)
        while piece := await self.beside(next, parts, b""):
            yield piece

    async def close(self) -> None:
        """Ends the thread, once it is done with what it does now."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


def pieces(answer: msgspec.Struct, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """JSON of an answer, as `msgspec.json.encode` has it. The items of its lists are encoded one by one, since
    no other thread runs while msgspec encodes one value."""
    buffer = bytearray(b"{")
    for number, field in enumerate(msgspec.structs.fields(answer)):
        buffer += (b"," if number else b"") + msgspec.json.encode(field.encode_name) + b":"
        value = getattr(answer, field.name)
        if not isinstance(value, list | tuple):
            buffer += msgspec.json.encode(value)
            continue
        buffer += b"["
        for at, item in enumerate(value):
            buffer += (b"," if at else b"") + msgspec.json.encode(item)
            if len(buffer) >= size:
                yield bytes(buffer)
                buffer.clear()
        buffer += b"]"
    buffer += b"}"
    yield bytes(buffer)
