"""elasticd's RendezvousBackend: torch's own rendezvous over etcd, without a client of etcd in the trainer.

The state lies in etcd under one key, changed by comparison with its last revision, which is the fencing token.
The agent does that on our behalf, and tells us which torchruns live.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from elasticd.rendezvous.agent_requests import AgentRequests
from elasticd.rendezvous.torch_state import TorchRendezvousState
from elasticd.wire.rendezvous import RoundAnswer, Torchrun


class Backend(RendezvousBackend):
    """`patient` while this node's workers run: a torchrun whose agent is away is then waited for, `grace`
    seconds long, since its workers may well train on. `closing` once this torchrun has ended: a round that it
    finds closed is not begun anew. `settle`: seconds that a round waits for more nodes once all torchruns that
    live have joined it."""

    def __init__(
        self,
        requests: AgentRequests,
        *,
        least: int,
        grace: float,
        settle: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = ""
        self.patient = False
        self.closing = False
        self.closed = False
        self.torchruns: dict[str, Torchrun] = {}
        self._requests, self._least, self._grace, self._settle = requests, least, grace, settle
        self._clock = clock
        self._absent: dict[str, float] = {}
        self._whole: tuple[int, frozenset[str]] = (-1, frozenset())
        self._whole_since = 0.0

    @property
    def name(self) -> str:
        """As `RendezvousBackend.name`: torch gives it as the handler's `get_backend`, and in its log."""
        return "elasticd"

    def get_state(self) -> tuple[bytes, Token] | None:
        """As `RendezvousBackend.get_state`, with heartbeats by what the agents know of each torchrun. Raises
        RendezvousConnectionError where no agent answers in time, RendezvousStateError for bytes that are no
        state of torch's."""
        return self._seen(self._requests.read())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """As `RendezvousBackend.set_state`; a token is the revision of the key in etcd. Raises as
        `get_state`."""
        answer = self._requests.write(state, token if isinstance(token, int) else 0)
        seen = self._seen(answer)
        return None if seen is None else (*seen, answer.done)

    @property
    def out(self) -> str:
        """Why this torchrun is to take no part, or the empty string: the last one left takes part all the
        same."""
        known = self.torchruns.get(self.me)
        if known is None or known.status != "out":
            return ""
        return known.reason if any(other.status == "here" for other in self.torchruns.values()) else ""

    def lives(self, name: str) -> bool:
        """Returns True if a torchrun is to be counted on."""
        return not self.out if name == self.me else self.status(name) == "here"

    def status(self, name: str) -> str:
        """here, left, died or out; one that the store does not know of has died once it is waited for no
        longer."""
        known = self.torchruns.get(name)
        if known is not None:
            return known.status
        waited = self._clock() - self._absent.get(name, self._clock())
        return "here" if self.patient and waited < self._grace else "died"

    def lost(self, partners: frozenset[str]) -> tuple[str, ...]:
        """Those of our round that ended otherwise than in good order, or are to take no part."""
        return tuple(sorted(p for p in partners if p != self.me and self.status(p) in ("died", "out")))

    def _seen(self, answer: RoundAnswer) -> tuple[bytes, int] | None:
        """The state as torch is to see it, and its token."""
        self.torchruns = answer.torchruns
        if not answer.token:
            return None
        state = TorchRendezvousState(answer.value)
        self.closed = state.closed
        now = self._clock()
        absent = state.known - answer.torchruns.keys()
        self._absent = {name: self._absent.get(name, now) for name in absent}
        if state.closed and not self.closing and not any(map(self.lives, state.known)):
            state.anew()
        state.judge(self.lives)
        if self._is_whole(state, now):
            state.settle()
        return state.encode(), answer.token

    def _is_whole(self, state: TorchRendezvousState, now: float) -> bool:
        """Returns True if all that live have joined a round that may begin, and no other came for a while."""
        here = {name for name, torchrun in self.torchruns.items() if torchrun.status == "here"}
        if state.complete or len(state.participants) < self._least or not here <= state.participants:
            self._whole = (-1, frozenset())
            return False
        if self._whole != (state.round, state.participants):
            self._whole, self._whole_since = (state.round, state.participants), now
        return now - self._whole_since >= self._settle
