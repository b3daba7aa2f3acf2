"""Why a worker failed, read from what it wrote to stderr, from its exit code and from torch's error file.

Theory of operation. A script need know nothing of elasticd, so nothing inside it reports its exception. But an
interpreter that ends by an exception prints it last, in a form that the language defines; and a script that
elasticd refuses leaves torch's own error file (`elasticd.runtime.exits.refused`). Of the workers of one node
several fail at once: those that torchrun ended itself, and those that lost another rank, are no cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from elasticd.wire.rendezvous import WorkerFailure

#: Characters that are kept of an exception's text and of its traceback; of the latter the end.
MOST_TEXT, MOST_TRACEBACK = 1000, 8000

#: torch puts this before each line of a traceback once there is a process group.
_RANK = re.compile(r"^\[rank\d+\]:\s?")
_BEGIN = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?P<kind>[^\W\d][\w.]*)(?:: (?P<text>.*))?$")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|\x1b\[[0-9;]*m")
#: Exceptions of torch's communication, and what gloo, NCCL and torch's store say in exceptions of another kind.
_OF_PEERS = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|gloo/transport/|Connection closed by peer|NCCL error|"
    r"ncclRemoteError|Connection reset by peer|Broken pipe|TCPStore"
)

#: How exceptions of elasticd's begin that refuse no script: another rank was lost; a node reads no sample.
_OF_FAULTS = ("elasticd.runtime.comm.", "elasticd.runtime.data.prefetch.")


def failure_of(stderr: str, code: int, refusal: str = "", stop: str = "") -> WorkerFailure:
    """The failure of a worker process.

    Args:
        stderr: the end of what it wrote there.
        code: its exit code; -N where signal N ended it.
        refusal: why elasticd refused its script, as its error file says; empty without one.
        stop: why the whole job ended, likewise.
    """
    if refusal:
        return WorkerFailure(text=refusal[:MOST_TEXT], code=code, refusal=True)
    if code < 0:
        return WorkerFailure(text=f"ended by {_name(-code)}", code=code)
    if stop:
        return WorkerFailure(text=stop[:MOST_TEXT], code=code)
    lines = [_RANK.sub("", _CONTROL.sub("", line.rpartition("\r")[2] or line)) for line in stderr.splitlines()]
    begin = max((at for at, line in enumerate(lines) if line == _BEGIN), default=None)
    if begin is not None:
        for at in range(begin + 1, len(lines)):
            if (end := _EXCEPTION.match(lines[at])) is not None:
                trace = "\n".join(lines[begin : at + 1])
                kind, text = end["kind"], (end["text"] or "")[:MOST_TEXT]
                return WorkerFailure(
                    kind=kind,
                    text=text,
                    traceback=trace[-MOST_TRACEBACK:],
                    code=code,
                    refusal=kind.startswith("elasticd.") and not kind.startswith(_OF_FAULTS),
                    lost_peer=bool(_OF_PEERS.search(f"{kind}: {text}")),
                )
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return WorkerFailure(text=(last or f"ended with exit code {code}")[:MOST_TEXT], code=code)


def cause(failures: Iterable[WorkerFailure]) -> WorkerFailure:
    """Of the workers of one node that failed together, the one whose failure made the others fail."""
    return min(failures, key=_rank)


def ending(failure: WorkerFailure) -> str:
    """The end of a worker, behind its name: "died (SIGKILL)", "failed: ValueError: no"."""
    if failure.code < 0:
        return f"died ({_name(-failure.code).removeprefix('signal ')})"
    return f"failed: {failure.line}"


def alike(one: WorkerFailure | None, other: WorkerFailure) -> bool:
    """Returns True if the script failed the same way twice by itself: neither by a signal, nor with another
    rank. Numbers in the text may differ."""
    if one is None or other.code < 0 or other.lost_peer or (one.kind, one.code) != (other.kind, other.code):
        return False
    return _NUMBER.sub("", one.text) == _NUMBER.sub("", other.text)


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def _rank(failure: WorkerFailure) -> int:
    if failure.refusal:
        return 0
    if failure.code == -signal.SIGTERM:  # torchrun ended it, as another one had failed
        return 4
    if failure.lost_peer:
        return 3
    return 1 if failure.code < 0 else 2


def _name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
