"""The bootstrap store of one job: small keys that process groups find each other by, kept by the leader.

It lives in the leader's memory: nothing new is formed without a leader anyway, and groups that stand do not
need it any more. Only what torchruns tell of their ranks is written down, for the next leader. Callers prefix
their keys by `plan/{number}/`, which is how old ones are dropped.
"""

from __future__ import annotations

import asyncio
import re

from elasticd.codec.decoding import shown
from elasticd.version import __version__
from elasticd.wire.worker import StoreAnswer, StoreCall

#: Characters of a key, bytes of a value, and of all that a job keeps: more than ten thousand ranks need.
LONGEST_KEY, LARGEST_VALUE, LARGEST_JOB = 1024, 1 << 20, 256 << 20
#: Seconds that a call may wait.
LONGEST_WAIT_SECONDS = 3600.0
#: What a counter can be: a signed integer of 64 bits, as torch's.
_MOST = 1 << 63

_PLAN = re.compile(r"plan/([0-9]{1,18})/")
_WHOLE = re.compile(rb"-?[0-9]{1,19}")


class BootstrapRoom:
    """The bytes that all jobs' stores share. No job and no node may hold more than is left free for others.

    So one that takes all it can leaves half of the bytes, two leave a third, and whoever comes has room (the
    dynamic threshold of Choudhury and Hahne, 1998, for the memory of a switch).
    """

    def __init__(self, size: int) -> None:
        self._size, self.used = size, 0
        self._of_node: dict[str, int] = {}

    def refusal(self, job: int, node: str, size: int) -> str:
        """Why a node may not have `size` bytes more kept in a store that holds `job` bytes, or nothing."""
        free = self._size - self.used - size
        if size <= 0 or (job + size <= free and self._of_node.get(node, 0) + size <= free):
            return ""
        return (
            f"there is no room for {size} bytes more: of {self._size} that all jobs' bootstrap stores share "
            f"{free + size} are free, the job has {job} and node {node} {self._of_node.get(node, 0)}"
        )

    def count(self, node: str, size: int) -> None:
        """So many bytes more are kept for a node, or less. The node "" is nobody's: it has no share."""
        self.used += size
        left = self._of_node.get(node, 0) + size
        if left and node:
            self._of_node[node] = left
        else:
            self._of_node.pop(node, None)


class BootstrapStore:
    """torch's Store in asyncio: `set`, `add`, `check` and `delete` answer at once, `get` waits for its key.

    All calls come from one event loop, which is the only lock needed.
    """

    def __init__(self, room: BootstrapRoom | None = None) -> None:
        """room: what is shared with the stores of other jobs."""
        self._room = room or BootstrapRoom(4 * LARGEST_JOB)
        self._owners: dict[str, str] = {}  # by key: the node that set it last
        self._values: dict[str, bytes] = {}
        self._of_plan: dict[int, set[str]] = {}  # the keys of `_values` that belong to one
        self._bytes = 0
        self._waiting: dict[str, set[asyncio.Future[bytes]]] = {}

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, as if a call had."""
        self._set(key, value, "")

    def close(self) -> None:
        """Nothing of it is kept any more. Whoever waits in it waits until his time is up."""
        for key in [*self._values]:
            self._pop(key)

    async def call(self, call: StoreCall, node: str = "") -> StoreAnswer:
        """The answer to a node's call; an `error` inside it where there is none. `number` is the sum after
        `add`, 1 or 0 for `check` (the key is there) and for `delete` (it was)."""
        if why := self.refusal(call, node):
            return StoreAnswer(id=call.id, error=why)
        if call.op == "get":
            return await self._get(call)
        if call.op == "set":
            self._set(call.key, call.value, node)
            return StoreAnswer(id=call.id)
        if call.op == "add":
            return self._add(call, node)
        if call.op == "check":
            return StoreAnswer(id=call.id, number=int(call.key in self._values))
        if call.op == "delete":
            return StoreAnswer(id=call.id, number=int(self._pop(call.key)))
        error = f"the coordinator's elasticd {__version__} has no bootstrap store call {shown(call.op)!r}"
        return StoreAnswer(id=call.id, error=error)

    def drop_before(self, number: int) -> None:
        """Forgets the keys of plans below `number`; whoever waits for one gets an error."""
        for over in [plan for plan in self._of_plan if plan < number]:
            for key in [*self._of_plan[over]]:
                self._pop(key)
        for key in [key for key in self._waiting if (plan := _plan(key)) is not None and plan < number]:
            for waiter in self._waiting.pop(key):
                if not waiter.done():
                    waiter.set_exception(KeyError(key))

    def refusal(self, call: StoreCall, node: str = "") -> str:
        """Why a node's call is too large for this store, or nothing."""
        if len(call.key) > LONGEST_KEY:
            return f"a key of {len(call.key)} characters: at most {LONGEST_KEY} are taken"
        if len(call.value) > LARGEST_VALUE:
            return f"{shown(call.key)}: a value of {len(call.value)} bytes: at most {LARGEST_VALUE} are taken"
        if call.op not in ("set", "add"):
            return ""
        size = len(call.key) + len(call.value)
        if self._bytes + size > LARGEST_JOB:
            return (
                f"the job's bootstrap store holds {self._bytes} bytes: there is no room for {shown(call.key)}"
            )
        before = len(call.key) + len(self._values[call.key]) if call.key in self._values else 0
        return self._room.refusal(self._bytes, node, size - before)

    def _pop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._count(self._owners.pop(key), -len(key) - len(value))
        plan = _plan(key)
        if plan is not None:
            self._of_plan[plan].discard(key)
            if not self._of_plan[plan]:
                del self._of_plan[plan]
        return True

    async def _get(self, call: StoreCall) -> StoreAnswer:
        if call.key in self._values:
            return StoreAnswer(id=call.id, value=self._values[call.key])
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(call.key, set())
        waiters.add(waiter)
        try:
            async with asyncio.timeout(min(max(call.seconds, 0.0), LONGEST_WAIT_SECONDS)):
                return StoreAnswer(id=call.id, value=await waiter)
        except TimeoutError:
            error = f"no process set {call.key} within {call.seconds:g} s"
        except KeyError:
            error = f"{call.key} belongs to a plan that is over"
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiting.get(call.key) is waiters:
                del self._waiting[call.key]
        return StoreAnswer(id=call.id, error=error)

    def _count(self, node: str, size: int) -> None:
        self._bytes += size
        self._room.count(node, size)

    def _set(self, key: str, value: bytes, node: str) -> None:
        before = self._values.get(key)
        if before is not None:
            self._count(self._owners[key], -len(key) - len(before))
        elif (plan := _plan(key)) is not None:
            self._of_plan.setdefault(plan, set()).add(key)
        self._values[key], self._owners[key] = value, node
        self._count(node, len(key) + len(value))
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(value)

    def _add(self, call: StoreCall, node: str) -> StoreAnswer:
        """torch keeps counters as decimal text, so that `get` reads what `add` wrote; so do we."""
        terms = self._values.get(call.key, b"0"), call.value or b"0"
        total = sum(map(int, terms)) if all(map(_WHOLE.fullmatch, terms)) else _MOST
        if not -_MOST <= total < _MOST:
            error = f"add to {shown(call.key)}: both, and their sum, must be whole numbers of 64 bits"
            return StoreAnswer(id=call.id, error=error)
        self._set(call.key, str(total).encode(), node)
        return StoreAnswer(id=call.id, number=total)


def _plan(key: str) -> int | None:
    """The number of the plan that a key belongs to; None for a key of no plan, which stays."""
    match = _PLAN.match(key)
    return int(match[1]) if match is not None else None
