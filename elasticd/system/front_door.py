"""The front door of a port: connections that have shown no token yet are bounded apart from those that have.

Anybody who reaches a port may connect to it. A connection passes through four phases:

    waiting   no byte was received: it costs a descriptor, and neither a transport nor a handshake
    queued    bytes are there, and a TLS handshake is to begin when one of `HANDSHAKES` ends
    shaking   in its TLS handshake, which has `HANDSHAKE_SECONDS`
    asking    its protocol reads requests, and none of them has shown a token

and is a *stranger* until the application calls `Guest.enter`. The port's limit of connections counts those that
entered; strangers take no place of theirs. Bounds of strangers:

    time         `SILENT_SECONDS`, and `CROWDED_SECONDS` while there are more than `FEW_STRANGERS`. Time in
                 which a stranger waits for this process does not count.
    number       `MOST_STRANGERS`. Above it the longest-waiting one of the address that has most of them makes
                 way; where no address has more than `OF_ONE_ADDRESS`, newcomers wait in the kernel's queue.
    descriptors  the last ones of the process stay free (`highest_descriptor`) for its own files and processes

So strangers that come back as soon as they are dropped shut nobody out: a newcomer has `CROWDED_SECONDS` to say
something, and an address with few connections loses none of them to one with many.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import logging
import math
import resource
import socket
import ssl
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import lru_cache

from elasticd.system.logs import Seldom

#: The key of an ASGI scope under which the request's `Guest` stands.
GUEST = "elasticd.guest"
#: Strangers up to which each of them has `SILENT_SECONDS`.
FEW_STRANGERS = 64
#: Strangers at once, and those of one address that are let in however many there are of other addresses.
MOST_STRANGERS, OF_ONE_ADDRESS = 1024, 8
#: Seconds that a stranger may take to say something, and while there are more than `FEW_STRANGERS`.
SILENT_SECONDS, CROWDED_SECONDS = 10.0, 2.0
#: TLS handshakes at once: each takes about a millisecond of the event loop in one go.
HANDSHAKES = 16
#: Seconds that a TLS handshake may take.
HANDSHAKE_SECONDS = 5.0
#: Connections that are accepted before other work of the event loop has its turn.
_ACCEPTED_TOGETHER = 16
#: Seconds between looks for strangers that take too long, and by which a look may be late and still judge them.
_LOOK_SECONDS, _LATE_SECONDS = 0.25, 0.1
#: Seconds until connections are accepted again after the kernel gave none.
_PAUSE_SECONDS = 0.2
#: Descriptors that strangers and guests leave to the process, at most and as a share of its limit.
_RESERVE, _RESERVED_SHARE = 256, 4

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Phases of a connection; see the module."""

    WAITING = enum.auto()
    QUEUED = enum.auto()
    SHAKING = enum.auto()
    ASKING = enum.auto()
    ENTERED = enum.auto()
    GONE = enum.auto()


class Guest:
    """One connection of a front door."""

    def __init__(self, door: FrontDoor, sock: socket.socket, address: str, now: float) -> None:
        self.address = address  # of the client; of an IPv6 address its network of 64 bits
        self.since = now  # loop's time at which it came, or at which its phase began
        self.phase = Phase.WAITING
        self.proof: object = None  # credentials that the application saw last
        self.socket = sock
        self.transport: asyncio.BaseTransport | None = None
        self.opening: asyncio.Task[None] | None = None
        self.door = door

    def enter(self, proof: object) -> bool:
        """Makes this connection a guest, which counts against the port's limit, and keeps its credentials.

        Returns:
            False where the limit is reached: the connection stays a stranger.
        """
        if self.phase is Phase.ASKING and not self.door._entered(self):
            return False
        self.proof = proof
        return True

    def seat(self, transport: asyncio.BaseTransport) -> None:
        """Notes the transport of this connection. Its protocol calls it as the connection is made."""
        self.door._seated(self, transport)

    def leave(self) -> None:
        """Counts this connection no longer: its protocol lost it. Harmless when called again."""
        self.door._left(self)


class FrontDoor:
    """Accepts connections of a socket that listens, for `protocol`, which is given each connection's guest.

    Args:
        listener: a socket that listens and does not block; the caller closes it.
        protocol: makes the protocol of a connection, which calls `Guest.seat` when the connection is made, and
            `Guest.leave` when it is lost.
        context: TLS of the port; None: no TLS.
        most: guests at once.
        refused: counts a connection that is dropped, by the reason: "crowded", "silent", "handshake".
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[Guest], asyncio.Protocol],
        *,
        context: ssl.SSLContext | None,
        most: int,
        refused: Callable[[str], None],
    ) -> None:
        self._listener, self._protocol, self._context = listener, protocol, context
        self._most, self._refused = most, refused
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[str, dict[Guest, None]] = {}  # by address, the longest here first
        self._strangers_count = 0
        self._guests: set[Guest] = set()
        self._queue: deque[Guest] = deque()
        self._shaking: Counter[str] = Counter()  # handshakes of each address
        self._open = self._resting = False
        self._full = Seldom(_log)
        self._look_due = self._loop.time() + _LOOK_SECONDS
        self._look = self._loop.call_at(self._look_due, self._drop_late)
        self._resume()

    @property
    def guests(self) -> frozenset[Guest]:
        """The connections that entered and are not lost."""
        return frozenset(self._guests)

    @property
    def guest_count(self) -> int:
        """The number of connections that entered and are not lost."""
        return len(self._guests)

    @property
    def strangers(self) -> int:
        """The number of connections that have not entered."""
        return self._strangers_count

    def drop(self, guest: Guest, reason: str) -> None:
        """Ends a connection without a word, and counts it."""
        self._refused(reason)
        self._end(guest)

    def close(self) -> None:
        """Accepts no more, and ends the strangers whose protocol has not begun."""
        self._look.cancel()
        self._pause()
        for guest in self._all_strangers():
            if guest.phase is not Phase.ASKING:
                self._end(guest)

    # -- coming in ---------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if not self._open:
            self._open = True
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_TOGETHER):
            if self._strangers_count >= MOST_STRANGERS and not self._make_way(OF_ONE_ADDRESS):
                self._pause()  # until a stranger enters or is gone
                return
            try:
                sock, place = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            if sock.fileno() >= highest_descriptor():
                sock = self._below_reserve(sock)
                if sock.fileno() < 0:
                    return
            sock.setblocking(False)
            guest = Guest(self, sock, network_of(str(place[0])), self._loop.time())
            self._strangers.setdefault(guest.address, {})[guest] = None
            self._strangers_count += 1
            self._loop.add_reader(sock, self._speaks, guest)

    def _below_reserve(self, sock: socket.socket) -> socket.socket:
        """Returns the connection at a descriptor that a stranger made way for; closed where there is none."""
        if not self._make_way(0):
            sock.close()
            self._refused("crowded")
            self._rest("all descriptors but those that are kept for this process are in use")
            return sock
        lower = sock.dup()
        sock.close()
        if lower.fileno() >= highest_descriptor():  # the stranger's is not free yet: the next one has it
            lower.close()
            self._refused("crowded")
        return lower

    def _rest(self, reason: object) -> None:
        self._full.warn(
            f"port {self._listener.getsockname()[1]} takes no connection for a moment: {reason}; if the "
            "clients are yours, raise the limit of open files (LimitNOFILE of the unit, ulimit -n)"
        )
        self._make_way(0)
        self._pause()
        self._resting = True
        self._loop.call_later(_PAUSE_SECONDS, self._resume_after_rest)

    def _resume_after_rest(self) -> None:
        self._resting = False
        if not self._look.cancelled():
            self._resume()

    def _make_way(self, allowed: int) -> bool:
        """Ends the longest-waiting stranger of the address that has most, if those are more than `allowed`."""
        if not self._strangers:
            return False
        most = max(self._strangers.values(), key=len)
        if len(most) <= allowed:
            return False
        self.drop(next(iter(most)), "crowded")
        return True

    # -- handshakes --------------------------------------------------------------------------------------------

    def _speaks(self, guest: Guest) -> None:
        self._loop.remove_reader(guest.socket)
        if self._context is None:
            self._begin(guest, Phase.ASKING)
            return
        guest.phase = Phase.QUEUED
        self._queue.append(guest)
        self._next_handshakes()

    def _next_handshakes(self) -> None:
        while self._queue and self._shaking.total() < HANDSHAKES:
            guest = min(self._queue, key=lambda queued: self._shaking[queued.address])
            self._queue.remove(guest)
            self._shaking[guest.address] += 1
            self._begin(guest, Phase.SHAKING)

    def _begin(self, guest: Guest, phase: Phase) -> None:
        guest.phase, guest.since = phase, self._loop.time()
        guest.opening = self._loop.create_task(self._connect(guest))

    async def _connect(self, guest: Guest) -> None:
        """Gives the connection to its protocol, after a handshake where the port has TLS."""
        handshake_seconds = None if self._context is None else HANDSHAKE_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(guest),
                guest.socket,
                ssl=self._context,
                ssl_handshake_timeout=handshake_seconds,
            )
        except OSError as error:
            _log.debug("a connection from %s ended in its handshake: %s", guest.address, error)
            if guest.phase is not Phase.GONE:
                self._refused("silent" if isinstance(error, ConnectionAbortedError) else "handshake")
                self._left(guest)
        finally:
            guest.opening = None
            if self._context is not None:
                self._handshake_ended(guest.address)

    def _handshake_ended(self, address: str) -> None:
        self._shaking[address] -= 1
        if not self._shaking[address]:
            del self._shaking[address]
        if not self._look.cancelled():
            self._next_handshakes()

    # -- going out ---------------------------------------------------------------------------------------------

    def _drop_late(self) -> None:
        now = self._loop.time()
        late, self._look_due = now - self._look_due, now + _LOOK_SECONDS
        self._look = self._loop.call_at(self._look_due, self._drop_late)
        if late > _LATE_SECONDS:
            return  # what the strangers said meanwhile is not read yet
        most_address = max(self._shaking, key=self._shaking.__getitem__, default="")
        greedy = self._shaking[most_address] > HANDSHAKES // 2 and any(
            queued.address != most_address for queued in self._queue
        )
        for guest in self._all_strangers():
            seconds = now - guest.since
            if seconds > self._allowed_seconds(guest):
                self.drop(guest, "silent")
            elif greedy and guest.address == most_address and self._dawdles(guest, seconds):
                self.drop(guest, "crowded")

    @staticmethod
    def _dawdles(guest: Guest, seconds: float) -> bool:
        return guest.phase is Phase.SHAKING and seconds > _LOOK_SECONDS

    def _allowed_seconds(self, guest: Guest) -> float:
        """Seconds that a stranger may stay in its phase."""
        crowded = self._strangers_count > FEW_STRANGERS
        match guest.phase:
            case Phase.WAITING:
                return CROWDED_SECONDS if crowded else SILENT_SECONDS
            case Phase.SHAKING:
                return CROWDED_SECONDS if crowded or self._queue else HANDSHAKE_SECONDS
            case Phase.ASKING if crowded:
                return CROWDED_SECONDS
        return math.inf  # it waits for this process, or its protocol watches it

    def _all_strangers(self) -> Iterator[Guest]:
        return iter([guest for guests in self._strangers.values() for guest in guests])

    def _seated(self, guest: Guest, transport: asyncio.BaseTransport) -> None:
        if guest.phase is Phase.GONE:
            _abort(transport)
            return
        guest.transport = transport
        guest.phase, guest.since = Phase.ASKING, self._loop.time()

    def _entered(self, guest: Guest) -> bool:
        if len(self._guests) >= self._most:
            return False
        self._no_stranger(guest)
        guest.phase = Phase.ENTERED
        self._guests.add(guest)
        return True

    def _end(self, guest: Guest) -> None:
        phase = guest.phase
        self._left(guest)
        if guest.transport is not None:
            _abort(guest.transport)
        elif phase is Phase.WAITING or phase is Phase.QUEUED:
            self._loop.remove_reader(guest.socket)
            guest.socket.close()
        else:
            with contextlib.suppress(OSError):  # its transport reads the end, and closes it
                guest.socket.shutdown(socket.SHUT_RDWR)

    def _left(self, guest: Guest) -> None:
        match guest.phase:
            case Phase.GONE:
                return
            case Phase.ENTERED:
                self._guests.discard(guest)
            case phase:
                self._no_stranger(guest)
                if phase is Phase.QUEUED:
                    self._queue.remove(guest)
        guest.phase = Phase.GONE

    def _no_stranger(self, guest: Guest) -> None:
        of_address = self._strangers[guest.address]
        del of_address[guest]
        if not of_address:
            del self._strangers[guest.address]
        self._strangers_count -= 1
        if not self._look.cancelled() and not self._resting:
            self._resume()


def highest_descriptor() -> int:
    """The lowest descriptor that a connection may not have: those from it on are for the process itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - min(_RESERVE, soft // _RESERVED_SHARE)


def _abort(transport: asyncio.BaseTransport) -> None:
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """The address of a client; of IPv6 the network of 64 bits, since a client has all of one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
