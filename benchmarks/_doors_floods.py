"""The flooders of benchmarks/doors.py, in a process of their own.

    python benchmarks/_doors_floods.py HOST PORT KIND NUMBER FOLDER TOKEN

So many agents with a token, over TLS, each of which comes back as soon as it is dropped. Prints a line once all
have connected, and ends with its standard input. The kinds:

    silent      its WebSocket stands, and no hello comes
    halves      half of the request that opens a WebSocket
    empty       a hello, then frames without a byte
    tiny        a hello, then messages of an unknown type, the smallest there are
    pings       a hello, then pings, whose answers are not read
    pongs       a hello, then pongs to no ping
    pieces      a hello, then one message in pieces without a byte
    huge        a hello, then frames of the largest size
    deaf        a hello, then questions whose answers are not read
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _doors_messages import JOB, greeting, join

from elasticd.codec.message import encode
from elasticd.wire.coordinator import FromClient
from elasticd.wire.worker import StoreCall

#: Bytes of what is sent in one go.
_BLOCK = 1 << 20
_CONTINUED, _TEXT, _BINARY, _PING, _PONG = 0x00, 0x81, 0x82, 0x89, 0x8A
#: The first piece of a message, and one of the largest frames.
_BEGUN, _HUGE = 0x02, (8 << 20) - 1


def frame(first: int, content: bytes = b"") -> bytes:
    """A frame with a mask of zeros, under which a content is as it is."""
    size = len(content)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + bytes(4) + content


def repeated(piece: bytes) -> bytes:
    """As many of it as make a block."""
    return piece * max(1, _BLOCK // len(piece))


def question() -> bytes:
    """One that the leader answers at once: a torchrun asks whether a key is there."""
    body = StoreCall(id=1, op="check", key="plan/1/0")
    return encode(FromClient(client="w", job=JOB, device="", incarnation="", body=body))


def opening(host: str, token: str) -> bytes:
    """The request that opens an agent's WebSocket."""
    lines = (
        "GET /v1/agent HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {token}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def hello(node: str) -> bytes:
    """The hello of the agent of a node."""
    said = msgspec.json.decode(greeting())
    said["record"] |= {"node": node, "agent": node}
    said["record"]["devices"] = [{**said["record"]["devices"][0], "name": f"{node}/0"}]
    return frame(_BINARY, msgspec.json.encode(said))


#: What follows the hello: once, then again and again.
FLOODS: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "empty": lambda: (b"", repeated(frame(_BINARY))),
    "tiny": lambda: (b"", repeated(frame(_TEXT, b'{"type":"x"}'))),
    "pings": lambda: (b"", repeated(frame(_PING))),
    "pongs": lambda: (b"", repeated(frame(_PONG))),
    "pieces": lambda: (frame(_BEGUN, b"["), repeated(frame(_CONTINUED))),
    "huge": lambda: (b"", frame(_BINARY, bytes(_HUGE))),
    "deaf": lambda: (frame(_BINARY, join()), repeated(frame(_BINARY, question()))),
}


def flood(address: tuple[str, int], context: ssl.SSLContext, kind: str, node: str, token: str) -> None:
    """One connection from its begin to its end."""
    with socket.create_connection(address, timeout=30) as plain, context.wrap_socket(plain) as connection:
        request = opening(address[0], token)
        if kind == "halves":
            connection.sendall(request[: len(request) // 2])
            connection.recv(1)
            return
        connection.sendall(request)
        if b" 101 " not in connection.recv(4096):
            return
        if kind == "silent":
            while connection.recv(4096):  # pings, which it does not answer
                pass
            return
        once, again = FLOODS[kind]()
        connection.sendall(hello(node) + once)
        while True:
            connection.sendall(again)


def main(host: str, port: int, kind: str, number: int, folder: Path, token: str) -> None:
    """Until standard input ends."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.check_hostname = False
    connected = threading.Semaphore(0)

    def come_back(node: str) -> None:
        while True:
            connected.release()
            with contextlib.suppress(OSError):
                flood((host, port), context, kind, node, token)

    for index in range(number):
        threading.Thread(target=come_back, args=(f"flood{index}",), daemon=True).start()
    for _ in range(number):
        connected.acquire()
    print("connected", flush=True)
    sys.stdin.readline()
    os._exit(0)  # threads may be in the midst of a send that nobody takes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
