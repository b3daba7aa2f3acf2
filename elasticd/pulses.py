"""Wire messages about whether a worker's process still runs: it may live and be stopped all the same."""

from __future__ import annotations

from elasticd.wire import Message


class Ping(Message, frozen=True, kw_only=True):
    """An agent asks a worker's control thread for an answer, and gets `Pong`."""


class Pong(Message, frozen=True, kw_only=True):
    """The answer: this process runs."""


class Frozen(Message, frozen=True, kw_only=True):
    """To the leader: a worker does not answer its agent, and how that is known; or it answers again (empty)."""

    job: str
    device: str
    incarnation: str
    how: str = ""
