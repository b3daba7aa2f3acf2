"""One client against all others at the coordinator's port: strangers that say nothing, and messages of the
largest size.

    make bench NAME=doors
    make bench NAME=doors ARGS='--only strangers handshakes'
    make bench NAME=doors ARGS='--only messages'
    make bench NAME=doors ARGS='--only floods'

A real coordinator in a process of its own, with tokens and the limits of `[security]`. *strangers*,
*handshakes*: another process holds silent connections, without TLS and with it, each of which comes back as
soon as it is dropped, while operators, agents and probes ask. *messages*: an agent with a token sends each wire
type with each of its lists, mappings and texts as long as the type's largest size allows, and frames that are
no message. *floods*: agents with a token and TLS that are silent, send empty frames, the largest ones, pings or
pieces of messages, or read no answer (`_doors_floods.py` has the kinds), while others ask. "held up" is by the
clock, and on a busy machine other programs are in it; "processor" is that of all threads of the coordinator in
one such time.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import httpx2
import msgspec
from _doors_leader import Figures
from _frame import Part, run
from _load_certificates import write as write_certificates
from _results import Row, row
from load import at_most, running, said
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from elasticd.config.credentials import Credentials, credentials
from elasticd.config.security import SecuritySection

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _doors_messages import greeting, join, largest_messages, no_messages

VIEWER, OPERATOR, AGENT, FLOODER = (
    f"{role}-0123456789abcdef" for role in ("view", "operate", "agent", "flood")
)
#: Connections that the port may have, and descriptors of its process, while strangers are there.
CONNECTIONS, DESCRIPTORS = 200, 400
#: Seconds that a request may take, and between two rounds of them.
PATIENCE, PAUSE = 5.0, 0.1
#: Of floods.
KINDS = ("silent", "halves", "empty", "tiny", "pings", "pongs", "pieces", "huge", "deaf")
#: Milliseconds that the loop may be held up by one client.
MOST_HELD_UP = 50
MIB = 1 << 20


def private(folder: Path) -> Path:
    """Tokens and certificates."""
    for role, token in (("viewers", VIEWER), ("operators", OPERATOR), ("agents", f"{AGENT}\n{FLOODER}")):
        (folder / role).touch(mode=0o600)
        (folder / role).write_text(token + "\n")
    write_certificates(folder)
    return folder


def strangers(number: int = 240, seconds: float = 25.0, tls: bool = False) -> Iterator[Row]:
    """Requests of operators, agents and probes while strangers hold connections."""
    name = f"{number} silent {'TLS handshakes' if tls else 'strangers'}"
    options = ["--connections", CONNECTIONS, "--descriptors", DESCRIPTORS, *(["--tls"] if tls else [])]
    with tempfile.TemporaryDirectory() as place:
        folder = private(Path(place))
        with running("_doors_leader.py", folder, *options) as leader:
            url = said(leader)
            host, port = url.rpartition("//")[2].split(":")
            with running("_doors_strangers.py", host, port, number) as others:
                said(others)
                leader_before(leader)
                answered, asked = asyncio.run(_requests(url, folder if tls else None, seconds))
                figures = leader_before(leader)
    yield row(
        f"{name}: requests of operators, agents and probes answered",
        round(100 * answered / asked, 2),
        "%",
        goal="100",
        met=answered == asked,
    )
    yield row(f"{name}: requests", asked, "")
    most = DESCRIPTORS // 4 * 3
    yield row(
        f"{name}: descriptors of {DESCRIPTORS} in use",
        figures.descriptors,
        "",
        goal=f"<= {most}",
        met=figures.descriptors <= most,
    )
    yield at_most(f"{name}: the loop held up, longest", figures.held_up * 1e3, MOST_HELD_UP)


def leader_before(leader: subprocess.Popen[str]) -> Figures:
    """The leader's figures since it was asked last."""
    return msgspec.json.decode(said(leader, "figures"), type=Figures)


async def _requests(url: str, folder: Path | None, seconds: float) -> tuple[int, int]:
    """The numbers of requests that were answered, and that were made."""
    verifying = credentials(SecuritySection(ca=str(folder / "ca.pem"))) if folder is not None else Credentials()

    async def get(path: str, token: str) -> None:
        known = Credentials(token=token, context=verifying.context)
        async with httpx2.AsyncClient(trust_env=False, verify=known.verifying()) as client:
            (await client.get(url + path, headers=known.headers(), timeout=PATIENCE)).raise_for_status()

    async def link() -> None:
        headers = Credentials(token=AGENT).headers()
        socket_url = url.replace("http", "ws", 1) + "/v1/agent"
        async with connect(
            socket_url, ssl=verifying.context, proxy=None, additional_headers=headers, open_timeout=PATIENCE
        ) as socket:
            await socket.send(greeting())
            await asyncio.wait_for(await socket.ping(), PATIENCE)

    requests: list[Callable[[], Awaitable[None]]] = [
        partial(get, "/v1/status", OPERATOR),
        partial(get, "/v1/status", VIEWER),
        partial(get, "/livez", VIEWER),
        link,
    ]
    answered = asked = 0
    end = asyncio.get_running_loop().time() + seconds
    while not asked or asyncio.get_running_loop().time() < end:
        for request in requests:
            asked += 1
            try:
                await request()
                answered += 1
            except (OSError, TimeoutError, httpx2.HTTPError, WebSocketException) as error:
                print(f"not answered: {error!r}", flush=True)
        await asyncio.sleep(PAUSE)
    return answered, asked


def messages(every: int = 1) -> Iterator[Row]:
    """Every `every`-th of the largest messages, and the frames that are none, one after another."""
    with tempfile.TemporaryDirectory() as place, running("_doors_leader.py", private(Path(place))) as leader:
        url = said(leader)
        before = leader_before(leader)
        longest: list[tuple[float, float, str]] = []
        largest = [one for index, one in enumerate(largest_messages()) if index % every == 0]
        for words, data in chain(largest, no_messages()):
            asyncio.run(_sent(url, data))
            figures = leader_before(leader)
            longest.append((figures.held_up, figures.processor, words))
        after = leader_before(leader)
    for held_up, processor, words in sorted(longest, reverse=True)[:8]:
        print(f"held up {held_up * 1e3:.1f} ms, processor {processor * 1e3:.1f} ms: {words}", flush=True)
    name = "any message at its largest"
    yield row(f"{name}: messages", len(longest), "")
    yield at_most(f"{name}: the loop held up, longest", max(longest)[0] * 1e3, MOST_HELD_UP)
    yield at_most(
        f"{name}: processor while the loop is held up, longest",
        max(processor for _, processor, _ in longest) * 1e3,
        MOST_HELD_UP,
    )
    grown = (after.memory - before.memory) / MIB
    yield row(f"{name}: memory kept after all of them", round(grown, 1), "MiB", goal="<= 128", met=grown <= 128)
    yield row(f"{name}: leaders lost", after.deposed, "", goal="0", met=after.deposed == 0)


async def _sent(url: str, data: bytes) -> None:
    """One message of an agent that has said hello and whose torchrun began a job, until it was dealt with."""
    headers = Credentials(token=AGENT).headers()
    socket_url = url.replace("http", "ws", 1) + "/v1/agent"
    async with connect(
        socket_url, proxy=None, additional_headers=headers, open_timeout=60, max_size=None
    ) as socket:
        await socket.send(greeting())
        await socket.send(join())
        with contextlib.suppress(WebSocketException):
            await socket.send(data)
            await socket.send(greeting())
            await asyncio.wait_for(await socket.ping(), 60)


def floods(number: int = 20, seconds: float = 8.0, kinds: tuple[str, ...] = KINDS) -> Iterator[Row]:
    """Requests of operators, agents and probes while agents flood the port."""
    answered = asked = deposed = 0
    held_up = processor = grown = 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = private(Path(place))
        with running("_doors_leader.py", folder, "--tls") as leader:
            url = said(leader)
            host, port = url.rpartition("//")[2].split(":")
            before = leader_before(leader)
            for kind in kinds:
                with running("_doors_floods.py", host, port, kind, number, folder, FLOODER) as others:
                    said(others)
                    leader_before(leader)
                    answers = asyncio.run(_requests(url, folder, seconds))
                    figures = leader_before(leader)
                print(
                    f"{kind}: answered {answers[0]} of {answers[1]}, held up {figures.held_up * 1e3:.1f} ms, "
                    f"processor {figures.processor * 1e3:.1f} ms, memory {figures.memory / MIB:.0f} MiB",
                    flush=True,
                )
                answered, asked = answered + answers[0], asked + answers[1]
                held_up, processor = max(held_up, figures.held_up), max(processor, figures.processor)
                deposed, grown = figures.deposed, max(grown, (figures.memory - before.memory) / MIB)
    name = f"{number} agents that flood, of {len(kinds)} kinds"
    share = round(100 * answered / asked, 2)
    yield row(f"{name}: requests of others answered", share, "%", goal="100", met=answered == asked)
    yield at_most(f"{name}: the loop held up, longest", held_up * 1e3, MOST_HELD_UP)
    yield at_most(f"{name}: processor while the loop is held up, longest", processor * 1e3, MOST_HELD_UP)
    yield row(f"{name}: memory grown by", round(grown, 1), "MiB", goal="<= 512", met=grown <= 512)
    yield row(f"{name}: leaders lost", deposed, "", goal="0", met=deposed == 0)


_COORDINATOR = tuple(f"elasticd/{name}" for name in ("codec", "coordinator", "machines", "system", "wire"))
_FEW = {"number": 80, "seconds": 1.0}
PARTS = {
    "strangers": Part(strangers, _COORDINATOR, _FEW),
    "handshakes": Part(partial(strangers, number=380, tls=True), _COORDINATOR, _FEW),
    "floods": Part(floods, _COORDINATOR, {"number": 2, "seconds": 0.5, "kinds": ("pings", "pieces")}),
    "messages": Part(messages, _COORDINATOR, {"every": 12}),
}

if __name__ == "__main__":
    sys.exit(run("doors", __doc__, PARTS))
