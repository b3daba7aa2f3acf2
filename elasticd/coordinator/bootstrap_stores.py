"""`BootstrapStores`: the bootstrap store of each job, by which its processes find each other.

The ranks that torchruns report are written to etcd, too, for the next leader.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from elasticd.codec.decoding import shown
from elasticd.coordinator.bootstrap_store import BootstrapRoom, BootstrapStore
from elasticd.coordinator.store_transactions import Asked, Rank
from elasticd.machines.job.state.events import Write
from elasticd.records import DoneRecord, Proposal
from elasticd.store.write_allowance import Allowance
from elasticd.wire.worker import StoreAnswer, StoreCall

#: Bytes of all bootstrap stores together.
MOST_STORED_BYTES = 1 << 30
#: Calls that need no bootstrap store where there is none: nothing is in it.
EMPTY_WITHOUT = ("check", "delete")
#: How the keys begin by which torchruns tell each other their ranks (elasticd.rendezvous.live_mode).
RANKS = "rdzv/"
#: Bytes of one such value, and of all that the torchruns of a node have written to etcd: at once, and a second.
LARGEST_RANK, RANKS_AT_ONCE, RANKS_A_SECOND = 16 << 10, 4 << 20, 4 << 10


class BootstrapStores:
    """The stores of all jobs of one leader."""

    def __init__(
        self, clock: Callable[[], float], put: Callable[[Asked], None], refusal: Callable[[Rank], str]
    ) -> None:
        """
        Args:
            clock: monotonic seconds.
            put: has a change made in the store.
            refusal: why the store would not take it; empty: it would.
        """
        self._clock, self._put, self._refusal = clock, put, refusal
        self._room = BootstrapRoom(MOST_STORED_BYTES)
        self._stores: dict[str, BootstrapStore] = {}
        self._allowances: dict[str, Allowance] = {}  # of ranks, by node

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def used_bytes(self) -> int:
        """Bytes that all stores hold."""
        return self._room.used

    def remember(self, ranks: Iterable[Rank]) -> None:
        """Takes over the ranks that torchruns reported to earlier leaders."""
        for rank in ranks:
            self._stores.setdefault(rank.job, BootstrapStore(self._room)).put(rank.key, rank.value)

    async def call(self, node: str, job: str, call: StoreCall, *, over: bool) -> StoreAnswer:
        """The answer to a call of a node's process. A `get` waits for its key. Ranks that etcd does not take
        are refused, so that nobody goes on as if they were there.

        Args:
            node: of the process.
            job: its job.
            call: the call.
            over: the job is over: nothing is begun again.
        """
        values = self._stores.get(job)
        if values is None:
            values = BootstrapStore(None if over else self._room)
            if call.op not in EMPTY_WITHOUT and not over:
                self._stores[job] = values
        if call.op == "set" and call.key.startswith(RANKS) and not over:
            rank = Rank(job=job, key=call.key, value=call.value)
            why = values.refusal(call, node) or self._refusal(rank) or self._too_much(node, call)
            if why:
                return StoreAnswer(id=call.id, error=f"set of {shown(call.key)}: {why}")
            self._put(rank)
        return await values.call(call, node)

    def decided(self, write: Write) -> None:
        """A job that is over needs its keys no more; one with a new proposal those of no plan before the
        running one."""
        for record in write.records:
            if isinstance(record, DoneRecord):
                self.drop(write.job)
                self._put(Rank(job=write.job))
            elif isinstance(record, Proposal) and record.old is not None and write.job in self._stores:
                self._stores[write.job].drop_before(record.old.number)

    def drop(self, job: str) -> None:
        """Nothing of a job is kept here any more."""
        if (store := self._stores.pop(job, None)) is not None:
            store.close()

    def keep(self, jobs: Container[str]) -> None:
        """Drops the stores of jobs other than these: such jobs never began."""
        for job in [job for job in self._stores if job not in jobs]:
            self.drop(job)
            self._put(Rank(job=job))

    def _too_much(self, node: str, call: StoreCall) -> str:
        """Why a node's torchruns may not have this written to etcd now, or nothing."""
        size = len(call.key) + len(call.value)
        if size > LARGEST_RANK:
            return f"{size} bytes: a torchrun tells of its ranks in at most {LARGEST_RANK}"
        allowance = self._allowances.setdefault(node, Allowance(RANKS_AT_ONCE, RANKS_A_SECOND))
        if not allowance.take(size, self._clock()):
            return (
                f"the torchruns of node {node} write more than {RANKS_A_SECOND} bytes a second of their ranks"
            )
        return ""
