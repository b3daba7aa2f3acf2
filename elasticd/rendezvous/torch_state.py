"""The one place that looks into the state of torch's own rendezvous, which torch keeps as a private class.

torch finds dead nodes by heartbeats: writes of every node to the one shared state, by clocks that must agree,
after 15 s. Agents know better and sooner. So each state that is read is given heartbeats that say what the
agents know: those of the living are of now, those of the dead are ages old. torch's own code does the rest.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _NodeDesc,
    _RendezvousState,
)

#: How the keys begin at which torch's own agents write the ranks and the size of the world.
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_DEAD = datetime.min.replace(tzinfo=UTC)
#: All that torch's state is made of: nothing else is brought to life from the store's bytes.
_ALLOWED = {
    (_RendezvousState.__module__, "_RendezvousState"): _RendezvousState,
    (_NodeDesc.__module__, "_NodeDesc"): _NodeDesc,
    ("datetime", "datetime"): datetime,
    ("datetime", "timezone"): type(UTC),
    ("datetime", "timedelta"): timedelta,
    ("builtins", "set"): set,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous' state") from None


class TorchRendezvousState:
    """The state of one round, as its bytes say. Names are torch's: address, process and a number."""

    def __init__(self, data: bytes) -> None:
        """Raises RendezvousStateError for bytes that are no state of torch's."""
        try:
            self._state = _Unpickler(io.BytesIO(data)).load()
            if not isinstance(self._state, _RendezvousState):
                raise TypeError(f"it is a {type(self._state).__name__}")
        except Exception as error:
            raise RendezvousStateError(
                f"elasticd: the rendezvous' state in the store cannot be read ({error}): "
                "run the same release of torch everywhere, or give the job another name"
            ) from error

    @property
    def participants(self) -> frozenset[str]:
        """The names of those that take part in this round; those that wait for another one are not among
        them."""
        return frozenset(map(str, self._state.participants))

    @property
    def complete(self) -> bool:
        """True if the round's members and ranks are final."""
        return bool(self._state.complete)

    @property
    def closed(self) -> bool:
        """True if the rendezvous is over, so that no further round begins."""
        return bool(self._state.closed)

    @property
    def known(self) -> frozenset[str]:
        """All that take part or wait to."""
        return frozenset(map(str, self._state.last_heartbeats))

    @property
    def round(self) -> int:
        """The round's number, counted from 0."""
        return int(self._state.round)

    def judge(self, lives: Callable[[str], bool]) -> None:
        """Heartbeats by what is known of each."""
        now = datetime.now(UTC)
        for node in list(self._state.last_heartbeats):
            self._state.last_heartbeats[node] = now if lives(str(node)) else _DEAD

    def settle(self) -> None:
        """Whoever takes part completes the round as soon as it looks."""
        if self._state.deadline is not None:
            self._state.deadline = _DEAD

    def anew(self) -> None:
        """Nobody is left of it: the next round of another run."""
        state = _RendezvousState()
        state.round = self._state.round + 1
        self._state = state

    def encode(self) -> bytes:
        """The bytes that torch decodes to this state, with all changes made here."""
        return pickle.dumps(self._state)


def name_methods_quickly() -> None:
    """Lets torch's rendezvous name its events without `inspect.stack()`, which looks at the file of every
    module for each frame: a torchrun spends seconds of processor time on that in a round. Replaces a function
    of torch's module by one with the same result."""
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    """The name of the function `depth` frames up, as torch's own `get_method_name` gives it."""
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:
        return "no_method_name"


def first(state: Any) -> str:
    """The participant with rank 0 in a state of torch's; empty where nobody has."""
    return next((str(node) for node, rank in state.participants.items() if rank == 0), "")


def world_size(info: RendezvousInfo, workers: int) -> int:
    """Workers of all nodes of a round, as torch wrote it to the round's store; the others are taken to have as
    many as this node where that cannot be read."""
    key = f"{_ASSIGNED_RANKS}{info.rank}"
    with contextlib.suppress(RuntimeError):
        if info.store.check([key]):
            return int(json.loads(info.store.get(key))[1])
    return workers * info.world_size
