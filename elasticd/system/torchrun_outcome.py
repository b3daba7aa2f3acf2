"""The end of a torchrun of `elasticd run`, as the launcher learns of it: more than an exit code can say.

The launcher names a file in the torchrun's environment; the torchrun writes it as it ends. A torchrun that is
killed leaves none.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec
from elasticd_planner.value import Value

from elasticd.wire.rendezvous import WorkerFailure

#: Names the file. Its presence says to a worker, too, that `elasticd run` prints why the job ended.
OUTCOME_VARIABLE = "ELASTICD_OUTCOME"
#: In torch's error file of a worker: why elasticd refused its script.
REFUSAL = "elasticd_refusal"
#: In the same place: why the job ended, on every rank.
STOP = "elasticd_stop"


class TorchrunOutcome(Value, frozen=True, kw_only=True):
    """The end of a torchrun."""

    restart_mode: bool = False  # its job goes on in restart mode
    reason: str = ""  # why it ended: its job is over, or it was turned away (empty: its worker ended)
    failure: WorkerFailure | None = None  # of its last worker (None: that did not fail)
    final: bool = False  # the script would fail again: it need not be started any more


def write_outcome(outcome: TorchrunOutcome) -> None:
    """For the launcher, if there is one."""
    if path := os.environ.get(OUTCOME_VARIABLE):
        with contextlib.suppress(OSError):
            Path(path).write_bytes(msgspec.json.encode(outcome))


def note_end_signal(path: Path, number: int) -> None:
    """For the torchrun that is to write its outcome to `path`: the launcher ends it since it got this signal
    itself. Any signal is passed on as SIGTERM."""
    with contextlib.suppress(OSError):
        Path(f"{path}.signal").write_text(signal.Signals(number).name)


def end_signal() -> str:
    """The signal that the launcher got; empty where there is no launcher, or it got none."""
    with contextlib.suppress(OSError, KeyError):
        return Path(f"{os.environ[OUTCOME_VARIABLE]}.signal").read_text()
    return ""


def signal_name(number: int) -> str:
    """The name of a signal that this process got; of the one that the launcher got, if that passed it on."""
    name = signal.Signals(number).name
    passed_on = end_signal() if number == signal.SIGTERM else ""
    return passed_on if passed_on in signal.Signals.__members__ else name


def read_outcome(path: Path) -> TorchrunOutcome:
    """The outcome that a torchrun wrote at its end; an empty outcome where it wrote nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TorchrunOutcome)
    except (OSError, msgspec.DecodeError):
        return TorchrunOutcome()
